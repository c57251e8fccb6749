"""The Debian package: both programs with their private environment, units, configuration and documentation.

`packaging/deb` has the files that a maintainer writes: control fields, maintainer scripts, units, defaults.
The rest (versions, libraries and their licences, checksums) is derived here, and dpkg-deb packs it. No
installation step runs Python or needs a network.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from release.environment import Environment, build_environment, files, normalize, required_glibc
from release.sources import BuildError, Release, build_wheel

_TEMPLATES = Path("packaging/deb")
_REVISION = "1"
_MODULES = {"cli/completion.py": "pykubelet.cli.completion", "cli/manpages.py": "pykubelet.cli.manpages"}
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/{program}",
    "zsh": "usr/share/zsh/vendor-completions/_{program}",
    "fish": "usr/share/fish/vendor_completions.d/{program}.fish",
}
"""Path of the completion of a program by shell."""
_INSTALLED = {
    "pykubelet.service": "lib/systemd/system/pykubelet.service",
    "kubelet.service": "lib/systemd/system/kubelet.service",
    "pykubelet.default": "etc/default/pykubelet",
    "kubelet.default": "etc/default/kubelet",
    "lintian-overrides": "usr/share/lintian/overrides/pykubelet",
}
_SCRIPTS = ("postinst", "prerm", "postrm")
_DOCUMENTS = ("docs/packages.md",)
_KUBERNETES = re.compile(r'^KUBERNETES_VERSION = "v([^"]+)"$', re.MULTILINE)
_PRERELEASE = re.compile(r"(\d)(a|b|rc)(\d)")


def build_deb(release: Release, out: Path, compression: str = "xz") -> Path:
    """Build the package and return its path; `compression` is dpkg-deb's. Raises BuildError."""
    architecture = release.run("dpkg", "--print-architecture").strip()
    with tempfile.TemporaryDirectory(prefix="pyk-deb-") as name:
        root = Path(name) / "root"
        wheel, _ = build_wheel(release, Path(name) / "wheel")
        environment = build_environment(release, wheel, root)
        install_files(release, environment)
        normalize(root, release.epoch)
        _write_control(release, environment, architecture)
        normalize(root / "DEBIAN", release.epoch)
        product = out / f"pykubelet_{debian_version(release)}_{architecture}.deb"
        partial = product.with_name(f".{product.name}.partial")
        out.mkdir(parents=True, exist_ok=True)
        # With several threads the result would depend on their number.
        packed = ("--root-owner-group", "--threads-max=1", f"-Z{compression}", "--build", root, partial)
        release.run("dpkg-deb", *packed)
        partial.replace(product)
    return product


def debian_version(release: Release) -> str:
    """Return the version of the package: pre-releases sort before the release."""
    return _PRERELEASE.sub(r"\1~\2\3", release.version) + f"-{_REVISION}"


def install_files(release: Release, environment: Environment) -> None:
    """Install everything but the environment and the control files below its root."""
    root, templates = environment.root, release.checkout / _TEMPLATES
    for source, target in _INSTALLED.items():
        path = root / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((templates / source).read_bytes())
    programs = root / "usr/bin"
    programs.mkdir(parents=True)
    for name in ("kubelet", "pykubelet"):
        (programs / name).symlink_to(f"../lib/pykubelet/bin/{name}")
    # Upstream's default for executables of volume plugins; the kubelet would create it.
    (root / "usr/libexec/kubernetes/kubelet-plugins/volume/exec").mkdir(parents=True)
    documents = root / "usr/share/doc/pykubelet"
    documents.mkdir(parents=True)
    (documents / "copyright").write_text(_copyright(release, environment))
    compress(documents / "changelog.gz", (release.checkout / "CHANGELOG.md").read_bytes())
    compress(documents / "changelog.Debian.gz", _changelog(release).encode())
    for document in _DOCUMENTS:
        page = release.checkout / document
        compress(documents / f"{page.name}.gz", page.read_bytes())
    shutil.copytree(release.checkout / "examples", documents / "examples")
    _write_completions(release, environment)
    _write_manpages(release, environment)


def compress(path: Path, data: bytes) -> None:
    """Write a gzip file without name and date, as Debian's policy demands."""
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))


def _write_completions(release: Release, environment: Environment) -> None:
    module = _MODULES["cli/completion.py"]
    if not (environment.site / "pykubelet/cli/completion.py").is_file():
        return
    for shell, pattern in COMPLETIONS.items():
        text = _run_module(release, environment, module, shell)
        path = environment.root / pattern.format(program="pykubelet")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        # The script is for both programs; bash and fish look for it by the program's name.
        other = environment.root / pattern.format(program="kubelet")
        if shell != "zsh":
            other.symlink_to(path.name)


def _write_manpages(release: Release, environment: Environment) -> None:
    if not (environment.site / "pykubelet/cli/manpages.py").is_file():
        return
    with tempfile.TemporaryDirectory(prefix="pyk-man-") as name:
        _run_module(release, environment, _MODULES["cli/manpages.py"], name)
        for page in sorted(Path(name).iterdir()):
            directory = environment.root / f"usr/share/man/man{page.suffix.removeprefix('.')}"
            directory.mkdir(parents=True, exist_ok=True)
            compress(directory / f"{page.name}.gz", page.read_bytes())


def _run_module(release: Release, environment: Environment, module: str, *arguments: str) -> str:
    path = {"PYTHONPATH": str(environment.site)}
    return release.run("/usr/bin/python3", "-S", "-B", "-m", module, *arguments, extra=path)


def _write_control(release: Release, environment: Environment, architecture: str) -> None:
    control = environment.root / "DEBIAN"
    templates = release.checkout / _TEMPLATES
    package_files = list(files(environment.root))
    control.mkdir()
    for name in _SCRIPTS:
        script = control / name
        script.write_bytes((templates / name).read_bytes())
        script.chmod(0o755)
    conffiles = [path for path in package_files if path.is_relative_to(environment.root / "etc")]
    (control / "conffiles").write_text(
        "".join(f"/{path.relative_to(environment.root)}\n" for path in conffiles)
    )
    sums = (
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  "
        f"{path.relative_to(environment.root)}\n"
        for path in package_files
        if path not in conffiles
    )
    (control / "md5sums").write_text("".join(sums))
    major, minor = environment.python.split(".")
    fields = {
        "VERSION": debian_version(release),
        "ARCHITECTURE": architecture,
        "SIZE": str(installed_kib(environment.root)),
        "GLIBC": required_glibc(release, environment.site),
        "PYTHON": environment.python,
        "NEXT_PYTHON": f"{major}.{int(minor) + 1}",
        "KUBERNETES": _kubernetes_version(environment),
    }
    (control / "control").write_text(fill((templates / "control").read_text(), fields))


def fill(template: str, fields: dict[str, str]) -> str:
    """Return a template with each @NAME@ replaced. Raises BuildError for an unknown name."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise BuildError(f"packaging/deb uses the unknown field @{match[1]}@")
        return fields[match[1]]

    return re.sub(r"@([A-Z_]+)@", value, template)


def installed_kib(root: Path) -> int:
    """Return the size as dpkg estimates it: files in whole KiB, and one for everything else."""
    return sum(
        -(-path.stat().st_size // 1024) if path.is_file() and not path.is_symlink() else 1
        for path in root.rglob("*")
        if not path.is_relative_to(root / "DEBIAN")
    )


def _kubernetes_version(environment: Environment) -> str:
    found = _KUBERNETES.search((environment.site / "pykubelet/__init__.py").read_text())
    if found is None:
        raise BuildError("src/pykubelet/__init__.py has no KUBERNETES_VERSION")
    return found[1]


def _changelog(release: Release) -> str:
    return (
        f"pykubelet ({debian_version(release)}) unstable; urgency=medium\n\n"
        f"  * Version {release.version}; the changes are in changelog.gz.\n\n"
        f" -- {_maintainer(release)}  {release.date('%a, %d %b %Y %H:%M:%S +0000')}\n"
    )


def _maintainer(release: Release) -> str:
    control = (release.checkout / _TEMPLATES / "control").read_text()
    return next(
        line.removeprefix("Maintainer: ") for line in control.splitlines() if line.startswith("Maintainer: ")
    )


def _copyright(release: Release, environment: Environment) -> str:
    template = (release.checkout / _TEMPLATES / "copyright").read_text()
    libraries = "\n".join(_library_paragraphs(environment))
    return fill(template, {"YEAR": release.date("%Y"), "LIBRARIES": libraries})


def _library_paragraphs(environment: Environment) -> Iterator[str]:
    """Yield a paragraph of the copyright file for each library, from its metadata."""
    licences = set()
    for library in sorted(
        importlib.metadata.distributions(path=[str(environment.site)]), key=lambda found: found.name.lower()
    ):
        if library.name == "pykubelet":
            continue
        licence = _licence(library)
        author = _field(library, "Author") or _field(library, "Author-email") or "its authors"
        tops = sorted({Path(str(path)).parts[0] for path in _top_level(environment.site, library)})
        where = " ".join(f"usr/lib/pykubelet/lib/*/site-packages/{top}*" for top in tops)
        yield f"Files: {where}\nCopyright: {' '.join(author.split())}\nLicense: {licence}\n"
        licences.add(licence)
    for licence in sorted(licences - {"Apache-2.0"}):
        yield f"License: {licence}\n The text is in the directory *.dist-info of each library above.\n"


def _field(library: importlib.metadata.Distribution, name: str) -> str:
    """Return a field of a library's metadata, or an empty string."""
    return next(iter(library.metadata.get_all(name) or []), "")


def _licence(library: importlib.metadata.Distribution) -> str:
    """Return the licence of a library in one line; classifiers are used by old metadata only."""
    stated = _field(library, "License-Expression") or _field(library, "License")
    if stated and "\n" not in stated:
        return stated.replace(" OR ", " or ").replace(" AND ", " and ")
    classifiers = library.metadata.get_all("Classifier") or []
    found = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License :: ")]
    if not found:
        raise BuildError(f"{library.name} does not state its licence: add it to release/deb.py")
    return " and ".join(found)


def _top_level(site: Path, library: importlib.metadata.Distribution) -> Iterator[str]:
    """Yield the first parts of a library's paths; without RECORD, from top_level.txt or its name."""
    listed = library.read_text("top_level.txt")
    names = listed.split() if listed else [library.name.replace("-", "_")]
    for name in names:
        if any(site.glob(f"{name}*")):
            yield name
    yield f"{library.name.replace('-', '_')}-"

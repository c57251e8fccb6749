"""Private Python environment of the Debian package and of the image, for the system's Python.

A virtual environment at `PREFIX`: dependencies from `uv.lock` as compiled wheels, verified by their hashes,
without development dependencies. It is assembled file by file, because a program that creates virtual
environments would write paths and dates of the build into it. Modules are compiled with unchecked hashes:
their validity depends on no date, and imports do not look at the sources.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from release.sources import BuildError, Release

PREFIX = "/usr/lib/pykubelet"
SYSTEM_PYTHON = Path("/usr/bin/python3")
PROGRAMS = {"kubelet": "pykubelet.cli.kubelet", "pykubelet": "pykubelet.cli.pykubelet"}
"""Modules of the programs, by name."""
_LAUNCHER = """\
#!{prefix}/bin/python
import sys

from {module} import main

sys.exit(main())
"""
_UNUSED_SUFFIXES = {".c", ".h", ".md", ".pxd", ".pxi", ".pyi", ".pyx"}
"""Sources of compiled modules and types for checkers."""
_INSTALLER_FILES = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json"}
"""Notes of the installer in a dist-info directory: the package manager owns these files instead."""
_GLIBC = re.compile(r"\bGLIBC_(\d+)\.(\d+)\b")


@dataclass(frozen=True, slots=True)
class Environment:
    """A private environment below a root directory."""

    root: Path
    """Directory that stands for `/`."""
    python: str
    """Version of Python that it is for, such as `3.11`."""

    @property
    def directory(self) -> Path:
        """Directory of the environment."""
        return self.root / PREFIX.lstrip("/")

    @property
    def site(self) -> Path:
        """Directory of its packages."""
        return self.directory / "lib" / f"python{self.python}" / "site-packages"


def build_environment(release: Release, wheel: Path, root: Path) -> Environment:
    """Build the environment with the wheel and its locked dependencies below `root`. Raises BuildError."""
    version = release.run(SYSTEM_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    environment = Environment(root, version)
    environment.site.mkdir(parents=True)
    _install(release, wheel, environment.site)
    _remove_unused(environment.site)
    for library in sorted(environment.site.rglob("*.so")):
        release.run("strip", "--strip-unneeded", "--remove-section=.comment", library)
    _write_programs(environment)
    normalize(environment.directory, release.epoch)
    compile_modules(release, environment.site, root)
    normalize(environment.directory, release.epoch)
    return environment


def _install(release: Release, wheel: Path, site: Path) -> None:
    pip = (release.uv, "pip", "install", "--quiet", "--python", SYSTEM_PYTHON, "--target", site, "--no-deps")
    binary = ("--only-binary", ":all:", "--link-mode", "copy")
    with tempfile.TemporaryDirectory(prefix="pyk-lock-") as name:
        locked = Path(name) / "requirements.txt"
        export = ("export", "--frozen", "--no-dev", "--no-emit-project", "--quiet", "--output-file", locked)
        release.run(release.uv, *export)
        release.run(*pip, *binary, "--require-hashes", "-r", locked)
    release.run(*pip, *binary, wheel)


def _remove_unused(site: Path) -> None:
    shutil.rmtree(site / "bin", ignore_errors=True)
    for path in sorted(site.rglob("*")):
        if path.parent.name.endswith(".dist-info"):
            unused = path.name in _INSTALLER_FILES
        else:
            unused = path.suffix in _UNUSED_SUFFIXES or path.name.startswith("_testcapi.")
        if unused and path.is_file():
            path.unlink()
    (site / ".lock").unlink(missing_ok=True)


def _write_programs(environment: Environment) -> None:
    programs = environment.directory / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(f"../../../bin/python{environment.python}")
    for name, module in PROGRAMS.items():
        launcher = programs / name
        launcher.write_text(_LAUNCHER.format(prefix=PREFIX, module=module))
        launcher.chmod(0o755)
    (environment.directory / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {environment.python}\n"
    )


def compile_modules(release: Release, directory: Path, root: Path) -> None:
    """Compile all modules of a directory below `root` for the system's Python. Raises BuildError."""
    # In one process: what several ones have compiled before decides on details of the files.
    command = (SYSTEM_PYTHON, "-m", "compileall", "-q", "-j1", "--invalidation-mode", "unchecked-hash")
    release.run(*command, "-s", root, "-p", "/", directory)


def normalize(directory: Path, epoch: int) -> None:
    """Set the same modes and dates on every host: for files by whether they are executable."""
    for path in [directory, *directory.rglob("*")]:
        if not path.is_symlink():
            executable = path.is_dir() or (path.parent.name in ("bin", "DEBIAN") and os.access(path, os.X_OK))
            path.chmod(0o755 if executable else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def files(directory: Path) -> Iterator[Path]:
    """Yield the regular files below a directory, sorted."""
    yield from (path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink())


def required_glibc(release: Release, directory: Path) -> str:
    """Return the oldest glibc that has all functions which the compiled modules call."""
    needed = {(2, 17)}
    for library in sorted(directory.rglob("*.so")):
        dump = release.run("readelf", "--version-info", "--wide", library)
        needed |= {(int(major), int(minor)) for major, minor in _GLIBC.findall(dump)}
    if not any(directory.rglob("*.so")):
        raise BuildError(f"{directory} contains no compiled module")
    return "{}.{}".format(*max(needed))

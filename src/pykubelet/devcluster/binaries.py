"""Executables of the control plane: lookup, and builds from Go modules into a cache.

`$KUBEBUILDER_ASSETS` is searched first, as by other Kubernetes tools; missing executables are built from
source once. etcd comes from the assets or from the host (Debian: etcd-server).

The control plane is a Go module in `tests/`, one executable that acts as the component by whose name it is
called; the conformance suite is another module. A cache directory is named by the hash of its module, so
that a changed module is built again, and is renamed into place only when complete: an interrupted build
leaves no partial result.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pykubelet.devcluster.layout import NotAvailable
from pykubelet.linux.processes import search_path

BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
GO_INSTALL_DIR = "/usr/local/go/bin"
"""Directory of Go's own installation, which root's PATH often lacks."""
_PROGRAM = "controlplane"
_KUBERNETES = "k8s.io/kubernetes"
_MAIN_SOURCES = ("go.mod", "go.sum", "main.go")
_PROGRESS_SECONDS = 15.0
_MAX_ERROR_LINES = 5


@dataclass(frozen=True, slots=True)
class GoBuild:
    """Build of one executable of a Go module: package, go subcommand, environment and links."""

    package: str = "."
    subcommand: tuple[str, ...] = ("build",)
    """`build`, or `test -c` for the binary of a package's tests."""
    env: Mapping[str, str] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    """Additional names of the executable, as symbolic links."""


@dataclass(frozen=True, slots=True)
class GoModule:
    """A Go module in a checkout, and the executables built from it by file name."""

    directory: Path
    name: str
    """Name of its directory in the cache."""
    title: str
    """Name in messages, such as `the control plane`."""
    remedy: str
    """Alternative to a build, appended to errors; may be empty."""
    programs: Mapping[str, GoBuild]
    source: str = _KUBERNETES
    """Go module that it is built from; executables of Kubernetes are stamped with its version."""


def build_control_plane(report: Callable[[str], None], module: Path | None = None) -> dict[str, Path]:
    """Return the executables of the control plane by name, from the cache or newly built.

    Raises NotAvailable with the reason why they cannot be built.
    """
    cache_dir = ensure_built(control_plane(module or source_module()), report)
    return {name: cache_dir / name for name in BUILT}


def control_plane(module: Path) -> GoModule:
    """Return the build of the control plane from its Go module."""
    return GoModule(
        directory=module,
        name=_PROGRAM,
        title="the control plane",
        remedy="set KUBEBUILDER_ASSETS",
        programs={_PROGRAM: GoBuild(links=BUILT)},
    )


def ensure_built(module: GoModule, report: Callable[[str], None]) -> Path:
    """Return the cache directory with the module's executables, building them if they are missing.

    Raises NotAvailable with the reason why they cannot be built.
    """
    cache_dir = module_cache_dir(module.directory, module.name)
    if not cache_dir.is_dir():
        go = shutil.which("go", path=f"{search_path()}{os.pathsep}{GO_INSTALL_DIR}")
        if go is None:
            raise NotAvailable(
                f"{module.title} is not built yet and Go is not installed: "
                f"install Go (https://go.dev/dl){_or_remedy(module.remedy)}"
            )
        with _build_lock(cache_dir):
            if not cache_dir.is_dir():
                _build(Path(go), module, cache_dir, report)
    return cache_dir


def source_module() -> Path:
    """Return the directory of the control plane's Go module in a checkout. Raises NotAvailable."""
    module = Path(__file__).parents[3] / "tests/support/controlplane/module"
    if not all((module / name).is_file() for name in _MAIN_SOURCES):
        raise NotAvailable(
            "the control plane is built from a checkout of pykubelet, and this is an installed package: "
            "set KUBEBUILDER_ASSETS to a folder with its programs"
        )
    return module


def module_cache_dir(module: Path, name: str = _PROGRAM) -> Path:
    """Return the cache directory of the executables built from a module."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    sources = [module / "go.mod", module / "go.sum", *sorted(module.rglob("*.go"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    return base / "pykubelet" / name / digest.hexdigest()[:16]


def _build(go: Path, module: GoModule, cache_dir: Path, report: Callable[[str], None]) -> None:
    version = _version(module)
    name = "Kubernetes " if module.source == _KUBERNETES else ""
    report(f"Building {module.title}, {name}{version}: once, and it takes some minutes")
    started_at = time.monotonic()
    output_dir = cache_dir.with_name(f"{cache_dir.name}.partial")
    # Left by a process that was killed: the caller holds the lock of this build.
    shutil.rmtree(output_dir, ignore_errors=True)
    output_dir.mkdir(mode=0o755)
    try:
        flags = _stamps(version) if module.source == _KUBERNETES else ""
        for program, target in module.programs.items():
            command = [str(go), *target.subcommand, "-v", "-trimpath", "-buildvcs=false"]
            command += [f"-ldflags=-s -w {flags}".rstrip(), "-o", str(output_dir / program), target.package]
            _run(command, module, target.env, report)
            for name in target.links:
                (output_dir / name).symlink_to(program)
        output_dir.rename(cache_dir)
    finally:
        shutil.rmtree(output_dir, ignore_errors=True)
    report(f"Built {module.title} in {time.monotonic() - started_at:.0f} s")


def _run(command: list[str], module: GoModule, env: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Run the compiler; report progress by the packages that it prints."""
    started_at = reported_at = time.monotonic()
    lines: list[str] = []
    packages = 0
    with subprocess.Popen(
        command,
        cwd=module.directory,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if re.fullmatch(r"[\w./~-]+", line.strip()):
                packages += 1
            else:
                lines.append(line.strip())
            if (now := time.monotonic()) - reported_at > _PROGRESS_SECONDS:
                reported_at = now
                report(f"  {packages} packages compiled in {now - started_at:.0f} s")
    if process.returncode:
        errors = [line for line in lines if line and not line.startswith("go: downloading")]
        reason = " | ".join(errors[-_MAX_ERROR_LINES:]) or f"it ended with {process.returncode}"
        raise NotAvailable(
            f"{module.title} could not be built: {reason}; `go build` in {module.directory} tells more"
            f"{_or_remedy(module.remedy)}"
        )


def _or_remedy(remedy: str) -> str:
    return f", or {remedy}" if remedy else ""


def _version(module: GoModule) -> str:
    required = re.compile(
        rf"^\s*(?:require )?{re.escape(module.source)} (v\S+)(?: // indirect)?$", re.MULTILINE
    )
    path = module.directory / "go.mod"
    match = required.search(path.read_text())
    if match is None:
        raise NotAvailable(f"{path} does not require {module.source}: restore it")
    return match[1]


def _stamps(version: str) -> str:
    """Return the linker flags that set the version of Kubernetes' executables."""
    major, minor = version.removeprefix("v").split(".")[:2]
    stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    return " ".join(
        f"-X k8s.io/{package}/version.{name}={value}"
        for package in ("component-base", "client-go/pkg")
        for name, value in stamps.items()
    )


@contextmanager
def _build_lock(cache_dir: Path) -> Iterator[None]:
    """Hold the lock of a build; concurrent builds of the same module wait."""
    try:
        cache_dir.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(
            cache_dir.with_name(f"{cache_dir.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
    except OSError as err:
        raise NotAvailable(f"the cache {cache_dir.parent} cannot be written: {err.strerror}") from err
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


ASSETS = "KUBEBUILDER_ASSETS"
_REQUIRED = ("etcd", "kube-apiserver")
_BUILDABLE = ("kube-controller-manager", "kube-scheduler", "kubectl")


@dataclass(frozen=True, slots=True)
class Binaries:
    """Executables of a control plane, and kubectl and kubelet."""

    etcd: Path
    apiserver: Path
    controller_manager: Path
    scheduler: Path
    kubectl: Path
    kubelet: Path | None
    """Upstream kubelet, for comparison."""


def find_programs(
    report: Callable[[str], None], environ: Mapping[str, str] = os.environ, module: Path | None = None
) -> Binaries:
    """Return the executables, building missing ones; `report` is called with a build's progress.

    Raises NotAvailable with the reason. Only the upstream kubelet may be missing.
    """
    found = _assets(environ)
    if "etcd" not in found:
        found["etcd"] = _etcd()
    if any(name not in found for name in (*_REQUIRED, *_BUILDABLE)):
        found = {**build_control_plane(report, module), **found}
    return Binaries(
        etcd=found["etcd"],
        apiserver=found["kube-apiserver"],
        controller_manager=found["kube-controller-manager"],
        scheduler=found["kube-scheduler"],
        kubectl=found["kubectl"],
        kubelet=found.get("kubelet"),
    )


def control_plane_version(programs: Binaries) -> str:
    """Return the version of the control plane, such as v1.36.3; empty if it prints none."""
    done = subprocess.run([programs.apiserver, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else ""


def _assets(environ: Mapping[str, str]) -> dict[str, Path]:
    directory = environ.get(ASSETS, "")
    if not directory:
        return {}
    names = ("etcd", *BUILT)
    found = {name: Path(directory, name) for name in names if os.access(Path(directory, name), os.X_OK)}
    if missing := [name for name in _REQUIRED if name not in found]:
        raise NotAvailable(
            f"{ASSETS}={directory} has no {' and no '.join(missing)}: put it there, or unset the variable"
        )
    return found


def _etcd() -> Path:
    found = shutil.which("etcd", path=search_path())
    if found is None:
        raise NotAvailable(f"etcd is not installed: install it (Debian: etcd-server), or set {ASSETS}")
    return Path(found)

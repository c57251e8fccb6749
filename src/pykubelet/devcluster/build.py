"""Building the control plane from source, once, into a cache.

The source is a small Go module of ours beside the tests; one program that acts as whichever of its
names it is called by. The cache's folder bears the hash of that module, so a changed version is built
anew, and a folder appears only when it is complete: a build that is interrupted leaves nothing that
could be mistaken for one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pykubelet.devcluster.errors import NotAvailable
from pykubelet.host.processes import search_path

BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
GO_PLACES = "/usr/local/go/bin"
"""Where Go's own installation puts it, which root's PATH often lacks."""
_PROGRAM = "controlplane"
_SOURCES = ("go.mod", "go.sum", "main.go")
_SAY_EVERY = 15.0
_ENOUGH_LINES = 5


def built_programs(say: Callable[[str], None], module: Path | None = None) -> dict[str, Path]:
    """Give the built programs by name, from the cache or by building them now.

    Raises NotAvailable with the reason why there are none.
    """
    module = module or source_module()
    place = cache_place(module)
    if not place.is_dir():
        go = shutil.which("go", path=f"{search_path()}{os.pathsep}{GO_PLACES}")
        if go is None:
            raise NotAvailable(
                "the control plane is not built yet and Go is not installed: "
                "install Go (https://go.dev/dl), or set KUBEBUILDER_ASSETS"
            )
        with _one_builder(place):
            if not place.is_dir():
                _build(Path(go), module, place, say)
    return {name: place / name for name in BUILT}


def source_module() -> Path:
    """Give the folder of the Go module in a checkout of this project."""
    module = Path(__file__).parents[3] / "tests" / "controlplane" / "module"
    if not all((module / name).is_file() for name in _SOURCES):
        raise NotAvailable(
            "the control plane is built from a checkout of pykubelet, and this is an installed package: "
            "set KUBEBUILDER_ASSETS to a folder with its programs"
        )
    return module


def cache_place(module: Path) -> Path:
    """Give where the program built from this module belongs."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    whole = hashlib.sha256(b"".join((module / name).read_bytes() for name in _SOURCES))
    return base / "pykubelet" / _PROGRAM / whole.hexdigest()[:16]


def _build(go: Path, module: Path, place: Path, say: Callable[[str], None]) -> None:
    version = _version(module)
    say(f"Building the control plane, Kubernetes {version}: once, and it takes some minutes")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=place.parent) as folder:
        made = Path(folder) / "made"
        made.mkdir(mode=0o755)
        major, minor = version.removeprefix("v").split(".")[:2]
        stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
        flags = " ".join(
            f"-X k8s.io/{package}/version.{name}={value}"
            for package in ("component-base", "client-go/pkg")
            for name, value in stamps.items()
        )
        command = [str(go), "build", "-v", "-trimpath", "-buildvcs=false", f"-ldflags=-s -w {flags}"]
        _run([*command, "-o", str(made / _PROGRAM), "."], module, say)
        for name in BUILT:
            (made / name).symlink_to(_PROGRAM)
        made.rename(place)
    say(f"Built the control plane in {time.monotonic() - began:.0f} s")


def _run(command: list[str], module: Path, say: Callable[[str], None]) -> None:
    """Run the compiler; it names each package that it has compiled, which is our progress."""
    began = said = time.monotonic()
    lines: list[str] = []
    packages = 0
    with subprocess.Popen(
        command, cwd=module, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if re.fullmatch(r"[\w./~-]+", line.strip()):
                packages += 1
            else:
                lines.append(line.strip())
            if (now := time.monotonic()) - said > _SAY_EVERY:
                said = now
                say(f"  {packages} packages compiled in {now - began:.0f} s")
    if process.returncode:
        told = [line for line in lines if line and not line.startswith("go: downloading")]
        why = " | ".join(told[-_ENOUGH_LINES:]) or f"it ended with {process.returncode}"
        raise NotAvailable(
            f"the control plane could not be built: {why}; `go build` in {module} tells more, "
            "or set KUBEBUILDER_ASSETS"
        )


def _version(module: Path) -> str:
    match = re.search(r"^\s*k8s\.io/kubernetes (v\S+)$", (module / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise NotAvailable(f"{module / 'go.mod'} does not require k8s.io/kubernetes: restore it")
    return match[1]


@contextmanager
def _one_builder(place: Path) -> Iterator[None]:
    """Have others wait who want to build the same."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise NotAvailable(f"the cache {place.parent} cannot be written: {err.strerror}") from err
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

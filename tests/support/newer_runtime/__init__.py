"""containerd 2.x and runc for the tests, newer than Debian's: `RUNTIME=2`.

Both are built from the Go modules beside this file and cached like the control plane. The variable puts
their directories in front of PATH, where `pykubelet.standalone` finds them as it finds any other
installation; without it the tests run on what the host has.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pykubelet.devcluster.binaries import GoBuild, GoModule, ensure_built, module_cache_dir
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.linux.processes import search_path
from pykubelet.standalone.requirements import UNKNOWN_VERSION, Version, find_newest, format_version

VARIABLE = "RUNTIME"
"""Environment variable that chooses the runtime: empty or `1` for the host's, `2` for containerd 2.x."""
CONTAINERD = "github.com/containerd/containerd/v2"
RUNC = "github.com/opencontainers/runc"
_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")


def containerd_module() -> GoModule:
    """Return the Go module of containerd, its shim and its client."""
    env = {"CGO_ENABLED": "0"}
    return GoModule(
        directory=Path(__file__).parent / "containerd",
        name="containerd",
        title="containerd",
        remedy=f"unset {VARIABLE}",
        programs={name: GoBuild(f"{CONTAINERD}/cmd/{name}", env=env) for name in _PROGRAMS},
        source=CONTAINERD,
    )


def runc_module() -> GoModule:
    """Return the Go module of runc; pods with a seccomp profile need its tag `seccomp`."""
    return GoModule(
        directory=Path(__file__).parent / "runc",
        name="runc",
        title="runc",
        remedy=f"unset {VARIABLE}",
        programs={"runc": GoBuild(RUNC, ("build", "-tags=seccomp"), env={"CGO_ENABLED": "1"})},
        source=RUNC,
    )


def build_newer_runtime(report: Callable[[str], None]) -> tuple[Path, Path]:
    """Return the directories of containerd and of runc, building them if they are missing.

    Raises NotAvailable with the reason why they cannot be built.
    """
    runc = runc_module()
    if shutil.which("pkg-config") is None or _run("pkg-config", "--exists", "libseccomp"):
        raise NotAvailable("runc needs libseccomp-dev and pkg-config: install them (Debian packages)")
    return ensure_built(containerd_module(), report), ensure_built(runc, report)


def is_chosen(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the tests run on containerd 2.x. Raises ValueError for another value than 1 or 2."""
    value = environ.get(VARIABLE, "")
    if value not in ("", "1", "2"):
        raise ValueError(f"{VARIABLE}={value} is invalid: use 2 for containerd 2.x, 1 for the host's")
    return value == "2"


def containerd_version() -> Version:
    """Return the version of the containerd that the tests run on."""
    found = find_newest("containerd", search_path())
    return found[1] if found is not None else UNKNOWN_VERSION


def needs_containerd(major: int, minor: int) -> pytest.MarkDecorator:
    """Return the mark of tests that an older containerd skips, with the reason."""
    version = containerd_version()
    reason = (
        f"containerd {format_version(version)} is older than {major}.{minor}: "
        f"{VARIABLE}=2 runs the tests on a newer one"
    )
    return pytest.mark.skipif(version < (major, minor, 0), reason=reason)


def host_path() -> str:
    """Return PATH without the newer runtime: of the host's own containerd and runc."""
    mine = {
        str(module_cache_dir(module.directory, module.name))
        for module in (containerd_module(), runc_module())
    }
    return os.pathsep.join(path for path in os.environ.get("PATH", "").split(os.pathsep) if path not in mine)


def put_first(report: Callable[[str], None]) -> None:
    """Put the newer runtime in front of this process's PATH if it is chosen. Raises NotAvailable."""
    if is_chosen():
        directories = [str(path) for path in build_newer_runtime(report)]
        rest = [path for path in os.environ.get("PATH", "").split(os.pathsep) if path not in directories]
        os.environ["PATH"] = os.pathsep.join([*directories, *rest])


def _run(*command: str) -> int:
    return subprocess.run(command, check=False, capture_output=True).returncode

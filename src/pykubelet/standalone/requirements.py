"""Requirements of the private runtime on the host: executables, and features that its configuration uses.

Of several installations of containerd or runc, such as a distribution's package and a newer release in
/usr/local/bin, the newest is used, wherever it is in PATH. `ctr` and the shim are those beside containerd if
they exist there.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pykubelet.linux import process_limits as capabilities
from pykubelet.linux.mounts import mount, unmount
from pykubelet.linux.processes import search_path
from pykubelet.standalone.instance import MissingPrograms

PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "setpriv": "util-linux",
    "busybox": "busybox-static",
    "catatonit": "catatonit",
}
"""Executables, each with its Debian package."""
Version = tuple[int, int, int]
UNKNOWN_VERSION: Version = (0, 0, 0)
"""Version of an executable that does not report one."""
_NEWEST = ("containerd", "runc")
"""Executables of which the newest is used instead of the first in PATH."""
_BESIDE_CONTAINERD = ("ctr", "containerd-shim-runc-v2")
_FURTHER_DIRS = ("/usr/local/bin",)
"""Directories that are searched in addition to PATH: containerd's own archive is unpacked there."""
_VERSION = re.compile(r"\sv?(\d+)\.(\d+)(?:\.(\d+))?")
_VERSION_TIMEOUT_SECONDS = 10.0
CNI_PLUGINS = ("bridge", "host-local", "loopback", "portmap")
CNI_PLUGIN_DIRS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))


@dataclass(frozen=True, slots=True)
class HostRequirements:
    """Executables and features found on the host."""

    programs: dict[str, Path]
    cni_plugin_dir: Path
    apparmor: bool
    """Whether AppArmor profiles can be applied to containers."""
    may_lower_oom_score: bool
    """Whether oom_score_adj can be set below that of this process (CAP_SYS_RESOURCE)."""
    containerd_version: Version = UNKNOWN_VERSION


def inspect_host() -> HostRequirements:
    """Return the executables and features of the host; runs containerd and runc for their versions.

    Raises MissingPrograms with all missing executables and their packages.
    """
    path = os.pathsep.join((search_path(), *_FURTHER_DIRS))
    found = {name: shutil.which(name, path=path) for name in PROGRAMS}
    versions = dict.fromkeys(_NEWEST, UNKNOWN_VERSION)
    for name in _NEWEST:
        if newest := find_newest(name, path):
            found[name], versions[name] = str(newest[0]), newest[1]
    if found["containerd"] is not None:
        beside = Path(found["containerd"]).parent
        found |= {name: str(beside / name) for name in _BESIDE_CONTAINERD if _is_executable(beside / name)}
    missing = [f"{name} ({PROGRAMS[name]})" for name, candidate in found.items() if candidate is None]
    plugin_dir = next(
        (
            candidate
            for candidate in CNI_PLUGIN_DIRS
            if all((candidate / name).is_file() for name in CNI_PLUGINS)
        ),
        None,
    )
    if plugin_dir is None:
        missing.append(f"the CNI plugins {', '.join(CNI_PLUGINS)} (containernetworking-plugins)")
    if missing or plugin_dir is None:
        raise MissingPrograms(
            f"not installed: {'; '.join(missing)}: run scripts/setup, or install the packages in parentheses"
        )
    return HostRequirements(
        programs={name: Path(candidate) for name, candidate in found.items() if candidate is not None},
        cni_plugin_dir=plugin_dir,
        apparmor=_has_apparmor(path),
        may_lower_oom_score=capabilities.has_capability("CAP_SYS_RESOURCE"),
        containerd_version=versions["containerd"],
    )


def find_newest(name: str, path: str) -> tuple[Path, Version] | None:
    """Return the newest executable with this name and its version; of equal ones the first in PATH."""
    found = [(candidate, read_version(candidate)) for candidate in _candidates(name, path)]
    # `max` returns the first of equal ones.
    return max(found, key=lambda item: item[1], default=None)


def read_version(program: Path) -> Version:
    """Return the version that `program --version` prints; UNKNOWN_VERSION if it prints none or fails."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN_VERSION
    return parse_version(done.stdout)


def parse_version(output: str) -> Version:
    """Return the first version in the output of `--version`, without its suffix."""
    match = _VERSION.search(output)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else UNKNOWN_VERSION


def format_version(version: Version) -> str:
    """Return a version as text; `of unknown version` for UNKNOWN_VERSION."""
    return ".".join(map(str, version)) if version != UNKNOWN_VERSION else "of unknown version"


def _candidates(name: str, path: str) -> Iterator[Path]:
    """Yield the executables with this name, each file once."""
    seen: set[Path] = set()
    for directory in path.split(os.pathsep):
        candidate = Path(directory or ".", name)
        if _is_executable(candidate) and (real := candidate.resolve()) not in seen:
            seen.add(real)
            yield candidate.absolute()


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def choose_snapshotter(directory: Path) -> str:
    """Return the snapshotter that works in this directory: `overlayfs`, else `native` (copies).

    An overlay does not work on another overlay, as in a container, or on some network file systems. The
    kernel does not report this, so a test mount is made.
    """
    with tempfile.TemporaryDirectory(prefix=".overlay-", dir=directory) as name:
        base = Path(name)
        for part in ("lower", "upper", "work", "merged"):
            (base / part).mkdir()
        options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        try:
            mount("overlay", base / "merged", "overlay", options)
        except OSError:
            return "native"
        unmount(base / "merged", detach=True)
    return "overlayfs"


def _has_apparmor(path: str) -> bool:
    try:
        enabled = Path("/sys/module/apparmor/parameters/enabled").read_text().startswith("Y")
    except OSError:
        return False
    return enabled and shutil.which("apparmor_parser", path=path) is not None

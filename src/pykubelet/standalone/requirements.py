"""Requirements of the private runtime on the host: executables, and features that its configuration uses."""

import shutil
import tempfile
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


def inspect_host() -> HostRequirements:
    """Return the executables and features of the host.

    Raises MissingPrograms with all missing executables and their packages.
    """
    path = search_path()
    found = {name: shutil.which(name, path=path) for name in PROGRAMS}
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
    )


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

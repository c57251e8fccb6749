"""Kernel features, sysctls, swap, tmpfs `noswap` and SELinux of the host.

A missing kernel feature shows late and with unrelated symptoms (a sandbox that does not start, a network
without replies), so `pykubelet doctor` checks for it. `KERNEL_DEFAULTS` are the sysctl values that the
kubelet expects: with `protectKernelDefaults` it refuses to start on others, without it sets them.

`failSwapOn` counts every area in /proc/swaps, zram as much as a disk: the memory requests of pods are for
memory, and neither is memory.

Secrets are on tmpfs, and a swapping kernel writes tmpfs to disk unless it is mounted with `noswap`. Kernels
before 6.4 do not have this option (some distributions backport it), and user namespaces may not use it.

With SELinux a container may only access files with a container label. Plugins create their sockets in
directories of the kubelet, so these directories must have it; the kubelet would not see an unprivileged
plugin otherwise.
"""

from __future__ import annotations

import gzip
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pykubelet.linux.mounts import mount, unmount
from pykubelet.logs import get_logger

log = get_logger(__name__)
KERNEL_DEFAULTS: Mapping[str, int] = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
NAMESPACES = frozenset({"ipc", "mnt", "net", "pid", "user", "uts"})


@dataclass(frozen=True, slots=True)
class Feature:
    """A kernel feature that may be built in, a module, or missing."""

    name: str
    module: str
    option: str
    """Name of the kernel configuration option."""
    purpose: str


FEATURES = (
    Feature("overlayfs", "overlay", "CONFIG_OVERLAY_FS", "image layers"),
    Feature("bridge", "bridge", "CONFIG_BRIDGE", "the pod network"),
    Feature("veth", "veth", "CONFIG_VETH", "the pod network"),
    Feature("br_netfilter", "br_netfilter", "CONFIG_BRIDGE_NETFILTER", "services reached over the bridge"),
    Feature("seccomp", "", "CONFIG_SECCOMP_FILTER", "seccomp profiles"),
    Feature("user namespaces", "", "CONFIG_USER_NS", "pods with hostUsers: false"),
)


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Observed state of the running kernel."""

    release: str
    present: frozenset[str] = frozenset()
    """Names of loaded, built-in and loadable modules, and of filesystems."""
    config: Mapping[str, str] | None = None
    """Kernel configuration; None if it is not published."""
    namespaces: frozenset[str] = frozenset()
    max_user_namespaces: int = 0
    seccomp: bool = False
    bridge_netfilter_active: bool = False
    modules_known: bool = False
    """Whether the list of built-in and loadable modules was readable."""


def feature_state(feature: Feature, facts: KernelFacts) -> bool | None:
    """Return whether a kernel has a feature; None if that cannot be determined."""
    if feature.name == "seccomp" and facts.seccomp:
        return True
    if feature.name == "user namespaces":
        return "user" in facts.namespaces and facts.max_user_namespaces > 0
    if feature.name == "br_netfilter" and facts.bridge_netfilter_active:
        return True
    if feature.module and feature.module in facts.present:
        return True
    if facts.config is not None:
        return facts.config.get(feature.option) in ("y", "m")
    return False if facts.modules_known and feature.module else None


def kernel_default_differences(
    proc: Path = Path("/proc"), defaults: Mapping[str, int] = KERNEL_DEFAULTS
) -> dict[str, tuple[int, int | None]]:
    """Return the sysctls with unexpected values: (expected, actual or None if unreadable) by name."""
    actual = {name: read_sysctl(name, proc) for name in defaults}
    return {name: (expected, actual[name]) for name, expected in defaults.items() if actual[name] != expected}


def read_sysctl(name: str, proc: Path = Path("/proc")) -> int | None:
    """Return a numeric sysctl such as `vm/overcommit_memory`; None if it is missing or not a number."""
    try:
        return int((proc / "sys" / name).read_text())
    except (OSError, ValueError):
        return None


def write_sysctl(name: str, value: int, proc: Path = Path("/proc")) -> None:
    """Set a numeric sysctl. Raises OSError if the kernel rejects the value or permission is missing."""
    (proc / "sys" / name).write_text(str(value))


def in_user_namespace(proc: Path = Path("/proc")) -> bool:
    """Return whether this process is in another user namespace than the host's."""
    try:
        mapping = (proc / "self" / "uid_map").read_text().split()
    except OSError:
        return False  # the kernel has no user namespaces
    return mapping != ["0", "0", "4294967295"]


def read_kernel(proc: Path = Path("/proc"), root: Path = Path("/")) -> KernelFacts:
    """Read the state of the running kernel; what cannot be read counts as missing."""
    release = os.uname().release
    directory = root / "lib/modules" / release
    listed = [_read(directory / "modules.builtin"), _read(directory / "modules.dep")]
    return KernelFacts(
        release=release,
        present=parse_filesystems(_read(proc / "filesystems") or "")
        | _names(root / "sys/module")
        | parse_module_list(text for text in listed if text),
        config=_config(proc, root, release),
        namespaces=_names(proc / "self/ns"),
        max_user_namespaces=read_sysctl("user/max_user_namespaces", proc) or 0,
        seccomp=(proc / "sys/kernel/seccomp").is_dir(),
        bridge_netfilter_active=(proc / "sys/net/bridge/bridge-nf-call-iptables").exists(),
        modules_known=any(text is not None for text in listed),
    )


def parse_release(release: str) -> tuple[int, ...]:
    """Return the version of a release for comparisons: (6, 1, 0) for `6.1.0-18-amd64`.

    Raises ValueError if it does not begin with a number.
    """
    match = re.match(r"\d+(\.\d+)*", release)
    if match is None:
        raise ValueError(f"{release!r} is not a kernel release")
    return tuple(int(part) for part in match[0].split("."))


def parse_config(text: str) -> dict[str, str]:
    """Parse a kernel configuration; options that are not set are omitted."""
    pairs = (line.partition("=") for line in text.splitlines() if line.startswith("CONFIG_"))
    return {name: value.strip().strip('"') for name, _, value in pairs}


def parse_filesystems(text: str) -> frozenset[str]:
    """Parse /proc/filesystems: the last word of each line."""
    return frozenset(line.split()[-1] for line in text.splitlines() if line.split())


def parse_module_list(texts: Iterable[str]) -> frozenset[str]:
    """Parse the module names of modules.builtin and modules.dep (`kernel/fs/overlayfs/overlay.ko.xz: …`)."""
    found = set()
    for text in texts:
        for line in text.splitlines():
            file = line.partition(":")[0].rpartition("/")[2]
            if name := file.partition(".ko")[0]:
                found.add(name.replace("-", "_"))
    return frozenset(found)


def _config(proc: Path, root: Path, release: str) -> dict[str, str] | None:
    try:
        with gzip.open(proc / "config.gz", "rt", errors="replace") as file:
            return parse_config(file.read())
    except OSError:
        text = _read(root / f"boot/config-{release}") or _read(root / f"lib/modules/{release}/config")
        return parse_config(text) if text else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _names(directory: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in directory.iterdir())
    except OSError:
        return frozenset()


_UNITS = ("KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class SwapArea:
    """One line of /proc/swaps; sizes in KiB."""

    path: str
    kind: str
    size_kib: int
    used_kib: int
    priority: int

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}, {_size(self.size_kib)}, {_size(self.used_kib)} used)"


def swap_areas(path: Path = Path("/proc/swaps")) -> list[SwapArea]:
    """Return the active swap areas; empty if the kernel has no swap support.

    Raises OSError if /proc/swaps exists and cannot be read.
    """
    try:
        return parse_swaps(path.read_text())
    except FileNotFoundError:
        return []


def parse_swaps(text: str) -> list[SwapArea]:
    """Parse the text of /proc/swaps: a header line, then one area per line.

    A line of unknown format counts as an area: failing to start is safer than swapping.
    """
    return [_parse_line(line) for line in text.strip().splitlines()[1:] if line.strip()]


def swap_problem(areas: list[SwapArea]) -> str | None:
    """Return the one-line reason why `failSwapOn` prevents the start, or None if there is no swap."""
    if not areas:
        return None
    listed = "; ".join(str(area) for area in areas)
    return (
        f"running with swap on is not supported, and /proc/swaps lists {listed}: "
        "turn it off (swapoff -a, and /etc/fstab) or set --fail-swap-on=false (failSwapOn: false)"
    )


def _parse_line(line: str) -> SwapArea:
    # Old kernels do not escape blanks in the path.
    fields = line.rsplit(maxsplit=4)
    try:
        name, kind, size, used, priority = fields
        return SwapArea(_unescape(name), kind, int(size), int(used), int(priority))
    except ValueError:
        return SwapArea(line.strip(), "unknown", 0, 0, 0)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _size(kib: int) -> str:
    value, unit = float(kib), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def supports_noswap(directory: Path) -> bool:
    """Return whether tmpfs supports `noswap`, by a temporary test mount below `directory`. Blocks."""
    try:
        with tempfile.TemporaryDirectory(prefix="tmpfs-noswap-", dir=directory) as mount_dir:
            mount("tmpfs", Path(mount_dir), "tmpfs", "noswap")
            unmount(Path(mount_dir), detach=True)
    except OSError:
        return False
    return True


FS = Path("/sys/fs/selinux")
CONTAINER_FILES = "system_u:object_r:container_file_t:s0"
_ATTRIBUTE = "security.selinux"
Write = Callable[[Path, str, bytes], None]
"""Sets an extended attribute of a file; raises OSError."""


def has_selinux(fs: Path = FS) -> bool:
    """Return whether the host has SELinux."""
    return (fs / "enforce").exists()


def label_for_containers(directory: Path, fs: Path = FS, write: Write = os.setxattr) -> None:
    """Set the SELinux label that lets containers use a directory; do nothing without SELinux.

    A failure is logged only.
    """
    if not has_selinux(fs):
        return
    try:
        write(directory, _ATTRIBUTE, CONTAINER_FILES.encode())
    except OSError as err:
        log.warning(
            "Failed to set SELinux label of directory, unprivileged plugins may not work",
            path=directory,
            err=err,
        )

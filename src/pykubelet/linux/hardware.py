"""Hardware inventory of the host, served at `/spec/`: CPUs, memory, NUMA nodes, disks, networks.

Field names are those of cAdvisor's v1 MachineInfo, which clients of `/spec/` parse. Nothing here raises: a
value that cannot be read (virtual machines often lack some) is zero, empty or omitted.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from pykubelet.linux.host_info import BOOT_ID_FILES, MACHINE_ID_FILES, parse_swap_total, read_machine
from pykubelet.linux.mounts import parse_mountinfo

_SECTOR = 512
_IGNORED_DISKS = ("loop", "ram", "sr")
_IGNORED_NETWORKS = ("lo", "veth", "docker", "nerdctl", "podman")
_ON_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs"})


class HugePages(msgspec.Struct, kw_only=True):
    """Huge pages of one size; `page_size` is in KiB."""

    page_size: int
    num_pages: int


class Filesystem(msgspec.Struct, kw_only=True):
    """A mounted filesystem; `capacity` is in bytes."""

    device: str
    capacity: int
    type: str
    inodes: int
    has_inodes: bool


class Disk(msgspec.Struct, kw_only=True):
    """A disk; `size` is in bytes."""

    name: str
    major: int
    minor: int
    size: int
    scheduler: str


class Network(msgspec.Struct, kw_only=True):
    """A network interface; `speed` is in Mbit/s, -1 if unknown."""

    name: str
    mac_address: str
    speed: int
    mtu: int


class Core(msgspec.Struct, kw_only=True):
    """A CPU core and its hardware threads."""

    core_id: int
    thread_ids: list[int]
    caches: list[object] = []
    uncore_caches: list[object] = []
    socket_id: int


class MemoryNode(msgspec.Struct, kw_only=True):
    """A NUMA node; `memory` is in bytes."""

    node_id: int
    memory: int
    hugepages: list[HugePages] = []
    cores: list[Core] = []
    caches: list[object] = []
    distances: list[int] = []


class Hardware(msgspec.Struct, kw_only=True):
    """The hardware of a host; capacities are in bytes."""

    timestamp: str
    vendor_id: str
    num_cores: int
    num_physical_cores: int
    num_sockets: int
    cpu_frequency_khz: int
    memory_capacity: int
    swap_capacity: int
    memory_by_type: dict[str, object] = {}
    hugepages: list[HugePages] = []
    machine_id: str
    system_uuid: str
    boot_id: str
    filesystems: list[Filesystem] = []
    disk_map: dict[str, Disk] = {}
    network_devices: list[Network] = []
    topology: list[MemoryNode] = []
    cloud_provider: str = "Unknown"
    instance_type: str = "Unknown"
    instance_id: str = "None"


def read_hardware(
    timestamp: str,
    machine_id_files: str = MACHINE_ID_FILES,
    boot_id_files: str = BOOT_ID_FILES,
    root: Path = Path("/"),
) -> Hardware:
    """Read the hardware of this host. Blocks briefly."""
    identity = read_machine(machine_id_files, boot_id_files, root)
    cpuinfo, meminfo = _text(root / "proc/cpuinfo"), _text(root / "proc/meminfo")
    topology = _topology(root / "sys/devices/system")
    cores = [core for node in topology for core in node.cores]
    threads = sum(len(core.thread_ids) for core in cores)
    return Hardware(
        timestamp=timestamp,
        vendor_id=_first(r"^vendor_id\s*: (.*)$", cpuinfo),
        num_cores=threads or len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)),
        num_physical_cores=len(cores),
        num_sockets=len({core.socket_id for core in cores}),
        cpu_frequency_khz=_frequency(root, cpuinfo),
        memory_capacity=_number(_first(r"^MemTotal:\s*(\d+) kB", meminfo)) * 1024,
        swap_capacity=parse_swap_total(meminfo),
        hugepages=_huge_pages(root / "sys/kernel/mm/hugepages"),
        machine_id=identity.machine_id,
        system_uuid=identity.system_uuid,
        boot_id=identity.boot_id,
        filesystems=_filesystems(root),
        disk_map=_disks(root / "sys/block"),
        network_devices=_networks(root / "sys/class/net"),
        topology=topology,
    )


def _topology(system: Path) -> list[MemoryNode]:
    nodes = []
    for directory in _numbered(system / "node", "node") or [(0, system / "cpu")]:
        number, path = directory
        cores: dict[tuple[int, int], Core] = {}
        for thread, cpu in _numbered(path, "cpu"):
            if _text(cpu / "online").strip() == "0":
                continue
            socket = _number(_text(cpu / "topology/physical_package_id"))
            core = _number(_text(cpu / "topology/core_id"))
            entry = cores.setdefault((socket, core), Core(core_id=core, thread_ids=[], socket_id=socket))
            entry.thread_ids.append(thread)
        memory = _number(_first(r"MemTotal:\s*(\d+) kB", _text(path / "meminfo"))) * 1024
        distances = [int(word) for word in _text(path / "distance").split() if word.isdigit()]
        nodes.append(
            MemoryNode(
                node_id=number,
                memory=memory,
                hugepages=_huge_pages(path / "hugepages"),
                cores=list(cores.values()),
                distances=distances,
            )
        )
    return nodes


def _huge_pages(directory: Path) -> list[HugePages]:
    found = []
    for path in _entries(directory):
        if match := re.fullmatch(r"hugepages-(\d+)kB", path.name):
            pages = _number(_text(path / "nr_hugepages"))
            found.append(HugePages(page_size=int(match[1]), num_pages=pages))
    return sorted(found, key=lambda each: each.page_size)


def _filesystems(root: Path) -> list[Filesystem]:
    found: dict[str, Filesystem] = {}
    for mount in parse_mountinfo(_text(root / "proc/self/mountinfo")):
        if mount.kind not in _ON_DISKS or mount.source in found:
            continue
        with suppress(OSError):
            sizes = os.statvfs(mount.point)
            found[mount.source] = Filesystem(
                device=mount.source,
                capacity=sizes.f_blocks * sizes.f_frsize,
                type=mount.kind,
                inodes=sizes.f_files,
                has_inodes=sizes.f_files > 0,
            )
    return list(found.values())


def _disks(directory: Path) -> dict[str, Disk]:
    found = {}
    for path in _entries(directory):
        device = _text(path / "dev").strip()
        major, _, minor = device.partition(":")
        if path.name.startswith(_IGNORED_DISKS) or not device:
            continue
        scheduler = _first(r"\[(.*?)\]", _text(path / "queue/scheduler")) or "none"
        found[device] = Disk(
            name=path.name,
            major=_number(major),
            minor=_number(minor),
            size=_number(_text(path / "size")) * _SECTOR,
            scheduler=scheduler,
        )
    return found


def _networks(directory: Path) -> list[Network]:
    return [
        Network(
            name=path.name,
            mac_address=_text(path / "address").strip(),
            # Reading the speed of an interface without carrier fails or yields -1.
            speed=_number(_text(path / "speed"), -1),
            mtu=_number(_text(path / "mtu")),
        )
        for path in _entries(directory)
        if not path.name.startswith(_IGNORED_NETWORKS)
    ]


def _frequency(root: Path, cpuinfo: str) -> int:
    highest = _number(_text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    megahertz = _first(r"^cpu MHz\s*: ([0-9.]+)$", cpuinfo)
    return highest or int(float(megahertz or 0) * 1000)


def _numbered(directory: Path, prefix: str) -> list[tuple[int, Path]]:
    found = [
        (int(path.name[len(prefix) :]), path)
        for path in _entries(directory)
        if re.fullmatch(rf"{prefix}\d+", path.name)
    ]
    return sorted(found)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else ""


def _number(text: str, default: int = 0) -> int:
    try:
        return int(text)
    except ValueError:
        return default


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

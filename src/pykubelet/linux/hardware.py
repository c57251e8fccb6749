"""Hardware inventory of the host, served at `/spec/`: CPUs, memory, NUMA nodes, disks, networks.

Field names are those of cAdvisor's v1 MachineInfo, which clients of `/spec/` parse, and so are the rules by
which cores and sockets are counted: distinct ids in /proc/cpuinfo, or in sysfs where that file has none.
Nothing here raises: a value that cannot be read (virtual machines often lack some) is zero, empty or omitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pykubelet.linux.host_info import BOOT_ID_FILES, MACHINE_ID_FILES, parse_swap_total, read_machine

_SECTOR = 512
_IGNORED_DISKS = ("loop", "ram", "sr")
_IGNORED_NETWORKS = ("lo", "veth", "docker", "nerdctl")
_FIRST_SHARED_LEVEL = 3
"""Level of the caches that several cores may share."""


class HugePages(msgspec.Struct, kw_only=True):
    """Huge pages of one size; `page_size` is in KiB."""

    page_size: int
    num_pages: int


class MemoryType(msgspec.Struct, kw_only=True):
    """Memory modules of one type; `capacity` is in bytes."""

    capacity: int = 0
    dimm_count: int = 0


class NonVolatileMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Non-volatile memory; zeros, because only Intel's library can read it."""

    memory_mode_capacity: int = 0
    app_direct_mode_capacity: int = msgspec.field(default=0, name="app direct_mode_capacity")
    avg_power_budget: int = 0


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """A processor cache; `size` is in bytes."""

    id: int
    size: int
    type: str
    level: int


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
    """A network interface; `speed` is in Mbit/s, 0 or -1 if unknown."""

    name: str
    mac_address: str
    speed: int
    mtu: int


class Core(msgspec.Struct, kw_only=True):
    """A CPU core and its hardware threads."""

    core_id: int
    thread_ids: list[int]
    caches: list[Cache] = []
    uncore_caches: list[Cache] = []
    socket_id: int


class MemoryNode(msgspec.Struct, kw_only=True):
    """A NUMA node; `memory` is in bytes."""

    node_id: int
    memory: int
    hugepages: list[HugePages] = []
    cores: list[Core] = []
    caches: list[Cache] = []
    distances: list[int] = []


class Hardware(msgspec.Struct, kw_only=True):
    """The hardware of a host; capacities are in bytes."""

    timestamp: str
    vendor_id: str
    num_cores: int
    num_physical_cores: int
    num_sockets: int
    num_books: int | msgspec.UnsetType = msgspec.UNSET
    """Omitted from JSON unless it is an s390x host; so is `num_drawers`."""
    num_drawers: int | msgspec.UnsetType = msgspec.UNSET
    cpu_frequency_khz: int
    memory_capacity: int
    swap_capacity: int
    memory_by_type: dict[str, MemoryType] = {}
    nvm: NonVolatileMemory = NonVolatileMemory()
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
    filesystems: Iterable[Filesystem] = (),
) -> Hardware:
    """Read the hardware of this host; the caller measures the `filesystems`. Blocks briefly."""
    identity = read_machine(machine_id_files, boot_id_files, root)
    cpuinfo, meminfo = _text(root / "proc/cpuinfo"), _text(root / "proc/meminfo")
    topology = _topology(root / "sys/devices/system")
    cores = [core for node in topology for core in node.cores]
    threads = sum(len(core.thread_ids) for core in cores)
    return Hardware(
        timestamp=timestamp,
        vendor_id=_first(r"^vendor_id\s*: (.*)$", cpuinfo),
        num_cores=threads or len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)),
        num_physical_cores=_distinct("core id", cpuinfo) or len(cores),
        num_sockets=_distinct("physical id", cpuinfo) or len({core.socket_id for core in cores}),
        # Only s390x has books and drawers.
        num_books=_distinct("book id", cpuinfo) or msgspec.UNSET,
        num_drawers=_distinct("drawer id", cpuinfo) or msgspec.UNSET,
        cpu_frequency_khz=_frequency(root, cpuinfo),
        memory_capacity=_number(_first(r"^MemTotal:\s*(\d+) kB", meminfo)) * 1024,
        swap_capacity=parse_swap_total(meminfo),
        memory_by_type=_memory_by_type(root / "sys/devices/system/edac/mc"),
        hugepages=_huge_pages(root / "sys/kernel/mm/hugepages"),
        machine_id=identity.machine_id,
        system_uuid=identity.system_uuid,
        boot_id=identity.boot_id,
        filesystems=list(filesystems),
        disk_map=_disks(root / "sys/block"),
        network_devices=_networks(root / "sys/class/net"),
        topology=topology,
    )


def _topology(system: Path) -> list[MemoryNode]:
    nodes = []
    for number, path in _numbered(system / "node", "node"):
        memory = _number(_first(r"MemTotal:\s*(\d+) kB", _text(path / "meminfo"))) * 1024
        node = MemoryNode(
            node_id=number,
            memory=memory,
            hugepages=_huge_pages(path / "hugepages"),
            cores=_cores(path),
            distances=[int(word) for word in _text(path / "distance").split() if word.isdigit()],
        )
        nodes.append(node)
    if not nodes:
        # Without NUMA, each socket counts as a node.
        cores = _cores(system / "cpu")
        for socket in sorted({core.socket_id for core in cores}):
            own = [core for core in cores if core.socket_id == socket]
            nodes.append(MemoryNode(node_id=socket, memory=0, cores=own))
    for node in nodes:
        _add_caches(node, system / "cpu")
    return nodes


def _cores(directory: Path) -> list[Core]:
    cores: dict[tuple[int, int], Core] = {}
    for thread, cpu in _numbered(directory, "cpu"):
        if _text(cpu / "online").strip() == "0":
            continue
        socket = _number(_text(cpu / "topology/physical_package_id"))
        core = _number(_text(cpu / "topology/core_id"))
        entry = cores.setdefault((socket, core), Core(core_id=core, thread_ids=[], socket_id=socket))
        entry.thread_ids.append(thread)
    return list(cores.values())


def _add_caches(node: MemoryNode, cpus: Path) -> None:
    """Add the caches of a node to it if all its cores share them, and to their cores otherwise."""
    node.caches = []
    for core in node.cores:
        core.caches, core.uncore_caches = [], []
        for _, index in _numbered(cpus / f"cpu{core.thread_ids[0]}/cache", "index"):
            cache = Cache(
                id=_number(_text(index / "id")),
                size=_number(_text(index / "size").strip().removesuffix("K")) * 1024,
                type=_text(index / "type").strip(),
                level=_number(_text(index / "level")),
            )
            users = _bits(_text(index / "shared_cpu_map"))
            if cache.level >= _FIRST_SHARED_LEVEL:
                is_of_node = users == len(node.cores) * len(core.thread_ids)
                shared = node.caches if is_of_node else core.uncore_caches
                if cache not in shared:
                    shared.append(cache)
            elif users == len(core.thread_ids):
                core.caches.append(cache)


def _bits(cpu_map: str) -> int:
    """Return the number of CPUs in a map such as `00000000,0000000f`."""
    try:
        return sum(int(word, 16).bit_count() for word in cpu_map.split(","))
    except ValueError:
        return 0


def _memory_by_type(controllers: Path) -> dict[str, MemoryType]:
    found: dict[str, MemoryType] = {}
    for _, controller in _numbered(controllers, "mc"):
        for _, module in _numbered(controller, "dimm"):
            if kind := _text(module / "dimm_mem_type").strip():
                entry = found.setdefault(kind, MemoryType())
                entry.capacity += _number(_text(module / "size")) * 1024 * 1024
                entry.dimm_count += 1
    return found


def _huge_pages(directory: Path) -> list[HugePages]:
    found = []
    for path in _entries(directory):
        if match := re.fullmatch(r"hugepages-(\d+)kB", path.name):
            pages = _number(_text(path / "nr_hugepages"))
            found.append(HugePages(page_size=int(match[1]), num_pages=pages))
    return sorted(found, key=lambda each: each.page_size)


def _disks(directory: Path) -> dict[str, Disk]:
    found = {}
    for path in _entries(directory):
        device = _text(path / "dev").strip()
        major, _, minor = device.partition(":")
        is_hidden = _text(path / "hidden").strip() == "1"
        if path.name.startswith(_IGNORED_DISKS) or not device or is_hidden:
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
            # Reading the speed of an interface without carrier fails (0) or yields -1.
            speed=_number(_text(path / "speed")),
            mtu=_number(_text(path / "mtu")),
        )
        for path in _entries(directory)
        if path.is_dir() and not path.name.startswith(_IGNORED_NETWORKS)
    ]


def _frequency(root: Path, cpuinfo: str) -> int:
    highest = _number(_text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    megahertz = _first(r"^(?:cpu MHz|CPU MHz|clock)\s*:\s*([0-9]+\.[0-9]+)(?:MHz)?", cpuinfo)
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


def _distinct(key: str, cpuinfo: str) -> int:
    """Return the number of different values of a key of /proc/cpuinfo."""
    return len(set(re.findall(rf"^{key}\s*:\s*([0-9]+)$", cpuinfo, re.MULTILINE)))


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else ""


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

"""What a machine is made of, read from made-up and from real files."""

from pathlib import Path

import msgspec
from msgspec import UNSET

from pykubelet.linux.hardware import Cache, MemoryType, Network, read_hardware


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_read_hardware_two_sockets_topology_is_read(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "processor\t: 0\nvendor_id\t: Some\ncpu MHz\t\t: 2100.5\n",
        "proc/meminfo": "MemTotal:  1000 kB\nSwapTotal:  10 kB\n",
        "proc/sys/kernel/random/boot_id": "boot\n",
        "etc/machine-id": "machine\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "7\n",
        "sys/block/sda/dev": "8:0\n",
        "sys/block/sda/size": "4\n",
        "sys/block/sda/queue/scheduler": "none [bfq]\n",
        "sys/block/loop0/dev": "7:0\n",
        "sys/class/net/eth0/address": "02:00:00:00:00:01\n",
        "sys/class/net/eth0/mtu": "1500\n",
        "sys/class/net/lo/mtu": "65536\n",
    }
    for cpu in range(8):
        place = f"sys/devices/system/node/node{cpu // 4}/cpu{cpu}"
        files[f"{place}/topology/physical_package_id"] = str(cpu // 4)
        files[f"{place}/topology/core_id"] = str(cpu // 2)
    files["sys/devices/system/node/node1/meminfo"] = "Node 1 MemTotal:  500 kB\n"
    files["sys/devices/system/node/node1/distance"] = "21 10\n"
    files["sys/devices/system/node/node1/cpu7/online"] = "0\n"
    write(tmp_path, files)
    found = read_hardware("now", root=tmp_path)
    assert (found.num_cores, found.num_physical_cores, found.num_sockets) == (7, 4, 2)
    assert (found.vendor_id, found.cpu_frequency_khz) == ("Some", 2100500)
    assert (found.memory_capacity, found.swap_capacity) == (1024000, 10240)
    assert (found.machine_id, found.boot_id, found.timestamp) == ("machine", "boot", "now")
    assert [(pages.page_size, pages.num_pages) for pages in found.hugepages] == [(2048, 7)]
    assert [(disk.name, disk.size, disk.scheduler) for disk in found.disk_map.values()] == [
        ("sda", 2048, "bfq")
    ]
    expected = Network(name="eth0", mac_address="02:00:00:00:00:01", speed=0, mtu=1500)
    assert found.network_devices == [expected]
    assert [core.thread_ids for core in found.topology[1].cores] == [[4, 5], [6]]
    assert (found.topology[1].memory, found.topology[1].distances) == (512000, [21, 10])


def test_read_hardware_empty_root_returns_zeros(tmp_path: Path) -> None:
    found = read_hardware("now", root=tmp_path)
    assert (found.num_cores, found.memory_capacity, found.filesystems) == (0, 0, [])


def test_read_hardware_on_host_returns_cores_and_memory() -> None:
    found = read_hardware("now")
    assert found.num_cores >= 1
    assert found.memory_capacity > 0


def test_read_hardware_caches_assigned_to_core_uncore_and_node(tmp_path: Path) -> None:
    """Verify the levels: L1 and L2 belong to a core, L3 to all cores of a node or to some of them."""
    files = {}
    for cpu in range(8):
        files[f"sys/devices/system/node/node{cpu // 4}/cpu{cpu}/topology/core_id"] = str(cpu)
        files[f"sys/devices/system/node/node{cpu // 4}/cpu{cpu}/topology/physical_package_id"] = "0"
        shared = "0f" if cpu < 4 else "c0" if cpu > 5 else "30"
        for index, (level, kind, users) in enumerate(
            [(1, "Data", f"{1 << cpu:x}"), (2, "Unified", "ff"), (3, "Unified", f"00000000,{shared}")]
        ):
            place = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files[f"{place}/id"] = "7\n"
            files[f"{place}/size"] = f"{32 * level}K\n"
            files[f"{place}/level"] = f"{level}\n"
            files[f"{place}/type"] = f"{kind}\n"
            files[f"{place}/shared_cpu_map"] = f"{users}\n"
    write(tmp_path, files)
    first, second = read_hardware("now", root=tmp_path).topology
    data = Cache(id=7, size=32768, type="Data", level=1)
    third = Cache(id=7, size=98304, type="Unified", level=3)
    assert [core.caches for core in first.cores] == [[data]] * 4
    assert (first.caches, first.cores[0].uncore_caches) == ([third], [])
    assert (second.caches, second.cores[0].uncore_caches) == ([], [third])


def test_read_hardware_cpuinfo_ids_counted_as_cadvisor_does(tmp_path: Path) -> None:
    cpus = [(0, 0), (0, 1), (1, 0), (1, 1)]
    text = "".join(f"processor : 0\nphysical id\t: {s}\ncore id\t\t: {c}\n\n" for s, c in cpus)
    write(tmp_path, {"proc/cpuinfo": text})
    found = read_hardware("now", root=tmp_path)
    assert (found.num_physical_cores, found.num_sockets, found.num_books) == (2, 2, UNSET)
    write(tmp_path, {"proc/cpuinfo": "book id : 1\nbook id : 2\ndrawer id : 0\n"})
    found = read_hardware("now", root=tmp_path)
    assert (found.num_books, found.num_drawers) == (2, 1)


def test_read_hardware_memory_modules_summed_by_type(tmp_path: Path) -> None:
    files = {}
    for number, kind in enumerate(["Registered-DDR4", "Registered-DDR4", "Unbuffered-DDR3"]):
        files[f"sys/devices/system/edac/mc/mc{number % 2}/dimm{number}/dimm_mem_type"] = f"{kind}\n"
        files[f"sys/devices/system/edac/mc/mc{number % 2}/dimm{number}/size"] = "16384\n"
    write(tmp_path, files)
    assert read_hardware("now", root=tmp_path).memory_by_type == {
        "Registered-DDR4": MemoryType(capacity=2 * 16 * 2**30, dimm_count=2),
        "Unbuffered-DDR3": MemoryType(capacity=16 * 2**30, dimm_count=1),
    }


def test_read_hardware_hidden_disk_skipped_and_sockets_are_nodes_without_numa(tmp_path: Path) -> None:
    files = {"sys/block/nvme0c0n1/dev": "259:1\n", "sys/block/nvme0c0n1/hidden": "1\n"}
    for cpu in range(4):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = str(cpu)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = str(cpu // 2)
    write(tmp_path, files)
    found = read_hardware("now", root=tmp_path)
    assert found.disk_map == {}
    assert [(node.node_id, len(node.cores)) for node in found.topology] == [(0, 2), (1, 2)]
    assert (found.num_cores, found.num_physical_cores, found.num_sockets) == (4, 4, 2)


def test_hardware_json_has_the_fields_of_machine_info() -> None:
    document = msgspec.to_builtins(read_hardware("now"))
    fields = (
        "timestamp vendor_id num_cores num_physical_cores num_sockets cpu_frequency_khz memory_capacity "
        "swap_capacity memory_by_type nvm hugepages machine_id system_uuid boot_id filesystems disk_map "
        "network_devices topology cloud_provider instance_type instance_id"
    )
    assert list(document) == fields.split()
    assert list(document["nvm"]) == ["memory_mode_capacity", "app direct_mode_capacity", "avg_power_budget"]

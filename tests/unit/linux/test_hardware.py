"""What a machine is made of, read from made-up and from real files."""

from pathlib import Path

from pykubelet.linux.hardware import Network, read_hardware


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
    expected = Network(name="eth0", mac_address="02:00:00:00:00:01", speed=-1, mtu=1500)
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

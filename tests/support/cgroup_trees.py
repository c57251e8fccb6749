"""Directory trees with the files of cgroups, for readers whose root is injected."""

from collections.abc import Mapping
from pathlib import Path

from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from pykubelet.stats.cgroups.files import DescriptorBudget
from pykubelet.stats.cgroups.host import ReaderHost

BOOT = 1_000_000_020.0

V1_MEMORY_STAT = """\
cache 4096
rss 8192
rss_huge 0
mapped_file 1024
swap 512
pgfault 71
pgmajfault 3
inactive_file 100
active_file 200
hierarchical_memory_limit 9223372036854771712
total_cache 40960
total_rss 81920
total_rss_huge 0
total_mapped_file 10240
total_swap 5120
total_pgfault 710
total_pgmajfault 30
total_inactive_file 30000
total_active_file 2000
"""

V1_FILES = {
    "cpuacct/cpuacct.usage": "123456789\n",
    "cpuacct/cpuacct.stat": "user 150\nsystem 25\n",
    "cpu/cpu.stat": "nr_periods 10\nnr_throttled 4\nthrottled_time 5000\nnr_bursts 2\nburst_time 7\n",
    "cpu/cpu.shares": "204\n",
    "cpu/cpu.cfs_period_us": "100000\n",
    "cpu/cpu.cfs_quota_us": "20000\n",
    "cpu/cgroup.procs": "",
    "memory/memory.usage_in_bytes": "131072\n",
    "memory/memory.stat": V1_MEMORY_STAT,
    "memory/memory.use_hierarchy": "1\n",
    "memory/memory.max_usage_in_bytes": "262144\n",
    "memory/memory.failcnt": "9\n",
    "memory/memory.kmem.usage_in_bytes": "16384\n",
    "memory/memory.limit_in_bytes": "134217728\n",
    "memory/memory.memsw.limit_in_bytes": "268435456\n",
    "memory/memory.soft_limit_in_bytes": "9223372036854771712\n",
    "pids/pids.current": "12\n",
    "pids/pids.max": "max\n",
    "blkio/blkio.throttle.io_serviced_recursive": "254:0 Read 3\n254:0 Write 4\n254:0 Total 7\nTotal 7\n",
    "blkio/blkio.throttle.io_service_bytes_recursive": (
        "254:0 Read 12288\n254:0 Write 16384\n254:0 Total 28672\nTotal 28672\n"
    ),
    "hugetlb/hugetlb.2MB.usage_in_bytes": "2097152\n",
    "hugetlb/hugetlb.2MB.max_usage_in_bytes": "4194304\n",
    "hugetlb/hugetlb.2MB.failcnt": "1\n",
}

V2_FILES = {
    "cpu.stat": (
        "usage_usec 123456\nuser_usec 100000\nsystem_usec 23456\nnr_periods 10\nnr_throttled 4\n"
        "throttled_usec 5\nnr_bursts 2\nburst_usec 7\n"
    ),
    "cpu.weight": "100\n",
    "cpu.max": "20000 100000\n",
    "memory.current": "131072\n",
    "memory.stat": (
        "anon 81920\nfile 40960\nkernel 5000\nfile_mapped 10240\ninactive_file 30000\nactive_file 2000\n"
        "pgfault 71\npgmajfault 3\n"
    ),
    "memory.swap.current": "5120\n",
    "memory.peak": "262144\n",
    "memory.max": "134217728\n",
    "memory.min": "4096\n",
    "memory.swap.max": "max\n",
    "pids.current": "12\n",
    "pids.max": "100\n",
    "io.stat": "254:0 rbytes=12288 wbytes=16384 rios=3 wios=4 dbytes=0 dios=0\n8:16 \n",
    "cpu.pressure": (
        "some avg10=1.50 avg60=0.25 avg300=0.05 total=4242\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=17\n"
    ),
    "hugetlb.2MB.rsvd.current": "2097152\n",
    "hugetlb.2MB.events": "max 3\n",
    "cgroup.procs": "1\n2\n3\n",
    "cgroup.events": "populated 1\n",
}

MEMINFO = "MemTotal:     1000 kB\nMemFree:       10 kB\nSwapTotal:     400 kB\nSwapFree:      100 kB\n"


def open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def reader_host(tmp_path: Path, *, descriptors: int = 100) -> ReaderHost:
    """Return a host with one size of huge pages, and little memory."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    return ReaderHost(
        budget=DescriptorBudget(descriptors), boot_time=BOOT, huge_page_sizes=("2MB",), meminfo=meminfo
    )


def v1_tree(
    tmp_path: Path, changes: Mapping[str, str | None] = {}, *, cgroup: str = "kubepods/pod1"
) -> Cgroups:
    """Write the files of a cgroup v1, also those of the root; a change to None leaves a file out."""
    mounts = {}
    for name, content in {**V1_FILES, **changes}.items():
        controller, _, file = name.partition("/")
        mounts[controller] = tmp_path / "v1" / controller
        for directory in {mounts[controller], mounts[controller] / cgroup}:
            directory.mkdir(parents=True, exist_ok=True)
            if content is not None:
                (directory / file).write_text(content)
    return Cgroups(CgroupMode.V1, tmp_path / "v1", mounts, {})


def v2_tree(
    tmp_path: Path, changes: Mapping[str, str | None] = {}, *, cgroup: str = "kubepods/pod1"
) -> Cgroups:
    """Write the files of a cgroup v2; a change to None leaves a file out."""
    root = tmp_path / "v2"
    directory = root / cgroup
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in {**V2_FILES, **changes}.items():
        if content is not None:
            (directory / name).write_text(content)
    return Cgroups(CgroupMode.V2, root, {}, {})

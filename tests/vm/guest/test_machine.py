from pathlib import Path


def test_guest_has_cgroup_v2_controllers_and_systemd() -> None:
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    assert {"cpu", "cpuset", "io", "memory", "hugetlb", "pids"} <= set(controllers)
    assert Path("/proc/1/comm").read_text() == "systemd\n"

from pathlib import Path


def test_it_is_what_the_tests_need() -> None:
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    assert {"cpu", "cpuset", "io", "memory", "hugetlb", "pids"} <= set(controllers)
    assert Path("/proc/1/comm").read_text() == "systemd\n"

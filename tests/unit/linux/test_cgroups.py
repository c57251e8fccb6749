import os
from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import (
    CGROUP2_MAGIC,
    CgroupMode,
    Cgroups,
    decide_mode,
    detect_cgroups,
    filesystem_magic,
    find_v1_mounts,
    parse_own_cgroups,
)
from pykubelet.linux.mounts import parse_mountinfo

TMPFS_MAGIC = 0x01021994
PROC_MAGIC = 0x9FA0

V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,seclabel,cpu,cpuacct
33 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime shared:10 master:3 - cgroup cgroup rw,cpuset,clone_children
34 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
35 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/agent,name=systemd
36 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
90 27 0:32 /pod /run/state/a\\040b/memory ro - cgroup cgroup rw,memory
"""
V1_OWN = "9:name=systemd:/init.scope\n5:cpu,cpuacct:/a:b\n4:memory:/x\n3:cpuset:/\n0::/unified\n"


@pytest.mark.parametrize(
    ("root", "unified", "mode"),
    [
        (CGROUP2_MAGIC, None, CgroupMode.V2),
        (CGROUP2_MAGIC, CGROUP2_MAGIC, CgroupMode.V2),
        (TMPFS_MAGIC, CGROUP2_MAGIC, CgroupMode.HYBRID),
        (TMPFS_MAGIC, TMPFS_MAGIC, CgroupMode.V1),
        (TMPFS_MAGIC, None, CgroupMode.V1),
    ],
)
def test_decide_mode_follows_filesystem_types(root: int, unified: int | None, mode: CgroupMode) -> None:
    assert decide_mode(root, unified) is mode


def test_parse_own_cgroups_returns_paths_by_controller() -> None:
    assert parse_own_cgroups(V1_OWN) == {
        "name=systemd": "/init.scope",
        "cpu": "/a:b",
        "cpuacct": "/a:b",
        "memory": "/x",
        "cpuset": "/",
        "": "/unified",
    }
    assert parse_own_cgroups("0::/system.slice/x.service\n") == {"": "/system.slice/x.service"}
    assert parse_own_cgroups("") == {}


def test_find_v1_mounts_uses_options_and_first_mount_point() -> None:
    found = find_v1_mounts(parse_mountinfo(V1_MOUNTS), frozenset(parse_own_cgroups(V1_OWN)))
    base = Path("/sys/fs/cgroup")
    assert found == {
        "cpu": base / "cpu,cpuacct",
        "cpuacct": base / "cpu,cpuacct",
        "cpuset": base / "cpuset",
        "memory": base / "memory",
        "name=systemd": base / "systemd",
    }


def test_cgroups_missing_controllers_and_paths_are_computed() -> None:
    root = Path("/sys/fs/cgroup")
    v1 = Cgroups(
        CgroupMode.V1, root, {"cpu": root / "cpu", "memory": root / "memory", "name=x": root / "x"}, {}
    )
    assert v1.controllers == {"cpu", "memory"}
    assert v1.missing == {"cpuacct", "cpuset"}
    assert v1.path("memory", "/kubepods/pod1") == root / "memory/kubepods/pod1"
    assert not v1.unified
    v2 = Cgroups(CgroupMode.V2, root, dict.fromkeys(["cpu", "memory", "pids", "cpuset", "io"], root), {})
    assert v2.unified
    assert v2.missing == frozenset()
    assert v2.path("io") == root
    with pytest.raises(KeyError):
        v2.path("hugetlb")


def test_filesystem_magic_returns_kernel_value() -> None:
    assert filesystem_magic(Path("/proc")) == PROC_MAGIC
    with pytest.raises(FileNotFoundError, match="/no/such/place"):
        filesystem_magic(Path("/no/such/place"))


def test_detect_cgroups_v1_fixture_detected(tmp_path: Path) -> None:
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(V1_OWN)
    (proc / "mountinfo").write_text(V1_MOUNTS)
    found = detect_cgroups(tmp_path, tmp_path / "proc")
    assert found.mode is CgroupMode.V1
    assert found.missing == frozenset()
    assert found.own["memory"] == "/x"


def test_detect_cgroups_on_host_matches_kernel() -> None:
    found = detect_cgroups()
    assert found.missing == frozenset()
    assert found.unified == (Path("/sys/fs/cgroup/cgroup.controllers").exists())
    for controller in found.controllers:
        assert (found.path(controller) / "cgroup.procs").exists()
    assert str(os.getpid()) in (
        (found.path("memory", found.own["memory"]) / "cgroup.procs").read_text().split()
    )

"""Selection and names of file systems in the text of a mount table."""

import os
import time
from pathlib import Path

import pytest

from pykubelet.stats.storage.mounted_filesystems import MAX_FILESYSTEMS, mount_of_directory, parse_mount_table

ROOT = Path("/var/lib/kubelet")
ID = "cbcd6f7461bdfed143a319df40164a12f00f34d4081f5c5fa40fdeb21ca6f8c3"
HOST = b"""\
22 27 0:21 / /proc rw,relatime - proc proc rw
24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=12331664k
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24682416k
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 25 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24682416k
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
"""


def line(point: str, kind: str = "tmpfs", source: str = "tmpfs", device: str = "0:99") -> bytes:
    return f"99 27 {device} / {point} rw shared:1 - {kind} {source} rw\n".encode()


def devices(text: bytes) -> list[str]:
    return [fs.device for fs in parse_mount_table(text, ROOT).filesystems]


def test_parse_mount_table_plain_host_named_as_cadvisor() -> None:
    table = parse_mount_table(HOST, ROOT)
    assert [fs.device for fs in table.filesystems] == ["/dev/shm", "/dev/vda", "/sys/fs/cgroup"]
    assert [(fs.major, fs.minor) for fs in table.filesystems] == [(0, 27), (254, 0), (0, 28)]
    assert table.for_device(254, 0) == table.filesystems[1]
    assert table.for_device(1, 1) is None


@pytest.mark.parametrize(
    ("kind", "source", "name"),
    [
        ("xfs", "/dev/sdb1", "/dev/sdb1"),
        ("nfs4", "server:/export", "server:/export"),
        ("zfs", "tank/data", "tank/data"),
        ("overlay", "overlay", "overlay_0-99"),
        ("tmpfs", "none", "/mnt/x"),
        ("vfat", "/dev/vda15", "/dev/vda15"),
        ("fuse.sshfs", "host:/", None),
        ("cgroup2", "cgroup2", None),
        ("9p", "share", None),
        ("autofs", "auto", None),
    ],
)
def test_parse_mount_table_type_included_or_skipped(kind: str, source: str, name: str | None) -> None:
    assert devices(line("/mnt/x", kind, source)) == ([name] if name else [])


def test_parse_mount_table_bind_mount_counts_once_at_first_point() -> None:
    text = line("/mnt/a", "ext4", "/dev/sdb", "8:16") + line("/mnt/b", "ext4", "/dev/sdb", "8:16")
    (found,) = parse_mount_table(text, ROOT).filesystems
    assert found.point == b"/mnt/a"


def test_parse_mount_table_root_mount_precedes_bind_mounts() -> None:
    text = line("/mnt/a", "ext4", "/dev/vda", "254:0") + line("/", "ext4", "/dev/vda", "254:0")
    (found,) = parse_mount_table(text, ROOT).filesystems
    assert found.point == b"/"


def test_parse_mount_table_overlay_root_reported_twice_as_cadvisor_does() -> None:
    assert devices(line("/", "overlay", "overlay", "0:40")) == ["overlay_0-40", "overlay"]


def test_parse_mount_table_mounts_of_pods_and_containers_skipped() -> None:
    text = (
        line("/var/lib/kubelet/pods/u1/volumes/kubernetes.io~secret/s")
        + line("/var/lib/kubelet/plugins/kubernetes.io/csi/d/x/globalmount", "ext4", "/dev/sdc")
        + line(f"/run/containerd/io.containerd.grpc.v1.cri/sandboxes/{ID}/shm", source="shm")
        + line(f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/rootfs", "overlay", "overlay")
        + line("/var/lib/kubelet", "ext4", "/dev/sdd")
        + line("/var/lib/kubelet/pods", "ext4", "/dev/sde")
    )
    assert devices(text) == ["/dev/sdd", "/dev/sde"]


def test_parse_mount_table_escaped_and_malformed_lines_handled() -> None:
    text = line("/mnt/with\\040space") + b"nonsense\n1 2 a:b / /x rw - tmpfs t rw\n\n1 2 - tmpfs t rw\n"
    assert devices(text) == ["/mnt/with space"]
    assert devices(b"1 1 0:9 / /mnt/\xff rw - tmpfs t rw\n") == ["/mnt/\ufffd"]


def test_parse_mount_table_more_than_limit_keeps_first_and_root() -> None:
    text = b"".join(line(f"/mnt/{number}") for number in range(20_000)) + line("/", "ext4", "/dev/vda")
    table = parse_mount_table(text, ROOT)
    assert len(table.filesystems) == MAX_FILESYSTEMS + 1
    assert table.omitted == 20_001 - MAX_FILESYSTEMS
    assert table.filesystems[0].device == "/mnt/0"
    assert table.filesystems[-1].device == "/dev/vda"


def test_parse_mount_table_large_table_sleeps_between_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    parse_mount_table(line("/mnt/x", "proc") * 20_000, ROOT)
    assert len(sleeps) == 20


def test_mount_of_directory_nested_and_stacked_returns_topmost() -> None:
    text = (
        line("/", "ext4", "/dev/vda", "254:0")
        + line("/data", "fuse.x", "old", "0:50")
        + line("/data", "virtiofs", "share", "0:51")
        + line("/database", "xfs", "/dev/sdb", "8:16")
    )
    for directory, source in ((b"/data/a", "share"), (b"/data", "share"), (b"/dat", "/dev/vda")):
        found = mount_of_directory(text, directory)
        assert found is not None
        assert found.source == source
    assert mount_of_directory(b"", b"/x") is None


def test_parse_mount_table_of_this_host_contains_its_root() -> None:
    text = Path("/proc/self/mountinfo").read_bytes()
    table = parse_mount_table(text, ROOT)
    device = Path("/").stat().st_dev
    assert table.for_device(os.major(device), os.minor(device)) is not None

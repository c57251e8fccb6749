"""Directories of pods and their logs: what containers left there is read with bounds, and always removed."""

import os
from pathlib import Path

import pytest

from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.pod_logs import PodLogs
from tests.support.containers import make_pod
from tests.support.trees import deep_directory, nest

CONTENT = "127.0.0.1\tlocalhost\n"


@pytest.fixture
def dirs(tmp_path: Path) -> PodDirs:
    dirs = PodDirs(tmp_path)
    dirs.make("u")
    return dirs


def test_write_hosts_missing_file_is_created(dirs: PodDirs) -> None:
    path = dirs.write_hosts("u", CONTENT)
    assert (path.read_text(), oct(path.stat().st_mode)) == (CONTENT, "0o100644")


def test_write_hosts_same_content_is_not_written(dirs: PodDirs) -> None:
    path = dirs.write_hosts("u", CONTENT)
    os.utime(path, ns=(1, 1))
    dirs.write_hosts("u", CONTENT)
    assert path.stat().st_mtime_ns == 1


@pytest.mark.parametrize("before", ["", CONTENT[:-1], CONTENT + "\n", "x" * 10_000], ids=len)
def test_write_hosts_other_content_is_replaced_in_place(dirs: PodDirs, before: str) -> None:
    path = dirs.write_hosts("u", before)
    inode = path.stat().st_ino
    assert dirs.write_hosts("u", CONTENT).read_text() == CONTENT
    assert path.stat().st_ino == inode, "containers that run have it mounted"


def test_write_hosts_file_extended_after_stat_reads_one_byte_more(
    dirs: PodDirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that a container that extends the file at the worst time cannot fill the kubelet's memory."""
    path = dirs.write_hosts("u", CONTENT)
    read: list[int] = []
    pread, fstat = os.pread, os.fstat

    def extending_fstat(opened: int) -> os.stat_result:
        found = fstat(opened)
        os.truncate(path, 1 << 40)
        return found

    def recording_pread(opened: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(opened, length, offset)

    def unbounded(*_: object) -> bytes:
        raise AssertionError("the whole file is read")

    monkeypatch.setattr(os, "fstat", extending_fstat)
    monkeypatch.setattr(os, "pread", recording_pread)
    monkeypatch.setattr(Path, "read_bytes", unbounded)
    dirs.write_hosts("u", CONTENT)
    assert read == [len(CONTENT) + 1]
    assert path.stat().st_size == len(CONTENT)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_write_hosts_other_file_type_is_replaced(dirs: PodDirs, tmp_path: Path, kind: str) -> None:
    """Verify that a link is not followed, and that a pipe without a writer does not block."""
    path, precious = dirs.hosts_file("u"), tmp_path / "precious"
    precious.write_text("precious")
    match kind:
        case "link":
            path.symlink_to(precious)
        case "pipe":
            os.mkfifo(path)
        case "directory":
            (path / "inner").mkdir(parents=True)
    assert dirs.write_hosts("u", CONTENT).read_text() == CONTENT
    assert not path.is_symlink()
    assert precious.read_text() == "precious"


def test_remove_deep_volume_tree_is_removed() -> None:
    """Verify that no depth of directories in a volume keeps a pod's directory from being removed."""
    with deep_directory() as root:
        dirs = PodDirs(root)
        dirs.make("u")
        nest(dirs.volumes("u"), 3000)
        dirs.remove("u")
        assert not dirs.pod("u").exists()


@pytest.mark.parametrize("name", ["web", ""], ids=["pod", "orphan"])
def test_remove_logs_deep_tree_is_removed(name: str) -> None:
    pod = make_pod()
    with deep_directory() as logs:
        directory = logs / f"{pod.metadata.namespace}_{pod.metadata.name}_{pod.uid}"
        directory.mkdir()
        nest(directory, 3000)
        if not name:
            pod.metadata.name = ""
        PodLogs(str(logs), None).remove(pod)
        assert not directory.exists()

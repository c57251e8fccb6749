"""A disk that is full to the last byte: files of the kubelet stay whole, and it starts on such a disk."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.util.files import write_atomically
from tests.support.manifests import Document, container, pod
from tests.support.node import Node, kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime
from tests.support.small_disk import MIB, fill_disk, free_disk, small_disk

pytestmark = pytest.mark.machine
DISK = 16 * MIB
_CHECKPOINTS = ("cpu_manager_state", "allocated_pods_state", "actuated_pods_state")


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(DISK) as point:
        yield point


def files_of(root: Path) -> dict[str, bytes]:
    """Return the files of the kubelet's state, by path: not those of pods, nor sockets."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("pods", "pki")
    }


def torn(root: Path) -> list[str]:
    """Return the files of the kubelet's state that are empty, not JSON, or temporary."""
    return [
        name
        for name, content in files_of(root).items()
        if Path(name).name.startswith(".") or name.endswith((".new", ".tmp")) or not is_json(content)
    ]


def is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def has_said(node: Node, text: str) -> bool:
    return text in node.log_text()


def test_write_atomically_disk_full_old_content_stays(disk: Path) -> None:
    file = disk / "state"
    write_atomically(file, b"old")
    fill_disk(disk)
    for content in (b"new", b"x" * 100_000):
        with pytest.raises(OSError, match="No space left"):
            write_atomically(file, content)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(file, content, temporary=disk / "state.new")
    assert file.read_bytes() == b"old"
    assert sorted(path.name for path in disk.iterdir()) == ["filler", "state"]
    free_disk(disk)
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"


def test_kubelet_disk_full_files_stay_whole_and_kubelet_starts(runtime: RunningRuntime, disk: Path) -> None:
    root, volumes = disk / "root", [{"name": "v", "emptyDir": {}}]
    mounts: Document = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    exclusive = {"limits": {"cpu": "1", "memory": "32Mi"}}
    settings: Document = {
        "cpuManagerPolicy": "static",
        "reservedSystemCPUs": "0",
        "podLogsDir": str(disk / "logs"),
    }
    with running(kubelet_node(runtime, root=root, **settings)) as node:
        node.start_pod(pod("steady", container(resources=exclusive, **mounts), volumes=volumes))
        leaving = node.start_pod(pod("leaves"))
        node.wait("its checkpoints", lambda: all((root / name).exists() for name in _CHECKPOINTS) or None)
        (first,) = node.truth.running("steady-n1")
        assert not torn(root)
        fill_disk(disk)
        # Changes of everything that is written: an allocation, a status, a volume, a pull record.
        node.write(pod("comes", container(**mounts), volumes=volumes))
        node.wait("the error to be logged", lambda: has_said(node, "No space left") or None)
        os.kill(node.truth.container_pid(first.id), signal.SIGKILL)
        node.remove("leaves")
        node.wait_gone("leaves-n1", leaving["metadata"]["uid"])
        fill_disk(disk)
        assert not torn(root)
        for _ in range(2):
            node.kill()
            fill_disk(disk)
            node.start()
            assert not torn(root)
        free_disk(disk)
        node.wait_ready("comes-n1", 60)
        steady = node.wait_ready("steady-n1", 60)
        assert status_of(steady, "main")["restartCount"] >= 1
        assert len(node.truth.running("steady-n1")) == 1
        node.wait("complete checkpoints", lambda: not torn(root) or None)
        assigned = json.loads((root / "cpu_manager_state").read_text())["entries"]
        assert list(assigned) == [steady["metadata"]["uid"]]
        node.clear()


def test_kubelet_first_start_on_full_disk_one_line_and_next_start_works(
    runtime: RunningRuntime, disk: Path
) -> None:
    """Verify that a first start on a full disk leaves nothing that prevents the next one."""
    fill_disk(disk)
    node = kubelet_node(runtime, root=disk / "root", podLogsDir=str(disk / "logs"))
    try:
        node.start(wait=False)
        with pytest.raises(AssertionError, match="the agent ended with 1"):
            node.wait("it to be healthy", lambda: node.is_healthy() or None)
        last = node.log_text().splitlines()[-1]
        assert last.endswith(
            f"cannot create the root directory {disk}/root: No space left on device: "
            "free some space there, or choose another --root-dir"
        )
        assert "Traceback" not in node.log_text()
        node.kill()
        free_disk(disk)
        node.start()
        node.start_pod(pod("works"))
        assert not torn(disk / "root")
        node.clear()
    finally:
        node.kill()
        node.truth.close()

"""The disk that the agent writes to is full for a while."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.manifests import Document, container, forever, pod
from tests.support.node import kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system that is quickly full."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,nr_inodes=300", "small", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
        path.rmdir()


def fill(path: Path) -> None:
    """Use up every byte and every inode."""
    with pytest.raises(OSError, match="No space"), (path / "filler").open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    with pytest.raises(OSError, match="No space"):
        for number in range(1000):
            (path / f"filler{number}").touch()


def test_kubelet_disk_full_pods_survive_and_recover(runtime: RunningRuntime) -> None:
    mounts: Document = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    volumes = [{"name": "v", "emptyDir": {}}]
    with small_disk(runtime.instance.data_dir.parent / "small") as disk:
        full = kubelet_node(runtime, root=disk / "root", podLogsDir=str(disk / "logs"))
        with running(full) as node:
            node.start_pod(pod("steady", container(**mounts), volumes=volumes))
            leaving = node.start_pod(pod("leaves", container(**mounts), volumes=volumes))
            (before,) = node.truth.running("steady-n1")
            hosts = disk / "root" / "pods" / leaving["metadata"]["uid"] / "etc-hosts"
            assert "127.0.0.1\tlocalhost" in hosts.read_text()
            fill(disk)
            node.write(pod("comes", container(command=forever("echo hello"), **mounts), volumes=volumes))
            node.wait("the trouble to be told", lambda: "No space left" in node.log_text())
            # What runs goes on, a restart of it does not spoil the files it needs, and what shall go can go.
            steady = node.wait_ready("steady-n1")
            assert "127.0.0.1\tlocalhost" in node.shell("steady-n1", "cat /etc/hosts")
            os.kill(node.truth.container_pid(before.id), signal.SIGKILL)
            node.remove("leaves")
            node.wait_gone("leaves-n1", leaving["metadata"]["uid"])
            hosts = disk / "root" / "pods" / steady["metadata"]["uid"] / "etc-hosts"
            assert "127.0.0.1\tlocalhost" in hosts.read_text()
            # An agent that starts now starts.
            node.kill()
            node.start()
            for path in disk.glob("filler*"):
                path.unlink()
            node.wait_ready("comes-n1", 60)
            node.wait_ready("steady-n1", 60)
            assert len(node.truth.running("comes-n1")) == 1
            assert "127.0.0.1\tlocalhost" in node.shell("steady-n1", "cat /etc/hosts")
            node.clear()

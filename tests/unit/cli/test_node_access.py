"""Selection of the node of a command, with real control sockets and a scripted /proc."""

import asyncio
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubelet.cli import node_access
from pykubelet.cli.client import KubeletNotRunning, NodeError, NodeNotFound
from pykubelet.cli.node_access import Node, running_kubelets, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.server.node_info import INFO_FILE_NAME, NodeInfo, read_node_info, write_node_info
from pykubelet.server.node_routes import node_routes
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.standalone.data_dir import claim, hold_lock
from pykubelet.standalone.instance import DirectoryError, Instance
from tests.support.cli_node import answering
from tests.support.pod_view import ScriptedView


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as path:  # sockets have short paths
        yield Path(path)


@pytest.fixture(autouse=True)
def nothing_by_default(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """The host's own nodes and environment are not part of these tests."""
    monkeypatch.delenv("PYKUBELET_DATA_DIR", raising=False)
    monkeypatch.delenv("PYKUBELET_ROOT_DIR", raising=False)
    monkeypatch.setattr(node_access, "DEFAULT_DATA_DIR", directory / "none")
    monkeypatch.setattr(node_access, "DEFAULT_ROOT_DIR", directory / "none")


def info(root: Path, **fields: Any) -> NodeInfo:
    return NodeInfo(
        node_name="n",
        root_dir=str(root),
        cert_dir=str(root / "pki"),
        pod_logs_dir="/var/log/pods",
        container_runtime_endpoint="unix:///run/c.sock",
        **fields,
    )


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    hidden = path.with_name(f".{path.name}")
    listener.bind(str(hidden))
    listener.listen()
    hidden.rename(path)
    return listener


def kubelets_in(directory: Path) -> list[str]:
    return [node.title for node in running_kubelets() if node.root_dir.is_relative_to(directory)]


def test_running_kubelets_found_by_listening_socket_with_its_name(directory: Path) -> None:
    for name in ("b", "a a", "other"):
        (directory / name).mkdir()
    with (
        listen(directory / "b" / SOCKET_NAME),
        listen(directory / "a a" / SOCKET_NAME),
        listen(directory / "other" / "other.sock"),
    ):
        assert kubelets_in(directory) == [str(directory / "a a"), str(directory / "b")]
    assert kubelets_in(directory) == []  # the files are there, without a listener


def test_running_kubelets_socket_of_container_or_other_user_ignored(directory: Path, tmp_path: Path) -> None:
    path = directory / SOCKET_NAME
    with listen(path):
        proc = tmp_path / "proc"
        (proc / "net").mkdir(parents=True)
        (proc / "net" / "unix").write_bytes(Path("/proc/net/unix").read_bytes())
        (proc / str(os.getpid()) / "root").mkdir(parents=True)
        assert directory not in [node.root_dir for node in running_kubelets(proc)]  # another root directory
        (proc / str(os.getpid()) / "root").rmdir()
        (proc / str(os.getpid()) / "root").symlink_to("/")
        assert directory in [node.root_dir for node in running_kubelets(proc)]
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
            assert directory not in [node.root_dir for node in running_kubelets(proc)]


def test_running_kubelets_damaged_table_ignored(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "unix").write_bytes(
        b"Num RefCount\n\xff\xfe\n0: 2 0 00010000 0001 01 1 relative/pykubelet.sock\n"
        b"0: 2 0 00010000 0001 01 1 /tmp/a\nb c d not-hex e f g h\x0bi j k l m n o p\n"
        b"0: 2 0 00010000 0001 01 1 @/pykubelet.sock\n0: 2 0 00010000 0001 01 1 /nowhere/pykubelet.sock\n"
    )
    assert running_kubelets(tmp_path) == []
    assert running_kubelets(tmp_path / "none") == []


def test_select_node_without_options_default_then_only_running_then_stopped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [Node(directory / "r1"), Node(directory / "r2")]
    running: list[Node] = []
    monkeypatch.setattr(node_access, "running_kubelets", lambda: running)
    with pytest.raises(NodeError, match=r"no node runs on this host: start one|run it with sudo"):
        select_node(NodeSelection())
    write_node_info(directory, info(directory))
    monkeypatch.setattr(node_access, "DEFAULT_ROOT_DIR", directory)
    assert select_node(NodeSelection()).root_dir == directory
    running[:] = nodes[:1]
    assert select_node(NodeSelection()) is nodes[0]
    running[:] = nodes
    several = f"choose one of them: --root-dir {directory}/r1, --root-dir {directory}/r2"
    with pytest.raises(NodeError, match=re.escape(several)):
        select_node(NodeSelection())
    (directory / "data").mkdir()
    monkeypatch.setattr(node_access, "DEFAULT_DATA_DIR", directory / "data")
    stopped = f"; or the stopped one: --data-dir {directory}/data"
    with pytest.raises(NodeError, match=re.escape(several + stopped)):
        select_node(NodeSelection())
    running[:] = []
    assert select_node(NodeSelection()).instance == Instance.at(directory / "data")
    running[:] = nodes[:1]  # a stopped default node does not hide the one that runs
    assert select_node(NodeSelection()) is nodes[0]
    claim(Instance.at(directory / "data"))
    with hold_lock(Instance.at(directory / "data"), "up"):
        assert select_node(NodeSelection()).instance == Instance.at(directory / "data")


def test_select_node_options_win_over_environment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKUBELET_DATA_DIR", str(directory / "by-env"))
    assert select_node(NodeSelection()).title == str(directory / "by-env")
    assert select_node(NodeSelection(root_dir=directory)).title == str(directory)
    assert select_node(NodeSelection(data_dir=directory / "d")).title == str(directory / "d")
    monkeypatch.setenv("PYKUBELET_ROOT_DIR", str(directory))
    with pytest.raises(NodeError, match="both set"):
        select_node(NodeSelection())
    monkeypatch.delenv("PYKUBELET_DATA_DIR")
    assert select_node(NodeSelection()).title == str(directory)


def test_select_node_wrong_directories_one_line_with_remedy(directory: Path) -> None:
    with pytest.raises(NodeError, match="give one of the two"):
        select_node(NodeSelection(directory, directory))
    with pytest.raises(NodeNotFound, match="give the --root-dir"):
        select_node(NodeSelection(root_dir=directory / "none"))
    (directory / "file").touch()
    with pytest.raises(NodeNotFound, match="no directory"):
        select_node(NodeSelection(root_dir=directory / "file"))
    with pytest.raises(DirectoryError, match="belongs to the system"):
        select_node(NodeSelection(data_dir=Path("/etc")))
    node = select_node(NodeSelection(root_dir=directory))
    with pytest.raises(KubeletNotRunning, match=r"no node runs on .*systemctl start kubelet"):
        node.client.pods()
    with pytest.raises(NodeNotFound, match=INFO_FILE_NAME):
        _ = node.endpoint


def test_node_at_root_in_data_dir_is_node_of_data_dir(directory: Path) -> None:
    instance = Instance.at(directory / "d")
    claim(instance)
    instance.kubelet_root.mkdir()
    node = Node.at_root(instance.kubelet_root)
    assert (node.instance, node.option) == (instance, f" --data-dir {instance.data_dir}")
    assert Node.at_root(directory / "d" / "other").instance is None


async def test_node_info_from_kubelet_then_file_then_derived(directory: Path) -> None:
    instance = Instance.at(directory / "d")
    claim(instance)
    instance.kubelet_root.mkdir()
    assert Node.of(instance).endpoint == instance.endpoint
    assert Node.of(instance).manifests == instance.manifests
    (instance.data_dir / "kubelet.yaml").write_text("containerRuntimeEndpoint: unix:///mine.sock\n")
    assert Node.of(instance).endpoint == "unix:///mine.sock"
    root = instance.kubelet_root
    write_node_info(root, info(root, image_service_endpoint="unix:///images.sock"))
    node = Node.of(instance)
    assert (node.endpoint, node.image_endpoint) == ("unix:///run/c.sock", "unix:///images.sock")
    assert node.manifests is None
    live = node_routes(info(root, static_pod_path="/live"))
    async with answering(instance, ScriptedView(), live):
        assert await asyncio.to_thread(lambda: Node.of(instance).manifests) == Path("/live")
        assert await asyncio.to_thread(Node.of(instance).is_running)
    async with answering(instance, ScriptedView()):  # an older version without the route
        assert await asyncio.to_thread(lambda: Node.of(instance).endpoint) == "unix:///run/c.sock"
    assert not Node.of(instance).is_running()


def test_read_node_info_damaged_or_huge_file_is_none(directory: Path) -> None:
    path = directory / INFO_FILE_NAME
    assert read_node_info(directory) is None
    for content in (b"", b"{}", b"[1]", b"\xff", b'{"nodeName": "' + b"x" * (2 << 20)):
        path.write_bytes(content)
        assert read_node_info(directory) is None
    path.unlink()
    path.mkdir()
    assert read_node_info(directory) is None

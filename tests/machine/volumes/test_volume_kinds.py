"""Volumes through real containers: kinds that programs mount, parts of volumes, propagation, read-only.

There is no NFS in this machine's kernel: `mount` is a stand-in for the agent, which binds a folder.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubelet.linux.mounts import MS_BIND, MS_REC, MS_SHARED, mount, plan_unmounts, read_mounts, unmount
from tests.support.manifests import container, forever, pod
from tests.support.node import Node, kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime
from tests.support.volume_programs import MOUNT, StandIns, dead_server

pytestmark = pytest.mark.machine

_DRIVER = """#!{python} -S
import json, subprocess, sys
command, *arguments = sys.argv[1:]
status = "Success"
if command == "mount":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "flex", arguments[0]], check=True)
elif command == "unmount":
    subprocess.run(["umount", arguments[0]], check=True)
elif command != "init":
    status = "Not supported"
print(json.dumps(dict(status=status, capabilities=dict(attach=False))))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def programs(place: Path) -> StandIns:
    (place / "bin").mkdir()
    made = StandIns(place / "bin")
    made.add("mount", MOUNT)
    driver = place / "drivers/example.com~disk/disk"
    driver.parent.mkdir(parents=True)
    driver.write_text(_DRIVER.format(python=sys.executable))
    driver.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def node(runtime: RunningRuntime, place: Path, programs: StandIns) -> Iterator[Node]:
    env = {"PATH": programs.path}
    with running(kubelet_node(runtime, env=env, volumePluginDir=str(place / "drivers"))) as started:
        yield started
        started.clear()
    assert not [one for one in read_mounts() if one.point.is_relative_to(started.root / "pods")]


@pytest.fixture(autouse=True)
def tidy(node: Node) -> Iterator[None]:
    yield
    for path in node.manifests.iterdir():
        path.unlink()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder whose mounts are shared; on this machine nothing is by itself."""
    folder = tmp_path / "shared"
    folder.mkdir()
    with share(folder):
        yield folder


@contextmanager
def share(folder: Path) -> Iterator[None]:
    mount(str(folder), folder, "", flags=MS_BIND)
    try:
        mount("", folder, "", flags=MS_SHARED | MS_REC)
        yield
    finally:
        for point in plan_unmounts(read_mounts(), folder):
            unmount(point, detach=True)
        unmount(folder, detach=True)


def mounting(name: str, path: str = "/v", **more: Any) -> dict[str, Any]:
    return {"name": name, "mountPath": path, **more}


def gone(node: Node, name: str, uid: str) -> None:
    node.remove(name)
    node.wait_gone(name, uid)


class TestKinds:
    def test_nfs_volume_mounted_with_sub_path(self, node: Node, tmp_path: Path, programs: StandIns) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "file").write_text("from the server")
        source = {"server": "nfs.example", "path": str(tmp_path)}
        main = container(volumeMounts=[mounting("v"), mounting("v", "/part", subPath="sub")])
        started = node.start_pod(pod("nfs", main, volumes=[{"name": "v", "nfs": source}]))
        assert node.shell("nfs-n1", "cat /v/file; echo mine > /part/new") == "from the server"
        assert (tmp_path / "sub/new").read_text() == "mine\n"
        gone(node, "nfs-n1", started["metadata"]["uid"])
        assert (tmp_path / "file").exists()
        where = f"pods/{started['metadata']['uid']}/volumes/kubernetes.io~nfs/v"
        assert ["mount", "-t", "nfs", f"nfs.example:{tmp_path}", str(node.root / where)] in programs.calls

    def test_nfs_volume_read_only_rejects_writes(self, node: Node, tmp_path: Path) -> None:
        source = {"server": "nfs.example", "path": str(tmp_path), "readOnly": True}
        main = container(volumeMounts=[mounting("v")])
        node.start_pod(pod("nfs-ro", main, volumes=[{"name": "v", "nfs": source}]))
        assert "Read-only" in node.shell("nfs-ro-n1", "touch /v/new 2>&1 || true")

    def test_flex_volume_mounted_with_fs_group(self, node: Node) -> None:
        volume = {"name": "v", "flexVolume": {"driver": "example.com/disk"}}
        main = container(
            volumeMounts=[mounting("v")],
            securityContext={"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True},
        )
        started = node.start_pod(pod("flex", main, volumes=[volume], securityContext={"fsGroup": 2345}))
        assert node.shell("flex-n1", "echo mine > /v/file; cat /v/file; stat -c %g /v/file") == "mine\n2345\n"
        uid = started["metadata"]["uid"]
        assert "flex" in [one.source for one in read_mounts() if uid in str(one.point)]
        gone(node, "flex-n1", uid)

    def test_git_repo_volume_fails_mount_with_remedy(self, node: Node) -> None:
        name = node.write(
            pod(
                "git",
                container(volumeMounts=[mounting("v")]),
                volumes=[{"name": "v", "gitRepo": {"repository": "https://git.example/x"}}],
            )
        )
        message = node.wait_event(name, "FailedMount")
        assert 'for volume "v" : gitRepo volumes are not supported: ' in message
        assert "clone into an emptyDir volume with an init container" in message


class TestParts:
    def test_sub_path_and_sub_path_expr_are_mounted(self, node: Node) -> None:
        mounts = [
            mounting("data", "/whole"),
            mounting("data", "/part", subPath="a/b"),
            mounting("data", "/own", subPathExpr="$(WHO)/log"),
        ]
        main = container(volumeMounts=mounts, env=[{"name": "WHO", "value": "me"}])
        started = node.start_pod(pod("parts", main, volumes=[{"name": "data", "emptyDir": {}}]))
        text = node.shell("parts-n1", "touch /part/x /own/y; cd /whole; find . -type f | sort")
        assert text == "./a/b/x\n./me/log/y\n"
        gone(node, "parts-n1", started["metadata"]["uid"])

    def test_sub_path_symlink_to_host_is_rejected(self, node: Node) -> None:
        """CVE-2017-1002101: what an init container plants, the next one's sub-path does not follow."""
        first = container("first", ["sh", "-c", "ln -s /etc /v/link"], volumeMounts=[mounting("data")])
        main = container(volumeMounts=[mounting("data", subPath="link")])
        name = node.write(
            pod("planted", main, initContainers=[first], volumes=[{"name": "data", "emptyDir": {}}])
        )
        found = node.wait_pod(
            name,
            "to be refused",
            lambda one: status_of(one, "main")["state"].get("waiting", {}).get("message"),
        )
        waiting = status_of(found, "main")["state"]["waiting"]
        assert waiting["reason"] == "CreateContainerConfigError"
        assert waiting["message"] == (
            'failed to prepare subPath for volumeMount "data" of container "main"'
        ), "and nothing is told of the host"
        gone(node, name, found["metadata"]["uid"])


class TestPropagation:
    def test_propagation_modes_decide_mount_visibility(self, node: Node, shared: Path) -> None:
        privileged = {"privileged": True}
        pods = pod(
            "spread",
            container("private", volumeMounts=[mounting("v", mountPropagation="None")]),
            container("usual", volumeMounts=[mounting("v")]),
            container("slave", volumeMounts=[mounting("v", mountPropagation="HostToContainer")]),
            container(
                "both",
                volumeMounts=[mounting("v", mountPropagation="Bidirectional")],
                securityContext=privileged,
            ),
            volumes=[{"name": "v", "hostPath": {"path": str(shared)}}],
        )
        for name in ("host", "inside"):
            (shared / name).mkdir()
        started = node.start_pod(pods)

        def seen(place: str) -> list[str]:
            names = ("private", "usual", "slave", "both")
            return [n for n in names if f" /v/{place} " in node.shell("spread-n1", "cat /proc/mounts", n)]

        mount("tmpfs", shared / "host", "tmpfs", "size=64k")
        assert seen("host") == ["slave", "both"]
        node.shell("spread-n1", "mount -t tmpfs -o size=64k inner /v/inside && touch /v/inside/x", "both")
        assert seen("inside") == ["slave", "both"]
        assert (shared / "inside/x").exists(), "the node sees it, too"
        unmount(shared / "host")
        assert seen("host") == []
        gone(node, "spread-n1", started["metadata"]["uid"])

    def test_bidirectional_unprivileged_container_is_rejected(self, node: Node, tmp_path: Path) -> None:
        main = container(volumeMounts=[mounting("v", mountPropagation="Bidirectional")])
        node.write(pod("cheeky", main, volumes=[{"name": "v", "hostPath": {"path": str(tmp_path)}}]))
        node.wait("a word of it", lambda: "only for privileged containers" in node.log_text())
        assert node.pod("cheeky-n1") is None


class TestReadOnly:
    def test_recursive_read_only_applies_to_submounts(self, node: Node, shared: Path) -> None:
        """Read-only is the volume itself; recursively so is what is mounted in it, where the runtime can."""
        (shared / "below").mkdir()
        mount("tmpfs", shared / "below", "tmpfs", "size=64k")
        mounts = [
            mounting("v", "/plain", readOnly=True),
            mounting("v", "/all", readOnly=True, recursiveReadOnly="IfPossible"),
        ]
        volumes = [{"name": "v", "hostPath": {"path": str(shared)}}]
        started = node.start_pod(pod("ro", container(volumeMounts=mounts), volumes=volumes))
        told = {
            one["mountPath"]: one.get("recursiveReadOnly")
            for one in status_of(started, "main")["volumeMounts"]
        }
        files = "/plain/x /all/x /plain/below/x /all/below/x"
        script = f"for f in {files}; do touch $f 2>/dev/null && echo $f; done; true"
        written = node.shell("ro-n1", script).split()
        assert told["/plain"] == "Disabled"
        expected = ["/plain/below/x"] if told["/all"] == "Enabled" else ["/plain/below/x", "/all/below/x"]
        assert written == expected

    def test_volume_mounts_keep_hosts_file_and_termination_log(self, node: Node) -> None:
        """Volumes around them change nothing: the hosts file is there, and last words are heard."""
        main = container(
            command=["sh", "-c", "grep -c last-n1 /etc/hosts && echo last words > /dev/termination-log"],
            volumeMounts=[mounting("v", "/etc/other", readOnly=True), mounting("w", "/dev/shm/w")],
        )
        volumes = [{"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {"medium": "Memory"}}]
        node.write(pod("last", main, volumes=volumes, restartPolicy="Never"))
        found = node.wait_phase("last-n1", "Succeeded")
        ended = status_of(found, "main")["state"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (0, "last words\n")


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs fuse")
def test_volume_on_dead_server_other_pods_start(node: Node, tmp_path: Path) -> None:
    """More pods hang on it than are started at a time; they can be deleted meanwhile."""
    names = [f"stuck{number}-n1" for number in range(5)]

    def begun() -> list[str]:
        return [name for name in names if any("Pulled" in event for event in node.events(name))]

    with dead_server(tmp_path / "dead"):
        volumes = [{"name": "v", "hostPath": {"path": f"{tmp_path}/dead"}}]
        main = container(volumeMounts=[mounting("v", subPath="part")])
        for name in names:
            node.write(pod(name.removesuffix("-n1"), main, volumes=volumes))
        node.wait("the starts that hang", lambda: len(begun()) >= 4)
        node.start_pod(pod("lively", container()))
        node.clear()


def test_fs_group_volume_files_have_pod_group(node: Node) -> None:
    """Users without a name in common share files by the pod's group."""
    who = {"runAsUser": 1001, "runAsGroup": 1001}
    first = container(
        "first",
        ["sh", "-c", "umask 0; mkdir /v/d; touch /v/d/one"],
        volumeMounts=[mounting("data")],
        securityContext=who,
    )
    main = container(
        command=forever("touch /v/d/two"),
        volumeMounts=[mounting("data")],
        securityContext={"runAsUser": 1002, "runAsGroup": 1002},
    )
    document = pod(
        "group",
        main,
        initContainers=[first],
        volumes=[{"name": "data", "emptyDir": {}}],
        securityContext={"fsGroup": 2345, "fsGroupChangePolicy": "OnRootMismatch"},
    )
    node.start_pod(document)
    # It runs as soon as its process exists, which may take a moment to write.
    seen = "until test -e /v/d/two; do sleep 0.1; done"
    text = node.shell("group-n1", f"{seen}; stat -c '%a %g' /v; stat -c '%u %g' /v/d/one /v/d/two", "main")
    assert text == "2777 2345\n1001 2345\n1002 2345\n"
    assert os.geteuid() == 0

"""Features of pods that only newer runtimes have, with real containers."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.device_plugin.asking import Asking, dongles
from tests.support.device_plugin.process import RESOURCE
from tests.support.manifests import IMAGE, container, pod
from tests.support.newer_runtime import needs_containerd
from tests.support.node import Node, status_of

pytestmark = [pytest.mark.machine, needs_containerd(2, 1)]
BLOCK = 65536
CDI_DIR = Path("/var/run/cdi")


def uid_map(node: Node, name: str) -> tuple[int, int, int]:
    inside, outside, length = node.shell(name, "cat /proc/self/uid_map").split()
    return int(inside), int(outside), int(length)


def test_host_users_false_pods_have_own_id_ranges(node: Node) -> None:
    volumes = [
        {"name": "data", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {
            "name": "about",
            "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]},
        },
    ]
    mounts = [{"name": one["name"], "mountPath": f"/{one['name']}"} for one in volumes]
    names = [
        node.write(pod(f"userns{index}", container(volumeMounts=mounts), hostUsers=False, volumes=volumes))
        for index in range(2)
    ]
    maps = [(node.wait_ready(name), uid_map(node, name))[1] for name in names]
    assert all(inside == 0 and outside >= BLOCK and length == BLOCK for inside, outside, length in maps)
    assert maps[0][1] != maps[1][1]
    name = names[0]
    [main] = node.truth.running(name)
    status = Path(f"/proc/{node.truth.container_pid(main.id)}/status").read_text()
    owner = next(line.split()[1] for line in status.splitlines() if line.startswith("Uid:"))
    assert int(owner) == maps[0][1]
    # The mounts are ID-mapped: root in the pod owns its volumes, and on the host they are root's.
    assert (
        node.shell(name, "touch /data/f /memory/f && stat -c %u /data/f /memory/f /about/name").split()
        == ["0"] * 3
    )
    found = node.pod(name) or {}
    data = node.root / "pods" / found["metadata"]["uid"] / "volumes/kubernetes.io~empty-dir/data/f"
    assert data.stat().st_uid == 0


def test_host_users_false_container_restarts_keeps_id_range(node: Node) -> None:
    name = node.write(pod("again", container(command=["sh", "-c", "sleep 1; exit 1"]), hostUsers=False))
    node.wait_pod(name, "to be restarted", lambda found: status_of(found, "main")["restartCount"] >= 1)
    uid = (node.pod(name) or {})["metadata"]["uid"]
    stored = json.loads((node.root / "pods" / uid / "userns").read_text())
    assert stored["uidMappings"][0]["length"] == BLOCK


def test_image_volume_mounted_read_only_with_sub_path(node: Node) -> None:
    mounts = [
        {"name": "tools", "mountPath": "/tools"},
        {"name": "tools", "mountPath": "/only-bin", "subPath": "bin"},
    ]
    volume = {"name": "tools", "image": {"reference": IMAGE, "pullPolicy": "IfNotPresent"}}
    name = node.write(pod("artifact", container(volumeMounts=mounts), volumes=[volume]))
    node.wait_ready(name)
    assert node.shell(name, "test -x /tools/bin/busybox && test -x /only-bin/busybox && echo yes") == "yes\n"
    assert "Read-only" in node.shell(name, "touch /tools/x 2>&1 || :")


def test_image_volume_missing_sub_path_event_names_it(node: Node) -> None:
    mounts = [{"name": "tools", "mountPath": "/tools", "subPath": "absent"}]
    volume = {"name": "tools", "image": {"reference": IMAGE, "pullPolicy": "IfNotPresent"}}
    name = node.write(pod("lost", container(volumeMounts=mounts), volumes=[volume]))
    assert "absent" in node.wait_event(name, "Failed")


def test_image_volume_image_not_present_pod_waits(node: Node) -> None:
    volume = {"name": "tools", "image": {"reference": "localhost:1/absent:1", "pullPolicy": "Never"}}
    mounts = [{"name": "tools", "mountPath": "/tools"}]
    name = node.write(pod("unpulled", container(volumeMounts=mounts), volumes=[volume]))

    def is_waiting(found: dict[str, object]) -> bool:
        return "ErrImageNeverPull" in json.dumps(found["status"])

    node.wait_pod(name, "to wait for its image", is_waiting)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A directory with a file system mounted below it."""
    below = tmp_path / "tree" / "below"
    below.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(below)], check=True)
    try:
        yield below.parent
    finally:
        subprocess.run(["umount", "--lazy", str(below)], check=True)


@pytest.mark.parametrize(
    ("mode", "result"), [("Enabled", "Read-only"), ("IfPossible", "Read-only"), ("Disabled", "written")]
)
def test_recursive_read_only_mount_covers_submounts(node: Node, tree: Path, mode: str, result: str) -> None:
    volume = {"name": "tree", "hostPath": {"path": str(tree)}}
    mount = {"name": "tree", "mountPath": "/tree", "readOnly": True, "recursiveReadOnly": mode}
    name = node.write(pod(f"rro-{mode.lower()}", container(volumeMounts=[mount]), volumes=[volume]))
    node.wait_ready(name)
    assert "Read-only" in node.shell(name, "touch /tree/x 2>&1 || :")
    assert result in node.shell(name, "touch /tree/below/x 2>&1 && echo written || :")
    expected = "Disabled" if mode == "Disabled" else "Enabled"
    [shown] = [
        one for one in status_of(node.pod(name) or {}, "main")["volumeMounts"] if one["mountPath"] == "/tree"
    ]
    assert shown["recursiveReadOnly"] == expected
    node.remove(name)
    node.wait("the pod to release the directory", lambda: not node.truth.running(name))


@pytest.fixture
def cdi_spec() -> Iterator[Path]:
    """A CDI specification of the test plugin's two devices."""
    CDI_DIR.mkdir(parents=True, exist_ok=True)
    path = CDI_DIR / "pykubelet-test.json"
    edits = {
        one: {
            "deviceNodes": [
                {"path": f"/dev/cdi-{one}", "hostPath": "/dev/null", "type": "c", "major": 1, "minor": 3}
            ],
            "env": [f"CDI_DEVICE={one}"],
        }
        for one in ("d1", "d2")
    }
    devices = [{"name": one, "containerEdits": edit} for one, edit in edits.items()]
    path.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": "example.com/dongle", "devices": devices}))
    try:
        yield path
    finally:
        path.unlink()


def test_cdi_device_of_device_plugin_reaches_container(node: Node, cdi_spec: Path, tmp_path: Path) -> None:
    asking = Asking(node.root)
    some = {RESOURCE: "1"}
    with dongles(tmp_path / "plugin", node.root, "--cdi"):
        node.wait("the devices to be offered", lambda: asking.offered() == ["d1", "d2"], 60)
        name = node.write(pod("cdi", container(resources={"limits": some, "requests": some})))
        node.wait_ready(name)
        device = node.shell(name, "echo $CDI_DEVICE").strip()
        assert device in ("d1", "d2")
        assert node.shell(name, f"test -c /dev/cdi-{device} && echo yes") == "yes\n"
        node.clear()


def test_cdi_device_unknown_to_runtime_event_names_it(node: Node, tmp_path: Path) -> None:
    asking = Asking(node.root)
    some = {RESOURCE: "1"}
    with dongles(tmp_path / "plugin", node.root, "--cdi"):
        node.wait("the devices to be offered", lambda: asking.offered() == ["d1", "d2"], 60)
        name = node.write(pod("uncdi", container(resources={"limits": some, "requests": some})))
        assert "example.com/dongle" in node.wait_event(name, "Failed")
        node.clear()

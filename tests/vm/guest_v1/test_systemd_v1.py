"""systemd itself on the hierarchies of v1: pods' slices, and containers that the runtime puts into them."""

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.systemd import is_running
from tests.support.data_dir import short_dir
from tests.support.manifests import container, pod
from tests.support.node import Node, kubelet_node, running, status_of
from tests.support.runtime import runtime_process
from tests.support.systemd_v1 import COUNTED, a_life
from tests.vm.guest.node import SLOW, GuestNode

PODS = {
    "sure": {"limits": {"cpu": "1", "memory": "32Mi"}},
    "burst": {"requests": {"cpu": "300m", "memory": "16Mi"}},
    "last": {},
}


class Systemctl:
    """The real one, as a `Manager`."""

    def reload(self) -> None:
        subprocess.run(["systemctl", "daemon-reload"], check=True)

    def names(self, root: str) -> list[str]:
        listed = [
            "systemctl",
            "list-units",
            "--all",
            "--plain",
            "--no-legend",
            "--full",
            "*.slice",
            "*.scope",
        ]
        said = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        return [line.split()[0] for line in said.splitlines() if line.startswith((root, "cri-containerd-"))]


def test_guest_has_cgroup_v1_controllers_and_systemd() -> None:
    assert is_running()
    found = detect_cgroups()
    assert not found.unified
    assert {"cpu", "memory", "pids", "cpuset"} <= set(found.mounts)


async def test_pod_cgroups_systemd_v1_created_updated_and_removed() -> None:
    root = f"pyk{secrets.token_hex(4)}"
    try:
        await a_life(root, Systemctl())
    finally:
        subprocess.run(["systemctl", "stop", f"{root}.slice"], check=False)


@pytest.fixture
def node() -> Iterator[Node]:
    with short_dir() as path, runtime_process(path, "systemd") as runtime:
        plain = kubelet_node(runtime, cgroupDriver="systemd", failCgroupV1=False)
        made = GuestNode(plain.instance, plain.command, (plain._healthz, plain._read_only), root=plain.root)
        plain.truth.close()
        with running(made):
            yield made


def test_pod_slices_systemd_v1_kubelet_restarted_keep_limits_and_are_removed(node: Node) -> None:
    """Containers are in their pods' slices with what they asked for, also after a kill; then all is gone."""
    for name, resources in PODS.items():
        node.write(pod(name, container(resources=resources), hostNetwork=True))
    found = {name: node.wait_ready(f"{name}-n1", SLOW) for name in PODS}
    shares = {name: scope_value(node, name, "cpu", "cpu.shares") for name in PODS}
    assert shares == {"sure": "1024", "burst": "307", "last": "2"}
    assert scope_value(node, "sure", "memory", "memory.limit_in_bytes") == str(32 << 20)
    containers = {status_of(one, "main")["containerID"] for one in found.values()}
    node.kill()
    node.start()
    after = {status_of(node.wait_ready(f"{name}-n1", SLOW), "main")["containerID"] for name in PODS}
    assert after == containers
    Systemctl().reload()
    assert {name: scope_value(node, name, "cpu", "cpu.shares") for name in PODS} == shares
    mine = node.instance.cgroup_root.strip("/").replace("-", "_")
    assert len([unit for unit in Systemctl().names(mine) if "-pod" in unit]) == len(PODS)
    node.clear(SLOW)
    # systemd forgets a unit a moment after its cgroup is gone.
    node.wait(
        "systemd to forget the pods' units",
        lambda: not [unit for unit in Systemctl().names(mine) if "-pod" in unit or unit.endswith(".scope")],
        SLOW,
    )
    above = [detect_cgroups().path(controller, f"{mine}.slice") for controller in COUNTED]
    assert [
        path for top in above if top.exists() for path in top.rglob("*-pod*.slice") if path.is_dir()
    ] == []


def scope_value(node: Node, name: str, controller: str, file: str) -> str:
    """What the cgroup of a pod's only container is set to."""
    (one,) = node.truth.running(f"{name}-n1")
    top = detect_cgroups().path(controller, "/")
    (scope,) = top.rglob(f"cri-containerd-{one.id}.scope")
    assert "-pod" in scope.parent.name
    return Path(scope, file).read_text().strip()

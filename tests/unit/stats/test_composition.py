"""What is sampled on a node: cgroups of pods and system containers, and rows of ephemeral storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykubelet.agent.stats import (
    NodeTargets,
    container_cgroup,
    own_cgroup,
    pod_targets,
    storage_rows,
)
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec, ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume import EmptyDir, Volume
from pykubelet.cm.cgroups.driver import CgroupError
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from pykubelet.stats.collector import NODE, Collector
from pykubelet.stats.pod_storage import FileUsage, PodStorage
from pykubelet.stats.runtime_stats import LayerUsage
from pykubelet.stats.samples import CgroupGone, Target
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.usage import VolumeStats


def container(name: str, phase: ContainerPhase = "running", attempt: int = 0) -> ObservedContainer:
    return ObservedContainer(
        id=f"{name}-{attempt}", name=name, phase=phase, attempt=attempt, created_at=2_000_000_000, image="img"
    )


def observed(*containers: ObservedContainer, ready: bool = True, uid: str = "u1") -> ObservedPod:
    sandbox = ObservedSandbox(id="box", ready=ready, created_at=1_000_000_000)
    return ObservedPod(uid=uid, name="web", namespace="ns", sandboxes=(sandbox,), containers=containers)


def targets_of(pod: ObservedPod, parent: str = "/kubepods/podu1") -> list[Target]:
    return list(pod_targets(pod, parent, lambda above, id: f"{above}/{id}", "pause:1"))


@pytest.mark.parametrize(
    ("driver", "runtime", "path"),
    [
        ("cgroupfs", "containerd", "/kubepods/podu/abc"),
        ("systemd", "containerd", "/kubepods/podu/cri-containerd-abc.scope"),
        ("systemd", "cri-o", "/kubepods/podu/crio-abc.scope"),
        ("cgroupfs", "cri-o", "/kubepods/podu/crio-abc"),
    ],
)
def test_container_cgroup_by_driver_and_runtime_returns_path(driver: str, runtime: str, path: str) -> None:
    assert container_cgroup("/kubepods/podu", "abc", driver, runtime) == path


def test_container_cgroup_pods_without_cgroups_returns_path_below_root() -> None:
    assert container_cgroup("", "abc", "cgroupfs", "containerd") == "/abc"


def test_pod_targets_running_pod_yields_pod_sandbox_and_running_containers() -> None:
    found = targets_of(
        observed(container("a", attempt=1), container("a", "exited"), container("b", "created"))
    )
    assert [(target.kind, target.path) for target in found] == [
        ("pod", "/kubepods/podu1"),
        ("sandbox", "/kubepods/podu1/box"),
        ("container", "/kubepods/podu1/a-1"),
    ]
    assert {(target.namespace, target.pod, target.pod_uid) for target in found} == {("ns", "web", "u1")}
    _, sandbox, only = found
    assert (sandbox.container, sandbox.image, sandbox.runtime_id, sandbox.created) == (
        "",
        "pause:1",
        "box",
        1.0,
    )
    assert (only.container, only.image, only.runtime_id, only.created) == ("a", "img", "a-1", 2.0)


def test_pod_targets_nothing_runs_yields_none() -> None:
    assert not targets_of(observed(container("a", "exited"), ready=False))


def test_pod_targets_pods_without_cgroups_yields_no_pod() -> None:
    assert [target.kind for target in targets_of(observed(container("a")), "")] == ["sandbox", "container"]


def gone(path: str) -> None:
    raise CgroupGone(path)


async def test_node_targets_pods_change_and_leave_sets_targets(tasks: TaskScope) -> None:
    asked: list[str] = []
    changes: list[int] = []
    pods: dict[str, ObservedPod] = {"u1": observed(container("a")), "u2": observed(container("a"), uid="u2")}

    def cgroup_of(pod: Pod) -> str:
        asked.append(pod.uid)
        if pod.uid == "bad":
            raise CgroupError(22, "invalid UID")
        return f"/kubepods/pod{pod.uid}"

    def paths() -> list[str]:
        return sorted(path for path in collector._entries if "a" in path.rpartition("/")[2])

    collector = Collector(gone, tasks)  # type: ignore[arg-type]
    targets = NodeTargets(
        collector,
        lambda: [(Pod(metadata=ObjectMeta(uid=uid)), pod) for uid, pod in pods.items()],
        cgroup_of,
        lambda parent, id: f"{parent}/{id}",
        lambda: changes.append(len(asked)),
    )
    collector.set_targets(NODE, [Target(path="/", kind="root")])
    for _ in range(3):
        targets.update()
    assert asked == ["u1", "u2"], "a pod that has not changed is not looked at again"
    assert changes == [2], "others are told once"
    pods |= {"u1": observed(container("a", attempt=1), container("a", "exited")), "bad": observed(uid="bad")}
    del pods["u2"]
    targets.update()
    assert paths() == ["/kubepods/podu1/a-1"]
    assert set(collector.owners()) == {NODE, "u1"}
    targets.set_sandbox_image("pause:2")
    targets.update()
    assert collector._entries["/kubepods/podu1/box"].target.image == "pause:2"


@pytest.mark.parametrize(
    ("mode", "own", "path"),
    [
        (CgroupMode.V2, {"": "/system.slice/kubelet.service"}, "/system.slice/kubelet.service"),
        (CgroupMode.V1, {"name=systemd": "/a.scope", "cpu": "/k", "memory": "/k"}, "/a.scope"),
        (CgroupMode.V1, {"cpu": "/k", "memory": "/k"}, "/k"),
        (CgroupMode.V1, {"cpu": "/k", "memory": "/other"}, ""),
        (CgroupMode.HYBRID, {"": "/k"}, ""),
        (CgroupMode.V2, {}, ""),
    ],
)
def test_own_cgroup_by_hierarchy_returns_path_of_both_controllers(
    mode: CgroupMode, own: dict[str, str], path: str, tmp_path: Path
) -> None:
    assert own_cgroup(Cgroups(mode, tmp_path, {}, own)) == path


def test_storage_rows_sum_of_parts_and_row_per_empty_dir() -> None:
    stats = VolumeStats(
        capacity=9, available=9, used=100, inodes=9, inodes_free=9, inodes_used=10, moment=1.0
    )
    pod = Pod(
        metadata=ObjectMeta(uid="u1", name="web", namespace="ns"),
        spec=PodSpec(
            volumes=[
                Volume(name="disk", empty_dir=EmptyDir(size_limit=Quantity.parse("1Ki"))),
                Volume(name="memory", empty_dir=EmptyDir(medium="Memory")),
            ],
            containers=[
                Container(
                    name="a",
                    resources=ResourceRequirements(limits={"ephemeral-storage": Quantity.parse("1Mi")}),
                )
            ],
        ),
    )
    storage = PodStorage(
        time=1.0,
        container_logs={"a": FileUsage(20, 2), "b": FileUsage()},
        pod_logs=None,
        hosts=FileUsage(4, 1),
    )
    layers = {"a-0": LayerUsage(1.0, "/", 1000, None)}
    rows = list(
        storage_rows(
            [(pod, observed(container("a")))],
            {"u1": storage},
            layers,
            lambda uid: {"disk": stats, "memory": stats},
        )
    )
    assert rows == [
        ("ns", "web", "disk", 100, 10, 1024),
        ("ns", "web", "memory", 100, 10, None),
        ("ns", "web", "", 1124, 13, 1 << 20),
    ]
    assert not list(storage_rows([(pod, observed(container("b")))], {}, {}, lambda uid: {}))

"""What is sampled on a node: cgroups of pods and system containers, and rows of ephemeral storage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.agent.host_setup import StartupError
from pykubelet.agent.stats import (
    NodeStatistics,
    NodeTargets,
    add_sample_listeners,
    build_statistics,
    container_cgroup,
    own_cgroup,
    pod_targets,
    sandbox_image,
    storage_rows,
)
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec, ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume import EmptyDir, Volume
from pykubelet.cm.cgroups.driver import CgroupWriteError
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from pykubelet.linux.taskstats import TaskStates
from pykubelet.stats.collector import NESTED, NODE, Collector
from pykubelet.stats.cri.runtime_stats import LayerUsage, RuntimeStatistics
from pykubelet.stats.machine import MachineFactsCache
from pykubelet.stats.samples import CgroupGone, CpuLoad, Limits, Target, Usage
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.stats.storage.pod_storage import FileUsage, PodStorage
from pykubelet.transport.errors import Unavailable
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.usage import VolumeStats
from tests.support.cri_servers import Runtime


def container(name: str, phase: ContainerPhase = "running", attempt: int = 0) -> ObservedContainer:
    return ObservedContainer(
        id=f"{name}-{attempt}", name=name, phase=phase, attempt=attempt, created_at=2_000_000_000, image="img"
    )


def observed(*containers: ObservedContainer, ready: bool = True, uid: str = "u1") -> ObservedPod:
    sandbox = ObservedSandbox(id="box", ready=ready, created_at=1_000_000_000)
    return ObservedPod(uid=uid, name="web", namespace="ns", sandboxes=(sandbox,), containers=containers)


def targets_of(pod: ObservedPod, parent: str = "/kubepods/podu1") -> list[Target]:
    return list(pod_targets(pod, parent, lambda above, id: f"{above}/{id}", {"box": "pause:1"}))


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
            raise CgroupWriteError(22, "invalid UID")
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
    collector.set_targets(NESTED, [Target(path="/kubepods/podu1/a-0/b", kind="node")])
    for _ in range(3):
        targets.update()
    assert asked == ["u1", "u2"], "a pod that has not changed is not looked at again"
    assert changes == [2], "others are told once"
    pods |= {"u1": observed(container("a", attempt=1), container("a", "exited")), "bad": observed(uid="bad")}
    del pods["u2"]
    targets.update()
    assert paths() == ["/kubepods/podu1/a-1"]
    assert set(collector.owners()) == {NODE, NESTED, "u1"}


async def test_node_targets_same_version_pods_not_listed(tasks: TaskScope) -> None:
    version, listed = 1, 0

    def pods() -> list[tuple[Pod, ObservedPod]]:
        nonlocal listed
        listed += 1
        return []

    targets = NodeTargets(
        Collector(gone, tasks),  # type: ignore[arg-type]
        pods,
        lambda pod: "/",
        lambda parent, id: f"{parent}/{id}",
        version=lambda: version,
    )
    for _ in range(3):
        targets.update()
    assert listed == 1
    version = 2
    targets.update()
    assert listed == 2


class SandboxImages:
    """Pods with one sandbox each, and a runtime that reports the images of some."""

    def __init__(self, tasks: TaskScope) -> None:
        self.pods: dict[str, ObservedPod] = {}
        self.images: dict[str, str] = {}
        self.calls: list[str] = []
        self.collector = Collector(gone, tasks)  # type: ignore[arg-type]
        self.targets = NodeTargets(
            self.collector,
            lambda: [(Pod(metadata=ObjectMeta(uid=uid)), pod) for uid, pod in self.pods.items()],
            lambda pod: f"/{pod.uid}",
            lambda parent, id: f"{parent}/{id}",
            version=lambda: tuple(self.pods.items()),
        )
        tasks.start(self.targets.find_sandbox_images(self._image), name="images")

    async def _image(self, sandbox: str) -> str:
        self.calls.append(sandbox)
        if sandbox not in self.images:
            raise Unavailable("PodSandboxStatus", "Unavailable", "runtime restarts")
        return self.images[sandbox]

    def run(self, uid: str, *sandboxes: str) -> None:
        boxes = tuple(ObservedSandbox(id=box, ready=True, created_at=1) for box in sandboxes)
        self.pods[uid] = ObservedPod(uid=uid, name=uid, namespace="ns", sandboxes=boxes)

    async def update(self) -> dict[str, str]:
        """Return the images by sandbox, after those that the runtime reports are found."""
        self.targets.update()
        for _ in range(10):
            await asyncio.sleep(0)
        self.targets.update()
        targets = (entry.target for entry in self.collector._entries.values())
        return {target.runtime_id: target.image for target in targets if target.kind == "sandbox"}


@pytest.mark.looptime
async def test_node_targets_sandboxes_of_different_images_each_has_its_own(tasks: TaskScope) -> None:
    node = SandboxImages(tasks)
    node.images = {"a": "pause:1", "b": "pause:2", "c": ""}
    node.run("u1", "a")
    node.run("u2", "b")
    node.run("u3", "c")
    assert await node.update() == node.images
    node.run("u1", "a")  # observed again, unchanged
    assert await node.update() == node.images
    assert sorted(node.calls) == ["a", "b", "c"], "each is requested once"
    node.images["d"] = "pause:3"
    node.run("u1", "d")
    assert (await node.update())["d"] == "pause:3"


@pytest.mark.looptime
async def test_node_targets_runtime_fails_image_retried_until_pod_is_gone(tasks: TaskScope) -> None:
    node = SandboxImages(tasks)
    node.run("u1", "a")
    node.run("u2", "b")
    assert await node.update() == {"a": "", "b": ""}
    node.images["a"] = "pause:1"
    await asyncio.sleep(5.1)
    assert await node.update() == {"a": "pause:1", "b": ""}
    node.pods.clear()
    assert await node.update() == {}
    calls = len(node.calls)
    await asyncio.sleep(60)
    assert len(node.calls) == calls
    assert [node.targets._images, node.targets._without_image, node.targets._sandboxes] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("info", "image"),
    [
        ({"info": '{"sandboxID": "x", "image": "pause:1", "runtimeSpec": {"a": [1]}}'}, "pause:1"),
        ({"info": "{}"}, ""),
        ({}, ""),
        ({"info": "not JSON"}, ""),
        ({"info": '{"image": 7}'}, ""),
        ({"info": "[" * 100_000}, ""),
    ],
)
async def test_sandbox_image_verbose_information_parsed(info: dict[str, str], image: str) -> None:
    async def status(sandbox: str, *, verbose: bool) -> pb.PodSandboxStatusResponse:
        assert (sandbox, verbose) == ("box", True)
        return pb.PodSandboxStatusResponse(info=info)

    cri: Any = SimpleNamespace(runtime=SimpleNamespace(pod_sandbox_status=status))
    assert await sandbox_image(cri, "box") == image


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


def node_statistics(cri: RuntimeConnection, tasks: TaskScope, **flags: Any) -> NodeStatistics:
    """Return the statistics of a node without pods, with PodAndContainerStatsFromCRI."""
    gates = SimpleNamespace(enabled=lambda name: name == "PodAndContainerStatsFromCRI")
    settings: Any = SimpleNamespace(node_name="node1", gates=gates, flags=SimpleNamespace(**flags))
    unused: Any = None
    return NodeStatistics(
        settings,
        Collector(gone, tasks),  # type: ignore[arg-type]
        unused,
        RuntimeStatistics(cri.stats, cri.images, tasks, pods_from_cri=True),
        unused,
        unused,
        unused,
        machine=MachineFactsCache(tasks, "/absent", "/absent"),
        started=1.0,
        system_containers={},
    )


async def test_summary_inputs_only_cpu_and_memory_has_sandboxes_of_runtime(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    pod = pb.PodSandboxStats(
        attributes=pb.PodSandboxAttributes(id="s0"), linux=pb.LinuxPodSandboxStats(containers=[])
    )
    scripted.answers["ListPodSandboxStats"] = pb.ListPodSandboxStatsResponse(stats=[pod])
    node = node_statistics(cri, tasks)
    assert (await node.summary_inputs(True)).runtime.sandboxes == {"s0": pod}
    assert await node.runtime_sandboxes() == {"s0": pod}


async def test_machine_info_custom_id_files_are_read(
    cri: RuntimeConnection, tasks: TaskScope, tmp_path: Path
) -> None:
    (tmp_path / "id").write_text("mine\n")
    path = str(tmp_path / "id")
    node = node_statistics(cri, tasks, machine_id_file=f"/absent,{path}", boot_id_file=path)
    node.host_filesystems = Filesystems(tmp_path, tasks)
    info = await node.machine_info()
    assert (info.machine_id, info.boot_id) == ("mine", "mine")


def test_build_statistics_invalid_container_hints_raises(tmp_path: Path) -> None:
    path = tmp_path / "hints.json"
    path.write_text("{")
    settings: Any = SimpleNamespace(config=None, flags=KubeletFlags(container_hints=str(path)))
    absent: Any = None
    with pytest.raises(StartupError, match="cannot use container hints"):
        build_statistics(*[settings, *[absent] * 7], started=0.0)


class UsageReader:
    """Reader of a cgroup whose samples are one second apart."""

    procs_file = None

    def __init__(self, path: str) -> None:
        self._time = 1000.0

    def read_usage(self, *, fresh: bool = False) -> Usage:
        self._time += 1
        return Usage(time=self._time, cpu=round(self._time * 1e9), memory=1, working_set=1)

    def read_limits(self) -> Limits:
        return Limits(created=1.0)

    def close(self) -> None: ...


@pytest.mark.parametrize("is_set", [False, True])
async def test_add_sample_listeners_flags_select_load_and_usage_log(
    tasks: TaskScope, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_set: bool
) -> None:
    caplog.set_level("INFO")
    states = TaskStates(running=2)
    client = SimpleNamespace(read=lambda directory: states, close=lambda: None)
    monkeypatch.setattr("pykubelet.stats.cpu_load.TaskstatsClient", lambda: client)
    cgroups = Cgroups(CgroupMode.V1, Path("/sys/fs/cgroup"), {"cpu": Path("/cpu")}, {"cpu": "/own"})
    collector = Collector(UsageReader, tasks, 1.0)  # type: ignore[arg-type]
    flags = KubeletFlags(enable_load_reader=is_set, log_cadvisor_usage=is_set)
    assert (add_sample_listeners(flags, cgroups, collector) is not None) == is_set
    collector.set_targets(NODE, [Target(path="/own", kind="node")])
    for _ in range(60):
        collector.sample_now(["/own"])
    record = collector.record("/own")
    assert record is not None
    assert record.load == (CpuLoad(states, 2.0, 0.0) if is_set else None)
    assert ("Usage of own cgroup" in caplog.text) == is_set

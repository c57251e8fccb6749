"""Resizing running containers: what is decided, and in which order the pod and its containers are set."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError, Unimplemented
from pykubelet.resources.resize_book import PodResources
from pykubelet.resources.resize_cgroup import PodGroup
from pykubelet.resources.resize_plan import Part, PodLimits, ResizePlan, Resource, plan_resize
from pykubelet.resources.resize_sizes import Scope, resources_of
from pykubelet.runtime.actions import Actions, Resize, Verdicts, decide
from pykubelet.runtime.facts import NodeFacts
from pykubelet.runtime.hashing import container_hash
from pykubelet.runtime.observe import observed_container
from pykubelet.runtime.observed import ActualResources, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.runtime.update import ResizeError, Resizer

READY = ObservedSandbox(id="sb0", ready=True, created_at=1, ips=("10.0.0.1",))
ALL = Scope()
MI = 1024**2


def needs(cpu: int, memory: int) -> dict[str, Any]:
    amounts = {"cpu": f"{cpu}m", "memory": f"{memory}Mi"}
    return {"requests": amounts, "limits": amounts}


def pod(*resources: dict[str, Any], sidecar: dict[str, Any] | None = None, policy: str = "") -> Pod:
    rules = [{"resourceName": name, "restartPolicy": policy} for name in ("cpu", "memory")] if policy else []
    extra = {"image": "i", "resizePolicy": rules}
    beside = {"name": "beside", "resources": sidecar, "restartPolicy": "Always", **extra}
    document = {
        "metadata": {"name": "web", "namespace": "default", "uid": "u"},
        "spec": {
            "restartPolicy": "Always",
            "containers": [{"name": f"c{i}", "resources": one, **extra} for i, one in enumerate(resources)],
            "initContainers": [beside] if sidecar is not None else [],
        },
    }
    return from_document(Pod, document)


def seen(of: Pod) -> ObservedPod:
    containers = [
        ObservedContainer(id=f"{one.name}-id", name=one.name, phase="running", hash=container_hash(one))
        for one in (*of.spec.init_containers, *of.spec.containers)
    ]
    return ObservedPod(uid="u", sandboxes=(READY,), containers=tuple(containers))


def plan(wanted: Pod, has: Pod) -> ResizePlan:
    names = {one.name for one in (*wanted.spec.init_containers, *wanted.spec.containers)}
    return plan_resize(wanted, names, resources_of(has, ALL), ALL)


def decided(wanted: Pod, has: Pod, **verdicts: Any) -> Actions:
    return decide(wanted, seen(wanted), Verdicts(**verdicts), resizes=plan(wanted, has))


class TestDecision:
    def test_nothing_to_do(self) -> None:
        assert decided(pod(needs(1, 1)), pod(needs(1, 1))).idle

    def test_in_place(self) -> None:
        actions = decided(pod(needs(2, 2), needs(1, 1)), pod(needs(1, 1), needs(1, 1)))
        assert not actions.idle
        assert actions.resize.containers.keys() == {"c0-id"}
        assert (actions.kill, actions.start, actions.resize.pod) == ([], [], False)

    def test_by_a_restart(self) -> None:
        actions = decided(pod(needs(2, 2), policy="RestartContainer"), pod(needs(1, 1)))
        (kill,) = actions.kill
        assert (kill.message, kill.reason) == ("Container c0 resize requires restart", "Resize")
        assert actions.start == ["c0"]
        assert actions.resize.containers == {}
        assert actions.resize.pod

    def test_a_sidecar(self) -> None:
        wanted, has = pod(needs(1, 1), sidecar=needs(2, 2)), pod(needs(1, 1), sidecar=needs(1, 1))
        assert decided(wanted, has).resize.containers.keys() == {"beside-id"}
        wanted = pod(needs(1, 1), sidecar=needs(2, 2), policy="RestartContainer")
        actions = decided(wanted, has)
        assert [kill.container.name for kill in actions.kill] == actions.start_init == ["beside"]

    def test_who_is_stopped_anyway_is_not_resized(self) -> None:
        actions = decided(pod(needs(2, 2)), pod(needs(1, 1)), liveness={"c0-id": False})
        assert actions.start == ["c0"]
        assert not actions.resize


@dataclass
class Machine:
    """A pod's cgroup and a runtime that keep note of what is done to them, and may refuse it."""

    limits: PodLimits
    wish: PodLimits
    usage: int = 0
    usages: dict[str, int] = field(default_factory=dict)
    refuses: str = ""
    done: list[str] = field(default_factory=list)
    noted: list[tuple[str, str]] = field(default_factory=list)

    # The cgroup

    @property
    def memory_limit(self) -> int:
        return self.wish.memory

    def now(self) -> PodLimits:
        return self.limits

    def wanted(self, now: PodLimits) -> PodLimits:
        return self.wish

    def memory_usage(self) -> int:
        return self.usage

    async def set(self, part: Part) -> None:
        self._do(f"pod {part}")

    # The runtime

    runtime = stats = property(lambda self: self)

    async def update_container_resources(self, id: str, linux: pb.LinuxContainerResources) -> None:
        self._do(f"{id} {linux.memory_limit_in_bytes // MI}Mi {linux.cpu_quota // 100}m")

    async def update_pod_sandbox_resources(self, *_: object, **__: object) -> None:
        raise Unimplemented("UpdatePodSandboxResources", "Unimplemented", "unknown method")

    async def list_container_stats(self, filter: pb.ContainerStatsFilter) -> list[pb.ContainerStats]:
        return [
            pb.ContainerStats(
                attributes=pb.ContainerAttributes(metadata=pb.ContainerMetadata(name=name)),
                memory=pb.MemoryUsage(usage_bytes=pb.UInt64Value(value=usage)),
            )
            for name, usage in self.usages.items()
        ]

    # Who keeps the books

    def resized(self, pod: Pod, container: Container, resources: ResourceRequirements) -> None:
        self.noted.append((container.name, str(resources.limits["memory"])))

    def resized_whole(self, pod: Pod, resource: Resource) -> None:
        self.noted.append(("whole", resource))

    def _do(self, what: str) -> None:
        if self.refuses and self.refuses in what:
            raise CriError("UpdateContainerResources", "Unknown", "not today")
        self.done.append(what)

    async def apply(self, wanted: Pod, has: Pod, *, actions: Resize | None = None) -> None:
        resize = actions or decided(wanted, has).resize
        resizer = Resizer(cast(Cri, self), NodeFacts(), lambda _: cast(PodGroup, self), self)
        await resizer.apply(wanted, "sb0", resize)


SMALL, LARGE = PodLimits(2 * MI, 20, 20), PodLimits(4 * MI, 40, 40)
BOTH_SMALL, BOTH_LARGE = pod(needs(1000, 1), needs(1000, 1)), pod(needs(2000, 2), needs(2000, 2))


class TestOrder:
    async def test_growing(self) -> None:
        machine = Machine(SMALL, LARGE)
        await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert machine.done == [
            "pod memory", "c0-id 2Mi 1000m", "c1-id 2Mi 1000m",
            "pod quota", "pod shares", "c0-id 2Mi 2000m", "c1-id 2Mi 2000m",
        ]  # fmt: skip

    async def test_shrinking(self) -> None:
        machine = Machine(LARGE, SMALL, usages={"c0": 1, "c1": 1})
        await machine.apply(BOTH_SMALL, BOTH_LARGE)
        assert machine.done == [
            "c0-id 1Mi 2000m", "c1-id 1Mi 2000m", "pod memory",
            "c0-id 1Mi 1000m", "c1-id 1Mi 1000m", "pod shares", "pod quota",
        ]  # fmt: skip

    async def test_one_gives_to_the_other(self) -> None:
        machine = Machine(SMALL, SMALL, usages={"c0": 1, "c1": 1})
        await machine.apply(pod(needs(2000, 2), needs(1000, 1)), pod(needs(1000, 1), needs(2000, 2)))
        assert machine.done == [
            "c1-id 1Mi 2000m", "c0-id 2Mi 1000m", "c1-id 1Mi 1000m", "c0-id 2Mi 2000m",
        ]  # fmt: skip

    async def test_cpus_alone_leave_memory_alone(self) -> None:
        machine = Machine(SMALL, SMALL._replace(quota=40), usage=10 * MI)
        await machine.apply(pod(needs(2000, 1)), pod(needs(1000, 1)))
        assert machine.done == ["pod quota", "c0-id 1Mi 2000m"]

    async def test_what_nobody_knows_is_set_once_the_pod_has_room(self) -> None:
        machine = Machine(SMALL, LARGE)
        unknown = plan_resize(pod(needs(2000, 2)), {"c0"}, PodResources(), ALL)
        actions = decide(pod(needs(2000, 2)), seen(pod(needs(2000, 2))), resizes=unknown)
        await machine.apply(pod(needs(2000, 2)), pod(needs(2000, 2)), actions=actions.resize)
        assert machine.done == ["pod memory", "pod quota", "pod shares", "c0-id 2Mi 2000m"]

    async def test_the_whole_pod(self) -> None:
        machine = Machine(SMALL, LARGE)
        await machine.apply(BOTH_LARGE, BOTH_LARGE, actions=Resize(whole=True))
        assert machine.done == ["pod memory", "pod quota", "pod shares"]
        assert machine.noted == [("whole", "memory"), ("whole", "cpu")]


class TestFailures:
    @pytest.mark.parametrize(("usage", "usages"), [(3 * MI, {"c0": 1, "c1": 1}), (1, {"c0": MI, "c1": 1})])
    async def test_memory_in_use_stops_everything(self, usage: int, usages: dict[str, int]) -> None:
        machine = Machine(LARGE, SMALL, usage, usages)
        with pytest.raises(ResizeError, match="cannot decrease memory limits"):
            await machine.apply(BOTH_SMALL, BOTH_LARGE)
        assert (machine.done, machine.noted) == ([], [])

    async def test_what_was_done_is_known(self) -> None:
        machine = Machine(SMALL, LARGE, refuses="c1")
        with pytest.raises(ResizeError, match="rpc error: code = Unknown desc = not today"):
            await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert machine.done == ["pod memory", "c0-id 2Mi 1000m"]
        assert machine.noted == [("c0", "2Mi")]


class TestObserved:
    def test_a_runtime_that_tells(self) -> None:
        linux = pb.LinuxContainerResources(
            cpu_shares=102, cpu_quota=20_000, cpu_period=100_000, memory_limit_in_bytes=64 * MI
        )
        status = pb.ContainerStatus(resources=pb.ContainerResources(linux=linux))
        expected = ActualResources(cpu_request=100, cpu_limit=200, memory_limit=64 * MI)
        assert observed_container(status).resources == expected

    @pytest.mark.parametrize(
        "status",
        [
            pb.ContainerStatus(),
            pb.ContainerStatus(resources=pb.ContainerResources()),
            pb.ContainerStatus(
                resources=pb.ContainerResources(linux=pb.LinuxContainerResources(cpu_quota=-1))
            ),
        ],
    )
    def test_a_runtime_that_says_nothing(self, status: pb.ContainerStatus) -> None:
        assert observed_container(status).resources is None

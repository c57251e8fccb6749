"""Resizing running containers: what is decided, and in which order the pod and its containers are set."""

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.cm.cgroups.pod_cgroups import PodCgroup
from pykubelet.cm.resize import (
    Part,
    PodLimits,
    PodResources,
    ResizePlan,
    Resource,
    Scope,
    plan_resize,
    resources_of,
)
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.decide import Actions, ProbeResults, Resize, decide
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observe import observed_container
from pykubelet.kuberuntime.observed import ActualResources, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.kuberuntime.resize import ResizeError, Resizer, without_overhead
from pykubelet.transport.errors import CriError, Unimplemented

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
    return decide(wanted, seen(wanted), ProbeResults(**verdicts), resizes=plan(wanted, has))


class TestDecision:
    def test_decide_equal_resources_is_idle(self) -> None:
        assert decided(pod(needs(1, 1)), pod(needs(1, 1))).idle

    def test_decide_resize_in_place_container_not_restarted(self) -> None:
        actions = decided(pod(needs(2, 2), needs(1, 1)), pod(needs(1, 1), needs(1, 1)))
        assert not actions.idle
        assert actions.resize.containers.keys() == {"c0-id"}
        assert (actions.kill, actions.start, actions.resize.pod) == ([], [], False)

    def test_decide_resize_policy_restart_kills_and_starts(self) -> None:
        actions = decided(pod(needs(2, 2), policy="RestartContainer"), pod(needs(1, 1)))
        (kill,) = actions.kill
        assert (kill.message, kill.reason) == ("Container c0 resize requires restart", "Resize")
        assert actions.start == ["c0"]
        assert actions.resize.containers == {}
        assert actions.resize.pod

    def test_decide_sidecar_resized_or_restarted(self) -> None:
        wanted, has = pod(needs(1, 1), sidecar=needs(2, 2)), pod(needs(1, 1), sidecar=needs(1, 1))
        assert decided(wanted, has).resize.containers.keys() == {"beside-id"}
        wanted = pod(needs(1, 1), sidecar=needs(2, 2), policy="RestartContainer")
        actions = decided(wanted, has)
        assert [kill.container.name for kill in actions.kill] == actions.start_init == ["beside"]

    def test_decide_container_killed_is_not_resized(self) -> None:
        actions = decided(pod(needs(2, 2)), pod(needs(1, 1)), liveness={"c0-id": False})
        assert actions.start == ["c0"]
        assert not actions.resize


STALE = ResizePlan(pod=True)
"""Only the pod's cgroup is not as it was promised: whoever that is for does not run."""


class TestThePodsCgroupForContainersThatDoNotRun:
    def test_decide_crashed_container_pod_cgroup_resized(self) -> None:
        crashed = ObservedContainer(id="c0-id", name="c0", phase="exited", exit_code=137)
        observed = ObservedPod(uid="u", sandboxes=(READY,), containers=(crashed,))
        actions = decide(pod(needs(2, 2)), observed, resizes=STALE)
        assert (actions.resize.pod, actions.start) == (True, ["c0"])

    def test_decide_container_waiting_for_init_pod_cgroup_resized(self) -> None:
        wanted = pod(needs(2, 2))
        first = Container(name="first", image="i")
        wanted.spec.init_containers.append(first)
        working = ObservedContainer(id="f", name="first", phase="running", hash=container_hash(first))
        observed = ObservedPod(uid="u", sandboxes=(READY,), containers=(working,))
        actions = decide(wanted, observed, resizes=STALE)
        assert (actions.resize.pod, actions.start, actions.idle) == (True, [], False)

    def test_decide_sandbox_lost_pod_cgroup_resized(self) -> None:
        lost = msgspec.structs.replace(READY, ready=False)
        actions = decide(pod(needs(2, 2)), ObservedPod(uid="u", sandboxes=(lost,)), resizes=STALE)
        assert (actions.create_sandbox, actions.resize.pod) == (True, True)

    def test_decide_pod_finished_pod_cgroup_not_resized(self) -> None:
        done = pod(needs(2, 2))
        done.spec.restart_policy = "Never"
        ended = ObservedContainer(id="c0-id", name="c0", phase="exited")
        observed = ObservedPod(uid="u", sandboxes=(READY,), containers=(ended,))
        actions = decide(done, observed, resizes=STALE)
        assert actions.kill_pod
        assert not actions.resize


@dataclass
class Machine:
    """A pod's cgroup and a runtime that keep note of what is done to them, and may refuse it."""

    limits: PodLimits
    wish: PodLimits
    usage: int = 0
    usages: dict[str, int] = field(default_factory=dict)
    refuses: str = ""
    runtime_says: str = ""
    """How the runtime answers when it is told of the pod as a whole; by default it does not know the call."""
    cgroup_is_stuck: bool = False
    period: int = 100_000
    done: list[str] = field(default_factory=list)
    told: list[tuple[int, int, int]] = field(default_factory=list)
    """Memory, quota and shares of the pod as a whole, as the runtime was told them."""
    noted: list[tuple[str, str]] = field(default_factory=list)

    # The cgroup

    @property
    def memory_limit(self) -> int:
        return self.wish.memory

    def now(self) -> PodLimits:
        return self.limits

    def desired(self, now: PodLimits) -> PodLimits:
        return self.wish

    def memory_usage(self) -> int:
        return self.usage

    async def set(self, part: Part) -> None:
        if self.cgroup_is_stuck:
            raise OSError(16, "Device or resource busy")
        self._do(f"pod {part}")

    # The runtime

    runtime = stats = property(lambda self: self)

    async def update_container_resources(self, id: str, linux: pb.LinuxContainerResources) -> None:
        self._do(f"{id} {linux.memory_limit_in_bytes // MI}Mi {linux.cpu_quota // 100}m")

    async def update_pod_sandbox_resources(
        self, sandbox_id: str, overhead: pb.LinuxContainerResources, resources: pb.LinuxContainerResources
    ) -> None:
        assert sandbox_id == "sb0"
        self.told.append((resources.memory_limit_in_bytes, resources.cpu_quota, resources.cpu_shares))
        match self.runtime_says:
            case "":
                raise Unimplemented("UpdatePodSandboxResources", "Unimplemented", "unknown method")
            case "yes":
                return
        raise CriError("UpdatePodSandboxResources", "Unknown", self.runtime_says)

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

    def resized_pod_level(self, pod: Pod, resource: Resource) -> None:
        self.noted.append(("whole", resource))

    def _do(self, what: str) -> None:
        if self.refuses and self.refuses in what:
            raise CriError("UpdateContainerResources", "Unknown", "not today")
        self.done.append(what)

    async def apply(
        self, wanted: Pod, has: Pod, *, actions: Resize | None = None, sandbox_id: str = "sb0"
    ) -> None:
        resize = actions or decided(wanted, has).resize
        resizer = Resizer(
            cast(RuntimeConnection, self), RuntimeNodeOptions(), lambda _: cast(PodCgroup, self), self
        )
        await resizer.apply(wanted, sandbox_id, resize)


SMALL, LARGE = PodLimits(2 * MI, 20, 20), PodLimits(4 * MI, 40, 40)
BOTH_SMALL, BOTH_LARGE = pod(needs(1000, 1), needs(1000, 1)), pod(needs(2000, 2), needs(2000, 2))


class TestOrder:
    async def test_resizer_increase_sets_pod_before_containers(self) -> None:
        machine = Machine(SMALL, LARGE)
        await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert machine.done == [
            "pod memory", "c0-id 2Mi 1000m", "c1-id 2Mi 1000m",
            "pod quota", "pod shares", "c0-id 2Mi 2000m", "c1-id 2Mi 2000m",
        ]  # fmt: skip

    async def test_resizer_decrease_sets_containers_before_pod(self) -> None:
        machine = Machine(LARGE, SMALL, usages={"c0": 1, "c1": 1})
        await machine.apply(BOTH_SMALL, BOTH_LARGE)
        assert machine.done == [
            "c0-id 1Mi 2000m", "c1-id 1Mi 2000m", "pod memory",
            "c0-id 1Mi 1000m", "c1-id 1Mi 1000m", "pod shares", "pod quota",
        ]  # fmt: skip

    async def test_resizer_decreases_one_container_before_increasing_other(self) -> None:
        machine = Machine(SMALL, SMALL, usages={"c0": 1, "c1": 1})
        await machine.apply(pod(needs(2000, 2), needs(1000, 1)), pod(needs(1000, 1), needs(2000, 2)))
        assert machine.done == [
            "c1-id 1Mi 2000m", "c0-id 2Mi 1000m", "c1-id 1Mi 1000m", "c0-id 2Mi 2000m",
        ]  # fmt: skip

    async def test_resizer_cpu_only_leaves_memory_unchanged(self) -> None:
        machine = Machine(SMALL, SMALL._replace(quota=40), usage=10 * MI)
        await machine.apply(pod(needs(2000, 1)), pod(needs(1000, 1)))
        assert machine.done == ["pod quota", "c0-id 1Mi 2000m"]

    async def test_resizer_unknown_sizes_set_after_pod_limits(self) -> None:
        machine = Machine(SMALL, LARGE)
        unknown = plan_resize(pod(needs(2000, 2)), {"c0"}, PodResources(), ALL)
        actions = decide(pod(needs(2000, 2)), seen(pod(needs(2000, 2))), resizes=unknown)
        await machine.apply(pod(needs(2000, 2)), pod(needs(2000, 2)), actions=actions.resize)
        assert machine.done == ["pod memory", "pod quota", "pod shares", "c0-id 2Mi 2000m"]

    async def test_resizer_pod_level_resize_sets_pod_cgroup(self) -> None:
        machine = Machine(SMALL, LARGE)
        await machine.apply(BOTH_LARGE, BOTH_LARGE, actions=Resize(pod_level=True))
        assert machine.done == ["pod memory", "pod quota", "pod shares"]
        assert machine.noted == [("whole", "memory"), ("whole", "cpu")]

    async def test_resizer_no_sandbox_runtime_not_called(self) -> None:
        machine = Machine(SMALL, LARGE, runtime_says="yes")
        await machine.apply(BOTH_LARGE, BOTH_LARGE, actions=Resize(pod=True), sandbox_id="")
        assert machine.done == ["pod memory", "pod quota", "pod shares"]
        assert machine.told == []


class TestRuntimesThatWantToKnow:
    async def test_resizer_runtime_notified_before_each_change(self) -> None:
        machine = Machine(SMALL, LARGE, runtime_says="yes")
        await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert machine.told == [(4 * MI, 20, 20), (4 * MI, 40, 20), (4 * MI, 40, 40)]

    @pytest.mark.parametrize("answer", ["", "not implemented yet"])
    async def test_resizer_update_sandbox_unimplemented_continues(self, answer: str) -> None:
        machine = Machine(SMALL, LARGE, runtime_says=answer)
        await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert "pod shares" in machine.done

    async def test_resizer_runtime_rejects_nothing_changed(self) -> None:
        machine = Machine(SMALL, LARGE, runtime_says="the guest is full")
        with pytest.raises(
            ResizeError,
            match=r"UpdatePodSandboxResources \(resource=memory\); resize rejected: .* the guest is full",
        ):
            await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert machine.done == []

    async def test_resizer_cgroup_write_fails_runtime_update_reverted(self) -> None:
        machine = Machine(SMALL, LARGE, runtime_says="yes", cgroup_is_stuck=True)
        with pytest.raises(ResizeError, match="Device or resource busy"):
            await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert machine.told == [(4 * MI, 20, 20), (2 * MI, 20, 20)]

    def test_without_overhead_subtracts_pod_overhead(self) -> None:
        light = pod(needs(1, 1))
        heavy = from_document(
            Pod, {**to_document(light), "spec": {"overhead": {"cpu": "250m", "memory": "1Mi"}}}
        )
        limits = PodLimits(3 * MI, 125_000, 1280)

        def told(of: Pod, limits: PodLimits) -> tuple[int, int, int]:
            linux = without_overhead(of, limits, 100_000)
            return linux.memory_limit_in_bytes, linux.cpu_quota, linux.cpu_shares

        assert told(light, limits) == (3 * MI, 125_000, 1280)
        assert told(heavy, limits) == (2 * MI, 100_000, 1024)
        assert told(heavy, PodLimits(2**63 - 1, -1, 2)) == (0, -1, 2)


class TestFailures:
    async def test_resizer_pod_memory_usage_above_limit_raises(self) -> None:
        machine = Machine(LARGE, SMALL, usage=3 * MI)
        with pytest.raises(ResizeError, match="attempting to set pod memory limit"):
            await machine.apply(BOTH_SMALL, BOTH_SMALL, actions=Resize(pod_level=True))
        assert (machine.done, machine.noted) == ([], [])

    @pytest.mark.parametrize(("usage", "usages"), [(3 * MI, {"c0": 1, "c1": 1}), (1, {"c0": MI, "c1": 1})])
    async def test_resizer_memory_usage_above_limit_changes_nothing(
        self, usage: int, usages: dict[str, int]
    ) -> None:
        machine = Machine(LARGE, SMALL, usage, usages)
        with pytest.raises(ResizeError, match="cannot decrease memory limits"):
            await machine.apply(BOTH_SMALL, BOTH_LARGE)
        assert (machine.done, machine.noted) == ([], [])

    async def test_resizer_runtime_error_completed_changes_recorded(self) -> None:
        machine = Machine(SMALL, LARGE, refuses="c1")
        with pytest.raises(ResizeError, match="rpc error: code = Unknown desc = not today"):
            await machine.apply(BOTH_LARGE, BOTH_SMALL)
        assert machine.done == ["pod memory", "c0-id 2Mi 1000m"]
        assert machine.noted == [("c0", "2Mi")]


class TestObserved:
    def test_observed_container_runtime_resources_converted(self) -> None:
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
    def test_observed_container_no_resources_returns_none(self, status: pb.ContainerStatus) -> None:
        assert observed_container(status).resources is None

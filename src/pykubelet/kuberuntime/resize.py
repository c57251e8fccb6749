"""In-place resize of running pods: the pod's cgroup, its sandbox and its containers, in the required order.

Before anything is changed, memory limits are compared with the usage: memory in use is not taken away. Memory
is set before CPU. Each container is recorded as actuated as soon as the runtime has accepted it, so that a
resize that is interrupted or fails continues there. A failure leaves the pod with a part of the change, never
with more than its allocation.

The sandbox is updated (UpdatePodSandboxResources) before the pod's cgroup: a runtime that runs pods in
virtual machines has to resize the VM, and may reject it; most others do not implement the call. If the cgroup
then cannot be set, the sandbox is reverted, so that the runtime does not count on resources that the pod does
not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.cm.cgroups.pod_cgroups import PodCgroup
from pykubelet.cm.qos import milli_cpu_of_shares, quota_of, shares_of
from pykubelet.cm.resize import (
    ContainerResize,
    Part,
    PodLimits,
    Resource,
    in_order,
    pod_steps,
    shrink_problem,
    shrinks,
    with_sizes,
)
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.decide import Resize
from pykubelet.kuberuntime.linux_resources import container_resources, overhead_resources
from pykubelet.kuberuntime.options import RunContainerOptions, RuntimeNodeOptions
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, Unimplemented

log = get_logger(__name__)
_NO_BOUND = 2**63 - 1
_NOTHING = Quantity.from_units(0)


class SandboxUpdateRejected(Exception):
    """The runtime rejected the resources of the sandbox; the text is the cause."""


class SandboxUpdates:
    """Updates the resources of one pod's sandbox; does nothing without a sandbox."""

    def __init__(self, cri: RuntimeConnection, node: RuntimeNodeOptions, pod: Pod, sandbox_id: str) -> None:
        self._cri = cri
        self._node = node
        self._pod = pod
        self._sandbox_id = sandbox_id

    async def tell(self, limits: PodLimits, period: int) -> None:
        """Send the next limits of the pod's cgroup to the runtime, `period` in microseconds.

        Raises SandboxUpdateRejected.
        """
        if not self._sandbox_id:
            return
        try:
            await self._cri.runtime.update_pod_sandbox_resources(
                self._sandbox_id,
                overhead=overhead_resources(self._pod, self._node),
                resources=without_overhead(self._pod, limits, period),
            )
        except Unimplemented:
            return
        except CriError as err:
            if "not implemented" not in err.rpc_text:  # containerd 2.2's text
                raise SandboxUpdateRejected(
                    f'updatePodSandboxResources failed for sandboxID "{self._sandbox_id}": {err.rpc_text}'
                ) from err

    async def take_back(self, limits: PodLimits, period: int) -> None:
        """Revert the sandbox to the current limits of the pod's cgroup; a failure is only logged."""
        try:
            await self.tell(limits, period)
        except SandboxUpdateRejected as err:
            pod = self._pod
            log.error(err, "Failed to revert sandbox resources", pod=pod.full_name, podUID=pod.uid)


def without_overhead(pod: Pod, limits: PodLimits, period: int) -> pb.LinuxContainerResources:
    """Return the pod's limits without the pod overhead."""
    cpu, memory = pod.spec.overhead.get("cpu", _NOTHING).milli, int(pod.spec.overhead.get("memory", _NOTHING))
    quota, shares = limits.quota, limits.shares
    if cpu:
        quota = quota - quota_of(cpu, period) if quota > 0 else quota
        shares = shares_of(max(0, milli_cpu_of_shares(shares) - cpu))
    return pb.LinuxContainerResources(
        cpu_period=period,
        cpu_quota=quota,
        cpu_shares=shares,
        memory_limit_in_bytes=limits.memory - memory if limits.memory < _NO_BOUND else 0,
    )


class ResizeError(Exception):
    """A pod could not be resized; the text is the cause."""


class ActuatedRecorder(Protocol):
    """Recorder of actuated resources."""

    def resized(self, pod: Pod, container: Container, resources: ResourceRequirements) -> None:
        """Record the resources that the runtime has set for a container."""
        ...

    def resized_whole(self, pod: Pod, resource: Resource) -> None:
        """Record that the pod-level allocation of a resource is actuated."""
        ...


class Resizer:
    """Resizes running pods."""

    def __init__(
        self,
        cri: RuntimeConnection,
        node: RuntimeNodeOptions,
        group_of: Callable[[Pod], PodCgroup | None],
        actuated: ActuatedRecorder,
        is_exclusive: Callable[[Pod, Container], bool] = lambda pod, container: False,
    ) -> None:
        """Initialize with the node, the lookup of pod cgroups, and which containers have exclusive CPUs."""
        self._cri = cri
        self._node = node
        self._group_of = group_of
        self._actuated = actuated
        self._is_exclusive = is_exclusive

    async def apply(self, pod: Pod, sandbox_id: str, resize: Resize) -> None:
        """Set the resources of a pod's containers and cgroup to those of its spec. Raises ResizeError.

        `sandbox_id` is empty without a sandbox: then only the pod's cgroup is set.
        """
        group = self._group_of(pod)
        try:
            now = group.now() if group is not None else None
        except FileNotFoundError as err:
            if resize.containers:
                raise ResizeError(_unreadable(pod, err)) from err
            group = now = None  # it will be recreated with the desired limits
        except OSError as err:
            raise ResizeError(_unreadable(pod, err)) from err
        await self._check(pod, sandbox_id, resize, group, now)
        whole = None
        if group is not None and now is not None:
            whole = _Whole(group, SandboxUpdates(self._cri, self._node, pod, sandbox_id), now)
        for resource in ("memory", "cpu"):
            await self._round(pod, resize, resource, whole)

    async def _check(
        self, pod: Pod, sandbox_id: str, resize: Resize, group: PodCgroup | None, now: PodLimits | None
    ) -> None:
        """Raise ResizeError when a limit would be below the memory usage."""
        updates = in_order([*resize.containers.values()], "memory")
        if not (updates or resize.pod or resize.whole):
            return
        limit = group.memory_limit if group is not None else None
        had = now.memory if now is not None else 0
        if not any(map(shrinks, updates)) and (limit is None or limit >= had):
            return
        try:
            usage = group.memory_usage() if group is not None else None
            usages = await self._usages(sandbox_id) if any(map(shrinks, updates)) else {}
        except (OSError, CriError, ValueError) as err:
            raise ResizeError(f'unable to read memory usage for pod "{_told(pod)}"') from err
        if problem := shrink_problem(limit, had, usage, updates, usages):
            raise ResizeError(problem)

    async def _usages(self, sandbox_id: str) -> Mapping[str, int]:
        found = await self._cri.stats.list_container_stats(pb.ContainerStatsFilter(pod_sandbox_id=sandbox_id))
        return {
            one.attributes.metadata.name: one.memory.usage_bytes.value or one.memory.working_set_bytes.value
            for one in found
            if one.HasField("memory")
        }

    async def _round(self, pod: Pod, resize: Resize, resource: Resource, whole: _Whole | None) -> None:
        """Resize one resource of a pod."""
        updates = in_order([*resize.containers.values()], resource)
        ids = {one.name: id for id, one in resize.containers.items()}
        changes = any(one.change(resource) for one in resize.containers.values())
        if not (updates or changes or resize.pod or resize.whole):
            return
        before, after = whole.steps(resource) if whole is not None else ([], [])
        try:
            if whole is not None:
                await whole.set(before, resource)
            await self._update(pod, updates, ids, resource)
            if whole is not None:
                await whole.set(after, resource)
        except CriError as err:
            raise ResizeError(err.rpc_text) from err
        except OSError as err:
            raise ResizeError(str(err)) from err
        if resize.whole:
            self._actuated.resized_whole(pod, resource)

    async def _update(
        self, pod: Pod, updates: Sequence[ContainerResize], ids: Mapping[str, str], resource: Resource
    ) -> None:
        containers = {one.name: one for one in (*pod.spec.init_containers, *pod.spec.containers)}
        for update in updates:
            container = containers[update.name]
            sized = with_sizes(container, update.after(resource))
            facts = RunContainerOptions(node=self._node, exclusive_cpus=self._is_exclusive(pod, container))
            await self._cri.runtime.update_container_resources(
                ids[update.name], container_resources(pod, sized, facts)
            )
            self._actuated.resized(pod, container, sized.resources)


class _Whole:
    """The pod's cgroup during a resize, with its current and desired limits."""

    def __init__(self, group: PodCgroup, sandbox: SandboxUpdates, now: PodLimits) -> None:
        self._group = group
        self._sandbox = sandbox
        self._now = now
        self._wanted = group.wanted(now)

    def steps(self, resource: Resource) -> tuple[list[Part], list[Part]]:
        """Return the limits to set before the containers, and those to set after them."""
        return pod_steps(self._now, self._wanted, resource)

    async def set(self, parts: Sequence[Part], resource: Resource) -> None:
        """Set some limits. Raises OSError, and ResizeError when the runtime rejects them."""
        for part in parts:
            new = self._now._replace(**{part: getattr(self._wanted, part)})
            try:
                await self._sandbox.tell(new, self._group.period)
            except SandboxUpdateRejected as err:
                raise ResizeError(
                    "failed to notify runtime for UpdatePodSandboxResources "
                    f"(resource={resource}); resize rejected: {err}"
                ) from err
            try:
                await self._group.set(part)
            except OSError:
                await self._sandbox.take_back(self._now, self._group.period)
                raise
            self._now = new


def _unreadable(pod: Pod, err: OSError) -> str:
    return f'unable to get pod cgroup config for pod "{_told(pod)}": {err}'


def _told(pod: Pod) -> str:
    return f"{pod.metadata.name}_{pod.metadata.namespace}({pod.uid})"

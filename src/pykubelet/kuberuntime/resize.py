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
    order_resizes,
    pod_steps,
    shrink_problem,
    shrinks,
    with_sizes,
)
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.configuration.linux_resources import container_resources, overhead_resources
from pykubelet.kuberuntime.configuration.options import (
    CpusetAssignment,
    RunContainerOptions,
    RuntimeNodeOptions,
)
from pykubelet.kuberuntime.decide import Resize
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

    async def update(self, limits: PodLimits, period: int) -> None:
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

    async def revert(self, limits: PodLimits, period: int) -> None:
        """Revert the sandbox to the current limits of the pod's cgroup; a failure is only logged."""
        try:
            await self.update(limits, period)
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

    def resized_pod_level(self, pod: Pod, resource: Resource) -> None:
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

    def set_node(self, node: RuntimeNodeOptions) -> None:
        """Replace the node's options for resizes that start afterwards."""
        self._node = node

    async def apply(self, pod: Pod, sandbox_id: str, resize: Resize) -> None:
        """Set the resources of a pod's containers and cgroup to those of its spec. Raises ResizeError.

        `sandbox_id` is empty without a sandbox: then only the pod's cgroup is set.
        """
        group = self._group_of(pod)
        try:
            current = group.now() if group is not None else None
        except FileNotFoundError as err:
            if resize.containers:
                raise ResizeError(_unreadable(pod, err)) from err
            group = current = None  # it will be recreated with the desired limits
        except OSError as err:
            raise ResizeError(_unreadable(pod, err)) from err
        await self._check(pod, sandbox_id, resize, group, current)
        pod_cgroup = None
        if group is not None and current is not None:
            pod_cgroup = _PodCgroupResize(
                group, SandboxUpdates(self._cri, self._node, pod, sandbox_id), current
            )
        for resource in ("memory", "cpu"):
            await self._round(pod, resize, resource, pod_cgroup)

    async def _check(
        self, pod: Pod, sandbox_id: str, resize: Resize, group: PodCgroup | None, current: PodLimits | None
    ) -> None:
        """Raise ResizeError when a limit would be below the memory usage."""
        updates = order_resizes([*resize.containers.values()], "memory")
        if not (updates or resize.pod or resize.pod_level):
            return
        limit = group.memory_limit if group is not None else None
        current_memory = current.memory if current is not None else 0
        if not any(map(shrinks, updates)) and (limit is None or limit >= current_memory):
            return
        try:
            usage = group.memory_usage() if group is not None else None
            usages = await self._usages(sandbox_id) if any(map(shrinks, updates)) else {}
        except (OSError, CriError, ValueError) as err:
            raise ResizeError(f'unable to read memory usage for pod "{_pod_description(pod)}"') from err
        if problem := shrink_problem(limit, current_memory, usage, updates, usages):
            raise ResizeError(problem)

    async def _usages(self, sandbox_id: str) -> Mapping[str, int]:
        found = await self._cri.stats.list_container_stats(pb.ContainerStatsFilter(pod_sandbox_id=sandbox_id))
        return {
            stats.attributes.metadata.name: stats.memory.usage_bytes.value
            or stats.memory.working_set_bytes.value
            for stats in found
            if stats.HasField("memory")
        }

    async def _round(
        self, pod: Pod, resize: Resize, resource: Resource, pod_cgroup: _PodCgroupResize | None
    ) -> None:
        """Resize one resource of a pod."""
        updates = order_resizes([*resize.containers.values()], resource)
        ids = {update.name: id for id, update in resize.containers.items()}
        changes = any(update.change(resource) for update in resize.containers.values())
        if not (updates or changes or resize.pod or resize.pod_level):
            return
        before, after = pod_cgroup.steps(resource) if pod_cgroup is not None else ([], [])
        try:
            if pod_cgroup is not None:
                await pod_cgroup.set(before, resource)
            await self._update(pod, updates, ids, resource)
            if pod_cgroup is not None:
                await pod_cgroup.set(after, resource)
        except CriError as err:
            raise ResizeError(err.rpc_text) from err
        except OSError as err:
            raise ResizeError(str(err)) from err
        if resize.pod_level:
            self._actuated.resized_pod_level(pod, resource)

    async def _update(
        self, pod: Pod, updates: Sequence[ContainerResize], ids: Mapping[str, str], resource: Resource
    ) -> None:
        containers = {
            container.name: container for container in (*pod.spec.init_containers, *pod.spec.containers)
        }
        for update in updates:
            container = containers[update.name]
            resized_container = with_sizes(container, update.after(resource))
            cpuset = CpusetAssignment(exclusive=self._is_exclusive(pod, container))
            options = RunContainerOptions(node=self._node, cpuset=cpuset)
            await self._cri.runtime.update_container_resources(
                ids[update.name], container_resources(pod, resized_container, options)
            )
            self._actuated.resized(pod, container, resized_container.resources)


class _PodCgroupResize:
    """The pod's cgroup during a resize, with its current and desired limits."""

    def __init__(self, group: PodCgroup, sandbox: SandboxUpdates, current: PodLimits) -> None:
        self._group = group
        self._sandbox = sandbox
        self._current = current
        self._desired = group.desired(current)

    def steps(self, resource: Resource) -> tuple[list[Part], list[Part]]:
        """Return the limits to set before the containers, and those to set after them."""
        return pod_steps(self._current, self._desired, resource)

    async def set(self, parts: Sequence[Part], resource: Resource) -> None:
        """Set some limits. Raises OSError, and ResizeError when the runtime rejects them."""
        for part in parts:
            new = self._current._replace(**{part: getattr(self._desired, part)})
            try:
                await self._sandbox.update(new, self._group.period)
            except SandboxUpdateRejected as err:
                raise ResizeError(
                    "failed to notify runtime for UpdatePodSandboxResources "
                    f"(resource={resource}); resize rejected: {err}"
                ) from err
            try:
                await self._group.set(part)
            except OSError:
                await self._sandbox.revert(self._current, self._group.period)
                raise
            self._current = new


def _unreadable(pod: Pod, err: OSError) -> str:
    return f'unable to get pod cgroup config for pod "{_pod_description(pod)}": {err}'


def _pod_description(pod: Pod) -> str:
    return f"{pod.metadata.name}_{pod.metadata.namespace}({pod.uid})"

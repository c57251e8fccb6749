"""Giving running containers other resources: the pod's cgroup and the containers, in the right order.

What may not be taken away is found out first: memory that is in use. Then memory, then cpu; each container
is noted as set the moment the runtime has taken it, so that whoever is interrupted here, or fails, goes on
later where it stopped. A failure leaves a pod that has a part of what it shall have, never more than it may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError, Unimplemented
from pykubelet.resources.resize_cgroup import PodGroup
from pykubelet.resources.resize_plan import (
    ContainerResize,
    Part,
    PodLimits,
    Resource,
    in_order,
    pod_steps,
    shrink_problem,
    shrinks,
)
from pykubelet.resources.resize_sizes import with_sizes
from pykubelet.runtime.actions import Resize
from pykubelet.runtime.facts import ContainerFacts, NodeFacts, SandboxFacts
from pykubelet.runtime.linux_resources import container_resources, overhead_resources, sandbox_resources


class ResizeError(Exception):
    """A pod could not be resized now; the text says why."""


class Actuated(Protocol):
    """Who keeps what containers were set to."""

    def resized(self, pod: Pod, container: Container, resources: ResourceRequirements) -> None:
        """Take note that the runtime has set a container to this."""
        ...

    def resized_whole(self, pod: Pod, resource: Resource) -> None:
        """Take note that the pod as a whole has what it was promised of a resource."""
        ...


class Resizer:
    """Resizes pods."""

    def __init__(
        self,
        cri: Cri,
        node: NodeFacts,
        group_of: Callable[[Pod], PodGroup | None],
        actuated: Actuated,
        is_exclusive: Callable[[Pod, Container], bool] = lambda pod, container: False,
    ) -> None:
        """Take the runtime, the node, where pods' cgroups are, and who has cpus of its own."""
        self._cri = cri
        self._node = node
        self._group_of = group_of
        self._actuated = actuated
        self._is_exclusive = is_exclusive

    async def apply(self, pod: Pod, sandbox_id: str, resize: Resize) -> None:
        """Have a pod's containers set to what the pod says; raises ResizeError."""
        group = self._group_of(pod)
        try:
            now = group.now() if group is not None else None
        except OSError as err:
            raise ResizeError(f'unable to get pod cgroup config for pod "{_told(pod)}": {err}') from err
        await self._check(pod, sandbox_id, resize, group, now)
        for resource in ("memory", "cpu"):
            await self._round(pod, sandbox_id, resize, resource, group, now)

    async def _check(
        self, pod: Pod, sandbox_id: str, resize: Resize, group: PodGroup | None, now: PodLimits | None
    ) -> None:
        """Raise ResizeError when memory that is in use would be taken away."""
        updates = in_order([*resize.containers.values()], "memory")
        if not updates and not resize.pod:
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

    async def _round(
        self,
        pod: Pod,
        sandbox_id: str,
        resize: Resize,
        resource: Resource,
        group: PodGroup | None,
        now: PodLimits | None,
    ) -> None:
        """Resize a pod in one resource."""
        updates = in_order([*resize.containers.values()], resource)
        ids = {one.name: id for id, one in resize.containers.items()}
        changes = any(one.change(resource) for one in resize.containers.values())
        if not (updates or changes or resize.pod or resize.whole):
            return
        steps: tuple[list[Part], list[Part]] = ([], [])
        if group is not None and now is not None:
            steps = pod_steps(now, group.wanted(now), resource)
        try:
            if any(steps):
                await self._tell(pod, sandbox_id)
            await _set(group, steps[0])
            await self._update(pod, updates, ids, resource)
            await _set(group, steps[1])
        except CriError as err:
            raise ResizeError(err.rpc_text) from err
        except OSError as err:
            raise ResizeError(str(err)) from err
        if resize.whole:
            self._actuated.resized_whole(pod, resource)

    async def _tell(self, pod: Pod, sandbox_id: str) -> None:
        """Tell a runtime that wants to know (a virtual machine's) what the pod shall have as a whole."""
        facts = SandboxFacts(node=self._node)
        try:
            await self._cri.runtime.update_pod_sandbox_resources(
                sandbox_id,
                overhead=overhead_resources(pod, self._node),
                resources=sandbox_resources(pod, facts),
            )
        except Unimplemented:
            return
        except CriError as err:
            if "not implemented" not in err.rpc_text:
                raise

    async def _update(
        self, pod: Pod, updates: Sequence[ContainerResize], ids: Mapping[str, str], resource: Resource
    ) -> None:
        containers = {one.name: one for one in (*pod.spec.init_containers, *pod.spec.containers)}
        for update in updates:
            container = containers[update.name]
            sized = with_sizes(container, update.after(resource))
            facts = ContainerFacts(node=self._node, exclusive_cpus=self._is_exclusive(pod, container))
            await self._cri.runtime.update_container_resources(
                ids[update.name], container_resources(pod, sized, facts)
            )
            self._actuated.resized(pod, container, sized.resources)


async def _set(group: PodGroup | None, parts: Sequence[Part]) -> None:
    for part in parts:
        if group is not None:
            await group.set(part)


def _told(pod: Pod) -> str:
    return f"{pod.metadata.name}_{pod.metadata.namespace}({pod.uid})"

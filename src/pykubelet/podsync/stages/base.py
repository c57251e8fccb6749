"""Interface of a stage, and the pod start that the stages prepare.

Before a sandbox is created or containers are started, `prepare` of every stage is called in the order of the
list. When no container of the pod runs any more, `release` is called in reverse order; those with
`before_final_status` come before the final status of the pod is reported, after which other nodes and pods
may use what the pod had. When the pod has left the node, `forget` drops what is kept of it in memory and in
checkpoints. A kubelet may be killed at any point, so `prepare` is idempotent, and `release` also works for a
pod of which only the uid is known.

While the pod runs, each sync passes the desired pod to `update`, checks `is_intact`, and calls `refresh`. A
`release` that fails ends the step, which is retried: the stages below it keep what they have until it
succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.configuration.config_builder import PodStartContext
from pykubelet.kuberuntime.configuration.options import IdMappings, extra_groups
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podsync.start_limiter import StartSlot
from pykubelet.tracing.span import child_span
from pykubelet.volumes.plugin import MountedVolume


@dataclass(slots=True)
class PodStart:
    """A start of a pod's containers; each stage adds what later stages and the containers need."""

    pod: Pod
    observed: ObservedPod
    actions: Actions
    slot: StartSlot
    """Start slot, which a stage releases while it waits for something slow."""
    cgroup_parent: str = ""
    volumes: dict[str, MountedVolume] = field(default_factory=dict)
    id_mappings: IdMappings | None = None

    def context(self) -> PodStartContext:
        """Return what the CRI requests need of the stages."""
        return PodStartContext(
            cgroup_parent=self.cgroup_parent,
            volumes=self.volumes,
            id_mappings=self.id_mappings,
            extra_groups=extra_groups(self.pod, self.volumes.values()),
        )


class Stage:
    """One concern of a pod on this node; every operation may be repeated and cancelled at any point."""

    name: str = "stage"
    """Name of the stage in traces."""
    before_final_status: ClassVar[bool] = False
    """Whether `release` precedes the final status of the pod."""

    def update(self, pod: Pod) -> None:
        """Handle the desired pod at the beginning of each sync; must not block."""

    async def prepare(self, start: PodStart) -> None:
        """Provide what the pod needs.

        Raises SyncError to wait for a retry, and PodRejected when the pod cannot run on this node.
        """

    async def refresh(self, pod: Pod) -> float | None:
        """Update what a running pod has; return the seconds until a retry after a failure."""
        return None

    def is_intact(self, pod: Pod) -> bool:
        """Return whether a running pod still has what it needs; otherwise it is stopped and started again."""
        return True

    async def release(self, uid: str, pod: Pod | None) -> None:
        """Release what the pod had; no container runs. `pod`: None for an orphan. Raises SyncError."""

    def forget(self, uid: str) -> None:
        """Drop the state of a pod that has left the node, or that is started again from the beginning."""


class StageList:
    """The stages of a node in their order."""

    def __init__(self, *stages: Stage) -> None:
        self._stages = stages

    def update(self, pod: Pod) -> None:
        """Pass the desired pod to every stage."""
        for stage in self._stages:
            stage.update(pod)

    async def prepare(self, start: PodStart) -> None:
        """Prepare every stage in order. Raises SyncError, PodRejected."""
        for stage in self._stages:
            with child_span(f"prepare/{stage.name}"):
                await stage.prepare(start)

    async def refresh(self, pod: Pod) -> float | None:
        """Refresh every stage; return the seconds until the earliest retry."""
        waits = [await stage.refresh(pod) for stage in self._stages]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def is_intact(self, pod: Pod) -> bool:
        """Return whether every stage of a running pod is intact."""
        return all(stage.is_intact(pod) for stage in self._stages)

    async def release(self, uid: str, pod: Pod | None, *, before_final_status: bool) -> None:
        """Release the stages before the final status, or those after it, in reverse. Raises SyncError."""
        for stage in reversed(self._stages):
            if stage.before_final_status is before_final_status:
                with child_span(f"release/{stage.name}"):
                    await stage.release(uid, pod)

    def forget(self, uid: str) -> None:
        """Drop the state of a pod in every stage."""
        for stage in reversed(self._stages):
            stage.forget(uid)

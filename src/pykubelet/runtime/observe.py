"""Looking at the runtime: from CRI's answers to the facts in `observed.py`.

A list call is cheap, a status call per container is not; a container that has ended never changes
again, so its facts are kept and asked for only once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import NotFound
from pykubelet.resources.qos import milli_cpu_of_quota, milli_cpu_of_shares
from pykubelet.runtime.labels import (
    CONTAINER_NAME,
    HASH,
    POD_NAME,
    POD_NAMESPACE,
    POD_UID,
    RESTART_COUNT,
)
from pykubelet.runtime.observed import (
    ActualResources,
    ContainerPhase,
    ObservedContainer,
    ObservedPod,
    ObservedSandbox,
)
from pykubelet.runtime.termination import termination_message

Seen = TypeVar("Seen", ObservedSandbox, ObservedContainer)

_PHASE: dict[int, ContainerPhase] = {
    pb.CONTAINER_CREATED: "created",
    pb.CONTAINER_RUNNING: "running",
    pb.CONTAINER_EXITED: "exited",
}
_ABANDONED = ("context canceled", "context deadline exceeded")
"""Texts in containerd's message about a start whose caller did not wait for it."""
_SHIM_FAILED = "failed to start shim: "
_SHIM_KILLED = "signal: killed"
_START_ERROR = "StartError"


class Observer:
    """Reads pods from the runtime."""

    def __init__(self, cri: Cri) -> None:
        self._cri = cri
        self._ended: dict[str, ObservedContainer] = {}
        self._sandboxes: dict[str, ObservedSandbox] = {}

    async def pod(self, uid: str) -> ObservedPod:
        """All that the runtime has of one pod, in full detail."""
        mine = {POD_UID: uid}
        sandboxes, containers = await asyncio.gather(
            self._cri.runtime.list_pod_sandbox(pb.PodSandboxFilter(label_selector=mine)),
            self._cri.runtime.list_containers(pb.ContainerFilter(label_selector=mine)),
        )
        details = await asyncio.gather(
            *(self._sandbox(sandbox) for sandbox in sandboxes), *(self._container(c) for c in containers)
        )
        seen_sandboxes = [found for found in details if isinstance(found, ObservedSandbox)]
        seen_containers = [found for found in details if isinstance(found, ObservedContainer)]
        every = [*(sandbox.labels for sandbox in sandboxes), *(container.labels for container in containers)]
        labels = dict(every[0]) if every else {}
        return ObservedPod(
            uid=uid,
            name=labels.get(POD_NAME, ""),
            namespace=labels.get(POD_NAMESPACE, ""),
            sandboxes=_newest_first(seen_sandboxes),
            containers=_newest_first(seen_containers),
        )

    async def new_sandbox(self, sandbox_id: str) -> ObservedSandbox:
        """Look at a sandbox that was just made; the next look at its pod need not ask again."""
        found = observed_sandbox((await self._cri.runtime.pod_sandbox_status(sandbox_id)).status)
        self._sandboxes[sandbox_id] = found
        return found

    def handler_of(self, sandbox_id: str) -> str:
        """Give the handler of a sandbox that was looked at; empty for the runtime's default."""
        known = self._sandboxes.get(sandbox_id)
        return known.runtime_handler if known is not None else ""

    async def all_pods(self) -> dict[str, ObservedPod]:
        """Every pod that the runtime knows, as lists tell: states and identities, no details."""
        sandboxes, containers = await asyncio.gather(
            self._cri.runtime.list_pod_sandbox(), self._cri.runtime.list_containers()
        )
        self._forget_missing({c.id for c in containers}, {s.id for s in sandboxes})
        by_uid: dict[str, tuple[list[ObservedSandbox], list[ObservedContainer], dict[str, str]]]
        by_uid = defaultdict(lambda: ([], [], {}))
        for sandbox in sandboxes:
            if uid := sandbox.labels.get(POD_UID):
                found = by_uid[uid]
                found[0].append(_listed_sandbox(sandbox))
                found[2].update(sandbox.labels)
        for container in containers:
            if uid := container.labels.get(POD_UID):
                found = by_uid[uid]
                found[1].append(_listed_container(container))
                found[2].update(container.labels)
        return {
            uid: ObservedPod(
                uid=uid,
                name=labels.get(POD_NAME, ""),
                namespace=labels.get(POD_NAMESPACE, ""),
                sandboxes=_newest_first(boxes),
                containers=_newest_first(seen),
            )
            for uid, (boxes, seen, labels) in by_uid.items()
        }

    def _forget_missing(self, containers: set[str], sandboxes: set[str]) -> None:
        for gone in self._ended.keys() - containers:
            del self._ended[gone]
        for gone in self._sandboxes.keys() - sandboxes:
            del self._sandboxes[gone]

    async def _sandbox(self, listed: pb.PodSandbox) -> ObservedSandbox | None:
        ready = listed.state == pb.SANDBOX_READY
        known = self._sandboxes.get(listed.id)
        if known is not None and known.ready == ready and (known.ips or known.host_network or not ready):
            return known
        try:
            status = (await self._cri.runtime.pod_sandbox_status(listed.id)).status
        except NotFound:
            return None
        found = observed_sandbox(status)
        self._sandboxes[listed.id] = found
        return found

    async def _container(self, listed: pb.Container) -> ObservedContainer | None:
        if listed.state == pb.CONTAINER_EXITED and (known := self._ended.get(listed.id)) is not None:
            return known
        try:
            status = (await self._cri.runtime.container_status(listed.id)).status
        except NotFound:
            return None
        message = status.message
        if _phase(status) == "exited":
            # The container wrote the file: reading it must not block the loop.
            message = await asyncio.to_thread(termination_message, status)
        found = observed_container(status, listed.pod_sandbox_id, message)
        if found.phase == "exited":
            self._ended[listed.id] = found
        return found


def _newest_first(found: Iterable[Seen]) -> tuple[Seen, ...]:
    """Sort by attempt, which only grows; by time alone, a clock that was set back would raise the dead."""
    return tuple(sorted(found, key=lambda one: (one.attempt, one.created_at), reverse=True))


def observed_sandbox(status: pb.PodSandboxStatus) -> ObservedSandbox:
    """Give a sandbox's facts from its status."""
    network = status.network
    ips = (network.ip, *(extra.ip for extra in network.additional_ips)) if network.ip else ()
    return ObservedSandbox(
        id=status.id,
        ready=status.state == pb.SANDBOX_READY,
        created_at=status.created_at,
        attempt=status.metadata.attempt,
        ips=ips,
        host_network=status.linux.namespaces.options.network == pb.NODE,
        runtime_handler=status.runtime_handler,
    )


def observed_container(
    status: pb.ContainerStatus, sandbox_id: str = "", message: str = ""
) -> ObservedContainer:
    """Return a container's facts from its status; `message` is the one that goes into its state."""
    user = status.user.linux if status.HasField("user") and status.user.HasField("linux") else None
    return ObservedContainer(
        id=status.id,
        name=status.labels.get(CONTAINER_NAME, status.metadata.name),
        phase=_phase(status),
        sandbox_id=sandbox_id,
        attempt=status.metadata.attempt,
        created_at=status.created_at,
        started_at=status.started_at,
        finished_at=status.finished_at,
        exit_code=status.exit_code,
        reason=_reason(status),
        message=message,
        image=status.image.image,
        image_id=status.image_ref,
        hash=status.annotations.get(HASH, ""),
        restart_count=_number(status.annotations.get(RESTART_COUNT)),
        annotations=dict(status.annotations),
        labels=dict(status.labels),
        log_path=status.log_path,
        user=None if user is None else (user.uid, user.gid, tuple(user.supplemental_groups)),
        resources=_resources(status),
    )


def _phase(status: pb.ContainerStatus) -> ContainerPhase:
    """Say what a container is up to.

    One that never ran counts as not started yet, unless its start really failed: whoever asked for
    it was killed or lost patience, or the runtime was killed on the way. A pod that is not restarted
    would otherwise have failed for nothing.
    """
    never_ran = status.state == pb.CONTAINER_EXITED and not status.started_at
    if never_ran and (status.reason != _START_ERROR or _is_abandoned_start(status.message)):
        return "created"
    return _PHASE.get(status.state, "unknown")


def _is_abandoned_start(message: str) -> bool:
    """Return whether the runtime's message describes a start that its caller did not wait for.

    Takes linear time: the message contains text of the pod, such as its command.
    """
    if any(text in message for text in _ABANDONED):
        return True
    failed = message.find(_SHIM_FAILED)
    return failed >= 0 and message.find(_SHIM_KILLED, failed + len(_SHIM_FAILED)) >= 0


def _resources(status: pb.ContainerStatus) -> ActualResources | None:
    if not status.HasField("resources") or not status.resources.HasField("linux"):
        return None
    told = status.resources.linux
    found = ActualResources(
        cpu_request=milli_cpu_of_shares(told.cpu_shares),
        cpu_limit=milli_cpu_of_quota(told.cpu_quota, told.cpu_period),
        memory_limit=max(0, told.memory_limit_in_bytes),
    )
    return found if found != ActualResources() else None


def _reason(status: pb.ContainerStatus) -> str:
    if status.reason or status.state != pb.CONTAINER_EXITED:
        return status.reason
    return "Completed" if status.exit_code == 0 else "Error"


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _listed_sandbox(listed: pb.PodSandbox) -> ObservedSandbox:
    return ObservedSandbox(
        id=listed.id,
        ready=listed.state == pb.SANDBOX_READY,
        created_at=listed.created_at,
        attempt=listed.metadata.attempt,
    )


def _listed_container(listed: pb.Container) -> ObservedContainer:
    return ObservedContainer(
        id=listed.id,
        name=listed.labels.get(CONTAINER_NAME, listed.metadata.name),
        phase=_PHASE.get(listed.state, "unknown"),
        sandbox_id=listed.pod_sandbox_id,
        attempt=listed.metadata.attempt,
        created_at=listed.created_at,
        image=listed.image.image,
        image_id=listed.image_ref,
        annotations=dict(listed.annotations),
        labels=dict(listed.labels),
    )


def running_ids(pods: Iterable[ObservedPod]) -> set[str]:
    """Ids of all running containers."""
    return {container.id for pod in pods for container in pod.running}

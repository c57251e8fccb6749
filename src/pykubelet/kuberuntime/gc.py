"""Removing dead containers and sandboxes that nobody will ask about any more.

A dead container is kept for its logs and its exit code, but only so many of them: by default the
newest of each container of a pod that still exists. Which ones go is decided by `plan_gc`, a pure
function of what the runtime has; the `GarbageCollector` does it one by one, and what fails is tried
again the next time. Nothing that runs is ever removed, and nothing that no agent made.

Logs that outlived their containers and pods.

Folders below /var/log/pods are named after their pod, so those of pods that are gone can be told
from the others; links in /var/log/containers are followed to see whether their log still exists.
Only what has such a name, and leads to such a folder, is touched: both places are shared with other
programs, and perhaps with another agent.
"""

from __future__ import annotations

import asyncio
import glob
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.labels import parse_container
from pykubelet.kuberuntime.observe import ObservedContainer, ObservedPod, Observer
from pykubelet.kuberuntime.paths import container_id_of_link, legacy_log_link, pod_uid_of_log_dir
from pykubelet.linux.mounts import remove_tree
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)


def plan_log_folders(names: Iterable[str], is_deleted: Callable[[str], bool]) -> list[str]:
    """Decide which folders go, by their names: those of deleted pods, and none that is no pod's."""
    return sorted(
        name
        for name in names
        if name.count("_") == 2 and all(name.split("_")) and is_deleted(pod_uid_of_log_dir(name))
    )


class LogCollector:
    """Deletes logs of what is gone."""

    def __init__(self, cri: RuntimeConnection, pod_logs: Path, legacy_logs: Path | None) -> None:
        self._cri = cri
        self._pod_logs = pod_logs
        self._legacy_logs = legacy_logs

    def drop_container_logs(self, log_path: str) -> None:
        """Delete a container's log and what was rotated away from it. Raises OSError. Blocks."""
        path = Path(os.path.normpath(log_path))
        if not log_path or self._pod_logs not in path.parents:
            return
        for file in path.parent.glob(f"{glob.escape(path.name)}*"):
            try:
                file.unlink(missing_ok=True)
            except IsADirectoryError:
                remove_tree(file)

    async def drop_folders(self, is_deleted: Callable[[str], bool]) -> None:
        """Delete the folders of deleted pods; what fails is logged and left for the next time."""
        try:
            entries = [
                entry.name for entry in os.scandir(self._pod_logs) if entry.is_dir(follow_symlinks=False)
            ]
        except FileNotFoundError:
            return
        for name in plan_log_folders(entries, is_deleted):
            log.v(4).info("Removing pod logs", podUID=pod_uid_of_log_dir(name))
            try:
                await asyncio.to_thread(remove_tree, self._pod_logs / name)
            except OSError as err:
                log.error(err, "Failed to remove pod logs directory", path=name)

    async def drop_dangling_links(self) -> None:
        """Delete links whose log is gone, if their container is gone or has ended.

        While a log is rotated it does not exist for a moment.
        """
        if self._legacy_logs is None:
            return
        for link in self._legacy_logs.glob("*.log"):
            if not link.is_symlink() or link.exists() or self._pod_logs not in link.readlink().parents:
                continue
            container_id = container_id_of_link(link.name)
            if container_id is None or await self._has_ended(container_id):
                link.unlink(missing_ok=True)
                log.v(4).info("Removed symlink", path=str(link))

    async def _has_ended(self, container_id: str) -> bool:
        try:
            status = (await self._cri.runtime.container_status(container_id)).status
        except NotFound:
            return True
        except CriError as err:
            log.error(err, "Cannot tell whether a container has ended", containerID=container_id)
            return False
        return status.state == pb.CONTAINER_EXITED


Tells = Callable[[str], bool]
"""Says something of a pod, given by its uid."""
_NO_TIME = Duration(0)
_UNKNOWN_GRACE_SECONDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPolicy:
    """How many dead containers are kept; negative numbers are no limit."""

    min_age: Duration = _NO_TIME
    """Younger ones are always kept (`--minimum-container-ttl-duration`)."""
    max_per_container: int = 1
    """Of each container of a pod (`--maximum-dead-containers-per-container`)."""
    max_containers: int = -1
    """On the whole node (`--maximum-dead-containers`)."""


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What goes, in this order."""

    containers: tuple[ObservedContainer, ...] = ()
    sandboxes: tuple[str, ...] = ()
    """Ids; each has no containers left when those above are gone."""


def plan_gc(pods: Mapping[str, ObservedPod], policy: GcPolicy, *, now: int, is_gone: Tells) -> GcPlan:
    """Decide what to remove at `now` (nanoseconds since the epoch).

    Of a pod that `is_gone` everything that is dead and old enough goes. Of the others the newest
    stay, and also one that was made but not started, if nothing newer is there: someone may be
    about to start it.
    """
    doomed: list[ObservedContainer] = []
    kept: list[list[ObservedContainer]] = []
    for uid, pod in pods.items():
        gone = is_gone(uid)
        for dead in _dead_by_name(pod, now - policy.min_age, every=gone):
            if gone:
                doomed += reversed(dead)
            else:
                kept.append(dead)
    if policy.max_per_container >= 0:
        doomed += _shorten(kept, policy.max_per_container)
    if 0 <= policy.max_containers < sum(map(len, kept)):
        # Every container keeps its fair part first: one that crashes often must not crowd out others.
        doomed += _shorten(kept, max(1, policy.max_containers // len(kept)))
        rest = sorted((one for dead in kept for one in dead), key=_age)
        doomed += rest[: max(0, len(rest) - policy.max_containers)]
    return GcPlan(tuple(doomed), tuple(_dead_sandboxes(pods, {one.id for one in doomed}, is_gone)))


class GarbageCollector:
    """Removes what is dead, with its logs."""

    def __init__(
        self,
        cri: RuntimeConnection,
        pod_logs_dir: str | Path,
        legacy_logs: Path | None,
        policy: GcPolicy | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Take the runtime, the folder of pods' logs, that of links to them, and what to keep."""
        self._cri = cri
        self._observer = Observer(cri)
        self._logs = LogCollector(cri, Path(pod_logs_dir), legacy_logs)
        self._legacy_logs = legacy_logs
        self._policy = policy or GcPolicy()
        self._clock = clock

    async def collect(
        self,
        *,
        is_deleted: Tells,
        is_removable: Tells = lambda uid: False,
        all_sources_ready: bool,
        evict_all: bool = False,
    ) -> None:
        """Remove everything that may go now; raises CriError when the runtime does not even list.

        `is_deleted` says of a pod that it is neither wanted nor on its way out. It is asked after the
        runtime was, so it must tell of the present: a pod that has just come must not be taken for
        a deleted one. With `evict_all` (the disk is full) the dead containers of pods that
        `is_removable`, because they have ended for good, go as well. As long as a source has not
        reported, no pod counts as deleted.
        """

        def is_gone(uid: str) -> bool:
            return all_sources_ready and (is_deleted(uid) or (evict_all and is_removable(uid)))

        pods = await self._observer.all_pods()
        plan = plan_gc(pods, self._policy, now=self._clock(), is_gone=is_gone)
        # Removing a sandbox would take a container with it that could not be removed by itself.
        held = {container.sandbox_id for container in plan.containers if not await self._try(container)}
        for sandbox_id in plan.sandboxes:
            if sandbox_id not in held:
                await self._remove_sandbox(sandbox_id)
        if all_sources_ready:
            await self._logs.drop_folders(is_deleted)
        await self._logs.drop_dangling_links()

    async def remove_container(self, container_id: str) -> None:
        """Remove a container that has ended, and its logs; raises CriError and OSError.

        The logs go first: without the container nobody would know whose they were.
        """
        try:
            status = (await self._cri.runtime.container_status(container_id)).status
            # In a thread: a pod with a hostPath of the logs may have made any number of files there.
            await finish_in_thread(lambda: self._logs.drop_container_logs(status.log_path))
            info = parse_container(status.labels, status.annotations)
            if self._legacy_logs is not None and info.ours:
                name = legacy_log_link(info.pod_name, info.pod_namespace, info.name, container_id)
                (self._legacy_logs / name).unlink(missing_ok=True)
            await self._cri.runtime.remove_container(container_id)
        except NotFound:
            return

    async def _try(self, container: ObservedContainer) -> bool:
        log.v(4).info("Removing container", containerID=container.id, containerName=container.name)
        try:
            if container.phase == "unknown":
                # It might run.
                await self._cri.runtime.stop_container(container.id, _UNKNOWN_GRACE_SECONDS)
            await self.remove_container(container.id)
        except (CriError, OSError) as err:
            log.error(err, "Failed to remove container", containerID=container.id)
            return False
        return True

    async def _remove_sandbox(self, sandbox_id: str) -> None:
        log.v(4).info("Removing sandbox", sandboxID=sandbox_id)
        try:
            # Usually stopped long ago; if not, its network would stay behind.
            await self._cri.runtime.stop_pod_sandbox(sandbox_id)
            await self._cri.runtime.remove_pod_sandbox(sandbox_id)
        except NotFound:
            return
        except CriError as err:
            log.error(err, "Failed to remove sandbox", sandboxID=sandbox_id)


def _age(container: ObservedContainer) -> tuple[int, int]:
    return container.created_at, container.attempt


def _dead_by_name(pod: ObservedPod, before: int, *, every: bool) -> list[list[ObservedContainer]]:
    """Give the containers that may go, newest first, for each name."""
    found: dict[str, list[ObservedContainer]] = {}
    newest: dict[str, ObservedContainer] = {}
    for container in sorted(pod.containers, key=_age, reverse=True):
        about_to_start = container is newest.setdefault(container.name, container) and (
            container.phase == "created"
        )
        if container.phase == "running" or container.created_at > before or (about_to_start and not every):
            continue
        found.setdefault(container.name, []).append(container)
    return list(found.values())


def _shorten(lists: Iterable[list[ObservedContainer]], length: int) -> list[ObservedContainer]:
    """Cut what is beyond a length off each list; gives what was cut, oldest first."""
    cut: list[ObservedContainer] = []
    for dead in lists:
        cut += reversed(dead[length:])
        del dead[length:]
    return cut


def _dead_sandboxes(pods: Mapping[str, ObservedPod], doomed: set[str], is_gone: Tells) -> Iterable[str]:
    for uid, pod in pods.items():
        used = {container.sandbox_id for container in pod.containers if container.id not in doomed}
        ordered = sorted(pod.sandboxes, key=lambda sandbox: (sandbox.created_at, sandbox.attempt))
        # The newest sandbox of a pod that exists tells how its next one is to be made.
        for sandbox in ordered if is_gone(uid) else ordered[:-1]:
            if not sandbox.ready and sandbox.id not in used:
                yield sandbox.id

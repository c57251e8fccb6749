"""Garbage collection of dead containers, dead sandboxes and their logs.

Dead containers are kept for their logs and exit codes, by default the newest of each container of an existing
pod. `plan_gc` decides what to remove, a pure function of the state of the runtime; `GarbageCollector` removes
it one by one, and failures are retried with the next collection. Running containers are never removed, nor is
anything that has no pod labels.

Directories below /var/log/pods are named after their pod, so those of deleted pods are recognized by name;
links in /var/log/containers are removed when the log that they point to does not exist. Only entries with
such a name, and links into the pod log directory, are touched: both directories are shared with other
processes, possibly with another kubelet.
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
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.paths import container_id_of_link, legacy_log_link, pod_uid_of_log_dir
from pykubelet.kuberuntime.removal import remove_container
from pykubelet.linux.mounts import remove_tree
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)


def plan_log_dirs(names: Iterable[str], is_deleted: Callable[[str], bool]) -> list[str]:
    """Return the log directories of deleted pods; names that are not a pod's are ignored."""
    return sorted(
        name
        for name in names
        if name.count("_") == 2 and all(name.split("_")) and is_deleted(pod_uid_of_log_dir(name))
    )


class PodLogsError(OSError):
    """Raised when the pod log directory cannot be read; its text is upstream's."""


class LogCollector:
    """Deletes logs of removed containers and deleted pods."""

    def __init__(self, cri: RuntimeConnection, pod_logs: Path, legacy_logs: Path | None) -> None:
        self._cri = cri
        self._pod_logs = pod_logs
        self._legacy_logs = legacy_logs

    def remove_container_logs(self, log_path: str) -> None:
        """Delete a container's log and its rotated files. Raises OSError. Blocks."""
        path = Path(os.path.normpath(log_path))
        if not log_path or self._pod_logs not in path.parents:
            return
        for file in path.parent.glob(f"{glob.escape(path.name)}*"):
            try:
                file.unlink(missing_ok=True)
            except IsADirectoryError:
                remove_tree(file)

    async def remove_log_dirs(self, is_deleted: Callable[[str], bool]) -> None:
        """Delete the log directories of deleted pods; failures are logged and retried the next time.

        Raises PodLogsError if the directory of all logs cannot be read.
        """
        for name in plan_log_dirs(await asyncio.to_thread(self._log_dirs), is_deleted):
            log.v(4).info("Removing pod logs", podUID=pod_uid_of_log_dir(name))
            try:
                await asyncio.to_thread(remove_tree, self._pod_logs / name)
            except OSError as err:
                log.error(err, "Failed to remove pod logs directory", path=name)

    def _log_dirs(self) -> list[str]:
        """Return the names of all log directories; empty before the first one exists. Blocks."""
        try:
            with os.scandir(self._pod_logs) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as err:
            reason = (err.strerror or str(err)).lower()
            raise PodLogsError(
                f'failed to read podLogsDirectory "{self._pod_logs}": open {self._pod_logs}: {reason}'
            ) from err

    def _dangling_links(self, legacy_logs: Path) -> list[Path]:
        """Return the links to logs that do not exist. Blocks."""
        return [link for link in legacy_logs.glob("*.log") if self._is_dangling(link)]

    def _is_dangling(self, link: Path) -> bool:
        try:
            return link.is_symlink() and not link.exists() and self._pod_logs in link.readlink().parents
        except OSError:  # removed concurrently
            return False

    async def remove_dangling_links(self) -> None:
        """Delete links whose log does not exist, if their container does not exist or has exited.

        During a rotation, the log of a running container does not exist for a short time.
        """
        if self._legacy_logs is None:
            return
        for link in await asyncio.to_thread(self._dangling_links, self._legacy_logs):
            container_id = container_id_of_link(link.name)
            if container_id is not None and not await self._has_ended(container_id):
                continue
            try:
                link.unlink(missing_ok=True)
            except OSError as err:
                log.error(err, "Failed to remove container log dead symlink", path=str(link))
            else:
                log.v(4).info("Removed symlink", path=str(link))

    async def _has_ended(self, container_id: str) -> bool:
        try:
            status = (await self._cri.runtime.container_status(container_id)).status
        except NotFound:
            return True
        except CriError as err:
            log.error(err, "Failed to get container status", containerID=container_id)
            return False
        return status.state == pb.CONTAINER_EXITED


PodPredicate = Callable[[str], bool]
"""A predicate of a pod, by its UID."""
_NO_TIME = Duration(0)
_UNKNOWN_GRACE_SECONDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPolicy:
    """Numbers of dead containers to keep; a negative number is unlimited."""

    min_age: Duration = _NO_TIME
    """Age below which containers are always kept (`--minimum-container-ttl-duration`)."""
    max_per_container: int = 1
    """Per container of a pod (`--maximum-dead-containers-per-container`)."""
    max_containers: int = -1
    """On the node (`--maximum-dead-containers`)."""


@dataclass(frozen=True, slots=True)
class GcPlan:
    """Containers and sandboxes to remove, in this order."""

    containers: tuple[ObservedContainer, ...] = ()
    sandboxes: tuple[str, ...] = ()
    """IDs of sandboxes without containers after the removal of those above."""


def plan_gc(
    pods: Mapping[str, ObservedPod], policy: GcPolicy, *, now: int, is_collectable: PodPredicate
) -> GcPlan:
    """Return what to remove at `now` (nanoseconds since the epoch).

    Of a pod that `is_collectable`, everything dead and old enough is removed. Of the others the newest
    containers are kept, and also the newest one in state created, because it may be about to start.
    """
    to_remove: list[ObservedContainer] = []
    retained: list[list[ObservedContainer]] = []
    for uid, pod in pods.items():
        collectable = is_collectable(uid)
        for dead in _dead_by_name(pod, now - policy.min_age, include_created=collectable):
            if collectable:
                to_remove += reversed(dead)
            else:
                retained.append(dead)
    if policy.max_per_container >= 0:
        to_remove += _truncate(retained, policy.max_per_container)
    if 0 <= policy.max_containers < sum(map(len, retained)):
        # Each container keeps an equal number first: one that crashes often must not displace others.
        to_remove += _truncate(retained, max(1, policy.max_containers // len(retained)))
        rest = sorted((container for dead in retained for container in dead), key=_age)
        to_remove += rest[: max(0, len(rest) - policy.max_containers)]
    return GcPlan(
        tuple(to_remove),
        tuple(_dead_sandboxes(pods, {container.id for container in to_remove}, is_collectable)),
    )


class GarbageCollector:
    """Removes dead containers and sandboxes, with their logs."""

    def __init__(
        self,
        cri: RuntimeConnection,
        pod_logs_dir: str | Path,
        legacy_logs: Path | None,
        policy: GcPolicy | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Initialize with the pod log directory, the directory of links to logs, and the policy."""
        self._cri = cri
        self._observer = Observer(cri)
        self._logs = LogCollector(cri, Path(pod_logs_dir), legacy_logs)
        self._legacy_logs = legacy_logs
        self._policy = policy or GcPolicy()
        self._clock = clock

    async def collect(
        self,
        *,
        is_deleted: PodPredicate,
        is_removable: PodPredicate = lambda uid: False,
        all_sources_ready: bool,
        evict_all: bool = False,
    ) -> None:
        """Remove everything that the policy allows.

        Raises CriError when the runtime cannot be listed, and PodLogsError.

        `is_deleted` returns whether a pod is neither desired nor terminating. It is called after the runtime
        was listed and must use the current state: a pod that has just been added must not count as deleted.
        With `evict_all` (disk pressure), dead containers of pods that `is_removable`, because they have
        terminated, are removed as well. Until all sources are ready, no pod counts as deleted.
        """

        def is_collectable(uid: str) -> bool:
            return all_sources_ready and (is_deleted(uid) or (evict_all and is_removable(uid)))

        pods = await self._observer.list_pods()
        plan = plan_gc(pods, self._policy, now=self._clock(), is_collectable=is_collectable)
        # Removing a sandbox would also remove its container whose own removal failed.
        occupied = {
            container.sandbox_id for container in plan.containers if not await self._try_remove(container)
        }
        for sandbox_id in plan.sandboxes:
            if sandbox_id not in occupied:
                await self._remove_sandbox(sandbox_id)
        if all_sources_ready:
            await self._logs.remove_log_dirs(is_deleted)
        await self._logs.remove_dangling_links()

    async def remove_container(self, container_id: str) -> None:
        """Remove an exited container and its logs. Raises CriError and OSError.

        The logs are removed first, because their path is known only from the container's status.
        """
        try:
            status = (await self._cri.runtime.container_status(container_id)).status
            # In a thread: a pod with a hostPath to the logs may have created any number of files.
            await finish_in_thread(lambda: self._logs.remove_container_logs(status.log_path))
            info = parse_container(status.labels, status.annotations)
            if self._legacy_logs is not None and info.is_managed:
                name = legacy_log_link(info.pod_name, info.pod_namespace, info.name, container_id)
                (self._legacy_logs / name).unlink(missing_ok=True)
            await remove_container(self._cri, container_id)
        except NotFound:
            return

    async def _try_remove(self, container: ObservedContainer) -> bool:
        log.v(4).info("Removing container", containerID=container.id, containerName=container.name)
        try:
            if container.phase == "unknown":
                # It may be running.
                await self._cri.runtime.stop_container(container.id, _UNKNOWN_GRACE_SECONDS)
            await self.remove_container(container.id)
        except (CriError, OSError) as err:
            log.error(err, "Failed to remove container", containerID=container.id)
            return False
        return True

    async def _remove_sandbox(self, sandbox_id: str) -> None:
        log.v(4).info("Removing sandbox", sandboxID=sandbox_id)
        try:
            # Usually stopped already; otherwise its network would leak.
            await self._cri.runtime.stop_pod_sandbox(sandbox_id)
            await self._cri.runtime.remove_pod_sandbox(sandbox_id)
        except NotFound:
            return
        except CriError as err:
            log.error(err, "Failed to remove sandbox", sandboxID=sandbox_id)


def _age(container: ObservedContainer) -> tuple[int, int]:
    return container.created_at, container.attempt


def _dead_by_name(
    pod: ObservedPod, created_before: int, *, include_created: bool
) -> list[list[ObservedContainer]]:
    """Return the removable containers, newest first, by name."""
    found: dict[str, list[ObservedContainer]] = {}
    newest: dict[str, ObservedContainer] = {}
    for container in sorted(pod.containers, key=_age, reverse=True):
        about_to_start = container is newest.setdefault(container.name, container) and (
            container.phase == "created"
        )
        if (
            container.phase == "running"
            or container.created_at > created_before
            or (about_to_start and not include_created)
        ):
            continue
        found.setdefault(container.name, []).append(container)
    return list(found.values())


def _truncate(lists: Iterable[list[ObservedContainer]], length: int) -> list[ObservedContainer]:
    """Truncate each list to a length; return what was cut, oldest first."""
    removed: list[ObservedContainer] = []
    for dead in lists:
        removed += reversed(dead[length:])
        del dead[length:]
    return removed


def _dead_sandboxes(
    pods: Mapping[str, ObservedPod], to_remove: set[str], is_collectable: PodPredicate
) -> Iterable[str]:
    for uid, pod in pods.items():
        used = {container.sandbox_id for container in pod.containers if container.id not in to_remove}
        ordered = sorted(pod.sandboxes, key=lambda sandbox: (sandbox.created_at, sandbox.attempt))
        # The newest sandbox of an existing pod determines the attempt number of the next one.
        for sandbox in ordered if is_collectable(uid) else ordered[:-1]:
            if not sandbox.ready and sandbox.id not in used:
                yield sandbox.id

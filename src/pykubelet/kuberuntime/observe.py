"""Observed state of pods in the runtime, read through CRI, and termination messages.

The `Observed…` types are immutable, newest first, and shared: `decide`, the status and the garbage collector
use the same snapshot. A list call is cheap, a status call per container is not; an exited container does not
change any more, so its state is cached and queried only once. The cache is in memory.

The termination message is the end of the container's message file, or of its log, which continues in the
newest rotated file if the active one has too few lines. The container writes the
file, so its content and type are untrusted: it is read only if it is a regular file, without following
symbolic links, and never more than the limit. The log belongs to the runtime; some runtimes make it a
symbolic link, so links are followed there. `termination_message` and `log_tail` block on the disk: call them
in a thread.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pykubelet.cm.qos import milli_cpu_of_quota, milli_cpu_of_shares
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.labels import (
    CONTAINER_NAME,
    HASH,
    POD_NAME,
    POD_NAMESPACE,
    POD_UID,
    RESTART_COUNT,
    TERMINATION_MESSAGE_PATH,
    TERMINATION_MESSAGE_POLICY,
)
from pykubelet.kuberuntime.observed import (
    ActualResources,
    ContainerPhase,
    ObservedContainer,
    ObservedPod,
    ObservedSandbox,
)
from pykubelet.linux.untrusted_files import read_tail
from pykubelet.transport.errors import NotFound

MESSAGE_BYTES = 4096
"""Maximum bytes of a termination message; of a longer one the last bytes are kept."""
LOG_BYTES, LOG_LINES = 2048, 80
_LINE_BYTES = 16 * 1024
"""Bytes at which runtimes split the lines of a log by default."""
_ROTATED_SUFFIX = re.compile(r"[0-9]{8}-[0-9]{6}(_[0-9]{6})?(\.gz)?", re.ASCII)
_MAX_ENTRIES = 10_000
"""Entries of a log directory that are read to find a rotated log."""


def termination_message(status: pb.ContainerStatus) -> str:
    """Return the message of an exited container, preceded by the runtime's own message, if any."""
    path = status.annotations.get(TERMINATION_MESSAGE_PATH, "")
    # The mount is at the absolute path; the annotation has the path of the spec.
    absolute = path if path.startswith("/") else f"/{path}"
    host_path = next(
        (mount.host_path for mount in status.mounts if path and mount.container_path == absolute), ""
    )
    message = _read_message(host_path) if host_path else ""
    policy = status.annotations.get(TERMINATION_MESSAGE_POLICY)
    falls_back = policy == "FallbackToLogsOnError" and status.exit_code != 0
    if not message and falls_back and status.reason != "ContainerCannotRun" and status.log_path:
        message = log_tail(Path(status.log_path), LOG_LINES, LOG_BYTES)
    if status.message and message:
        return f"{status.message}: {message}"
    return status.message or message


def _read_message(path: str) -> str:
    try:
        return read_tail(path, MESSAGE_BYTES)[0].decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as err:
        return f"Error on reading termination log {path}: {err.strerror}"


def log_tail(path: Path, lines: int, limit: int) -> str:
    """Return the last lines of a container log in CRI format, without the time stamps."""
    try:
        # A line's prefix has about forty bytes: this is enough for `limit` bytes of text.
        content, truncated = read_tail(path, limit + lines * 64 + _LINE_BYTES, follow_symlink=True)
    except OSError as err:
        return f"Error on reading termination message from logs: {path}: {err.strerror}"
    text, count = _last_lines(content, lines, limit, truncated=truncated)
    if count < lines and len(text) < limit and not truncated and (older := _newest_rotated(path)) is not None:
        # The log was rotated shortly before the container exited; the file may be removed concurrently.
        with suppress(OSError):
            rest = limit - len(text)
            content, truncated = read_tail(older, rest + lines * 64 + _LINE_BYTES)
            text = _last_lines(content, lines - count, rest, truncated=truncated)[0] + text
    return text.decode(errors="replace")


def _last_lines(content: bytes, lines: int, limit: int, *, truncated: bool) -> tuple[bytes, int]:
    """Return the text of the last lines, at most `limit` bytes, and their number."""
    # Not splitlines(), which also ends lines at a carriage return.
    raw = BytesIO(content).readlines()
    # The first line lacks its start; of a long one, the rest has more text than is needed.
    first_line = raw.pop(0) if truncated and raw else b""
    text = b"".join(_text_of(line) for line in raw[-lines:])
    if len(raw) < lines and len(text) < limit:
        text = first_line + text
    return text[-limit:], len(raw)


def _newest_rotated(path: Path) -> Path | None:
    """Return the newest file that `path` was rotated to, if it is not compressed; None without one."""
    prefix = f"{path.name}."
    with suppress(OSError), os.scandir(path.parent) as entries:
        names = (entry.name for entry in islice(entries, _MAX_ENTRIES) if entry.name.startswith(prefix))
        rotated = (name for name in names if _ROTATED_SUFFIX.fullmatch(name.removeprefix(prefix)))
        newest = max(rotated, default="")
        if newest and not newest.endswith(".gz"):
            return path.parent / newest
    return None


def _text_of(line: bytes) -> bytes:
    """Strip `<time> <stream> <F|P> ` from one line; a partial line (P) has no line end of its own."""
    parts = line.split(b" ", 3)
    if len(parts) < 4:
        return line
    return parts[3].rstrip(b"\n") if parts[2] == b"P" else parts[3]


ObservedT = TypeVar("ObservedT", ObservedSandbox, ObservedContainer)
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
    """Reads the state of pods from the runtime."""

    def __init__(self, cri: RuntimeConnection) -> None:
        self._cri = cri
        self._ended: dict[str, ObservedContainer] = {}
        self._sandboxes: dict[str, ObservedSandbox] = {}

    async def observe_pod(self, uid: str) -> ObservedPod:
        """Return the state of one pod, in full detail."""
        selector = {POD_UID: uid}
        sandboxes, containers = await asyncio.gather(
            self._cri.runtime.list_pod_sandbox(pb.PodSandboxFilter(label_selector=selector)),
            self._cri.runtime.list_containers(pb.ContainerFilter(label_selector=selector)),
        )
        details = await asyncio.gather(
            *(self._sandbox(sandbox) for sandbox in sandboxes), *(self._container(c) for c in containers)
        )
        observed_sandboxes = [found for found in details if isinstance(found, ObservedSandbox)]
        observed_containers = [found for found in details if isinstance(found, ObservedContainer)]
        label_sets = [
            *(sandbox.labels for sandbox in sandboxes),
            *(container.labels for container in containers),
        ]
        labels = dict(label_sets[0]) if label_sets else {}
        return ObservedPod(
            uid=uid,
            name=labels.get(POD_NAME, ""),
            namespace=labels.get(POD_NAMESPACE, ""),
            sandboxes=_newest_first(observed_sandboxes),
            containers=_newest_first(observed_containers),
        )

    async def observe_sandbox(self, sandbox_id: str) -> ObservedSandbox:
        """Return and cache the state of a new sandbox."""
        found = observed_sandbox((await self._cri.runtime.pod_sandbox_status(sandbox_id)).status)
        self._sandboxes[sandbox_id] = found
        return found

    def handler_of(self, sandbox_id: str) -> str:
        """Return the runtime handler of an observed sandbox; empty for the default one."""
        known = self._sandboxes.get(sandbox_id)
        return known.runtime_handler if known is not None else ""

    async def list_pods(self) -> dict[str, ObservedPod]:
        """Return every pod in the runtime as listed: states and identities, no details."""
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
                sandboxes=_newest_first(pod_sandboxes),
                containers=_newest_first(pod_containers),
            )
            for uid, (pod_sandboxes, pod_containers, labels) in by_uid.items()
        }

    def _forget_missing(self, containers: set[str], sandboxes: set[str]) -> None:
        for missing_id in self._ended.keys() - containers:
            del self._ended[missing_id]
        for missing_id in self._sandboxes.keys() - sandboxes:
            del self._sandboxes[missing_id]

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
            # The container controls the file: reading it must not block the event loop.
            message = await asyncio.to_thread(termination_message, status)
        found = observed_container(status, listed.pod_sandbox_id, message)
        if found.phase == "exited":
            self._ended[listed.id] = found
        return found


def _newest_first(found: Iterable[ObservedT]) -> tuple[ObservedT, ...]:
    """Sort by attempt, then time; time alone would be wrong after a clock was set back."""
    return tuple(sorted(found, key=lambda item: (item.attempt, item.created_at), reverse=True))


def observed_sandbox(status: pb.PodSandboxStatus) -> ObservedSandbox:
    """Convert the status of a sandbox."""
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
    """Convert the status of a container; `message` is the message of its state."""
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
        image_mounts=tuple(
            (mount.container_path, mount.image.image) for mount in status.mounts if mount.image.image
        ),
    )


def _phase(status: pb.ContainerStatus) -> ContainerPhase:
    """Return the phase of a container.

    One that never ran counts as created, unless its start really failed: the caller of the start was killed
    or timed out, or the runtime was killed in between. Otherwise a pod that is not restarted would fail
    without a cause of its own.
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
    linux = status.resources.linux
    found = ActualResources(
        cpu_request=milli_cpu_of_shares(linux.cpu_shares),
        cpu_limit=milli_cpu_of_quota(linux.cpu_quota, linux.cpu_period),
        memory_limit=max(0, linux.memory_limit_in_bytes),
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
    """Return the IDs of all running containers."""
    return {container.id for pod in pods for container in pod.running}

"""containerd's own services: task events, and deletion of tasks that CRI has lost.

containerd 1.6 has no CRI container events, but its event service is on the same socket. Events are hints: the
consumer queries CRI after each one, and relists when the stream breaks, because events in between are lost.

An interrupted start (its caller was killed) can leave a process that CRI reports as exited and then refuses
to remove; `delete_task` kills and deletes it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import get_args

from google.protobuf.message import DecodeError

from pykubelet.cri import events_tasks_pb2 as tasks
from pykubelet.cri.channel import FOREVER, Channel
from pykubelet.cri.events_pb2 import SubscribeRequest
from pykubelet.cri.events_types_pb2 import Empty, Envelope
from pykubelet.cri.tasks_pb2 import DeleteResponse, DeleteTaskRequest, KillRequest
from pykubelet.logs import get_logger
from pykubelet.transport.errors import BadResponse, CriError, NotFound

log = get_logger(__name__)
SUBSCRIBE = "/containerd.services.events.v1.Events/Subscribe"
TASKS = "/containerd.services.tasks.v1.Tasks/"
CRI_NAMESPACE = "k8s.io"
_TOPICS = "^/tasks/(start|exit|oom|paused|resumed)$"
_TASK_SECONDS = 30.0
_RETRY_DELAYS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)

# Codes for a process that is still exiting: of containerd itself, and of its shim, which sets no code.
_DYING = ("FailedPrecondition", "Unknown")
Details = (
    tasks.TaskCreate
    | tasks.TaskStart
    | tasks.TaskDelete
    | tasks.TaskExit
    | tasks.TaskOOM
    | tasks.TaskExecAdded
    | tasks.TaskExecStarted
    | tasks.TaskPaused
    | tasks.TaskResumed
    | tasks.TaskCheckpointed
)
_KINDS: dict[str, type[Details]] = {kind.DESCRIPTOR.full_name: kind for kind in get_args(Details)}


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """An event of a container's task."""

    time: float
    """Seconds since the epoch, by containerd's clock."""
    container_id: str
    """CRI container or sandbox id: a sandbox has a task as well."""
    details: Details
    """The event's message; its class is the event type."""


async def task_events(channel: Channel, namespace: str = CRI_NAMESPACE) -> AsyncGenerator[TaskEvent, None]:
    """Yield task events of a namespace until the connection breaks: start, exit, OOM, paused and resumed.

    An exec probe causes three events, of which only its exit is of these types. containerd's filters cannot
    exclude it, because they do not compare two fields of an event.

    Close the iterator (`contextlib.aclosing`) when leaving it early. Raises Unimplemented if the runtime is
    not containerd, Unavailable when the connection breaks.
    """
    request = SubscribeRequest(filters=[f'topic~="{_TOPICS}",namespace=={namespace}'])
    envelopes = channel.stream(SUBSCRIBE, request, Envelope, timeout=FOREVER)
    async with aclosing(envelopes):
        async for envelope in envelopes:
            event = decode(envelope)
            if event is not None:
                yield event


async def delete_task(channel: Channel, container_id: str, namespace: str = CRI_NAMESPACE) -> None:
    """Kill and delete the task of a container or sandbox, if it has one.

    Raises CriError: Unimplemented if the runtime is not containerd.
    """
    headers = [("containerd-namespace", namespace)]
    kill = KillRequest(container_id=container_id, signal=signal.SIGKILL, all=True)
    delete = DeleteTaskRequest(container_id=container_id)
    try:
        await channel.call(f"{TASKS}Kill", kill, Empty, timeout=_TASK_SECONDS, headers=headers)
    except CriError as err:
        # A task that never started cannot be killed, but it can be deleted.
        log.v(4).info("Failed to kill containerd task", containerID=container_id, err=err)
    for delay in (*_RETRY_DELAYS, None):
        try:
            await channel.call(
                f"{TASKS}Delete", delete, DeleteResponse, timeout=_TASK_SECONDS, headers=headers
            )
        except NotFound:
            return
        except CriError as err:
            # The process may still be exiting.
            if delay is None or err.code not in _DYING:
                raise
            await asyncio.sleep(delay)
        else:
            return


def decode(envelope: Envelope) -> TaskEvent | None:
    """Return the event in an envelope, or None for an unknown event type.

    Raises BadResponse if the content does not match its type.
    """
    kind = _KINDS.get(envelope.event.type_url.rpartition("/")[2])
    if kind is None:
        return None
    try:
        details = kind.FromString(envelope.event.value)
    except DecodeError:
        raise BadResponse("Subscribe", f"a {envelope.topic} event cannot be decoded") from None
    stamp = envelope.timestamp
    return TaskEvent(stamp.seconds + stamp.nanos / 1e9, details.container_id, details)

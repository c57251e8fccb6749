"""containerd beside its CRI: its own event stream, and the way to a process that CRI has lost.

containerd 1.6 has no CRI container events, but its own event service is on the same socket. The
events are hints, not facts: a consumer asks the CRI for the truth after each, and relists when the
stream breaks, because events in between are lost.

A start that is cut off (its caller was killed) can leave a process that CRI shows as ended and then
refuses to remove; `delete_task` ends it.
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
_TASK_SECONDS = 30.0
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)

# What is said of a process that still dies: by containerd itself, or by its shim, which has no codes.
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
    """One thing that happened to a container's processes."""

    time: float
    """When, in seconds since the epoch, by containerd's clock."""
    container_id: str
    """The CRI's container or sandbox: a sandbox has a process too."""
    details: Details
    """What: `isinstance` tells which kind."""


async def task_events(channel: Channel, namespace: str = CRI_NAMESPACE) -> AsyncGenerator[TaskEvent, None]:
    """Yield every task event of a namespace until the connection breaks.

    Close the iterator (`contextlib.aclosing`) when leaving it early. Raises Unimplemented where the
    runtime is not containerd, Unavailable when the connection breaks.
    """
    request = SubscribeRequest(filters=[f'topic~="^/tasks/",namespace=={namespace}'])
    envelopes = channel.stream(SUBSCRIBE, request, Envelope, timeout=FOREVER)
    async with aclosing(envelopes):
        async for envelope in envelopes:
            event = decode(envelope)
            if event is not None:
                yield event


async def delete_task(channel: Channel, container_id: str, namespace: str = CRI_NAMESPACE) -> None:
    """Kill and forget the process of a container or sandbox, if it has one.

    Raises CriError: Unimplemented where the runtime is not containerd.
    """
    headers = [("containerd-namespace", namespace)]
    kill = KillRequest(container_id=container_id, signal=signal.SIGKILL, all=True)
    delete = DeleteTaskRequest(container_id=container_id)
    try:
        await channel.call(f"{TASKS}Kill", kill, Empty, timeout=_TASK_SECONDS, headers=headers)
    except CriError as err:
        # One that never got so far as to run cannot be killed, but deleted.
        log.v(4).info("Could not kill a task", containerID=container_id, err=err)
    for pause in (*_PAUSES, None):
        try:
            await channel.call(
                f"{TASKS}Delete", delete, DeleteResponse, timeout=_TASK_SECONDS, headers=headers
            )
        except NotFound:
            return
        except CriError as err:
            # It takes a moment to die.
            if pause is None or err.code not in _DYING:
                raise
            await asyncio.sleep(pause)
        else:
            return


def decode(envelope: Envelope) -> TaskEvent | None:
    """Give an envelope's content, or None for a kind of event that this agent does not know.

    Raises BadResponse where the content is not what its name says.
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

"""containerd's own event stream: what happens to containers' processes, as it happens.

containerd 1.6 has no CRI container events, but its own event service is on the same socket. The
events are hints, not facts: a consumer asks the CRI for the truth after each, and relists when the
stream breaks, because events in between are lost.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from google.protobuf.message import DecodeError, Message

from pykubelet.cri import events_pb2, events_tasks_pb2, events_types_pb2
from pykubelet.cri.channel import FOREVER, Channel
from pykubelet.cri.errors import BadResponse

SUBSCRIBE = "/containerd.services.events.v1.Events/Subscribe"
CRI_NAMESPACE = "k8s.io"

_TYPES: dict[str, type[Message]] = {
    cls.DESCRIPTOR.full_name: cls
    for cls in (
        events_tasks_pb2.TaskCreate,
        events_tasks_pb2.TaskStart,
        events_tasks_pb2.TaskDelete,
        events_tasks_pb2.TaskExit,
        events_tasks_pb2.TaskOOM,
        events_tasks_pb2.TaskExecAdded,
        events_tasks_pb2.TaskExecStarted,
        events_tasks_pb2.TaskPaused,
        events_tasks_pb2.TaskResumed,
        events_tasks_pb2.TaskCheckpointed,
    )
}


async def task_events(channel: Channel, namespace: str = CRI_NAMESPACE) -> AsyncGenerator[Message, None]:
    """Yield every task event (`TaskStart`, `TaskExit`, …) until the connection breaks.

    Close the iterator (`contextlib.aclosing`) when leaving it early. Raises Unimplemented where the
    runtime is not containerd, Unavailable when the connection breaks.
    """
    request = events_pb2.SubscribeRequest(filters=[f'topic~="^/tasks/",namespace=={namespace}'])
    envelopes = channel.stream(SUBSCRIBE, request, events_types_pb2.Envelope, timeout=FOREVER)
    async with aclosing(envelopes):
        async for envelope in envelopes:
            event = decode(envelope)
            if event is not None:
                yield event


def decode(envelope: events_types_pb2.Envelope) -> Message | None:
    """Give an envelope's content, or None for a kind of event that this agent does not know.

    Raises BadResponse where the content is not what its name says.
    """
    kind = _TYPES.get(envelope.event.type_url.rpartition("/")[2])
    if kind is None:
        return None
    try:
        return kind.FromString(envelope.event.value)
    except DecodeError:
        raise BadResponse("Subscribe", f"a {envelope.topic} event cannot be decoded") from None

"""containerd's own events and tasks: what is asked for, and what is made of the answers."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.containerd import Details, TaskEvent, decode, delete_task, task_events
from pykubelet.cri.events_pb2 import SubscribeRequest
from pykubelet.cri.events_tasks_pb2 import TaskExit, TaskOOM, TaskStart
from pykubelet.cri.events_types_pb2 import Any, Envelope, Timestamp
from pykubelet.cri.tasks_pb2 import DeleteResponse
from pykubelet.transport import errors
from tests.support.cri_servers import Refuse, Runtime


def envelope(name: str, value: bytes) -> Envelope:
    stamp = Timestamp(seconds=1700000000, nanos=250_000_000)
    return Envelope(
        timestamp=stamp, namespace="k8s.io", topic="/tasks/x", event=Any(type_url=name, value=value)
    )


def wrap(details: Details) -> Envelope:
    return envelope(details.DESCRIPTOR.full_name, details.SerializeToString())


def event(details: Details) -> TaskEvent:
    return TaskEvent(1700000000.25, details.container_id, details)


@pytest.mark.parametrize(
    "details",
    [
        TaskStart(container_id="c1", pid=7),
        TaskExit(container_id="c1", id="e1", exit_status=137, exited_at=Timestamp(seconds=1)),
        TaskOOM(container_id="c2"),
    ],
)
def test_decode_known_event_returns_task_event(details: Details) -> None:
    assert decode(wrap(details)) == event(details)


def test_decode_full_type_url_accepted() -> None:
    details = TaskExit(container_id="c1")
    url = "type.googleapis.com/containerd.events.TaskExit"
    assert decode(envelope(url, details.SerializeToString())) == event(details)


def test_decode_unknown_type_returns_none() -> None:
    assert decode(envelope("containerd.events.SnapshotPrepare", b"\xff")) is None


def test_decode_malformed_event_raises_bad_response() -> None:
    with pytest.raises(errors.BadResponse, match="/tasks/x event cannot be decoded"):
        decode(envelope("containerd.events.TaskExit", b"\xff"))


async def test_task_events_subscribes_to_tasks_of_namespace(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    start, end = TaskStart(container_id="c1"), TaskExit(container_id="c1")
    scripted.answers["Subscribe"] = [wrap(start), envelope("containerd.events.New", b""), wrap(end)]
    async with aclosing(task_events(cri.runtime_channel)) as events:
        assert [heard async for heard in events] == [event(start), event(end)]
    assert [seen.request for seen in scripted.seen] == [
        SubscribeRequest(filters=['topic~="^/tasks/(start|exit|oom|paused|resumed)$",namespace==k8s.io'])
    ]


async def test_task_events_other_runtime_raises_unimplemented(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    scripted.answers["Subscribe"] = Refuse("UNIMPLEMENTED", "unknown service")
    async with aclosing(task_events(cri.runtime_channel)) as events:
        with pytest.raises(errors.Unimplemented, match="Subscribe"):
            await anext(events)


@pytest.mark.parametrize(
    "dying",
    [
        Refuse("FAILED_PRECONDITION", "task must be stopped before deletion"),
        Refuse("UNKNOWN", "failed to delete task: cannot delete a running process"),
    ],
)
async def test_delete_task_process_still_running_is_retried(
    scripted: Runtime, cri: RuntimeConnection, dying: Refuse
) -> None:
    scripted.answers["Delete"] = [dying, dying, DeleteResponse()]
    await delete_task(cri.runtime_channel, "c1")
    assert [seen.method for seen in scripted.seen] == ["Kill", "Delete", "Delete", "Delete"]


async def test_delete_task_other_error_is_not_retried(scripted: Runtime, cri: RuntimeConnection) -> None:
    scripted.answers["Delete"] = Refuse("UNIMPLEMENTED", "unknown service")
    with pytest.raises(errors.Unimplemented, match="Delete"):
        await delete_task(cri.runtime_channel, "c1")
    assert [seen.method for seen in scripted.seen] == ["Kill", "Delete"]


async def test_delete_task_not_found_succeeds(scripted: Runtime, cri: RuntimeConnection) -> None:
    gone = Refuse("NOT_FOUND", "no running task found")
    scripted.answers |= {"Kill": gone, "Delete": gone}
    await delete_task(cri.runtime_channel, "c1")

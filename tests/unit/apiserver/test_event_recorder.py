"""Events on their way to the API server: in order, without waiting, through outages and refusals."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from pykubelet.api.core import Event, EventSource, ObjectReference
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import (
    AlreadyExists,
    Forbidden,
    NotFound,
    ServerError,
    StatusCause,
    StatusDetails,
    TooManyRequests,
    Unreachable,
)
from pykubelet.apiserver.events import (
    FAILED_TRIES,
    HOLD_SECONDS,
    EventRecorder,
    EventStore,
    node_reference,
    pod_reference,
)
from pykubelet.podconfig.pod_history import PodHistory
from tests.support.api_server import Server, answer

SOURCE = EventSource(component="kubelet", host="one")
WEB = ObjectReference(kind="Pod", namespace="default", name="web", uid="u1", api_version="v1")
AWAY = Unreachable("https://x", "refused")


class Store:
    """Keeps events, or fails as told."""

    def __init__(self) -> None:
        self.kept: dict[str, Event] = {}
        self.calls: list[str] = []
        self.failures: list[Exception] = []
        self.always: Exception | None = None
        self.refused = ""
        """If set, only this message fails."""
        self.pauses: list[float] = []

    def _begin(self, call: str, message: str) -> None:
        self.calls.append(call)
        if self.refused and message != self.refused:
            return
        if self.failures:
            raise self.failures.pop(0)
        if self.always is not None:
            raise self.always

    async def create(self, resource: Any, obj: Event, namespace: str = "") -> Event:
        self._begin("create", obj.message)
        self.kept[obj.metadata.name] = obj
        return obj

    async def patch(self, resource: Any, name: str, patch: Any, namespace: str = "", **_: Any) -> Event:
        self._begin("patch", patch["message"])
        if name not in self.kept:
            raise NotFound(404, "NotFound")
        self.kept[name].count = patch["count"]
        self.kept[name].message = patch["message"]
        return self.kept[name]

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(seconds)


@asynccontextmanager
async def recording(
    store: EventStore, crowded: Callable[[], bool] = lambda: False, **options: Any
) -> AsyncIterator[EventRecorder]:
    recorder = EventRecorder(store, "one", rng=lambda: 0.5, **options)
    task = asyncio.ensure_future(recorder.run(crowded))
    try:
        yield recorder
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.looptime
async def test_event_recorder_sends_in_order_and_counts_repeats() -> None:
    store = Store()
    async with recording(store) as recorder:
        for message in ("a", "b", "a"):
            recorder.record(WEB, "Normal", "Pulled", message)
        assert await recorder.flush(10)
    assert store.calls == ["create", "create", "patch"]
    assert [(e.message, e.count) for e in store.kept.values()] == [("a", 2), ("b", 1)]
    assert len(store.kept) == 2


@pytest.mark.looptime
async def test_event_recorder_normal_events_delayed_under_load() -> None:
    store, crowd = Store(), [True]
    async with recording(store, lambda: bool(crowd)) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        await asyncio.sleep(5)
        assert store.calls == []
        crowd.clear()
        await asyncio.sleep(0.5)
        assert store.calls == ["create"]
        crowd.append(True)
        recorder.record(WEB, "Normal", "Pulled", "b")
        await asyncio.sleep(HOLD_SECONDS + 0.1)
        assert store.calls == ["create"] * 2


@pytest.mark.looptime
async def test_event_recorder_warning_flushes_earlier_events() -> None:
    store = Store()
    async with recording(store, lambda: True) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        recorder.record(WEB, "Normal", "Pulled", "b")
        await asyncio.sleep(1)
        recorder.record(WEB, "Warning", "Failed", "c")
        recorder.record(WEB, "Normal", "Pulled", "d")
        await asyncio.sleep(0.1)
        assert [event.message for event in store.kept.values()] == ["a", "b", "c"]
        assert await recorder.flush(1)
        assert [event.message for event in store.kept.values()] == ["a", "b", "c", "d"]


@pytest.mark.looptime
async def test_event_recorder_long_queue_is_sent_under_load() -> None:
    store = Store()
    async with recording(store, lambda: True, queued=10) as recorder:
        for number in range(9):
            recorder.record(WEB, "Normal", "Pulled", str(number))
        await asyncio.sleep(1)
        assert 4 <= len(store.kept) < 9
    assert recorder.dropped == 0


@pytest.mark.looptime
async def test_event_recorder_pod_history_events_are_sent() -> None:
    store, journal = Store(), PodHistory()
    pod = Pod(metadata=ObjectMeta(name="web", namespace="default", uid="u1", resource_version="5"))
    async with recording(store) as recorder:
        journal.add_listener(recorder.pod_event)
        journal.event(pod, "Normal", "Started", "Started container main", "spec.containers{main}")
        journal.event(pod, "Normal", "Started", "Started container main", "spec.containers{main}")
        assert await recorder.flush(10)
    (kept,) = store.kept.values()
    assert kept.involved_object == pod_reference(pod, "spec.containers{main}")
    assert kept.involved_object.resource_version == "5"
    assert (kept.count, kept.reason, kept.source, kept.type) == (2, "Started", SOURCE, "Normal")


@pytest.mark.looptime
async def test_event_recorder_server_unreachable_retries_in_order(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.failures = [AWAY] * 6
    with caplog.at_level(logging.INFO, "pykubelet"):
        async with recording(store) as recorder:
            recorder.record(WEB, "Normal", "Pulled", "a")
            recorder.record(WEB, "Normal", "Pulled", "b")
            assert not await recorder.flush(50)
            assert await recorder.flush(10)
    assert store.pauses == [5, 10, 10, 10, 10, 10]
    assert [e.message for e in store.kept.values()] == ["a", "b"]
    assert [r.levelname for r in caplog.records] == ["ERROR", "INFO"]
    assert recorder.dropped == 0


@pytest.mark.looptime
async def test_event_recorder_twelve_failed_tries_drops_event() -> None:
    store = Store()
    store.failures = [AWAY] * 12
    async with recording(store) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        recorder.record(WEB, "Normal", "Pulled", "b")
        assert await recorder.flush(200)
    assert store.calls.count("create") == 13
    assert [e.message for e in store.kept.values()] == ["b"]
    assert recorder.dropped == 1


@pytest.mark.looptime
async def test_event_recorder_unlimited_tries_retries_until_sent() -> None:
    store = Store()
    store.failures = [AWAY] * 360
    async with recording(store, tries=None) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        assert await recorder.flush(3700)
    assert len(store.kept) == 1


@pytest.mark.looptime
async def test_event_recorder_queue_full_drops_without_blocking(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.always = AWAY
    with caplog.at_level(logging.INFO, "pykubelet"):
        async with recording(store, queued=10) as recorder:
            for number in range(1000):
                recorder.record(WEB, "Normal", "Pulled", f"{number}")
    assert recorder.dropped == 990
    assert [r.getMessage() for r in caplog.records] == ["Dropped an event, too many are waiting to be sent"]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("failure", "tried", "dropped", "lines"),
    [
        (AlreadyExists(409, "AlreadyExists"), 1, 0, 0),
        (Forbidden(403, "Forbidden"), 1, 1, 1),
        (
            Forbidden(403, "Forbidden", details=StatusDetails(causes=[StatusCause("NamespaceTerminating")])),
            1,
            1,
            0,
        ),
        (ServerError(503, "ServiceUnavailable"), 12, 1, 1),
        (ServerError(500, "InternalError"), FAILED_TRIES, 1, 1),
        (TooManyRequests(429, retry_after=30), 12, 1, 1),
    ],
)
async def test_event_recorder_api_error_decides_retry_and_drop(
    caplog: pytest.LogCaptureFixture, failure: Exception, tried: int, dropped: int, lines: int
) -> None:
    store = Store()
    store.always = failure
    with caplog.at_level(logging.INFO, "pykubelet"):
        async with recording(store) as recorder:
            recorder.record(WEB, "Normal", "Pulled", "a")
            assert await recorder.flush(1000)
    assert (len(store.calls), recorder.dropped, len(caplog.records)) == (tried, dropped, lines)
    if isinstance(failure, TooManyRequests):
        assert set(store.pauses) == {30}


@pytest.mark.looptime
async def test_event_recorder_server_error_for_one_event_sends_others() -> None:
    """As with a webhook that is down and that only one namespace has."""
    store = Store()
    store.failures = [ServerError(500, "InternalError", "failed calling webhook")] * 100
    async with recording(store, tries=None) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        await asyncio.sleep(0)
        store.refused = "a"
        recorder.record(WEB, "Normal", "Pulled", "b")
        assert await recorder.flush(120)
    assert [e.message for e in store.kept.values()] == ["b"]
    assert recorder.dropped == 1


@pytest.mark.looptime
async def test_event_recorder_queued_events_rate_limited_by_event_time() -> None:
    """Of one object are told 25 at once, then one each five minutes: also after hours without a server."""
    store = Store()
    store.always = AWAY
    async with recording(store, tries=None) as recorder:
        for number in range(40):
            recorder.record(WEB, "Warning", "BackOff", f"{number % 5}")
            await asyncio.sleep(301)
        store.always = None
        assert await recorder.flush(60)
    assert sum(e.count for e in store.kept.values()) == 40
    assert len(store.calls) - len(store.pauses) == 40


@pytest.mark.looptime
async def test_event_recorder_clock_corrected_timestamps_follow() -> None:
    store, now = Store(), datetime(2026, 7, 24, 10, tzinfo=UTC)
    ahead = [7200, 7200, 0, 0]
    clock = (int((now.timestamp() + seconds) * 1e9) for seconds in ahead)
    async with recording(store, clock=lambda: next(clock)) as recorder:
        for number in range(len(ahead)):
            recorder.record(WEB, "Normal", "Pulled", f"{number}")
        assert await recorder.flush(1)
    hours = [e.last_timestamp.hour for e in store.kept.values() if e.last_timestamp]
    assert hours == [12, 12, 10, 10]


@pytest.mark.looptime
async def test_event_recorder_expired_event_is_recreated_with_count() -> None:
    store = Store()
    async with recording(store) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        await recorder.flush(1)
        store.kept.clear()
        recorder.record(WEB, "Normal", "Pulled", "a")
        await recorder.flush(1)
    assert store.calls == ["create", "patch", "create"]
    assert [e.count for e in store.kept.values()] == [2]


@pytest.mark.looptime
async def test_event_recorder_same_timestamp_names_differ() -> None:
    store = Store()
    async with recording(store, clock=lambda: 1_700_000_000_000_000_000) as recorder:
        for number in range(5):
            recorder.record(WEB, "Normal", "Pulled", f"{number}")
        await recorder.flush(1)
    assert len(store.kept) == 5


async def test_event_recorder_http_requests_match_api(server: Server, client: ApiClient) -> None:
    server.default = answer({})
    async with recording(client) as recorder:
        recorder.record(node_reference("one"), "Normal", "Starting", "Starting kubelet.")
        recorder.record(node_reference("one"), "Normal", "Starting", "Starting kubelet.")
        assert await recorder.flush(60)
    first, second = server.seen
    assert (first.method, first.path) == ("POST", "/api/v1/namespaces/default/events")
    assert (first.json["kind"], first.json["apiVersion"], first.json["count"]) == ("Event", "v1", 1)
    assert first.json["involvedObject"] == {"kind": "Node", "name": "one", "apiVersion": "v1"}
    assert second.method == "PATCH"
    assert second.path == f"/api/v1/namespaces/default/events/{first.json['metadata']['name']}"
    assert second.header("Content-Type") == "application/strategic-merge-patch+json"
    assert set(second.json) == {"count", "lastTimestamp", "message"}
    assert second.json["count"] == 2


async def test_event_recorder_message_with_surrogates_is_sanitized(server: Server, client: ApiClient) -> None:
    """Such as the name of a file that nobody could have read."""
    server.default = answer({})
    async with recording(client) as recorder:
        recorder.record(WEB, "Warning", "FailedMount", "cannot change /data/caf\udce9")
        recorder.record(WEB, "Normal", "Pulled", "and the next")
        assert await recorder.flush(60)
    messages = [seen.json["message"] for seen in server.seen]
    assert messages == ["cannot change /data/caf\ufffd", "and the next"]

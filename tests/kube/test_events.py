import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.api.event import Event, EventSource, ObjectReference
from pykubelet.api.meta import ObjectMeta, to_document
from pykubelet.api.pod import Pod
from pykubelet.kube.client import ApiClient
from pykubelet.kube.errors import (
    AlreadyExists,
    Forbidden,
    NotFound,
    ServerError,
    StatusCause,
    StatusDetails,
    TooManyRequests,
    Unreachable,
)
from pykubelet.kube.event_recorder import (
    HOLD_SECONDS,
    EventRecorder,
    EventStore,
    node_reference,
    pod_reference,
)
from pykubelet.kube.events import COMBINED, Correlator, Write, event_name, new_event
from pykubelet.pods.journal import Journal
from tests.kube.servers import Server, answer

SOURCE = EventSource(component="kubelet", host="one")
WEB = ObjectReference(kind="Pod", namespace="default", name="web", uid="u1", api_version="v1")
AWAY = Unreachable("https://x", "refused")


def event(
    message: str = "m",
    reason: str = "BackOff",
    *,
    kind: str = "Warning",
    about: ObjectReference = WEB,
    at: float = 0,
) -> Event:
    return new_event(about, SOURCE, kind, reason, message, int(at * 1e9) + 1_700_000_000_000_000_000)


def make(
    correlator: Correlator, *messages: str, at: float = 0, reason: str = "BackOff"
) -> list[Write | None]:
    return [correlator.correlate(event(message, reason, at=at), at) for message in messages]


def test_an_event() -> None:
    made = event("Back-off restarting", at=1.5)
    assert to_document(made) == {
        "metadata": {"name": f"web.{1_700_000_001_500_000_000:x}", "namespace": "default"},
        "involvedObject": {
            "kind": "Pod",
            "namespace": "default",
            "name": "web",
            "uid": "u1",
            "apiVersion": "v1",
        },
        "reason": "BackOff",
        "message": "Back-off restarting",
        "source": {"component": "kubelet", "host": "one"},
        "firstTimestamp": "2023-11-14T22:13:21Z",
        "lastTimestamp": "2023-11-14T22:13:21Z",
        "count": 1,
        "type": "Warning",
        "eventTime": None,
        "reportingComponent": "kubelet",
        "reportingInstance": "one",
    }
    assert event(about=node_reference("one")).metadata.namespace == "default"


def test_names_are_valid_whatever_the_object() -> None:
    assert event_name("web", 255) == "web.ff"
    assert len(event_name("Not_Valid", 255)) == 36
    assert len(event_name("x" * 250, 2**60)) == 36


def test_the_same_again_is_counted() -> None:
    correlator = Correlator()
    first, *others = make(correlator, "m", "m", "m")
    assert first is not None
    assert (first.exists, first.event.count) == (False, 1)
    for count, write in enumerate(others, 2):
        assert write is not None
        assert write.exists
        assert write.event.metadata.name == first.event.metadata.name
        assert write.event.first_timestamp == first.event.first_timestamp
        assert write.patch == {"count": count, "lastTimestamp": "2023-11-14T22:13:20Z", "message": "m"}


@pytest.mark.parametrize(
    "other",
    [
        event("other"),
        event(reason="Failed"),
        event(kind="Normal"),
        event(about=ObjectReference(kind="Pod", namespace="default", name="web", uid="u2", api_version="v1")),
        event(
            about=ObjectReference(kind="Node", namespace="default", name="web", uid="u1", api_version="v1")
        ),
        event(
            about=ObjectReference(
                kind="Pod",
                namespace="default",
                name="web",
                uid="u1",
                api_version="v1",
                field_path="spec.containers{a}",
            )
        ),
    ],
)
def test_what_makes_an_event_another(other: Event) -> None:
    correlator = Correlator()
    correlator.correlate(event(), 0)
    write = correlator.correlate(other, 0)
    assert write is not None
    assert not write.exists


def test_similar_ones_are_combined_from_the_tenth() -> None:
    correlator = Correlator()
    writes = [w for w in make(correlator, *(f"m{n}" for n in range(13))) if w]
    assert [w.event.message for w in writes[:9]] == [f"m{n}" for n in range(9)]
    assert [(w.event.message, w.event.count, w.exists) for w in writes[9:]] == [
        (f"{COMBINED}m9", 1, False),
        (f"{COMBINED}m10", 2, True),
        (f"{COMBINED}m11", 3, True),
        (f"{COMBINED}m12", 4, True),
    ]
    assert len({w.event.metadata.name for w in writes[9:]}) == 1
    # What was there before is still itself; another reason is another matter.
    assert [w.event.message for w in make(correlator, "m3") if w] == ["m3"]
    assert [w.event.message for w in make(correlator, "m99", reason="Failed") if w] == ["m99"]


def test_combining_ends_after_ten_quiet_minutes() -> None:
    correlator = Correlator()
    make(correlator, *(f"m{n}" for n in range(12)))
    assert [w.event.message for w in make(correlator, "x", at=600) if w] == [f"{COMBINED}x"]
    assert [w.event.message for w in make(correlator, "y", at=1201) if w] == ["y"]


def test_spam_is_kept_back_but_counted() -> None:
    correlator = Correlator()
    writes = make(correlator, *["m"] * 30)
    assert [w is not None for w in writes] == [True] * 25 + [False] * 5
    # Of another type, or about another object, is another matter.
    assert correlator.correlate(event(kind="Normal"), 0) is not None
    assert correlator.correlate(event(about=node_reference("one")), 0) is not None
    assert make(correlator, "m", at=299) == [None]
    (write,) = make(correlator, "m", at=301)
    assert write is not None
    assert write.event.count == 32
    assert make(correlator, "m", at=302) == [None]


def test_what_the_server_says_counts() -> None:
    correlator = Correlator()
    (write,) = make(correlator, "m")
    assert write is not None
    correlator.written(
        write,
        Event(metadata=ObjectMeta(name="renamed"), count=7, first_timestamp=datetime(2026, 1, 1, tzinfo=UTC)),
    )
    (again,) = make(correlator, "m")
    assert again is not None
    assert (again.event.metadata.name, again.event.count) == ("renamed", 8)
    correlator.written(again, Event())
    (third,) = make(correlator, "m")
    assert third is not None
    assert (third.event.metadata.name, third.event.count) == ("renamed", 9)


THINGS = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["Warning", "Normal"]),
    st.sampled_from(["BackOff", "Failed"]),
    st.integers(0, 14),
    st.floats(0, 400),
)


@settings(max_examples=100)
@given(st.lists(THINGS, max_size=80))
def test_counts_add_up(things: list[tuple[str, str, str, int, float]]) -> None:
    """Kept back or not, combined or not: every event is counted once, and no object is told too often."""
    correlator, now = Correlator(), 0.0
    written: dict[str, int] = {}
    sent: Counter[tuple[str, str]] = Counter()
    for number, (name, kind, reason, message, gap) in enumerate(things, 1):
        now += gap
        about = ObjectReference(kind="Pod", namespace="default", name=name, uid=name, api_version="v1")
        made = event(f"m{message}", reason, kind=kind, about=about, at=now + number * 1e-3)
        write = correlator.correlate(made, now)
        assert sum(known.count for known in correlator._known._entries.values()) == number
        if write is not None:
            sent[name, kind] += 1
            assert sent[name, kind] <= 25 + now / 300 + 1e-6
            assert write.event.count > written.get(write.event.metadata.name, 0)
            assert write.exists == (write.event.count > 1)
            written[write.event.metadata.name] = write.event.count
    assert sum(written.values()) <= len(things)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 1000), st.text(max_size=5)), min_size=200, max_size=400))
def test_memory_is_bounded(things: list[tuple[int, str]]) -> None:
    correlator = Correlator(remembered=20)
    for number, message in things:
        about = ObjectReference(kind="Pod", namespace="default", name=f"p{number}", uid=f"u{number}")
        correlator.correlate(event(message, about=about), 0)
    for table in (correlator._groups, correlator._known, correlator._limits):
        assert len(table._entries) <= 20
    assert all(len(group.messages) < 10 for group in correlator._groups._entries.values())


# Sending.


class Store:
    """Keeps events, or fails as told."""

    def __init__(self) -> None:
        self.kept: dict[str, Event] = {}
        self.calls: list[str] = []
        self.failures: list[Exception] = []
        self.always: Exception | None = None
        self.pauses: list[float] = []

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        if self.failures:
            raise self.failures.pop(0)
        if self.always is not None:
            raise self.always

    async def create(self, resource: Any, obj: Event, namespace: str = "") -> Event:
        self._begin("create")
        self.kept[obj.metadata.name] = obj
        return obj

    async def patch(self, resource: Any, name: str, patch: Any, namespace: str = "", **_: Any) -> Event:
        self._begin("patch")
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
    recorder = EventRecorder(store, "one", chance=lambda: 0.5, **options)
    task = asyncio.ensure_future(recorder.run(crowded))
    try:
        yield recorder
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.looptime
async def test_in_order_and_counted() -> None:
    store = Store()
    async with recording(store) as recorder:
        for message in ("a", "b", "a"):
            recorder.record(WEB, "Normal", "Pulled", message)
        assert await recorder.flush(10)
    assert store.calls == ["create", "create", "patch"]
    assert [(e.message, e.count) for e in store.kept.values()] == [("a", 2), ("b", 1)]
    assert len(store.kept) == 2


@pytest.mark.looptime
async def test_ordinary_events_wait_for_a_quiet_moment() -> None:
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
async def test_a_warning_takes_all_before_it_along() -> None:
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
async def test_a_long_queue_does_not_wait() -> None:
    store = Store()
    async with recording(store, lambda: True, queued=10) as recorder:
        for number in range(9):
            recorder.record(WEB, "Normal", "Pulled", str(number))
        await asyncio.sleep(1)
        assert 4 <= len(store.kept) < 9
    assert recorder.dropped == 0


@pytest.mark.looptime
async def test_from_the_journal_of_pods() -> None:
    store, journal = Store(), Journal()
    pod = Pod(metadata=ObjectMeta(name="web", namespace="default", uid="u1", resource_version="5"))
    async with recording(store) as recorder:
        journal.listen(recorder.pod_event)
        journal.event(pod, "Normal", "Started", "Started container main", "spec.containers{main}")
        journal.event(pod, "Normal", "Started", "Started container main", "spec.containers{main}")
        assert await recorder.flush(10)
    (kept,) = store.kept.values()
    assert kept.involved_object == pod_reference(pod, "spec.containers{main}")
    assert kept.involved_object.resource_version == "5"
    assert (kept.count, kept.reason, kept.source, kept.type) == (2, "Started", SOURCE, "Normal")


@pytest.mark.looptime
async def test_a_server_that_is_away_for_a_minute(caplog: pytest.LogCaptureFixture) -> None:
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
async def test_after_twelve_tries_it_is_given_up() -> None:
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
async def test_or_tried_for_as_long_as_it_takes() -> None:
    store = Store()
    store.failures = [AWAY] * 360
    async with recording(store, tries=None) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        assert await recorder.flush(3700)
    assert len(store.kept) == 1


@pytest.mark.looptime
async def test_a_queue_that_is_full_drops_and_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
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
        (ServerError(500, "InternalError"), 12, 1, 1),
        (TooManyRequests(429, retry_after=30), 12, 1, 1),
    ],
)
async def test_refusals(
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
async def test_an_event_that_expired_is_made_anew_with_its_count() -> None:
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
async def test_names_differ_even_when_the_clock_stands_still() -> None:
    store = Store()
    async with recording(store, clock=lambda: 1_700_000_000_000_000_000) as recorder:
        for number in range(5):
            recorder.record(WEB, "Normal", "Pulled", f"{number}")
        await recorder.flush(1)
    assert len(store.kept) == 5


async def test_over_the_wire(server: Server, client: ApiClient) -> None:
    server.default = answer({})
    async with recording(client) as recorder:
        recorder.record(node_reference("one"), "Normal", "Starting", "Starting kubelet.")
        recorder.record(node_reference("one"), "Normal", "Starting", "Starting kubelet.")
        assert await recorder.flush(5)
    first, second = server.seen
    assert (first.method, first.path) == ("POST", "/api/v1/namespaces/default/events")
    assert (first.json["kind"], first.json["apiVersion"], first.json["count"]) == ("Event", "v1", 1)
    assert first.json["involvedObject"] == {"kind": "Node", "name": "one", "apiVersion": "v1"}
    assert second.method == "PATCH"
    assert second.path == f"/api/v1/namespaces/default/events/{first.json['metadata']['name']}"
    assert second.header("Content-Type") == "application/strategic-merge-patch+json"
    assert set(second.json) == {"count", "lastTimestamp", "message"}
    assert second.json["count"] == 2

from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.api.core import Event, EventSource, ObjectReference
from pykubelet.api.meta import ObjectMeta, to_document
from pykubelet.apiserver.events import COMBINED, EventCorrelator, Write, event_name, new_event, node_reference

SOURCE = EventSource(component="kubelet", host="one")
WEB = ObjectReference(kind="Pod", namespace="default", name="web", uid="u1", api_version="v1")


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
    correlator: EventCorrelator, *messages: str, at: float = 0, reason: str = "BackOff"
) -> list[Write | None]:
    return [correlator.correlate(event(message, reason, at=at), at) for message in messages]


def test_new_event_has_expected_fields() -> None:
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


def test_event_name_any_object_name_is_valid() -> None:
    assert event_name("web", 255) == "web.ff"
    assert len(event_name("Not_Valid", 255)) == 36
    assert len(event_name("x" * 250, 2**60)) == 36


def test_event_correlator_repeated_event_is_counted() -> None:
    correlator = EventCorrelator()
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
def test_event_correlator_different_field_is_new_event(other: Event) -> None:
    correlator = EventCorrelator()
    correlator.correlate(event(), 0)
    write = correlator.correlate(other, 0)
    assert write is not None
    assert not write.exists


def test_event_correlator_tenth_similar_event_is_combined() -> None:
    correlator = EventCorrelator()
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


def test_event_correlator_combining_ends_after_ten_idle_minutes() -> None:
    correlator = EventCorrelator()
    make(correlator, *(f"m{n}" for n in range(12)))
    assert [w.event.message for w in make(correlator, "x", at=600) if w] == [f"{COMBINED}x"]
    assert [w.event.message for w in make(correlator, "y", at=1201) if w] == ["y"]


def test_event_correlator_spam_is_suppressed_but_counted() -> None:
    correlator = EventCorrelator()
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


def test_event_correlator_written_uses_server_name_and_count() -> None:
    correlator = EventCorrelator()
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
def test_event_correlator_any_events_counts_add_up(things: list[tuple[str, str, str, int, float]]) -> None:
    """Kept back or not, combined or not: every event is counted once, and no object is told too often."""
    correlator, now = EventCorrelator(), 0.0
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
def test_event_correlator_any_events_memory_is_bounded(things: list[tuple[int, str]]) -> None:
    correlator = EventCorrelator(remembered=20)
    for number, message in things:
        about = ObjectReference(kind="Pod", namespace="default", name=f"p{number}", uid=f"u{number}")
        correlator.correlate(event(message, about=about), 0)
    for table in (correlator._groups, correlator._known, correlator._limits):
        assert len(table._entries) <= 20
    assert all(len(group.messages) < 10 for group in correlator._groups._entries.values())

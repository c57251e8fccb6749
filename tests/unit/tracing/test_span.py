"""Spans: parents, sampling, propagation, and nothing at all when tracing is off."""

import asyncio
import contextvars
import random

import pytest

from pykubelet.tracing.span import (
    MAX_ATTRIBUTES,
    MAX_VALUE_CHARACTERS,
    NO_SPAN,
    Span,
    SpanContext,
    Tracer,
    child_span,
    current_span,
    own_span,
    parse_traceparent,
)

TRACE, SPAN = bytes(range(16)), bytes(range(1, 9))


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def names(self) -> list[str]:
        return [span.name for span in self.spans]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def tracer(sink: Sink) -> Tracer:
    return Tracer(sink, 1.0, random.Random(1))


def test_child_span_without_current_span_does_nothing() -> None:
    assert child_span("a") is NO_SPAN
    assert own_span(None, "a") is NO_SPAN
    with child_span("a") as span:
        span.set_attribute("k", "v")
        span.fail("x")
        assert current_span() is None


def test_child_span_within_span_has_its_trace_and_parent(sink: Sink, tracer: Tracer) -> None:
    with tracer.start("root") as root, child_span("child", {"k": 1}) as child:
        assert current_span() is child
    assert current_span() is None
    first, second = sink.spans
    assert (first.name, first.parent_id, first.attributes) == ("child", root.context.span_id, {"k": 1})
    assert first.context.trace_id == second.context.trace_id
    assert second.parent_id == b""
    assert second.start_ns <= first.start_ns <= first.end_ns <= second.end_ns


def test_span_exception_is_recorded_and_raised(sink: Sink, tracer: Tracer) -> None:
    with pytest.raises(ValueError, match="no"), tracer.start("root"):
        raise ValueError("no")
    assert sink.spans[0].error == "no"


async def test_span_cancelled_is_an_error(sink: Sink, tracer: Tracer) -> None:
    async def work() -> None:
        with tracer.start("root"):
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert sink.spans[0].error == "cancelled"


async def test_child_span_in_task_that_outlives_its_span_does_nothing(sink: Sink, tracer: Tracer) -> None:
    go = asyncio.Event()

    async def later() -> None:
        with child_span("early"):
            pass
        await go.wait()
        with child_span("late"):
            pass

    with tracer.start("root") as root:
        task = asyncio.ensure_future(later())
        await asyncio.sleep(0)
    go.set()
    await task
    assert sink.names() == ["early", "root"]
    # A span of its own in that task begins a new trace, and not one that has ended.
    in_task = contextvars.copy_context()
    own = in_task.run(lambda: tracer.start("own"))
    assert own.context.trace_id != root.context.trace_id


def test_tracer_ratio_zero_records_nothing_and_still_has_a_trace(sink: Sink) -> None:
    tracer = Tracer(sink, 0.0)
    with tracer.start("root", {"k": "v"}) as root:
        assert child_span("child") is NO_SPAN
        assert tracer.start("call").context.traceparent.endswith("-00")
        assert root.attributes == {}
    assert not sink.spans


def test_tracer_parent_sampled_is_recorded_whatever_the_ratio(sink: Sink) -> None:
    tracer = Tracer(sink, 0.0)
    with tracer.start("a", parent=SpanContext(TRACE, SPAN, True)):
        pass
    with Tracer(sink, 1.0).start("b", parent=SpanContext(TRACE, SPAN, False)):
        pass
    assert sink.names() == ["a"]
    assert (sink.spans[0].context.trace_id, sink.spans[0].parent_id) == (TRACE, SPAN)


def test_tracer_ratio_samples_its_share(sink: Sink) -> None:
    tracer = Tracer(sink, 0.1, random.Random(7))
    for _ in range(5000):
        tracer.start("a", root=True).end()
    assert 400 < len(sink.spans) < 600


def test_span_attributes_and_errors_are_bounded_and_masked(sink: Sink, tracer: Tracer) -> None:
    with tracer.start("a") as span:
        for number in range(1000):
            span.set_attribute(f"k{number}", "x" * 10_000)
        span.fail("Bearer s3cr3t-token: " + "y" * 10_000)
    recorded = sink.spans[0]
    assert len(recorded.attributes) == MAX_ATTRIBUTES
    assert {len(str(value)) for value in recorded.attributes.values()} == {MAX_VALUE_CHARACTERS}
    assert recorded.error is not None
    assert len(recorded.error) <= MAX_VALUE_CHARACTERS
    assert "s3cr3t" not in recorded.error


def test_span_ended_twice_is_recorded_once(sink: Sink, tracer: Tracer) -> None:
    span = tracer.start("a")
    span.end()
    span.end()
    assert sink.names() == ["a"]


def test_traceparent_round_trip() -> None:
    context = SpanContext(TRACE, SPAN, True)
    assert parse_traceparent(context.traceparent) == context
    assert context.traceparent == "00-000102030405060708090a0b0c0d0e0f-0102030405060708-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        ("00-000102030405060708090a0b0c0d0e0f-0102030405060708-00", False),
        ("00-000102030405060708090a0b0c0d0e0f-0102030405060708-03", True),
        ("cc-000102030405060708090a0b0c0d0e0f-0102030405060708-01-later", True),
    ],
)
def test_parse_traceparent_valid(text: str, sampled: bool) -> None:
    assert parse_traceparent(text) == SpanContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "00-000102030405060708090A0B0C0D0E0F-0102030405060708-01",
        "00-00000000000000000000000000000000-0102030405060708-01",
        "00-000102030405060708090a0b0c0d0e0f-0000000000000000-01",
        "ff-000102030405060708090a0b0c0d0e0f-0102030405060708-01",
        "00-000102030405060708090a0b0c0d0e0f-0102030405060708-01-more",
        "00-000102030405060708090a0b0c0d0e0f-0102030405060708-0",
        "00-" + "0" * 100_000,
        "cc-000102030405060708090a0b0c0d0e0f-0102030405060708-01-" + "x" * 100_000,
        "00-000102030405060708090a0b0c0d0e0f-0102030405060708-01\n",
    ],
)
def test_parse_traceparent_invalid_is_none(text: str) -> None:
    assert parse_traceparent(text) is None

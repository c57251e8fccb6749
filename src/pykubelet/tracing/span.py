"""Spans, the current span of a task, sampling, and the W3C header `traceparent`.

A part of the kubelet that begins work on its own (a pod sync, a request of a client, a garbage collection, a
call to the runtime) has the kubelet's `Tracer`, which is None when tracing is off, and starts a span with it.
What happens within that work calls `child_span`: it needs no tracer, because the current span of the task has
one, and it does nothing if there is no current span. Tasks inherit the current span of the task that started
them; a span that has ended gets no children, so that a long-lived task does not extend a trace without end.

Sampling is parent-based: a span is recorded if its parent is, and a span without parent is recorded for the
configured share of traces. A span that is not recorded stores nothing, and passes its trace on all the same.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar, Token
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from pykubelet.logs.mask import mask_text

AttributeValue = str | int | bool
MAX_VALUE_CHARACTERS = 512
"""Characters of an attribute or of an error message that are recorded."""
MAX_ATTRIBUTES = 32
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,200})?")
_SAMPLED = 1


class SpanKind(IntEnum):
    """Kind of a span, with the numbers of OTLP."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanContext(NamedTuple):
    """Identity of a span in its trace."""

    trace_id: bytes
    span_id: bytes
    sampled: bool

    @property
    def traceparent(self) -> str:
        """Value of the W3C header."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{'01' if self.sampled else '00'}"


def parse_traceparent(value: str) -> SpanContext | None:
    """Parse the W3C header; None if it is not valid."""
    found = _TRACEPARENT.fullmatch(value)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = bytes.fromhex(found[2]), bytes.fromhex(found[3])
    if not any(trace_id) or not any(span_id):
        return None
    return SpanContext(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))


class SpanSink(Protocol):
    """Receiver of ended spans."""

    def record(self, span: Span) -> None:
        """Record a span that has ended; must not block."""


class Span:
    """A span; a context manager that is the current span within its block, and ends with it."""

    __slots__ = (
        "_began",
        "_token",
        "_tracer",
        "attributes",
        "context",
        "end_ns",
        "error",
        "kind",
        "link",
        "name",
        "parent_id",
        "start_ns",
    )

    def __init__(
        self, tracer: Tracer, name: str, kind: SpanKind, context: SpanContext, parent_id: bytes
    ) -> None:
        self._tracer = tracer
        self._token: Token[Span | None] | None = None
        self._began = time.monotonic_ns()
        self.name = name
        self.kind = kind
        self.context = context
        self.parent_id = parent_id
        """Id of the parent, empty for the first span of a trace."""
        self.link: SpanContext | None = None
        self.attributes: dict[str, AttributeValue] = {}
        self.error: str | None = None
        """Message of the failure; None for success."""
        self.start_ns = time.time_ns()
        self.end_ns = 0
        """Unix time in nanoseconds; 0 while the span is open."""

    @property
    def tracer(self) -> Tracer:
        """The tracer that started the span."""
        return self._tracer

    def set_attribute(self, name: str, value: AttributeValue) -> None:
        """Set an attribute; a long text is shortened."""
        if self.context.sampled and (len(self.attributes) < MAX_ATTRIBUTES or name in self.attributes):
            self.attributes[name] = value[:MAX_VALUE_CHARACTERS] if isinstance(value, str) else value

    def fail(self, message: str) -> None:
        """Set the status to an error; secrets are masked."""
        if self.context.sampled:
            self.error = mask_text(message[:MAX_VALUE_CHARACTERS])

    def end(self) -> None:
        """End the span, unless it has ended, and record it."""
        if not self.end_ns:
            self.end_ns = self.start_ns + time.monotonic_ns() - self._began
            if self.context.sampled:
                self._tracer.sink.record(self)

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        if isinstance(err, asyncio.CancelledError):
            self.fail("cancelled")
        elif err is not None:
            self.fail(str(err) or type(err).__name__)
        self.end()


_current: ContextVar[Span | None] = ContextVar("span", default=None)


def current_span() -> Span | None:
    """Return the current span of this task, if it has not ended."""
    span = _current.get()
    return span if span is not None and not span.end_ns else None


class NoSpan:
    """Takes the place of a span that is not recorded."""

    __slots__ = ()

    def set_attribute(self, name: str, value: AttributeValue) -> None:
        """Do nothing."""

    def fail(self, message: str) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


NO_SPAN = NoSpan()


def child_span(
    name: str, attributes: Mapping[str, AttributeValue] | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> Span | NoSpan:
    """Return a child of the current span, to be used in a `with` statement; does nothing without one."""
    parent = _current.get()
    if parent is None or parent.end_ns or not parent.context.sampled:
        return NO_SPAN
    return parent.tracer.start(name, attributes, kind=kind)


def own_span(
    tracer: Tracer | None,
    name: str,
    attributes: Mapping[str, AttributeValue] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span | NoSpan:
    """Return a span for a `with` statement of work that begins on its own; `tracer`: None without tracing."""
    return NO_SPAN if tracer is None else tracer.start(name, attributes, kind=kind)


class Tracer:
    """Starts spans; `ratio` is the share of traces that are recorded, from 0 to 1."""

    def __init__(self, sink: SpanSink, ratio: float, rng: random.Random | None = None) -> None:
        self.sink = sink
        self._bound = int(ratio * (1 << 63))
        self._rng = rng or random.Random()  # noqa: S311 - no secret

    def start(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: SpanContext | None = None,
        link: SpanContext | None = None,
        root: bool = False,
    ) -> Span:
        """Start a span: a child of `parent`, else of the current span, else the first of a new trace.

        `root` starts a new trace in any case. The caller ends the span, or uses it in a `with` statement.
        """
        if parent is None and not root and (current := current_span()) is not None:
            parent = current.context
        span_id = self._rng.getrandbits(64).to_bytes(8, "big")
        if parent is not None:
            context = SpanContext(parent.trace_id, span_id, parent.sampled)
        else:
            high, low = self._rng.getrandbits(64), self._rng.getrandbits(64)
            # The rule of OpenTelemetry's TraceIdRatioBased, so that all components choose the same traces.
            trace_id = (high << 64 | low).to_bytes(16, "big")
            context = SpanContext(trace_id, span_id, low >> 1 < self._bound)
        span = Span(self, name, kind, context, parent.span_id if parent is not None else b"")
        if context.sampled:
            span.link = link
            for key, value in (attributes or {}).items():
                span.set_attribute(key, value)
        return span

"""Drawings of the page as SVG: bars, sparklines and the time axis of a pod.

Positions are percentages, so that a drawing fits any width without inline styles. Colours are classes of the
style sheet. Each drawing has a text for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pykubelet.server.page.html import EMPTY, Html, tag

_LINE_HEIGHT = 24.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across a bar: a reservation or a threshold, as a share of the whole."""

    share: float
    label: str
    kind: str = "mark"


def bar(share: float | None, label: str, marks: Sequence[Mark] = ()) -> Html:
    """Return a horizontal bar that is filled up to a share of 1."""
    known = 0.0 if share is None or math.isnan(share) else min(max(share, 0.0), 1.0)
    level = "bad" if known >= 0.9 else "warn" if known >= 0.75 else "ok"
    lines = [
        tag(
            "line",
            tag("title", mark.label),
            x1=_at(mark.share),
            x2=_at(mark.share),
            y1="0",
            y2="100%",
            class_=mark.kind,
        )
        for mark in marks
        if 0 <= mark.share <= 1
    ]
    return tag(
        "svg",
        tag("title", label),
        tag("rect", x="0", y="0", width="100%", height="100%", rx="3", class_="track"),
        tag("rect", x="0", y="0", width=_at(known), height="100%", rx="3", class_=f"fill {level}"),
        *lines,
        class_="bar",
        role="img",
        aria_label=label,
    )


def sparkline(
    values: Sequence[float] | None,
    label: str,
    *,
    limit: float | None = None,
    request: float | None = None,
) -> Html:
    """Return a line of values over time; limit and request are drawn, and the scale includes them."""
    known = [value for value in values or () if not math.isnan(value)]
    if len(known) < 2 or values is None:
        return EMPTY
    top = max(known)
    bounds = [
        (kind, bound)
        for kind, bound in (("limit", limit), ("request", request))
        if bound is not None and bound > 0
    ]
    scale = max(top, *(bound for _, bound in bounds), 0.0) * 1.05 or 1.0
    first = next(index for index, value in enumerate(values) if not math.isnan(value))
    # A young series gets at least a third of the width.
    values = values[min(first, len(values) * 2 // 3) :]
    step = 100 / max(len(values) - 1, 1)
    points = [
        f"{index * step:.1f},{_LINE_HEIGHT - 1 - value / scale * (_LINE_HEIGHT - 2):.1f}"
        for index, value in enumerate(values)
        if not math.isnan(value)
    ]
    shapes = [tag("polyline", points=" ".join(points), class_="line", vector_effect="non-scaling-stroke")]
    for kind, bound in bounds:
        y = _LINE_HEIGHT - 1 - bound / scale * (_LINE_HEIGHT - 2)
        shapes.append(
            tag("line", x1="0", x2="100", y1=y, y2=y, class_=kind, vector_effect="non-scaling-stroke")
        )
    return tag(
        "svg",
        tag("title", label),
        *shapes,
        viewBox=f"0 0 100 {_LINE_HEIGHT:.0f}",
        preserveAspectRatio="none",
        class_="spark",
        role="img",
        aria_label=label,
    )


def dots(passed: Sequence[bool], label: str) -> Html:
    """Return one mark per result, oldest first; those of failures are also taller."""
    marks = [
        tag(
            "rect",
            x=10 * index,
            y=4 if each else 0,
            width=7,
            height=8 if each else 16,
            rx=2,
            class_="fill passed" if each else "fill bad",
        )
        for index, each in enumerate(passed)
    ]
    return tag("svg", *marks, class_="dots", width=10 * len(passed), height=16, role="img", aria_label=label)


@dataclass(frozen=True, slots=True)
class Span:
    """A period on a lane of the time axis; times in seconds since the epoch."""

    start: float
    end: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A line of the time axis: periods, and moments (with a kind and a label)."""

    name: str
    spans: tuple[Span, ...]
    moments: tuple[Span, ...] = ()


def time_axis(lanes: Sequence[Lane], start: float, end: float) -> Html:
    """Return the time axis with one row per lane between two times, and a scale."""
    width = max(end - start, 0.001)

    def at(time: float) -> float:
        return min(max((time - start) / width, 0.0), 1.0)

    rows = []
    for lane in lanes:
        shapes = []
        for span in lane.spans:
            if span.end < start or span.start > end:
                continue
            left, right = at(span.start), at(span.end)
            shapes.append(
                tag(
                    "rect",
                    tag("title", span.label),
                    x=_at(left),
                    y="3",
                    width=_at(max(right - left, 0.004)),
                    height="12",
                    rx="2",
                    class_=f"span {span.kind}",
                )
            )
        for moment in lane.moments:
            if start <= moment.start <= end:
                shapes.append(
                    tag(
                        "circle",
                        tag("title", moment.label),
                        cx=_at(at(moment.start)),
                        cy="9",
                        r="4",
                        class_=f"dot {moment.kind}",
                    )
                )
        drawing = tag("svg", *shapes, class_="lane", role="img", aria_label=_spoken(lane))
        rows.append(tag("div", tag("span", lane.name, class_="name"), drawing, class_="lane-row"))
    ticks = [
        tag("text", _clock(start + width * share), x=_at(share), y="11", class_=f"tick {anchor}")
        for share, anchor in ((0.0, "first"), (0.25, ""), (0.5, ""), (0.75, ""), (1.0, "last"))
    ]
    scale = tag("svg", *ticks, class_="scale", aria_hidden="true")
    return tag(
        "div", *rows, tag("div", tag("span", "", class_="name"), scale, class_="lane-row"), class_="axis"
    )


def _spoken(lane: Lane) -> str:
    return f"{lane.name}: " + (
        "; ".join(span.label for span in (*lane.spans, *lane.moments)[:20]) or "nothing"
    )


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC).astimezone():%H:%M:%S}"


def _at(share: float) -> str:
    return f"{share * 100:.2f}%"

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.apiserver.errors import InvalidResponse
from pykubelet.apiserver.reflector import WatchStream

TEXTS = st.text(max_size=20)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "NEW"]),
            "object": st.dictionaries(TEXTS, TEXTS | st.integers(-(2**53), 2**53) | st.none(), max_size=4),
        }
    ),
    max_size=12,
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@given(
    EVENTS,
    st.lists(st.integers(0, 10_000), max_size=40),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.booleans(),
)
def test_watch_stream_any_chunking_yields_same_events(
    events: list[dict[str, Any]], cuts: list[int], end: bytes, ascii_only: bool
) -> None:
    data = b"".join(json.dumps(event, ensure_ascii=ascii_only).encode() + end for event in events)
    stream = WatchStream()
    found = [event for piece in pieces(data, cuts) for event in stream.feed(piece)]
    assert [{"type": e.type, "object": json.loads(bytes(e.object))} for e in found] == events
    assert stream.finish()


@given(EVENTS.filter(bool), st.integers(1, 10_000), st.lists(st.integers(0, 10_000), max_size=10))
def test_watch_stream_truncated_loses_only_incomplete_event(
    events: list[dict[str, Any]], cut: int, cuts: list[int]
) -> None:
    data = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    data = data[: len(data) - 1 - cut % (len(data) - 1)]
    stream = WatchStream()
    found = [event for piece in pieces(data, cuts) for event in stream.feed(piece)]
    whole = data.count(b"\n")
    assert [json.loads(bytes(e.object)) for e in found] == [e["object"] for e in events[:whole]]
    assert stream.finish() == data.endswith(b"\n") or not data


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"null",
        b'{"type": 3, "object": {}}',
        b'{"type": "ADDED"}',
        b'{"object": {}}',
        b"\xff\xff",
        b"<html>",
    ],
)
def test_watch_stream_invalid_line_raises_invalid_response(line: bytes) -> None:
    with pytest.raises(InvalidResponse, match="not an event"):
        WatchStream().feed(line + b"\n")


def test_watch_stream_event_too_long_raises_invalid_response() -> None:
    event = json.dumps({"type": "ADDED", "object": {"x": "y" * 1000}}).encode()
    stream = WatchStream(max_line_bytes=2000)
    for _ in range(5):
        assert len(stream.feed(event + b"\n" + event + b"\n")) == 2
    stream = WatchStream(max_line_bytes=500)
    with pytest.raises(InvalidResponse, match="longer than"):
        stream.feed(event + b"\n")
    stream = WatchStream(max_line_bytes=500)
    with pytest.raises(InvalidResponse, match="longer than"):
        for byte in event:
            stream.feed(bytes([byte]))

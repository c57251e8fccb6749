"""WebSocket frames of a client: tables, properties and limits."""

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.transport.websocket import (
    MAX_FRAME_BYTES,
    CloseCode,
    Control,
    FrameParser,
    Opcode,
    Payload,
    WebSocketError,
    accept_key,
    close_frame,
    data_frame,
    mask_with_int,
    pong_frame,
)
from tests.support.websocket_client import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, client_frame


def parse(wire: bytes, parser: FrameParser | None = None) -> list[Payload | Control]:
    parser = parser or FrameParser()
    parser.feed(wire)
    events = []
    while (event := parser.next_event()) is not None:
        events.append(event)
    return events


def messages(events: list[Payload | Control]) -> list[tuple[bytes, bool]]:
    """The messages and whether they are text."""
    found: list[tuple[bytes, bool]] = []
    current = bytearray()
    for event in events:
        if isinstance(event, Payload):
            if event.starts:
                current = bytearray()
            current += event.data
            if event.ends:
                found.append((bytes(current), event.text))
    return found


def test_accept_key_example_of_rfc() -> None:
    assert accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@given(
    st.lists(st.tuples(st.binary(max_size=70_000), st.booleans(), st.integers(1, 4)), max_size=4),
    st.lists(st.integers(0, 300_000), max_size=8),
)
def test_frame_parser_fragments_and_arbitrary_chunks_same_messages(
    sent: list[tuple[bytes, bool, int]], cuts: list[int]
) -> None:
    wire = b""
    for data, text, parts in sent:
        size = len(data) // parts + 1
        pieces = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
        for number, piece in enumerate(pieces):
            opcode = (TEXT if text else BINARY) if number == 0 else CONTINUATION
            # Control frames may come between the fragments.
            wire += client_frame(opcode, piece, fin=number == len(pieces) - 1) + client_frame(PING, b"p")
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    parser = FrameParser()
    events = [event for start, end in itertools.pairwise(edges) for event in parse(wire[start:end], parser)]
    assert messages(events) == [(data, text) for data, text, _ in sent]
    assert all(event.data == b"p" for event in events if isinstance(event, Control))
    assert parser.buffered == 0


@pytest.mark.parametrize("opcode", [PING, PONG, CLOSE])
@pytest.mark.parametrize("payload", [b"", b"x" * 125])
def test_frame_parser_control_frames_returned_whole(opcode: int, payload: bytes) -> None:
    parser = FrameParser()
    wire = client_frame(opcode, payload)
    assert parse(wire[:-1], parser) == []
    assert parse(wire[-1:], parser) == [Control(Opcode(opcode), bytearray(payload))]


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (client_frame(BINARY, b"x", masked=False), CloseCode.PROTOCOL_ERROR),
        (client_frame(BINARY | 0x40, b"x"), CloseCode.PROTOCOL_ERROR),
        (client_frame(3, b"x"), CloseCode.PROTOCOL_ERROR),
        (client_frame(11, b"x"), CloseCode.PROTOCOL_ERROR),
        (client_frame(CONTINUATION, b"x"), CloseCode.PROTOCOL_ERROR),
        (client_frame(BINARY, b"x", fin=False) + client_frame(BINARY, b"x"), CloseCode.PROTOCOL_ERROR),
        (client_frame(PING, b"x", fin=False), CloseCode.PROTOCOL_ERROR),
        (client_frame(PING, b"x" * 126), CloseCode.PROTOCOL_ERROR),
        (client_frame(BINARY, length=MAX_FRAME_BYTES + 1), CloseCode.TOO_BIG),
        (client_frame(BINARY, length=10**9), CloseCode.TOO_BIG),
        (client_frame(BINARY, length=2**64 - 1), CloseCode.TOO_BIG),
        (client_frame(TEXT, b"", fin=False) + client_frame(0, length=2**40), CloseCode.TOO_BIG),
    ],
    ids=lambda value: value.name if isinstance(value, CloseCode) else "",  # the masks are random
)
def test_frame_parser_invalid_frame_raises_with_close_code(wire: bytes, code: CloseCode) -> None:
    with pytest.raises(WebSocketError) as caught:
        parse(wire)
    assert caught.value.code is code


def test_frame_parser_large_frame_rejected_before_its_payload() -> None:
    """Verify that the header alone is enough: no byte of the payload has to be received."""
    header = client_frame(BINARY, length=2**30)[:10]
    with pytest.raises(WebSocketError):
        parse(header)


def test_frame_parser_largest_frame_needs_no_buffer() -> None:
    parser = FrameParser()
    assert parse(client_frame(BINARY, length=MAX_FRAME_BYTES), parser) == []
    left = MAX_FRAME_BYTES
    while left:
        [event] = parse(b"x" * min(left, 65_521), parser)
        assert isinstance(event, Payload)
        left -= len(event.data)
        assert event.ends == (not left)
        assert parser.buffered == 0


@given(st.binary(max_size=300), st.binary(min_size=4, max_size=4))
def test_mask_with_int_same_as_each_byte(data: bytes, mask: bytes) -> None:
    masked = bytearray(data)
    mask_with_int(mask, masked)
    assert masked == bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))


@pytest.mark.parametrize("size", [0, 124, 125, 126, 65534, 65535, 65536, 200_000])
def test_data_frame_any_size_header_of_shortest_form(size: int) -> None:
    data = os.urandom(size)
    wire = data_frame(b"\x01", data)
    assert wire.endswith(b"\x01" + data)
    header = wire[: len(wire) - size - 1]
    total = size + 1
    if total < 126:
        assert header == bytes((0x82, total))
    elif total < 65536:
        assert header == b"\x82\x7e" + total.to_bytes(2, "big")
    else:
        assert header == b"\x82\x7f" + total.to_bytes(8, "big")


def test_close_frame_long_reason_is_cut_at_a_character() -> None:
    frame = close_frame(CloseCode.TOO_BIG, "ü" * 200)
    assert frame[:4] == bytes((0x88, 2 + 122)) + (1009).to_bytes(2, "big")
    assert frame[4:].decode() == "ü" * 61
    assert pong_frame(b"abc") == b"\x8a\x03abc"

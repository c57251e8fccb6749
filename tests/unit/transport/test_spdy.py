"""SPDY frames: tables and properties."""

import itertools
import struct
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.transport.spdy import (
    MAX_DATA_BYTES,
    Data,
    Frame,
    FrameReader,
    FrameWriter,
    GoAway,
    Ping,
    Reset,
    SpdyError,
    data_header,
)


def control(kind: int, payload: bytes) -> bytes:
    return struct.pack(">HHI", 0x8003, kind, len(payload)) + payload


FRAMES: list[tuple[bytes, Frame | None]] = [
    (struct.pack(">II", 5, 3) + b"abc", Data(5, b"abc", False)),
    (struct.pack(">II", 5, 1 << 24 | 3) + b"abc", Data(5, b"abc", True)),
    (struct.pack(">II", 7, 0), Data(7, b"", False)),
    (control(2, struct.pack(">I", 1) + b"compressed headers"), None),
    (control(3, struct.pack(">II", 3, 5)), Reset(3)),
    (control(4, b"\0" * 12), None),
    (control(6, struct.pack(">I", 2)), Ping(2)),
    (control(7, struct.pack(">II", 9, 0)), GoAway()),
    (control(9, struct.pack(">II", 1, 65536)), None),
]


def read(reader: FrameReader, wire: bytes) -> list[Frame]:
    reader.feed(wire)
    return list(reader.frames())


def merged(frames: Iterable[Frame]) -> list[Frame]:
    """The frames with the pieces of a data frame joined up to its end; ends are those of streams 5 and 7."""
    result: list[Frame] = []
    for frame in frames:
        before = result[-1] if result else None
        if (
            isinstance(frame, Data)
            and isinstance(before, Data)
            and before.stream == frame.stream
            and not before.last
        ):
            result[-1] = Data(frame.stream, before.data + frame.data, frame.last)
        else:
            result.append(frame)
    return result


@pytest.mark.parametrize(("wire", "frame"), FRAMES)
def test_spdy_frame_reader_server_frames_decoded(wire: bytes, frame: Frame | None) -> None:
    assert read(FrameReader(), wire) == ([frame] if frame else [])


@given(st.lists(st.sampled_from(FRAMES), max_size=10), st.lists(st.integers(0, 400), max_size=10))
def test_spdy_frame_reader_arbitrary_chunks_same_frames(
    chosen: list[tuple[bytes, Frame | None]], cuts: list[int]
) -> None:
    wire = b"".join(part for part, _ in chosen)
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    reader = FrameReader()
    found = [frame for start, end in itertools.pairwise(edges) for frame in read(reader, wire[start:end])]
    assert merged(found) == merged(frame for _, frame in chosen if frame)
    assert reader.buffered == 0


@given(st.binary(max_size=3 * MAX_DATA_BYTES), st.booleans())
def test_spdy_frame_writer_data_split_only_last_frame_has_fin(data: bytes, last: bool) -> None:
    frames = read(FrameReader(), FrameWriter().data(3, data, last=last))
    assert all(isinstance(frame, Data) and len(frame.data) <= MAX_DATA_BYTES for frame in frames)
    assert b"".join(frame.data for frame in frames if isinstance(frame, Data)) == data
    assert [frame.last for frame in frames if isinstance(frame, Data)] == [False] * (len(frames) - 1) + [last]


def test_spdy_frame_writer_streams_odd_ids_shared_header_compression() -> None:
    writer, inflate = FrameWriter(), zlib.decompressobj()
    for number, name in ((1, "error"), (3, "stdin"), (5, "stdout")):
        stream, frame = writer.open_stream({"streamType": name})
        assert stream == number
        head, body = frame[:8], frame[8:]
        assert struct.unpack(">HHI", head) == (0x8003, 1, len(body))
        assert struct.unpack(">IIH", body[:10]) == (number, 0, 0)
        pair = b"".join(struct.pack(">I", len(text)) + text for text in (b"streamtype", name.encode()))
        assert inflate.decompress(body[10:]) == struct.pack(">I", 1) + pair


def test_spdy_frame_reader_large_data_frame_yields_pieces_without_buffer() -> None:
    reader = FrameReader()
    assert read(reader, data_header(5, 2**24 - 1, last=True)) == []
    left = 2**24 - 1
    while left:
        piece = b"x" * min(left, 60_000)
        left -= len(piece)
        assert read(reader, piece) == [Data(5, piece, not left)]
        assert reader.buffered == 0


def test_spdy_frame_reader_large_header_frame_skipped_without_buffer() -> None:
    reader = FrameReader()
    assert read(reader, struct.pack(">HHI", 0x8003, 2, 2**24 - 1)) == []
    for _ in range(255):
        assert read(reader, b"h" * 65536) == []
        assert reader.buffered == 0
    assert read(reader, b"h" * 65535 + control(6, struct.pack(">I", 2))) == [Ping(2)]


@pytest.mark.parametrize("kind", [3, 6, 7])
def test_spdy_frame_reader_oversized_control_frame_raises(kind: int) -> None:
    with pytest.raises(SpdyError, match="16777215 bytes"):
        read(FrameReader(), struct.pack(">HHI", 0x8003, kind, 2**24 - 1))


def test_spdy_frame_reader_abandoned_iterator_continues() -> None:
    reader = FrameReader()
    reader.feed(b"".join(wire for wire, _ in FRAMES))
    found: list[Frame] = []
    while reader.buffered:
        found += itertools.islice(reader.frames(), 1)
    assert found == [frame for _, frame in FRAMES if frame]

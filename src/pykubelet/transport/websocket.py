"""WebSocket frames (RFC 6455) of a server, without I/O.

    frames = FrameParser()
    frames.feed(received)
    while (event := frames.next_event()) is not None:
        ...
    transport.write(data_frame(b"\\x01", output))

The payload of a data frame is returned in the pieces in which it arrives, so that a frame of any size
needs no buffer; only headers and control frames, which are short, are kept until they are complete. The
client is not trusted: frames above `MAX_FRAME_BYTES` and violations of the protocol raise WebSocketError
with the code for the Close frame. Extensions are not negotiated.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

MAX_FRAME_BYTES = 32 * 2**20
"""Largest payload of a frame, in bytes; upstream's limit."""
_MAX_CONTROL_BYTES = 125
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_FIN, _RESERVED, _OPCODE, _MASKED, _LENGTH = 0x80, 0x70, 0x0F, 0x80, 0x7F


class Opcode(IntEnum):
    """Type of a frame."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


_OPCODES = {int(opcode): opcode for opcode in Opcode}
_EXTENDED_LENGTHS = {126: 2, 127: 8}
"""Bytes of the extended length by the value of the short one."""


class CloseCode(IntEnum):
    """Code of a Close frame."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    TOO_BIG = 1009


class WebSocketError(Exception):
    """Raised when the client violates the protocol or a limit; `code` is for the Close frame."""

    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Payload:
    """Piece of a message, unmasked."""

    data: bytearray
    starts: bool
    """Whether it is the first piece of its message."""
    ends: bool
    """Whether it is the last piece of its message."""
    text: bool


@dataclass(frozen=True, slots=True)
class Control:
    """Ping, pong or close frame."""

    opcode: Opcode
    data: bytearray


Event = Payload | Control


def accept_key(key: str) -> str:
    """Return the value of Sec-WebSocket-Accept for the client's Sec-WebSocket-Key."""
    return base64.b64encode(
        hashlib.sha1(key.encode(errors="surrogateescape") + _GUID, usedforsecurity=False).digest()
    ).decode()


def frame_header(opcode: Opcode, length: int) -> bytes:
    """Return the header of an unfragmented, unmasked frame."""
    first = bytes((_FIN | opcode,))
    if length < 126:
        return first + length.to_bytes(1, "big")
    if length < 2**16:
        return first + b"\x7e" + length.to_bytes(2, "big")
    return first + b"\x7f" + length.to_bytes(8, "big")


def data_frame(prefix: bytes, data: bytes | bytearray | memoryview) -> bytes:
    """Return a binary message whose payload is `prefix` and `data`."""
    return b"".join((frame_header(Opcode.BINARY, len(prefix) + len(data)), prefix, data))


def pong_frame(data: bytes | bytearray) -> bytes:
    """Return the reply to a ping."""
    return frame_header(Opcode.PONG, len(data)) + data


def close_frame(code: CloseCode, reason: str = "") -> bytes:
    """Return a Close frame; a long reason is cut."""
    text = reason.encode()[: _MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()
    return frame_header(Opcode.CLOSE, 2 + len(text)) + code.to_bytes(2, "big") + text


def mask_with_int(mask: bytes, data: bytearray) -> None:
    """XOR `data` with the repeated mask in place, without compiled code."""
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    masked = int.from_bytes(data, "little") ^ int.from_bytes(repeated, "little")
    data[:] = masked.to_bytes(len(data), "little")


def _compiled_mask() -> Callable[[bytes, bytearray], None]:
    try:
        # 12 GB/s for 32 KiB, where the int takes 200 us. It is not a public name of aiohttp.
        from aiohttp._websocket.helpers import websocket_mask
    except ImportError:  # pragma: no cover
        return mask_with_int
    return websocket_mask


_apply_mask = _compiled_mask()


class FrameParser:
    """Incremental parser of a client's frames: `feed`, then call `next_event` until it returns None."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._received: bytes | bytearray = b""
        self._position = 0
        self._mask = b""
        self._opcode = Opcode.CONTINUATION
        self._in_frame = False
        self._final = False
        self._left = 0
        """Bytes of the current frame's payload that are not parsed yet."""
        self._message: Opcode | None = None
        """Type of the message whose end has not been received."""
        self._starts = False

    @property
    def buffered(self) -> int:
        """Bytes that were fed and not yet returned."""
        return len(self._received) - self._position

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        rest = self._received[self._position :]
        self._received = rest + data if rest else data
        self._position = 0

    def next_event(self) -> Event | None:
        """Return the next event; None if more bytes are needed. Raises WebSocketError."""
        if not self._in_frame and not self._parse_header():
            return None
        if self._opcode >= Opcode.CLOSE:
            if self.buffered < self._left:
                return None
            self._in_frame = False
            return Control(self._opcode, self._take(self._left))
        count = min(self._left, self.buffered)
        if not count and self._left:
            return None
        data = self._take(count)
        frame_ends = not self._left
        starts, self._starts = self._starts, False
        ends = frame_ends and self._final
        text = self._message is Opcode.TEXT
        if frame_ends:
            self._in_frame = False
        if ends:
            self._message = None
        return Payload(data, starts, ends, text)

    def _parse_header(self) -> bool:
        """Parse the header of the next frame; return False if it is incomplete."""
        received, start = self._received, self._position
        available = len(received) - start
        if available < 2:
            return False
        first, second = received[start], received[start + 1]
        if first & _RESERVED:
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, "reserved bits are set")
        if not second & _MASKED:
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, "the frame is not masked")
        opcode = self._valid_opcode(first & _OPCODE, bool(first & _FIN))
        length = second & _LENGTH
        if opcode >= Opcode.CLOSE and length > _MAX_CONTROL_BYTES:
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, "the control frame is too long")
        extended = _EXTENDED_LENGTHS.get(length, 0)
        if available < 2 + extended:
            return False
        if extended:
            length = int.from_bytes(received[start + 2 : start + 2 + extended], "big")
        if length > self._max_frame_bytes:
            raise WebSocketError(
                CloseCode.TOO_BIG, f"a frame has at most {self._max_frame_bytes} bytes, not {length}"
            )
        end = start + 2 + extended + 4
        if len(received) < end:
            return False
        self._mask = bytes(received[end - 4 : end])
        self._position = end
        self._in_frame, self._left = True, length
        self._opcode, self._final = opcode, bool(first & _FIN)
        if opcode in (Opcode.TEXT, Opcode.BINARY):
            self._message, self._starts = opcode, True
        return True

    def _valid_opcode(self, number: int, final: bool) -> Opcode:
        opcode = _OPCODES.get(number)
        if opcode is None:
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, f"opcode {number} is unknown")
        if opcode >= Opcode.CLOSE:
            if not final:
                raise WebSocketError(CloseCode.PROTOCOL_ERROR, "the control frame is fragmented")
        elif (opcode is Opcode.CONTINUATION) != (self._message is not None):
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, "the fragments of a message are out of order")
        return opcode

    def _take(self, count: int) -> bytearray:
        """Return the next bytes of the payload, unmasked."""
        data = bytearray(memoryview(self._received)[self._position : self._position + count])
        self._position += count
        self._left -= count
        if count:
            _apply_mask(self._mask, data)
            if turn := count % 4:
                # The next piece goes on in the middle of the mask.
                self._mask = self._mask[turn:] + self._mask[:turn]
        return data

"""D-Bus client: the wire format, and one connection to a bus or to a peer such as systemd.

`docs/packages/transport.md` compares it with dbus-fast, which often hangs on systemd's private socket and
accepts messages up to 128 MiB. A connection lives as long as the `async with` block that opened it, so that
there is nothing to reconnect between two tasks: the next task connects to a restarted peer.

The peer may hang, exit or send invalid data. Every wait has a timeout, a broken connection fails all calls on
it immediately, and every failure is a `DBusError`.

Encoding and decoding are pure functions. Data from a socket is not trusted: anything that is not a valid
message raises `DBusProtocolError` and nothing else, and no length field is believed beyond the bytes
received.

Values have Python's plain types: `str` for s, o and g, `int`, `bool`, `float`, a list for an array (`bytes`
for an array of bytes, a dict for an array of dict entries), a tuple for a struct, and `Variant` for v.

A connection opened with `descriptors=True` receives file descriptors, which `call_for_descriptor` returns;
every other received descriptor is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message; the protocol allows 128 MiB, replies of systemd have a few hundred bytes."""
HEAD_BYTES = 16
"""Bytes of a message that are needed to compute its size."""
_MAX_DEPTH = 32
_MAX_SIGNATURE = 255
_FIELDS_SIGNATURE = "a(yv)"
_FORMATS = {"y": "B", "n": "h", "q": "H", "i": "i", "u": "I", "x": "q", "t": "Q", "d": "d", "h": "I"}
_ALIGNMENT = {
    **{code: struct.calcsize("<" + fmt) for code, fmt in _FORMATS.items()},
    **dict.fromkeys("bsoa", 4),
    **dict.fromkeys("gv", 1),
    **dict.fromkeys("({", 8),
}
_BASIC = frozenset("ynqiuxtdhbsog")
_CLOSING = {"(": ")", "{": "}"}


class DBusProtocolError(ValueError):
    """Raised for bytes that are not a D-Bus message, or a value that does not match its signature."""


class Variant(NamedTuple):
    """A value with its own signature, which is one complete type such as `t`."""

    signature: str
    value: Any


class MessageType(IntEnum):
    """Type of a message."""

    CALL = 1
    RETURN = 2
    ERROR = 3
    SIGNAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A complete message."""

    kind: int
    serial: int
    """Number of the message, from 1, unique per sender."""
    flags: int = 0
    path: str = ""
    interface: str = ""
    member: str = ""
    error: str = ""
    reply_to: int = 0
    """Serial of the call that this message replies to."""
    destination: str = ""
    sender: str = ""
    signature: str = ""
    unix_fds: int = 0
    """Number of file descriptors that are sent with the message; values of the type h are their indexes."""
    body: tuple[Any, ...] = ()


# Header fields by number: the attribute, and its type in the message.
_FIELDS = {
    1: ("path", "o"),
    2: ("interface", "s"),
    3: ("member", "s"),
    4: ("error", "s"),
    5: ("reply_to", "u"),
    6: ("destination", "s"),
    7: ("sender", "s"),
    8: ("signature", "g"),
    9: ("unix_fds", "u"),
}


def encode_message(message: Message) -> bytes:
    """Encode a message in little-endian byte order."""
    body = encode(message.signature, message.body)
    fields = [
        (number, Variant(kind, value))
        for number, (name, kind) in _FIELDS.items()
        if (value := getattr(message, name))
    ]
    head = struct.pack("<4BII", ord("l"), message.kind, message.flags, 1, len(body), message.serial)
    writer = _Writer(bytearray(head))
    writer.write(_FIELDS_SIGNATURE, fields, 0)
    writer.align(8)
    if len(writer.data) + len(body) > MAX_MESSAGE_BYTES:
        raise DBusProtocolError(f"a message of {len(writer.data) + len(body)} bytes is too long")
    return bytes(writer.data) + body


def message_size(head: bytes | bytearray) -> int:
    """Return the size of the message with these first `HEAD_BYTES` bytes. Raises DBusProtocolError."""
    order = _order(head)
    version = head[3]
    if version != 1:
        raise DBusProtocolError(f"version {version} of the protocol is not known")
    body, _, fields = struct.unpack_from(f"{order}III", head, 4)
    size = HEAD_BYTES + int(fields) + -int(fields) % 8 + int(body)
    if size > MAX_MESSAGE_BYTES:
        raise DBusProtocolError(f"a message of {size} bytes is too long")
    return size


def decode_message(data: bytes) -> Message:
    """Decode one complete message. Raises DBusProtocolError."""
    if len(data) < HEAD_BYTES or len(data) != message_size(data):
        raise DBusProtocolError("a message of another size than it says")
    order = _order(data)
    body_size, serial = struct.unpack_from(f"{order}II", data, 4)
    reader = _Reader(data, order, 12)
    known: dict[str, Any] = {}
    for number, variant in reader.read(_FIELDS_SIGNATURE, 0):
        name, kind = _FIELDS.get(number, ("", ""))
        if not name:
            continue  # the specification requires unknown fields to be ignored
        if variant.signature != kind:
            raise DBusProtocolError(f"header field {number} has the type {variant.signature!r}")
        known[name] = variant.value
    reader.align(8)
    if reader.at != len(data) - body_size:
        raise DBusProtocolError("the header ends elsewhere than it says")
    body = decode(known.get("signature", ""), data[reader.at :], big=order == ">")
    return Message(kind=data[1], flags=data[2], serial=serial, body=body, **known)


def encode(signature: str, values: tuple[Any, ...]) -> bytes:
    """Encode values in sequence. Raises DBusProtocolError for a value that does not match its type."""
    types = split_signature(signature)
    if len(types) != len(values):
        raise DBusProtocolError(f"{len(values)} values for the signature {signature!r}")
    writer = _Writer(bytearray())
    for kind, value in zip(types, values, strict=True):
        writer.write(kind, value, 0)
    return bytes(writer.data)


def decode(signature: str, data: bytes, *, big: bool = False) -> tuple[Any, ...]:
    """Decode all of what `encode` returned. Raises DBusProtocolError."""
    reader = _Reader(data, ">" if big else "<", 0)
    values = tuple([reader.read(kind, 0) for kind in split_signature(signature)])
    if reader.at != len(data):
        raise DBusProtocolError(f"{len(data) - reader.at} bytes after the last value")
    return values


def split_signature(signature: str) -> list[str]:
    """Split a signature into complete types: `a{sv}u` is `a{sv}` and `u`. Raises DBusProtocolError."""
    if len(signature) > _MAX_SIGNATURE:
        raise DBusProtocolError("the signature is too long")
    found, at = [], 0
    while at < len(signature):
        end = _type_end(signature, at, 0)
        found.append(signature[at:end])
        at = end
    return found


def _type_end(signature: str, at: int, depth: int) -> int:
    code = signature[at : at + 1]
    if depth > _MAX_DEPTH:
        raise DBusProtocolError("the signature is too deep")
    if code in _BASIC or code == "v":
        return at + 1
    if code == "a":
        return _type_end(signature, at + 1, depth + 1)
    if code in _CLOSING:
        inner = []
        end = at + 1
        while signature[end : end + 1] not in ("", _CLOSING[code]):
            inner.append(signature[end])
            end = _type_end(signature, end, depth + 1)
        if signature[end : end + 1] == _CLOSING[code] and _may_hold(code, inner, signature[at - 1 : at]):
            return end + 1
    raise DBusProtocolError(f"{signature!r} is not a signature")


def _may_hold(code: str, inner: list[str], before: str) -> bool:
    if code == "(":
        return bool(inner)
    return len(inner) == 2 and inner[0] in _BASIC and before == "a"


class _Writer:
    """Encoder; alignment counts from the start of its data."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def align(self, size: int) -> None:
        self.data += bytes(-len(self.data) % size)

    def write(self, kind: str, value: Any, depth: int) -> None:
        if depth > 2 * _MAX_DEPTH:
            raise DBusProtocolError("the value is too deep")
        code = kind[0]
        self.align(_ALIGNMENT[code])
        try:
            if code in _FORMATS:
                self.data += struct.pack("<" + _FORMATS[code], value)
            elif code == "b":
                self.data += struct.pack("<I", bool(value))
            elif code == "a":
                self._write_array(kind[1:], value, depth)
            elif code in _CLOSING:
                self._write_parts(kind, value, depth)
            elif code == "v":
                self._write_variant(value, depth)
            else:
                self._write_text(code, value)
        except (struct.error, TypeError, AttributeError, UnicodeEncodeError) as err:
            raise DBusProtocolError(f"{value!r} is not of the type {kind!r}: {err}") from err

    def _write_text(self, code: str, value: str) -> None:
        raw = value.encode()
        if b"\0" in raw:
            raise DBusProtocolError("a text must not contain a zero")
        if code == "o" and not _is_path(value):
            raise DBusProtocolError(f"{value!r} is not an object path")
        if code == "g":
            split_signature(value)
        self.data += struct.pack("<B" if code == "g" else "<I", len(raw)) + raw + b"\0"

    def _write_array(self, kind: str, value: Any, depth: int) -> None:
        start = len(self.data)
        self.data += bytes(4)
        self.align(_ALIGNMENT[kind[0]])
        first = len(self.data)
        if kind == "y":
            self.data += bytes(value)
        else:
            for item in value.items() if kind[0] == "{" else value:
                self.write(kind, item, depth + 1)
        struct.pack_into("<I", self.data, start, len(self.data) - first)

    def _write_parts(self, kind: str, value: Any, depth: int) -> None:
        types = split_signature(kind[1:-1])
        if len(types) != len(value):
            raise DBusProtocolError(f"{len(value)} values for the struct {kind!r}")
        for part, item in zip(types, value, strict=True):
            self.write(part, item, depth + 1)

    def _write_variant(self, variant: Variant, depth: int) -> None:
        if len(split_signature(variant.signature)) != 1:
            raise DBusProtocolError(f"a variant holds one value, not {variant.signature!r}")
        self._write_text("g", variant.signature)
        self.write(variant.signature, variant.value, depth + 1)


class _Reader:
    """Decoder; alignment counts from the start of its data."""

    def __init__(self, data: bytes, order: str, at: int) -> None:
        self.data = data
        self.at = at
        self._order = order

    def align(self, size: int) -> None:
        padding = self._take(-self.at % size)
        if padding.strip(b"\0"):
            raise DBusProtocolError("padding that is not zero")

    def read(self, kind: str, depth: int) -> Any:
        if depth > 2 * _MAX_DEPTH:
            raise DBusProtocolError("the value is too deep")
        code = kind[0]
        self.align(_ALIGNMENT[code])
        if code in _FORMATS:
            return self._number(_FORMATS[code])
        if code == "b":
            number = self._number("I")
            if number not in (0, 1):
                raise DBusProtocolError(f"{number} is not a boolean")
            return bool(number)
        readers: dict[str, Callable[[str, int], Any]] = {
            "a": self._read_array,
            "(": self._read_parts,
            "{": self._read_parts,
            "v": self._read_variant,
        }
        return readers.get(code, self._read_text)(kind, depth)

    def _read_text(self, kind: str, _depth: int) -> str:
        raw = self._take(self._number("B" if kind == "g" else "I"))
        if self._take(1) != b"\0" or b"\0" in raw:
            raise DBusProtocolError("a text that does not end where it says")
        try:
            text = raw.decode()
        except UnicodeDecodeError as err:
            raise DBusProtocolError("a text that is not UTF-8") from err
        if kind == "o" and not _is_path(text):
            raise DBusProtocolError(f"{text!r} is not an object path")
        if kind == "g":
            split_signature(text)
        return text

    def _read_array(self, kind: str, depth: int) -> Any:
        item = kind[1:]
        size = self._number("I")
        self.align(_ALIGNMENT[item[0]])
        end = self.at + size
        if end > len(self.data):
            raise DBusProtocolError("an array that is longer than the message")
        if item == "y":
            return self._take(size)
        items = []
        while self.at < end:
            items.append(self.read(item, depth + 1))
        if self.at != end:
            raise DBusProtocolError("an array that does not end where it says")
        return dict(items) if item[0] == "{" else items

    def _read_parts(self, kind: str, depth: int) -> tuple[Any, ...]:
        return tuple([self.read(part, depth + 1) for part in split_signature(kind[1:-1])])

    def _read_variant(self, _kind: str, depth: int) -> Variant:
        signature = self._read_text("g", depth)
        if len(split_signature(signature)) != 1:
            raise DBusProtocolError(f"a variant of the type {signature!r}")
        return Variant(signature, self.read(signature, depth + 1))

    def _number(self, fmt: str) -> Any:
        size = struct.calcsize("<" + fmt)
        return struct.unpack(self._order + fmt, self._take(size))[0]

    def _take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise DBusProtocolError("the message ends too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken


def _order(head: bytes | bytearray) -> str:
    order = {ord("l"): "<", ord("B"): ">"}.get(head[0])
    if order is None:
        raise DBusProtocolError(f"{head[0]:#04x} does not begin a message")
    return order


def _is_path(text: str) -> bool:
    if text == "/":
        return True
    return text.startswith("/") and all(
        part and part.isascii() and part.replace("_", "a").isalnum() for part in text[1:].split("/")
    )


CALL_SECONDS = 25.0
"""Seconds until a call times out: the usual value of D-Bus libraries."""
CONNECT_SECONDS = 10.0
_BUS = "org.freedesktop.DBus"
_BUS_PATH = "/org/freedesktop/DBus"
_FULL_PAUSE = 0.1
_NUDGE_SECONDS = 0.2
_LONGEST_NUDGE = 2.0
_NO_REPLY = 1
_MAX_LINE = 16 * 1024
_MAX_DESCRIPTORS = 16
"""File descriptors per message that buses allow by default."""
_RECEIVE_BYTES = 64 * 1024


class DBusError(OSError):
    """Raised when a call fails or times out; `name` is the peer's D-Bus error name, if it sent one."""

    def __init__(self, number: int, text: str, name: str = "") -> None:
        super().__init__(number, text)
        self.name = name

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.asynccontextmanager
async def connect(
    path: Path, *, bus: bool, seconds: float = CONNECT_SECONDS, descriptors: bool = False
) -> AsyncIterator[DBusConnection]:
    """Open a connection to a socket; `bus` is whether a bus listens there or a single peer.

    `descriptors`: whether the peer may send file descriptors.

    Raises DBusError if the connection is not established within `seconds`.
    """
    connection = DBusConnection(path, descriptors=descriptors)
    try:
        try:
            async with asyncio.timeout(seconds):
                await connection.open()
                if bus:
                    await connection.call(_BUS, _BUS_PATH, _BUS, "Hello")
        except TimeoutError:
            raise DBusError(errno.ETIMEDOUT, f"{path} does not answer") from None
        yield connection
    finally:
        connection.close()


class DBusConnection(asyncio.Protocol):
    """An open connection; created by `connect`."""

    def __init__(self, path: Path, *, descriptors: bool = False) -> None:
        self._path = path
        self._negotiates = descriptors
        self._descriptors: deque[int] = deque()
        """Received file descriptors of messages that are not complete yet."""
        self._transport: asyncio.Transport | _DescriptorTransport | None = None
        self._data = bytearray()
        self._welcome: asyncio.Future[None] | None = None
        self._authenticated = False
        self._awaits_agreement = False
        self._serials = itertools.count(1)
        self._calls: dict[int, asyncio.Future[tuple[Message, list[int]]]] = {}
        self._heard: list[tuple[asyncio.Queue[Message | None], Callable[[Message], bool]]] = []
        self._over: DBusError | None = None
        self._nudge: asyncio.TimerHandle | None = None
        self._was_heard = False

    async def call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *args: Any,
        seconds: float = CALL_SECONDS,
    ) -> tuple[Any, ...]:
        """Call a method and return the values of its reply. Raises DBusError."""
        reply, descriptors = await self._call(destination, path, interface, member, signature, args, seconds)
        _close_all(descriptors)
        return reply.body

    async def call_for_descriptor(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *args: Any,
        seconds: float = CALL_SECONDS,
    ) -> int:
        """Call a method whose reply is one file descriptor, and return it; the caller closes it.

        Raises DBusError.
        """
        reply, descriptors = await self._call(destination, path, interface, member, signature, args, seconds)
        if reply.signature != "h" or reply.body != (0,) or len(descriptors) != 1:
            _close_all(descriptors)
            raise DBusError(errno.EBADMSG, f"{member}: the reply is not one file descriptor")
        return descriptors[0]

    async def _call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str,
        args: tuple[Any, ...],
        seconds: float,
    ) -> tuple[Message, list[int]]:
        serial = next(self._serials)
        message = Message(
            kind=MessageType.CALL,
            serial=serial,
            destination=destination,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=args,
        )
        data = encode_message(message)
        if self._over is not None or self._transport is None:
            raise self._over or DBusError(errno.ENOTCONN, f"{self._path} is not connected")
        answer: asyncio.Future[tuple[Message, list[int]]] = asyncio.get_running_loop().create_future()
        self._calls[serial] = answer
        reply: Message | None = None
        try:
            self._transport.write(data)
            self._nudge_later(_NUDGE_SECONDS)
            async with asyncio.timeout(seconds):
                reply, descriptors = await answer
        except TimeoutError:
            raise DBusError(errno.ETIMEDOUT, f"{member} is not answered after {seconds:g}s") from None
        finally:
            del self._calls[serial]
            if reply is None and answer.done() and not answer.cancelled() and answer.exception() is None:
                _close_all(answer.result()[1])  # the reply arrived while the caller was cancelled
        if reply.kind == MessageType.ERROR:
            _close_all(descriptors)
            text = reply.body[0] if reply.body and isinstance(reply.body[0], str) else reply.error
            raise DBusError(errno.EREMOTEIO, f"{member}: {text}", reply.error)
        return reply, descriptors

    async def subscribe(self, rule: str) -> None:
        """Request from the bus the signals that match a rule (AddMatch). Raises DBusError."""
        await self.call(_BUS, _BUS_PATH, _BUS, "AddMatch", "s", rule)

    @contextlib.contextmanager
    def signals(
        self, accepts: Callable[[Message], bool] = lambda _: True
    ) -> Iterator[asyncio.Queue[Message | None]]:
        """Collect the signals that arrive within the block, in order; None if the connection ends.

        Every client of a bus can send any signal directly to this one, whatever the rules: `accepts` returns
        whether a signal is collected, for example because of its sender, which the bus sets.
        """
        heard: asyncio.Queue[Message | None] = asyncio.Queue()
        if self._over is not None:
            heard.put_nowait(None)
        entry = heard, accepts
        self._heard.append(entry)
        try:
            yield heard
        finally:
            self._heard.remove(entry)

    @property
    def over(self) -> DBusError | None:
        """The reason why the connection ended; None while it is open."""
        return self._over

    async def open(self) -> None:
        """Connect and authenticate (EXTERNAL: the kernel passes on the user id). Raises DBusError."""
        loop = asyncio.get_running_loop()
        try:
            sock = await _reach(self._path)
            try:
                if self._negotiates:
                    self.connection_made(_DescriptorTransport(sock, self))
                else:
                    await loop.create_unix_connection(lambda: self, sock=sock)
            except BaseException:
                sock.close()
                raise
        except OSError as err:
            why = err.strerror or str(err)
            raise DBusError(err.errno or errno.EIO, f"{self._path} cannot be reached: {why}") from err
        assert self._transport is not None
        self._welcome = loop.create_future()
        self._transport.write(b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\n")
        await self._welcome

    def close(self) -> None:
        """Close the connection and fail its pending calls."""
        self._end(DBusError(errno.ENOTCONN, f"the connection to {self._path} is closed"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        # uvloop's transports have the methods, but not the base class.
        self._transport = cast(asyncio.Transport | _DescriptorTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle received data; an invalid message ends the connection."""
        self._data += data
        try:
            if not self._authenticated:
                self._take_welcome()
            if self._authenticated:
                self._take_messages()
        except DBusProtocolError as err:
            self._end(DBusError(errno.EBADMSG, f"{self._path} talks nonsense: {err}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending calls."""
        why = f": {exc}" if exc is not None else ""
        self._end(DBusError(errno.ECONNRESET, f"{self._path} closed the connection{why}"))

    def _take_welcome(self) -> None:
        line, found, rest = self._data.partition(b"\r\n")
        if not found:
            if len(self._data) > _MAX_LINE:
                raise DBusProtocolError("the greeting has no end")
            return
        self._data = rest
        if self._negotiates and line.startswith(b"OK"):
            assert self._transport is not None
            self._transport.write(b"NEGOTIATE_UNIX_FD\r\n")
            self._negotiates = False
            self._awaits_agreement = True
            self._take_welcome()
            return
        if not line.startswith(b"AGREE_UNIX_FD" if self._awaits_agreement else b"OK"):
            told = bytes(line[:200]).decode(errors="replace")
            self._end(DBusError(errno.EACCES, f"{self._path} does not let us in: {told}"))
            return
        assert self._transport is not None
        self._transport.write(b"BEGIN\r\n")
        self._authenticated = True
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)

    def _take_messages(self) -> None:
        while len(self._data) >= HEAD_BYTES:
            size = message_size(self._data[:HEAD_BYTES])
            if len(self._data) < size:
                return
            self._was_heard = True
            message = decode_message(bytes(self._data[:size]))
            del self._data[:size]
            if message.unix_fds > len(self._descriptors):
                raise DBusProtocolError(f"{message.unix_fds} file descriptors are announced and not sent")
            descriptors = [self._descriptors.popleft() for _ in range(message.unix_fds)]
            if message.kind == MessageType.SIGNAL:
                for heard, accepts in self._heard:
                    if accepts(message):
                        heard.put_nowait(message)
            elif message.kind in (MessageType.RETURN, MessageType.ERROR):
                answer = self._calls.get(message.reply_to)
                if answer is not None and not answer.done():
                    answer.set_result((message, descriptors))
                    continue
            _close_all(descriptors)

    def descriptors_received(self, descriptors: Iterable[int]) -> None:
        """Store received file descriptors, in the order of the messages that they belong to."""
        self._descriptors.extend(descriptors)

    def _nudge_later(self, seconds: float) -> None:
        """Schedule a Ping if the peer has not sent any message yet.

        A busy systemd may read the end of the authentication and the first call in one read, and then waits
        for more data before it handles the call.
        """
        if self._nudge is None and not self._was_heard:
            loop = asyncio.get_running_loop()
            self._nudge = loop.call_later(seconds, self._send_nudge, seconds)

    def _send_nudge(self, seconds: float) -> None:
        self._nudge = None
        if self._over is None and self._transport is not None and not self._was_heard:
            ping = Message(
                kind=MessageType.CALL,
                serial=next(self._serials),
                flags=_NO_REPLY,
                path="/",
                interface=f"{_BUS}.Peer",
                member="Ping",
            )
            self._transport.write(encode_message(ping))
            self._nudge_later(min(2 * seconds, _LONGEST_NUDGE))

    def _end(self, why: DBusError) -> None:
        if self._over is not None:
            return
        self._over = why
        _close_all(self._descriptors)
        self._descriptors.clear()
        if self._nudge is not None:
            self._nudge.cancel()
        if self._transport is not None:
            self._transport.abort()
        waiting: list[asyncio.Future[Any]] = [*self._calls.values()]
        if self._welcome is not None:
            waiting.append(self._welcome)
        for future in waiting:
            if not future.done():
                future.set_exception(why)
                future.exception()  # mark as retrieved: the caller may have been cancelled concurrently
        for heard, _ in self._heard:
            heard.put_nowait(None)


class _DescriptorTransport(asyncio.BaseTransport):
    """A transport that receives file descriptors, which asyncio's and uvloop's drop.

    Requests are small and the peer reads them: a write that does not fit into the socket ends the connection.
    """

    def __init__(self, sock: socket.socket, connection: DBusConnection) -> None:
        super().__init__()
        self._sock = sock
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._read)

    def write(self, data: bytes) -> None:
        """Send data. A failure ends the connection."""
        try:
            sent = self._sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as err:
            self._lost(err)
        else:
            if sent < len(data):
                self._lost(BlockingIOError(errno.EAGAIN, "the peer does not read"))

    def abort(self) -> None:
        """Close the socket."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def _read(self) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._sock, _RECEIVE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError as err:
            self._lost(err)
            return
        self._connection.descriptors_received(descriptors)
        if flags & socket.MSG_CTRUNC:
            self._lost(OSError(errno.EMFILE, "too many file descriptors"))
        elif data:
            self._connection.data_received(data)
        else:
            self._lost(None)

    def _lost(self, err: OSError | None) -> None:
        self.abort()
        self._connection.connection_lost(err)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def _reach(path: Path) -> socket.socket:
    """Connect to a socket; wait while its accept queue is full. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        while True:
            try:
                sock.connect(str(path))
            except BlockingIOError:
                await asyncio.sleep(_FULL_PAUSE)
            else:
                return sock
    except BaseException:
        sock.close()
        raise

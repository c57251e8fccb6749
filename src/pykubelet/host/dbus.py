"""One connection to a D-Bus bus, or to a program that speaks D-Bus by itself, such as systemd.

It lives as long as the `async with` block it is opened in: calls are made, signals are heard, and then
it is gone. There is nothing to keep alive or to mend between two tasks, and a program that restarts is
simply found anew by the next one.

Whoever is at the other end may hang, vanish or talk nonsense: every wait has an end, a connection that
breaks ends all calls on it at once, and all of it is a `DBusError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

from pykubelet.host.dbus_wire import (
    HEAD_BYTES,
    Kind,
    Message,
    WireError,
    decode_message,
    encode_message,
    message_size,
)

CALL_SECONDS = 25.0
"""How long an answer may take: the protocol's own usual time."""

CONNECT_SECONDS = 10.0

_BUS = "org.freedesktop.DBus"
_BUS_PATH = "/org/freedesktop/DBus"
_FULL_PAUSE = 0.1
_NUDGE_SECONDS = 0.2
_LONGEST_NUDGE = 2.0
_NO_REPLY = 1
_MAX_LINE = 16 * 1024


class DBusError(OSError):
    """A call was refused or not answered; `name` is the error's D-Bus name, if the other end gave one."""

    def __init__(self, number: int, text: str, name: str = "") -> None:
        super().__init__(number, text)
        self.name = name

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.asynccontextmanager
async def connect(
    path: Path, *, bus: bool, seconds: float = CONNECT_SECONDS
) -> AsyncIterator[DBusConnection]:
    """Open a connection to a socket; `bus` says whether a bus listens there or a single program.

    Raises DBusError when nobody lets us in within so many `seconds`.
    """
    connection = DBusConnection(path)
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
    """An open connection; made by `connect`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._welcome: asyncio.Future[None] | None = None
        self._authenticated = False
        self._serials = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._heard: list[asyncio.Queue[Message | None]] = []
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
        """Call a method and give what it returns; raises DBusError."""
        serial = next(self._serials)
        message = Message(
            kind=Kind.CALL,
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
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[serial] = answer
        try:
            self._transport.write(data)
            self._nudge_later(_NUDGE_SECONDS)
            async with asyncio.timeout(seconds):
                reply = await answer
        except TimeoutError:
            raise DBusError(errno.ETIMEDOUT, f"{member} is not answered after {seconds:g}s") from None
        finally:
            del self._calls[serial]
        if reply.kind == Kind.ERROR:
            told = reply.body[0] if reply.body and isinstance(reply.body[0], str) else reply.error
            raise DBusError(errno.EREMOTEIO, f"{member}: {told}", reply.error)
        return reply.body

    async def subscribe(self, rule: str) -> None:
        """Have a bus pass signals on that match the rule."""
        await self.call(_BUS, _BUS_PATH, _BUS, "AddMatch", "s", rule)

    @contextlib.contextmanager
    def signals(self) -> Iterator[asyncio.Queue[Message | None]]:
        """Collect the signals that arrive within the block, in order; None when nothing more will come."""
        heard: asyncio.Queue[Message | None] = asyncio.Queue()
        if self._over is not None:
            heard.put_nowait(None)
        self._heard.append(heard)
        try:
            yield heard
        finally:
            self._heard.remove(heard)

    @property
    def over(self) -> DBusError | None:
        """Why nothing more will come; None as long as the connection stands."""
        return self._over

    async def open(self) -> None:
        """Connect, and say who we are: the kernel tells the other end our user, and we only confirm it."""
        loop = asyncio.get_running_loop()
        try:
            sock = await _reach(self._path)
            try:
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
        """End the connection, and the calls on it."""
        self._end(DBusError(errno.ENOTCONN, f"the connection to {self._path} is closed"))

    # What the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's have the methods, but not the class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take what came; nonsense ends the connection."""
        self._data += data
        try:
            if not self._authenticated:
                self._take_welcome()
            if self._authenticated:
                self._take_messages()
        except WireError as err:
            self._end(DBusError(errno.EBADMSG, f"{self._path} talks nonsense: {err}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls."""
        why = f": {exc}" if exc is not None else ""
        self._end(DBusError(errno.ECONNRESET, f"{self._path} closed the connection{why}"))

    def _take_welcome(self) -> None:
        line, found, rest = self._data.partition(b"\r\n")
        if not found:
            if len(self._data) > _MAX_LINE:
                raise WireError("the greeting has no end")
            return
        self._data = rest
        if not line.startswith(b"OK"):
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
            if message.kind == Kind.SIGNAL:
                for heard in self._heard:
                    heard.put_nowait(message)
            elif message.kind in (Kind.RETURN, Kind.ERROR):
                answer = self._calls.get(message.reply_to)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _nudge_later(self, seconds: float) -> None:
        """Have the other end look again if it says nothing at all.

        systemd, when it is busy, reads the end of the greeting and the first call at once, and then waits
        for more to arrive before it looks at the call.
        """
        if self._nudge is None and not self._was_heard:
            loop = asyncio.get_running_loop()
            self._nudge = loop.call_later(seconds, self._send_nudge, seconds)

    def _send_nudge(self, seconds: float) -> None:
        self._nudge = None
        if self._over is None and self._transport is not None and not self._was_heard:
            ping = Message(
                kind=Kind.CALL,
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
                future.exception()  # seen: its caller may have been cancelled just now
        for heard in self._heard:
            heard.put_nowait(None)


async def _reach(path: Path) -> socket.socket:
    """Connect to a socket; waits while its queue is full."""
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

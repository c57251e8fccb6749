"""A D-Bus daemon of the test's own, and a logind on it, as well behaved as a test requires.

The daemon is Debian's, with a private configuration and socket. logind is this process: it owns the names
`org.freedesktop.login1` and `org.freedesktop.systemd1`, and passes inhibitors as the real one does, as pipes.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

from pykubelet.linux.dbus import (
    HEAD_BYTES,
    Message,
    MessageType,
    Variant,
    decode_message,
    encode_message,
    message_size,
)
from pykubelet.linux.logind import DROP_IN_NAME, parse_time_span

_CONFIG = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""
_MANAGER = "org.freedesktop.login1.Manager"
_PATH = "/org/freedesktop/login1"
NAMES = ("org.freedesktop.login1", "org.freedesktop.systemd1")


@contextlib.contextmanager
def bus_daemon(directory: Path) -> Iterator[Path]:
    """Run a D-Bus daemon, and yield its socket."""
    path, config = directory / "bus", directory / "bus.conf"
    config.write_text(_CONFIG.format(socket=path))
    command = ["dbus-daemon", f"--config-file={config}", "--nofork", "--nopidfile", "--print-address"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline()
            yield path
        finally:
            daemon.kill()


class LogindPeer:
    """A logind; leaving its block is its end, and the bus reports that to all clients."""

    def __init__(self, bus: Path, drop_ins: Path, *, delay: float = 5.0, preparing: bool = False) -> None:
        self.delay = delay
        """InhibitDelayMaxSec, in seconds."""
        self.preparing = preparing
        self.is_stubborn = False
        """Whether a reload changes nothing, as with a later drop-in file."""
        self.inhibitors: list[tuple[str, ...]] = []
        """Arguments of all calls of Inhibit."""
        self.reloads: list[tuple[Any, ...]] = []
        self._bus = bus
        self._drop_ins = drop_ins
        self._held: set[int] = set()
        self._changed = asyncio.Event()
        self._serial = 0

    async def __aenter__(self) -> Self:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._sock, str(self._bus))
        self._data = b""
        uid = str(os.geteuid()).encode().hex().encode()
        await loop.sock_sendall(self._sock, b"\0AUTH EXTERNAL " + uid + b"\r\nNEGOTIATE_UNIX_FD\r\n")
        while self._data.count(b"\r\n") < 2:
            self._data += await loop.sock_recv(self._sock, 4096)
        assert b"AGREE_UNIX_FD" in self._data
        self._data = b""
        await loop.sock_sendall(self._sock, b"BEGIN\r\n")
        self._call_bus("Hello")
        for name in NAMES:
            self._call_bus("RequestName", "su", name, 0)
        self._task = asyncio.ensure_future(self._serve())
        await self.until(lambda: self._serial_of_reply >= len(NAMES) + 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for descriptor in list(self._held):
            self._drop(descriptor)
        self._sock.close()

    @property
    def held(self) -> int:
        """Number of inhibitors that are held."""
        return len(self._held)

    async def until(self, condition: Any, seconds: float = 45.0) -> None:
        """Wait until a condition of this peer holds."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def prepare_for_shutdown(self, active: bool) -> None:
        """Announce a shutdown, or its cancellation."""
        self.preparing = active
        self._send(
            Message(
                kind=MessageType.SIGNAL,
                serial=self._next_serial(),
                path=_PATH,
                interface=_MANAGER,
                member="PrepareForShutdown",
                signature="b",
                body=(active,),
            )
        )

    _serial_of_reply = 0

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while chunk := await loop.sock_recv(self._sock, 65536):
            self._data += chunk
            while len(self._data) >= HEAD_BYTES and len(self._data) >= message_size(self._data[:HEAD_BYTES]):
                size = message_size(self._data[:HEAD_BYTES])
                message, self._data = decode_message(self._data[:size]), self._data[size:]
                if message.kind == MessageType.CALL:
                    self._handle(message)
                self._serial_of_reply = max(self._serial_of_reply, message.reply_to)
                self._changed.set()

    def _handle(self, call: Message) -> None:
        if call.member == "Get":
            value = {
                "InhibitDelayMaxUSec": Variant("t", int(self.delay * 1e6)),
                "PreparingForShutdown": Variant("b", self.preparing),
            }[call.body[1]]
            self._reply(call, "v", value)
        elif call.member == "Inhibit" and self.preparing:
            self._fail(call, "org.freedesktop.login1.OperationInProgress", "already running")
        elif call.member == "Inhibit":
            self.inhibitors.append(call.body)
            self._inhibit(call)
        elif call.member == "KillUnit":
            self.reloads.append(call.body)
            self._reload()
            self._reply(call)
        else:
            self._fail(call, "org.freedesktop.DBus.Error.UnknownMethod", call.member)

    def _inhibit(self, call: Message) -> None:
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        reply = Message(
            kind=MessageType.RETURN,
            serial=self._next_serial(),
            reply_to=call.serial,
            destination=call.sender,
            signature="h",
            body=(0,),
            unix_fds=1,
        )
        socket.send_fds(self._sock, [encode_message(reply)], [theirs])
        os.close(theirs)
        self._held.add(ours)
        asyncio.get_running_loop().add_reader(ours, self._drop, ours)

    def _drop(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._held.discard(descriptor)
        os.close(descriptor)
        self._changed.set()

    def _reload(self) -> None:
        path = self._drop_ins / DROP_IN_NAME
        if not self.is_stubborn and path.exists():
            value = path.read_text().partition("InhibitDelayMaxSec=")[2]
            self.delay = parse_time_span(value) or 0.0

    def _call_bus(self, member: str, signature: str = "", *body: object) -> None:
        bus = "org.freedesktop.DBus"
        self._send(
            Message(
                kind=MessageType.CALL,
                serial=self._next_serial(),
                destination=bus,
                path="/org/freedesktop/DBus",
                interface=bus,
                member=member,
                signature=signature,
                body=body,
            )
        )

    def _reply(self, call: Message, signature: str = "", *body: object) -> None:
        self._send(
            Message(
                kind=MessageType.RETURN,
                serial=self._next_serial(),
                reply_to=call.serial,
                destination=call.sender,
                signature=signature,
                body=body,
            )
        )

    def _fail(self, call: Message, name: str, text: str) -> None:
        self._send(
            Message(
                kind=MessageType.ERROR,
                serial=self._next_serial(),
                reply_to=call.serial,
                destination=call.sender,
                error=name,
                signature="s",
                body=(text,),
            )
        )

    def _send(self, message: Message) -> None:
        self._sock.send(encode_message(message))

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


@contextlib.asynccontextmanager
async def logind_on_bus(directory: Path, **options: Any) -> AsyncIterator[tuple[Path, LogindPeer]]:
    """Run a bus with a logind, and yield the bus's socket and the logind."""
    with bus_daemon(directory) as path:
        async with LogindPeer(path, directory / "logind.conf.d", **options) as peer:
            yield path, peer

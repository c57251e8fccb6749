"""One call to our gRPC server: what its handler sends goes out as the client makes room for it."""

from __future__ import annotations

import asyncio
import string
from typing import Protocol
from urllib.parse import quote

from pykubelet.cri import http2
from pykubelet.cri.grpc_status import CODES, Status
from pykubelet.cri.http2_rules import Code
from pykubelet.cri.server_rules import PREFIX

HEADERS = b"\x88" + http2.more_headers([("content-type", "application/grpc")])
"""What each answer begins with: the HTTP status 200, and that it is gRPC's."""

# Clients refuse trailers that are too long, and then know nothing at all.
_LONGEST_MESSAGE = 2000
_LATE = Status("DEADLINE_EXCEEDED", "context deadline exceeded")
# gRPC's messages are percent-encoded but for printable ASCII.
_PLAIN = "".join(char for char in string.printable[:95] if char != "%")


class Sender(Protocol):
    """What a call needs of its connection."""

    def write_headers(self, stream: int, block: bytes, *, last: bool) -> None:
        """Send headers or trailers."""

    def reset(self, stream: int, code: Code) -> None:
        """Tell the client that a call is over."""

    def forget(self, stream: int) -> None:
        """Drop a call that has ended."""

    def flush(self) -> None:
        """Send of the answers what the client makes room for."""


class ServerStream:
    """A call under way."""

    def __init__(self, connection: Sender, number: int, path: str, window: int) -> None:
        self.path = path
        self.window = window
        """How many bytes the client takes."""
        self.room = http2.FIRST_WINDOW
        """How many bytes the client may send."""
        self.request = bytearray()
        self.complete = False
        """Whether the client has said all."""
        self.unsent = b""
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._number = number
        self._begun = False
        self._over = False
        self._sent: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: bytes) -> None:
        """Send a message; waits until the client has made room for all of it."""
        if self._over:
            return
        if not self._begun:
            self._begun = True
            self._connection.write_headers(self._number, HEADERS, last=False)
        self.unsent = PREFIX.pack(False, len(message)) + message
        self._connection.flush()
        if self.unsent:
            self._sent = asyncio.get_running_loop().create_future()
            await self._sent

    def finish(self, status: Status) -> None:
        """End the call with a status; only the first end counts."""
        if self._over:
            return
        trailers = [("grpc-status", str(CODES.index(status.code)))]
        if status.message:
            trailers.append(("grpc-message", quote(status.message[:_LONGEST_MESSAGE], safe=_PLAIN)))
        block = http2.more_headers(trailers)
        self._connection.write_headers(self._number, block if self._begun else HEADERS + block, last=True)
        if not self.complete:
            self._connection.reset(self._number, Code.NO_ERROR)
        self.drop()

    def drop(self) -> None:
        """Forget the call; whoever works on it is told to stop."""
        self._over = True
        self.unsent = b""
        self._connection.forget(self._number)
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def set_deadline(self, seconds: float) -> None:
        """End the call after so many seconds, if it has not ended by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.finish, _LATE)

    def sent(self) -> None:
        """Take note that all of the message is on its way."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

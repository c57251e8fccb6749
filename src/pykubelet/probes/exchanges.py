"""Plain HTTP GETs and TCP connects of probes, on bare non-blocking sockets.

Most probes are of these types, with a new connection each. An asyncio transport takes several times the CPU
time of the system calls. So `Exchanges` owns the sockets and one epoll instance, which the event loop watches
as a single descriptor: all responses that have arrived are handled in one callback.

An exchange connects and, if the connection is established by then (to a pod on this node it mostly is),
sends its request immediately. It ends with the response, an error or its deadline, and calls its listener
once; a cancelled one calls nothing. Peers are not trusted: `ResponseReader` bounds what is read, the deadline
bounds the time.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from errno import EINPROGRESS

from pykubelet.logs import get_logger
from pykubelet.probes.types import OUTPUT_LIMIT
from pykubelet.transport.http1 import HttpProtocolError, ResponseReader

log = get_logger(__name__)
_SOCKET_TYPE = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_READ_BYTES = 16 * 1024
_MAX_EVENTS = 64
"""Number of exchanges that are handled before the event loop runs other callbacks."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The numeric address of a server."""

    family: socket.AddressFamily
    address: tuple[str, int]


def numeric_peer(host: str, port: int) -> Peer | None:
    """Return the peer at an IP address without a zone; None if `host` is anything else."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return Peer(family, (host, port))
    return None


class Exchange:
    """One connection with its request and response. Read the attributes after the listener was called."""

    __slots__ = ("_exchanges", "_listener", "_socket", "_timer", "_unsent", "connected", "failure", "reader")

    def __init__(self, exchanges: Exchanges, request: bytes, listener: Listener) -> None:
        self.connected = False
        self.failure: Exception | None = None
        """Cause of a failure; TimeoutError without an errno after the deadline."""
        self.reader = ResponseReader(OUTPUT_LIMIT) if request else None
        """The response, possibly incomplete; None for a connect without a request."""
        self._exchanges = exchanges
        self._unsent = request
        self._listener: Listener | None = listener
        self._socket: socket.socket | None = None
        self._timer: asyncio.Handle | None = None

    def start(self, peer: Peer, deadline: float) -> None:
        """Connect; a result that is known immediately is reported in the next iteration of the loop."""
        loop = asyncio.get_running_loop()
        try:
            self._socket = socket.socket(peer.family, _SOCKET_TYPE)
            error = self._socket.connect_ex(peer.address)
            if error not in (0, EINPROGRESS):
                raise OSError(error, os.strerror(error))
            if self._send() and self.reader is None:
                self._timer = loop.call_soon(self._finish, None)
                return
            events = select.EPOLLOUT if self._is_sending else select.EPOLLIN
            self._exchanges.watch(self._socket.fileno(), self, events)
        except OSError as err:
            self._timer = loop.call_soon(self._finish, err)
        else:
            self._timer = loop.call_at(deadline, self._finish, TimeoutError())

    def cancel(self) -> None:
        """Close the connection; the listener is not called."""
        self._listener = None
        self._close()

    def advance(self) -> None:
        """Send or receive what the socket is ready for; also called if it is not ready."""
        assert self._socket is not None
        try:
            if self._is_sending:
                error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                if not self._send():
                    return
                if self.reader is None:
                    self._finish(None)
                else:
                    self._exchanges.watch_response(self._socket.fileno())
            else:
                self._receive(self._socket)
        except BlockingIOError:
            pass
        except (OSError, HttpProtocolError) as err:
            self._finish(err)
        except Exception as err:  # a bug must not end other exchanges
            log.exception(err, "Unexpected error in probe connection")
            self._finish(err)

    @property
    def _is_sending(self) -> bool:
        return not self.connected or bool(self._unsent)

    def _send(self) -> bool:
        """Send the request; return whether it was sent completely. A request without bytes only connects."""
        assert self._socket is not None
        try:
            count = self._socket.send(self._unsent)
        except BlockingIOError:
            return False
        self.connected = True
        self._unsent = self._unsent[count:]
        return not self._unsent

    def _receive(self, connection: socket.socket) -> None:
        assert self.reader is not None
        data = connection.recv(_READ_BYTES)
        if data:
            self.reader.feed(data)
        else:
            self.reader.end()
        if self.reader.done:
            self._finish(None)

    def _finish(self, failure: Exception | None) -> None:
        listener, self._listener = self._listener, None
        self._close()
        if listener is not None:
            self.failure = failure
            listener(self)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            self._exchanges.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None


Listener = Callable[[Exchange], None]


class Exchanges:
    """The exchanges in progress on the running event loop."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._by_descriptor: dict[int, Exchange] = {}

    def start(self, peer: Peer, request: bytes, deadline: float, listener: Listener) -> Exchange:
        """Connect, send a request and read the response; without a request only connect.

        `deadline` is in loop time. The listener is called once, never before this method has returned.
        """
        exchange = Exchange(self, request, listener)
        exchange.start(peer, deadline)
        return exchange

    def close(self) -> None:
        """Cancel all exchanges. The next `start` begins again."""
        for exchange in list(self._by_descriptor.values()):
            exchange.cancel()
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    # Called by exchanges

    def watch(self, descriptor: int, exchange: Exchange, events: int) -> None:
        """Call `advance` when the socket is ready for `events`. Raises OSError."""
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._handle_ready)
        self._epoll.register(descriptor, events)
        self._by_descriptor[descriptor] = exchange

    def watch_response(self, descriptor: int) -> None:
        """Wait for the response on a socket that is watched."""
        assert self._epoll is not None
        self._epoll.modify(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Stop watching a socket that is about to be closed."""
        if self._by_descriptor.pop(descriptor, None) is not None:
            assert self._epoll is not None
            # Closing alone does not suffice while a forked child process has a copy of the descriptor.
            self._epoll.unregister(descriptor)

    def _handle_ready(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0, _MAX_EVENTS):
            # An earlier one of these may have cancelled it, or another may have the same number.
            if (exchange := self._by_descriptor.get(descriptor)) is not None:
                exchange.advance()

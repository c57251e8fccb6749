"""HTTP/2 for a server: its connections, and how many streams they may have together.

Imported with the first connection that needs it: most of its memory is `h2`.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pykubelet.server.http2_connection import Http2Connection
from pykubelet.server.http2_stream import stream_server
from pykubelet.server.http2_turns import ReadingTurns

MOST_STREAMS_OF_ALL = 1000


class Http2:
    """What the connections of one server share."""

    def __init__(self, server: web.Server, *, idle_seconds: float, **options: Any) -> None:
        """Serve streams as `server` serves connections; `options` are those of its request handlers."""
        self.server = server
        self.streams = stream_server(server, **options)
        self.turns = ReadingTurns()
        self.idle_seconds = idle_seconds
        self.open = 0
        """How many streams there are."""
        self._most = MOST_STREAMS_OF_ALL
        self._connections: dict[Http2Connection, None] = {}

    def __call__(self) -> Http2Connection:
        """Make the protocol of a connection."""
        return Http2Connection(self)

    def come(self, connection: Http2Connection) -> None:
        """Take note of a connection."""
        self._connections[connection] = None

    def leave(self, connection: Http2Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)

    def has_room(self) -> bool:
        """Whether one stream more can be begun, if need be instead of answers that nobody takes."""
        # Handlers that were told to end and did not yet count, too.
        if len(self.streams.connections) >= self._most:
            return False
        if self.open >= self._most:
            for connection in self._connections:
                if connection.idle and connection.streams:
                    connection.force_close()
                    break
        return self.open < self._most

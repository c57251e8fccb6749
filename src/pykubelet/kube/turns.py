"""How many requests of a client are under way at once: as few as keep it going.

Each takes a connection, and a new one costs both sides more than several requests do. A request that
finds all of them taken therefore waits for a moment: with an API server nearby, one is free by then. If
none is, the server is far away or slow, and one connection more is allowed, up to a limit. Beyond it
there is one more only when nothing moves at all: a server that does not answer some (for secrets it may
have to ask another) must not keep a pod's status from being told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

PATIENCE_SECONDS = 0.01
"""How long the first in the line waits before there is one more."""
STUCK_SECONDS = 1.0
"""How long he waits when there are as many as there should be."""
STUCK_TIMES = 8
"""How many times as many there may be when nothing moves."""
KEPT_SECONDS = 30.0
"""After so much silence connections are closed, and what there was no longer counts."""


class Turns:
    """An asynchronous context manager: inside, it is one's turn. The first come are the first served."""

    def __init__(self, most: int, patience: float = PATIENCE_SECONDS, kept: float = KEPT_SECONDS) -> None:
        self._most = most
        self._patience = patience
        self._kept = kept
        self._allowed = 1
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._taken == 0 and loop.time() - self._last > self._kept:
            self._allowed = 1
        if not self._waiting and self._taken < self._allowed:
            self._taken += 1
            return self
        turn = loop.create_future()
        self._waiting.append(turn)
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                # Who gave turns out in the meantime has taken it from the line already.
                if turn in self._waiting:
                    self._waiting.remove(turn)
            else:
                self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._taken -= 1
        self._last = asyncio.get_running_loop().time()
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._taken < self._allowed:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)

    def _watch(self) -> None:
        """Have one more when the first in the line has waited long enough."""
        if self._timer is None and self._waiting and self._allowed < self._most * STUCK_TIMES:
            patience = self._patience if self._allowed < self._most else STUCK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(patience, self._grow, self._waiting[0])

    def _grow(self, first: asyncio.Future[None]) -> None:
        self._timer = None
        if self._waiting and self._waiting[0] is first:
            self._allowed += 1
            self._serve()
        self._watch()

"""Looking up the API server's name, one look-up at a time.

While the cluster's DNS is away a look-up blocks a thread for many seconds, and every request makes
one. Whoever asks for the same name meanwhile shares the answer, and one who stops waiting leaves no
second thread behind, so that the agent's few threads stay free for what runs on the node.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
"""An address as `socket.getaddrinfo` gives it."""
_Found = Sequence[AddressInfo]


class SharedResolver(AbstractResolver):
    """Resolves names with the system's own rules; nothing is remembered."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int, int], asyncio.Future[_Found]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Give the addresses of a host as the HTTP library wants them; raises OSError."""
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=address[1],
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in await self.addresses(host, port, family)
        ]

    async def addresses(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> Sequence[AddressInfo]:
        """Give the addresses of a host; raises OSError."""
        key = (host, port, family)
        pending = self._pending.get(key)
        if pending is None:
            ask = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
            pending = asyncio.get_running_loop().run_in_executor(None, ask)
            self._pending[key] = pending
            pending.add_done_callback(partial(self._done, key))
        return await asyncio.shield(pending)

    async def close(self) -> None:
        """There is nothing to close; a look-up under way ends by itself."""

    def _done(self, key: tuple[str, int, int], pending: asyncio.Future[_Found]) -> None:
        del self._pending[key]
        # Perhaps nobody waits any more; a failure is then nobody's.
        if not pending.cancelled():
            pending.exception()

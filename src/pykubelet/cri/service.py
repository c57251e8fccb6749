"""What the clients of the CRI services have in common: a channel, a deadline, and how to list.

Newer runtimes can answer a list as a stream, which has no limit of size. It is used when the
agent's `CRIListStreaming` gate is on, and given up for good at the first runtime that lacks it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import ClassVar, TypeVar

from google.protobuf.message import Message

from pykubelet.api.duration import Duration
from pykubelet.cri.channel import Answer, Channel, Check
from pykubelet.cri.errors import Unimplemented
from pykubelet.logs import get_logger

log = get_logger(__name__)

Item = TypeVar("Item")

RUNTIME_SERVICE = "/runtime.v1.RuntimeService/"
IMAGE_SERVICE = "/runtime.v1.ImageService/"


class Service:
    """The base of the typed clients; `timeout` is the configured runtime request timeout."""

    path: ClassVar[str]

    def __init__(self, channel: Channel, timeout: Duration, *, stream_lists: bool = False) -> None:
        self._channel = channel
        self._timeout = timeout.seconds
        self._streaming = stream_lists

    async def _call(
        self,
        method: str,
        operation: str,
        request: Message,
        answer: type[Answer],
        *,
        timeout: float | None = None,
        check: Check[Answer] | None = None,
    ) -> Answer:
        return await self._channel.call(
            self.path + method,
            request,
            answer,
            timeout=self._timeout if timeout is None else timeout,
            operation=operation,
            check=check,
        )

    def _stream(
        self,
        method: str,
        operation: str,
        request: Message,
        answer: type[Answer],
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[Answer, None]:
        return self._channel.stream(
            self.path + method,
            request,
            answer,
            timeout=self._timeout if timeout is None else timeout,
            operation=operation,
        )

    @contextmanager
    def _fall_back(self) -> Iterator[None]:
        """Let the caller list the old way when the runtime cannot stream."""
        try:
            yield
        except Unimplemented as err:
            self._streaming = False
            log.info("The runtime cannot stream lists, using plain lists", call=err.call)


async def flatten(
    parts: AsyncGenerator[Answer, None], pick: Callable[[Answer], Iterable[Item]]
) -> AsyncGenerator[Item, None]:
    """Yield the items of every part of a streamed list."""
    async with aclosing(parts):
        async for part in parts:
            for item in pick(part):
                yield item

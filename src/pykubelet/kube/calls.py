"""One request to the API server, from waiting for its turn to an answer or an exception.

A request that the server puts off (429 or 5xx with Retry-After) is made again when it says so, a few
times; a refused identity (401) is renewed once, in case a token or certificate was replaced meanwhile.
Whatever else the server says is raised as an error that tells which request it was about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pykubelet.kube.credentials import Credentials
from pykubelet.kube.errors import ApiError, NoCredentials, TimedOut, api_error, forbidden_hint
from pykubelet.kube.metrics import RestMetrics
from pykubelet.kube.rate import TokenBucket
from pykubelet.kube.resources import Resource
from pykubelet.kube.retrying import Complaints
from pykubelet.kube.transport import Chunks, Transport, Whole
from pykubelet.kube.turns import Turns
from pykubelet.logs import get_logger

log = get_logger(__name__)

MAX_ANSWER_BYTES = 128 * 1024 * 1024
MOST_RETRIES = 10
AT_ONCE = 12
"""How many requests of a client may be under way, when the server is slow to answer; see `turns.py`."""
LONGEST_WAIT_SECONDS = 30.0
"""A longer Retry-After is the caller's to obey."""
# Servers begin to answer a watch at once; some proxies only with its first event.
_WATCH_BEGINS_SECONDS = 120.0

Params = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: the verb as RBAC names it, and the place."""

    verb: str
    method: str
    resource: Resource[Any]
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    params: Params = ()
    body: bytes | None = None
    content_type: str = "application/json"

    @property
    def path(self) -> str:
        """The path of the object or list."""
        return self.resource.path(self.namespace, self.name, self.subresource)

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


class Caller:
    """Makes requests within one limit; `timeout` is in seconds for each answer."""

    def __init__(
        self,
        transport: Transport,
        limit: TokenBucket,
        *,
        timeout: float,
        retries: int,
        metrics: RestMetrics | None,
    ) -> None:
        self._transport = transport
        self._limit = limit
        self._timeout = timeout
        self._retries = retries
        self._metrics = metrics
        self._at_once = Turns(AT_ONCE)
        self._renewing = Complaints(log, "Failed to renew refused credentials")

    async def call(self, request: Request) -> bytes:
        """Give the body of a good answer; raises a KubeError otherwise."""
        retries, renewed = 0, False
        while True:
            await self._turn(request)
            # Before the clock runs: a plugin may take its time.
            credentials = await self._transport.credentials.current()
            async with self._at_once:
                answer = await self._ask(request, credentials)
            if self._metrics is not None:
                self._metrics.received(request.method, self._transport.host, len(answer.body))
            if 200 <= answer.code < 300:
                return answer.body
            error = self._refusal(request, answer)
            if error.code == 401 and not renewed:
                renewed = True
                try:
                    if await self._transport.credentials.renewed(credentials):
                        continue
                except NoCredentials as err:
                    self._renewing.failed(err, asyncio.get_running_loop().time())
            wait = error.retry_after
            put_off = error.code == 429 or error.code >= 500
            if not put_off or wait is None or wait > LONGEST_WAIT_SECONDS or retries >= self._retries:
                raise error
            retries += 1
            log.v(4).info("The API server wants to be asked later", seconds=wait, request=str(request))
            await asyncio.sleep(wait)
            if self._metrics is not None:
                self._metrics.retried(error.code, request.method, self._transport.host)

    async def _ask(self, request: Request, credentials: Credentials) -> Whole:
        try:
            return await self._transport.fetch(
                credentials,
                request.method,
                request.path,
                params=request.params,
                body=request.body,
                content_type=request.content_type,
                deadline=asyncio.get_running_loop().time() + self._timeout,
                max_bytes=MAX_ANSWER_BYTES,
            )
        except TimedOut as err:
            raise TimedOut(err.server, f"{request}: {err.why} ({self._timeout:g} s)") from None

    @asynccontextmanager
    async def stream(self, request: Request, seconds: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the body of a good answer as it comes, at most for so long: then TimedOut."""
        await self._turn(request)
        credentials = await self._transport.credentials.current()
        begin = asyncio.get_running_loop().time()
        deadline = begin + min(seconds, _WATCH_BEGINS_SECONDS)
        async with self._transport.ask(
            credentials, request.method, request.path, params=request.params, deadline=deadline, stream=True
        ) as answer:
            if answer.code == 200:
                yield Chunks(answer, begin + seconds)
                return
            body = await answer.read(MAX_ANSWER_BYTES, deadline)
            error = self._refusal(request, Whole(answer.code, answer.headers, body))
        if error.code == 401:
            await self._transport.credentials.renewed(credentials)
        raise error

    async def _turn(self, request: Request) -> None:
        waited = await self._limit.wait()
        if self._metrics is not None:
            self._metrics.waited(request.method, self._transport.host, waited)
        if waited > 1:
            log.v(2).info("Waited for the agent's own limit", seconds=round(waited, 3), request=str(request))

    def _refusal(self, request: Request, answer: Whole) -> ApiError:
        retry_after = _seconds(answer.headers.get("retry-after", ""))
        error = api_error(answer.code, answer.body, request=str(request), retry_after=retry_after)
        resource = request.resource
        if answer.code == 403:
            plural = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
            namespace = request.namespace if resource.namespaced else ""
            error.hint = forbidden_hint(error.message, request.verb, resource.group, plural, namespace)
        elif answer.code == 401:
            error.hint = self._transport.credentials.problem() or (
                "the token or certificate of the kubeconfig's user is not accepted: renew it"
            )
        return error


def _seconds(retry_after: str) -> float | None:
    """Read a Retry-After in seconds; API servers never send dates."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None

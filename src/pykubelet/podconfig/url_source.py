"""Static pods from a URL (`staticPodURL`), fetched every `httpCheckFrequency`.

The response is a manifest with the full set of pods. If it cannot be fetched or used (timeout, a status other
than 200, too large, invalid, empty), the last valid set stays and the failure is logged: immediately, for
each new cause, and every ten minutes while it lasts (`ErrorLogLimiter`). A URL without any usable response so
far has not reported, so no pods are removed because of it; only an empty first response means "no pods", as
upstream.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping

import aiohttp

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.logs import get_logger
from pykubelet.podconfig.file_source import Emit
from pykubelet.podconfig.manifests import MAX_BYTES
from pykubelet.podconfig.static_pods import static_pods, without_duplicates
from pykubelet.podconfig.validate import DEFAULT_OPTIONS, PodValidationOptions
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
TIMEOUT_SECONDS = 10.0
"""Seconds for a complete response."""
_CHUNK = 64 * 1024
_LOGIN = re.compile(r"(?<=//)[^/?#]*@")
_MIN_PERIOD_SECONDS = 0.1


class UrlSource:
    """Static pod source of a URL; emits after the first response and whenever the response changes.

    `headers` are sent with each request, a name possibly several times; `served` are the kinds of API objects
    that static pods may refer to on this node; `clock` returns Unix time in nanoseconds.
    """

    name = "http"

    def __init__(
        self,
        url: str,
        headers: Mapping[str, Iterable[str]],
        period: Duration,
        node_name: str,
        emit: Emit,
        *,
        served: frozenset[str] = frozenset(),
        options: PodValidationOptions = DEFAULT_OPTIONS,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._url = url
        self._headers = [(name, value) for name, values in headers.items() for value in values]
        self._period = max(period.seconds, _MIN_PERIOD_SECONDS)
        self._period_changed = asyncio.Event()
        self._node_name = node_name
        self._emit = emit
        self._served = served
        self._options = options
        self._clock = clock
        # Passwords in a URL must neither be logged nor be part of a pod's identity.
        self._origin = _LOGIN.sub("", url)
        self._pods: list[Pod] | None = None
        self._digest = b""
        self._manifest_problems: list[Problem] = []
        self._error_log = ErrorLogLimiter(log, "Failed to read pods from URL", url=self._origin)
        self._emitted: tuple[list[Pod], list[Problem]] | None = None

    def set_period(self, period: Duration) -> None:
        """Change the time between two requests, and send one immediately."""
        self._period = max(period.seconds, _MIN_PERIOD_SECONDS)
        self._period_changed.set()

    async def run(self) -> None:
        """Fetch periodically until cancelled."""
        log.v(1).info("Watching URL", url=self._origin)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        # Uses the proxy of the environment and keeps no cookies, like all other HTTP clients of the kubelet.
        async with aiohttp.ClientSession(
            timeout=timeout, trust_env=True, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                await self._check(session)
                self._period_changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._period):
                        await self._period_changed.wait()

    async def _check(self, session: aiohttp.ClientSession) -> None:
        try:
            body = await self._fetch(session)
            if not body:
                self._pods = [] if self._pods is None else self._pods
                problems = [
                    Problem(self._origin, "gave an empty answer: a PodList without items means no pods")
                ]
            else:
                problems = await self._decode(body)
        except TimeoutError:
            problems = [Problem(self._origin, f"gave no answer within {TIMEOUT_SECONDS:g} seconds")]
        except (aiohttp.ClientError, OSError, ValueError) as err:
            cause = str(err).replace(self._url, self._origin) or type(err).__name__
            problems = [Problem(self._origin, f"could not be read: {cause}")]
        self._report(problems)

    async def _fetch(self, session: aiohttp.ClientSession) -> bytes:
        async with session.get(self._url, headers=self._headers) as response:
            if response.status != 200:
                raise ValueError(f"it answered {response.status} {response.reason or ''}".rstrip())
            data = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK):
                data += chunk
                if len(data) > MAX_BYTES:
                    raise ValueError(f"its answer is larger than {MAX_BYTES // 1024**2} MiB")
        return bytes(data)

    async def _decode(self, body: bytes) -> list[Problem]:
        """Decode a response unless it equals the previous one; return its problems."""
        digest = hashlib.blake2b(body).digest()
        if digest != self._digest:
            try:
                pods = await asyncio.to_thread(self._load, body)
                self._pods, self._manifest_problems = without_duplicates((self._origin, pod) for pod in pods)
            except ConfigError as err:
                self._manifest_problems = err.problems
            self._digest = digest
        return self._manifest_problems

    def _load(self, body: bytes) -> list[Pod]:
        return static_pods(
            body,
            source="http",
            origin=self._origin,
            node_name=self._node_name,
            now=self._clock(),
            served=self._served,
            options=self._options,
        )

    def _report(self, problems: list[Problem]) -> None:
        now = asyncio.get_running_loop().time()
        for problem in problems:
            self._error_log.failed(problem.message, now)
        if not problems:
            self._error_log.succeeded(now)
        if self._pods is not None and (self._pods, problems) != self._emitted:
            self._emitted = (self._pods, problems)
            self._emit(self.name, list(self._pods), list(problems))

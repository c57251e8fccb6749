"""Delegated authentication and authorization: TokenReviews and SubjectAccessReviews, with a cache.

Results are cached for the configured TTLs in a bounded LRU cache; failures are not cached. Concurrent lookups
of the same key share one review, and at most `MOST_AT_ONCE` reviews of each type are in flight, so that
clients with invalid tokens cannot starve the kubelet. A review continues while any caller waits for it and is
cancelled when the last one is gone, so that nothing of an abandoned request is retained. At most
`MOST_WAITING` callers wait per cache; one more evicts the one that has waited longest (`WaitEvicted`), so
that clients with invalid tokens cannot block all others. Tokens are stored only as keyed hashes.

If the API server does not return a result, `ReviewUnavailable` is raised and the caller denies the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from pykubelet.api.meta import to_json
from pykubelet.api.reviews import (
    ResourceAttributes,
    SubjectAccessReview,
    SubjectAccessReviewSpec,
    SubjectAccessReviewStatus,
    TokenReview,
    TokenReviewSpec,
    TokenReviewStatus,
)
from pykubelet.apiserver.client import HasMetadata, Resource
from pykubelet.apiserver.errors import ApiError, KubeError, ServerError, TooManyRequests
from pykubelet.logs import get_logger
from pykubelet.server.identity import AuthorizerAttributes, BadCredentials, User
from pykubelet.server.metrics import Review, ServerMetrics
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
MOST_WAITING = 256
"""Maximum number of callers that wait concurrently."""
K = TypeVar("K")
V = TypeVar("V")


class WaitEvicted(Exception):
    """Raised in the caller that has waited longest when too many wait."""


class _Fetch(Generic[V]):
    """A fetch in progress and the futures of its waiters."""

    def __init__(self) -> None:
        self.waiters: set[asyncio.Future[V]] = set()
        self.task: asyncio.Task[None] | None = None

    def abandon(self) -> None:
        """Cancel the fetch."""
        if self.task is not None:
            self.task.cancel()

    def end(self, answer: V) -> None:
        """Return the result to all waiters."""
        for waiter in self._pending():
            waiter.set_result(answer)

    def fail(self, err: Exception) -> None:
        """Raise the error in all waiters."""
        for waiter in self._pending():
            waiter.set_exception(err)

    def cancel(self) -> None:
        """Cancel the remaining waiters."""
        for waiter in self._pending():
            waiter.cancel()

    def _pending(self) -> list[asyncio.Future[V]]:
        return [waiter for waiter in self.waiters if not waiter.done()]


class ReviewCache(Generic[K, V]):
    """LRU cache of review results by key; `seconds` returns the TTL of a result (0: not cached)."""

    def __init__(
        self,
        scope: TaskScope,
        seconds: Callable[[V], float],
        *,
        most: int,
        name: str,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._scope = scope
        self._seconds = seconds
        self._most = most
        self._name = name
        self._known: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._most_waiting = most_waiting
        self._fetching: dict[K, _Fetch[V]] = {}
        self._waiting: dict[asyncio.Future[V], None] = {}
        """Waiters in order of arrival."""

    def __len__(self) -> int:
        return len(self._known)

    def known(self, question: K) -> V | None:
        """Return the cached result, or None."""
        found = self._known.get(question)
        if found is None:
            return None
        until, answer = found
        if asyncio.get_running_loop().time() >= until:
            del self._known[question]
            return None
        self._known.move_to_end(question)
        return answer

    async def get(self, question: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """Return the cached result, or fetch it. Raises WaitEvicted and whatever `fetch` raises."""
        answer = self.known(question)
        if answer is not None:
            return answer
        fetching = self._fetching.get(question)
        if fetching is None:
            fetching = self._fetching[question] = _Fetch()
            fetching.task = self._scope.start(self._fetch(question, fetch, fetching), name=self._name)
        waiter: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        fetching.waiters.add(waiter)
        self._waiting[waiter] = None
        self._evict()
        try:
            return await waiter
        finally:
            self._waiting.pop(waiter, None)
            fetching.waiters.discard(waiter)
            if not fetching.waiters:
                self._forget(question, fetching)
                fetching.abandon()

    def _evict(self) -> None:
        while len(self._waiting) > self._most_waiting:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            if not longest.done():
                longest.set_exception(WaitEvicted("too many requests wait for an answer"))

    async def _fetch(self, question: K, fetch: Callable[[], Awaitable[V]], fetching: _Fetch[V]) -> None:
        try:
            answer = await fetch()
            self._keep(question, answer)
            fetching.end(answer)
        except Exception as err:  # raised in all waiters
            fetching.fail(err)
        finally:
            fetching.cancel()
            self._forget(question, fetching)

    def _forget(self, question: K, fetching: _Fetch[V]) -> None:
        """Drop a fetch, unless a newer one for the same key has replaced it."""
        if self._fetching.get(question) is fetching:
            del self._fetching[question]

    def _keep(self, question: K, answer: V) -> None:
        seconds = self._seconds(answer)
        if seconds <= 0:
            return
        self._known[question] = (asyncio.get_running_loop().time() + seconds, answer)
        self._known.move_to_end(question)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


TOKEN_REVIEWS = Resource(
    TokenReview, "TokenReview", "tokenreviews", "authentication.k8s.io", namespaced=False
)
ACCESS_REVIEWS = Resource(
    SubjectAccessReview,
    "SubjectAccessReview",
    "subjectaccessreviews",
    "authorization.k8s.io",
    namespaced=False,
)
MOST_REMEMBERED = 4096
MOST_AT_ONCE = 32
LONGEST_SECONDS = 30.0
MOST_BYTES = 10_000
"""Maximum size in bytes of a SubjectAccessReview spec whose result is cached."""
_TRIES = 5
_FIRST_PAUSE = 0.5
R = TypeVar("R", bound=HasMetadata)


class ReviewUnavailable(Exception):
    """Raised when the API server returns no conclusive review."""


class ReviewClient(Protocol):
    """API client for reviews: an `apiserver.client.ApiClient`."""

    async def create(self, resource: Resource[R], obj: R, namespace: str = "") -> R:
        """Create an object and return it as the API server has it. Raises KubeError."""
        ...


class _Asker:
    """Sender of reviews that tries at most `_TRIES` times on server errors and 429, with back-off."""

    def __init__(self, client: ReviewClient, kind: Review, metrics: ServerMetrics) -> None:
        self._client = client
        self._kind: Review = kind
        self._metrics = metrics
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._complaints = ErrorLogLimiter(log, "Failed to ask the API server about a request", review=kind)

    async def ask(self, resource: Resource[R], question: R) -> R:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(LONGEST_SECONDS), self._turns:
                answer = await self._persist(resource, question)
        except (KubeError, TimeoutError) as err:
            self._complaints.failed(err, clock())
            raise ReviewUnavailable(str(err) or f"no answer in {LONGEST_SECONDS:g} s") from err
        self._complaints.succeeded(clock())
        return answer

    async def _persist(self, resource: Resource[R], question: R) -> R:
        pause = _FIRST_PAUSE
        for tries_left in reversed(range(_TRIES)):
            started, code = perf_counter(), "<error>"
            try:
                answer = await self._client.create(resource, question)
                code = "201"
                return answer
            except ApiError as err:
                code = str(err.code)
                if not tries_left or not isinstance(err, ServerError | TooManyRequests):
                    raise
            finally:
                self._metrics.review(self._kind, code, perf_counter() - started)
            await asyncio.sleep(pause * (1 + 0.2 * random.random()))  # noqa: S311 - no secret
            pause *= 1.5
        raise AssertionError("the last try returns or raises")


class TokenReviews:
    """Bearer token authenticator by TokenReview; `seconds` is the TTL of any result, valid or not."""

    def __init__(
        self, client: ReviewClient, scope: TaskScope, seconds: float, metrics: ServerMetrics
    ) -> None:
        self._asker = _Asker(client, "authn", metrics)
        self._metrics = metrics
        self._key = secrets.token_bytes(32)
        self._answers: ReviewCache[bytes, TokenReviewStatus] = ReviewCache(
            scope, lambda _: seconds, most=MOST_REMEMBERED, name="token-review"
        )

    async def user(self, token: str) -> User:
        """Return the user of a token. Raises BadCredentials for an invalid token, ReviewUnavailable."""
        started = perf_counter()
        key = hmac.digest(self._key, token.encode(errors="surrogateescape"), hashlib.sha256)
        status = self._answers.known(key)
        if status is not None:
            self._metrics.token_known(perf_counter() - started)
        else:
            with self._metrics.token_unknown():
                try:
                    status = await self._answers.get(key, lambda: self._review(token))
                except WaitEvicted as err:
                    raise ReviewUnavailable(str(err)) from None
        if not status.authenticated:
            raise BadCredentials("the API server does not know the bearer token")
        user = status.user
        return User(user.username, user.uid, tuple(user.groups), user.extra)

    async def _review(self, token: str) -> TokenReviewStatus:
        with self._metrics.token_review():
            question = TokenReview(spec=TokenReviewSpec(token=token))
            status = (await self._asker.ask(TOKEN_REVIEWS, question)).status
            if status.error and not status.authenticated:
                # The check itself may have failed: raise, so that the result is not cached.
                raise BadCredentials(f"the API server could not check the bearer token: {status.error}")
            return status


class AccessReviews:
    """Authorizer of requests to this node by SubjectAccessReview."""

    def __init__(
        self,
        client: ReviewClient,
        scope: TaskScope,
        node_name: Callable[[], str],
        metrics: ServerMetrics,
        *,
        yes_seconds: float,
        no_seconds: float,
    ) -> None:
        self._asker = _Asker(client, "authz", metrics)
        self._node_name = node_name

        def seconds(status: SubjectAccessReviewStatus) -> float:
            return yes_seconds if status.allowed else no_seconds

        self._answers: ReviewCache[bytes, SubjectAccessReviewStatus] = ReviewCache(
            scope, seconds, most=MOST_REMEMBERED, name="access-review"
        )

    async def allowed(self, user: User, wish: AuthorizerAttributes) -> bool:
        """Return whether the API server allows it. Raises ReviewUnavailable, also if allowed and denied."""
        spec = self._spec(user, wish)
        question = to_json(spec)

        async def review() -> SubjectAccessReviewStatus:
            return (await self._asker.ask(ACCESS_REVIEWS, SubjectAccessReview(spec=spec))).status

        if len(question) > MOST_BYTES:
            status = await review()
        else:
            try:
                status = await self._answers.get(question, review)
            except WaitEvicted as err:
                raise ReviewUnavailable(str(err)) from None
        if status.allowed and status.denied:
            raise ReviewUnavailable("the API server answered both yes and no")
        return status.allowed

    def _spec(self, user: User, wish: AuthorizerAttributes) -> SubjectAccessReviewSpec:
        return SubjectAccessReviewSpec(
            resource_attributes=ResourceAttributes(
                verb=wish.verb,
                version="v1",
                resource="nodes",
                subresource=wish.subresource,
                name=self._node_name(),
            ),
            user=user.name,
            uid=user.uid,
            groups=list(user.groups),
            extra={name: list(values) for name, values in user.extra.items()},
        )

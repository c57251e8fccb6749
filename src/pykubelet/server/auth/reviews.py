"""Delegated authentication and authorization: TokenReviews and SubjectAccessReviews, with a cache.

Results are cached for the configured TTLs in a bounded LRU cache; failures are not cached. Concurrent lookups
of the same key share one review, and at most `MAX_CONCURRENT_REVIEWS` reviews of each type are in flight, so
that clients with invalid tokens cannot starve the kubelet. A review continues while any caller waits for it
and is cancelled when the last one is gone, so that nothing of an abandoned request is retained. At most
`MAX_WAITING` callers wait per cache; one more evicts the one that has waited longest (`WaitEvicted`), so
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
from typing import Generic, TypeVar

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
from pykubelet.apiserver.client import ApiClient, HasMetadata, Resource
from pykubelet.apiserver.errors import ApiError, KubeError, ServerError, TooManyRequests
from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import AuthorizerAttributes, BadCredentials, User
from pykubelet.server.metrics.server_metrics import Review, ServerMetrics
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
MAX_WAITING = 256
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

    def complete(self, result: V) -> None:
        """Return the result to all waiters."""
        for waiter in self._pending():
            waiter.set_result(result)

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
    """LRU cache of review results by key; `ttl_seconds` returns the TTL of a result (0: not cached)."""

    def __init__(
        self,
        scope: TaskScope,
        ttl_seconds: Callable[[V], float],
        *,
        max_entries: int,
        name: str,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._scope = scope
        self._ttl_seconds = ttl_seconds
        self._max_entries = max_entries
        self._name = name
        self._cached: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._max_waiting = max_waiting
        self._fetching: dict[K, _Fetch[V]] = {}
        self._waiting: dict[asyncio.Future[V], None] = {}
        """Waiters in order of arrival."""

    def __len__(self) -> int:
        return len(self._cached)

    def cached(self, key: K) -> V | None:
        """Return the cached result, or None."""
        found = self._cached.get(key)
        if found is None:
            return None
        until, result = found
        if asyncio.get_running_loop().time() >= until:
            del self._cached[key]
            return None
        self._cached.move_to_end(key)
        return result

    async def get(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """Return the cached result, or fetch it. Raises WaitEvicted and whatever `fetch` raises."""
        result = self.cached(key)
        if result is not None:
            return result
        fetching = self._fetching.get(key)
        if fetching is None:
            fetching = self._fetching[key] = _Fetch()
            fetching.task = self._scope.start(self._fetch(key, fetch, fetching), name=self._name)
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
                self._forget(key, fetching)
                fetching.abandon()

    def _evict(self) -> None:
        while len(self._waiting) > self._max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            if not oldest.done():
                oldest.set_exception(WaitEvicted("too many requests wait for an answer"))

    async def _fetch(self, key: K, fetch: Callable[[], Awaitable[V]], fetching: _Fetch[V]) -> None:
        try:
            result = await fetch()
            self._store(key, result)
            fetching.complete(result)
        except Exception as err:  # raised in all waiters
            fetching.fail(err)
        finally:
            fetching.cancel()
            self._forget(key, fetching)

    def _forget(self, key: K, fetching: _Fetch[V]) -> None:
        """Drop a fetch, unless a newer one for the same key has replaced it."""
        if self._fetching.get(key) is fetching:
            del self._fetching[key]

    def _store(self, key: K, result: V) -> None:
        ttl_seconds = self._ttl_seconds(result)
        if ttl_seconds <= 0:
            return
        self._cached[key] = (asyncio.get_running_loop().time() + ttl_seconds, result)
        self._cached.move_to_end(key)
        while len(self._cached) > self._max_entries:
            self._cached.popitem(last=False)


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
MAX_CACHED_REVIEWS = 4096
MAX_CONCURRENT_REVIEWS = 32
REVIEW_TIMEOUT_SECONDS = 30.0
MAX_CACHED_SPEC_BYTES = 10_000
"""Maximum size in bytes of a SubjectAccessReview spec whose result is cached."""
_MAX_ATTEMPTS = 5
_FIRST_DELAY_SECONDS = 0.5
R = TypeVar("R", bound=HasMetadata)


class ReviewUnavailable(Exception):
    """Raised when the API server returns no conclusive review."""


class _ReviewSender:
    """Sender of reviews that tries at most `_MAX_ATTEMPTS` times on server errors and 429, with back-off."""

    def __init__(self, client: ApiClient, kind: Review, metrics: ServerMetrics) -> None:
        self._client = client
        self._kind: Review = kind
        self._metrics = metrics
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REVIEWS)
        self._error_log = ErrorLogLimiter(log, "Failed to review request at the API server", review=kind)

    async def send(self, resource: Resource[R], review: R) -> R:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(REVIEW_TIMEOUT_SECONDS), self._slots:
                result = await self._send_with_retries(resource, review)
        except (KubeError, TimeoutError) as err:
            self._error_log.failed(err, clock())
            raise ReviewUnavailable(str(err) or f"no answer in {REVIEW_TIMEOUT_SECONDS:g} s") from err
        self._error_log.succeeded(clock())
        return result

    async def _send_with_retries(self, resource: Resource[R], review: R) -> R:
        delay = _FIRST_DELAY_SECONDS
        for attempts_left in reversed(range(_MAX_ATTEMPTS)):
            started, code = perf_counter(), "<error>"
            try:
                result = await self._client.create(resource, review)
                code = "201"
                return result
            except ApiError as err:
                code = str(err.code)
                if not attempts_left or not isinstance(err, ServerError | TooManyRequests):
                    raise
            finally:
                self._metrics.review(self._kind, code, perf_counter() - started)
            await asyncio.sleep(delay * (1 + 0.2 * random.random()))  # noqa: S311 - no secret
            delay *= 1.5
        raise AssertionError("the last try returns or raises")


class TokenReviews:
    """Bearer token authenticator by TokenReview; `ttl_seconds` is the TTL of any result, valid or not."""

    def __init__(
        self, client: ApiClient, scope: TaskScope, ttl_seconds: float, metrics: ServerMetrics
    ) -> None:
        self._sender = _ReviewSender(client, "authn", metrics)
        self._metrics = metrics
        self._key = secrets.token_bytes(32)
        self._cache: ReviewCache[bytes, TokenReviewStatus] = ReviewCache(
            scope, lambda _: ttl_seconds, max_entries=MAX_CACHED_REVIEWS, name="token-review"
        )

    async def user(self, token: str) -> User:
        """Return the user of a token. Raises BadCredentials for an invalid token, ReviewUnavailable."""
        started = perf_counter()
        key = hmac.digest(self._key, token.encode(errors="surrogateescape"), hashlib.sha256)
        status = self._cache.cached(key)
        if status is not None:
            self._metrics.token_cache_hit(perf_counter() - started)
        else:
            with self._metrics.token_cache_miss():
                try:
                    status = await self._cache.get(key, lambda: self._review(token))
                except WaitEvicted as err:
                    raise ReviewUnavailable(str(err)) from None
        if not status.authenticated:
            raise BadCredentials("the API server does not know the bearer token")
        user = status.user
        return User(user.username, user.uid, tuple(user.groups), user.extra)

    async def _review(self, token: str) -> TokenReviewStatus:
        with self._metrics.token_review():
            review = TokenReview(spec=TokenReviewSpec(token=token))
            status = (await self._sender.send(TOKEN_REVIEWS, review)).status
            if status.error and not status.authenticated:
                # The check itself may have failed: raise, so that the result is not cached.
                raise BadCredentials(f"the API server could not check the bearer token: {status.error}")
            return status


class AccessReviews:
    """Authorizer of requests to this node by SubjectAccessReview."""

    def __init__(
        self,
        client: ApiClient,
        scope: TaskScope,
        node_name: Callable[[], str],
        metrics: ServerMetrics,
        *,
        allowed_ttl_seconds: float,
        denied_ttl_seconds: float,
    ) -> None:
        self._sender = _ReviewSender(client, "authz", metrics)
        self._node_name = node_name

        def ttl_seconds(status: SubjectAccessReviewStatus) -> float:
            return allowed_ttl_seconds if status.allowed else denied_ttl_seconds

        self._cache: ReviewCache[bytes, SubjectAccessReviewStatus] = ReviewCache(
            scope, ttl_seconds, max_entries=MAX_CACHED_REVIEWS, name="access-review"
        )

    async def allowed(self, user: User, attributes: AuthorizerAttributes) -> bool:
        """Return whether the API server allows it. Raises ReviewUnavailable, also if allowed and denied."""
        spec = self._spec(user, attributes)
        key = to_json(spec)

        async def review() -> SubjectAccessReviewStatus:
            return (await self._sender.send(ACCESS_REVIEWS, SubjectAccessReview(spec=spec))).status

        if len(key) > MAX_CACHED_SPEC_BYTES:
            status = await review()
        else:
            try:
                status = await self._cache.get(key, review)
            except WaitEvicted as err:
                raise ReviewUnavailable(str(err)) from None
        if status.allowed and status.denied:
            raise ReviewUnavailable("the API server answered both yes and no")
        return status.allowed

    def _spec(self, user: User, attributes: AuthorizerAttributes) -> SubjectAccessReviewSpec:
        return SubjectAccessReviewSpec(
            resource_attributes=ResourceAttributes(
                verb=attributes.verb,
                version="v1",
                resource="nodes",
                subresource=attributes.subresource,
                name=self._node_name(),
            ),
            user=user.name,
            uid=user.uid,
            groups=list(user.groups),
            extra={name: list(values) for name, values in user.extra.items()},
        )

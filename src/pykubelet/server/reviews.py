"""Asking the API server about the senders of requests: who they are, and what they may do.

Answers are remembered for the configured times, what is being asked already is not asked again, and
no more than a few questions are under way at once, so that strangers with made-up tokens cannot keep the
agent from its own work. Requests that wait for a review are few, too (`answer_cache.MOST_WAITING`): one more
evicts the one that has waited longest, and a review for which no request waits any more is cancelled. Tokens
are kept as keyed hashes only. When the API server gives no answer, `ReviewUnavailable` is raised: the caller
refuses.

Answers that were expensive to get, kept for a while; nobody asks for one that is being fetched.

Bounded: when it is full, the answer that was used longest ago goes. Failures are not kept. Fetching goes
on when the one who began it gives up, as long as another caller waits for the same; without any it is
cancelled, so that nothing of an abandoned question is retained. No more than `most_waiting` callers wait
at a time: one more evicts the one that has waited longest (`WaitEvicted`), so that callers with
worthless questions cannot keep all others out.
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
"""Callers that may wait at a time."""
K = TypeVar("K")
V = TypeVar("V")


class WaitEvicted(Exception):
    """Raised in the caller that has waited longest when too many wait."""


class _Fetch(Generic[V]):
    """An answer that is being fetched, and who waits for it."""

    def __init__(self) -> None:
        self.waiters: set[asyncio.Future[V]] = set()
        self.task: asyncio.Task[None] | None = None

    def abandon(self) -> None:
        """Stop fetching."""
        if self.task is not None:
            self.task.cancel()

    def end(self, answer: V) -> None:
        """Return the answer to all who wait."""
        for waiter in self._pending():
            waiter.set_result(answer)

    def fail(self, err: Exception) -> None:
        """Raise the error in all who wait."""
        for waiter in self._pending():
            waiter.set_exception(err)

    def cancel(self) -> None:
        """Cancel all who still wait."""
        for waiter in self._pending():
            waiter.cancel()

    def _pending(self) -> list[asyncio.Future[V]]:
        return [waiter for waiter in self.waiters if not waiter.done()]


class ReviewCache(Generic[K, V]):
    """Answers by question; `seconds` says for how long an answer is kept (0: not at all)."""

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
        """Who waits, in the order of arrival."""

    def __len__(self) -> int:
        return len(self._known)

    def known(self, question: K) -> V | None:
        """The answer that is remembered, if one is."""
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
        """Return the known answer, or fetch it. Raises WaitEvicted and what `fetch` raises."""
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
        except Exception as err:  # handed to whoever waits, whatever it is
            fetching.fail(err)
        finally:
            fetching.cancel()
            self._forget(question, fetching)

    def _forget(self, question: K, fetching: _Fetch[V]) -> None:
        """Drop a fetch, unless another one of the same question has taken its place."""
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
"""A question with longer texts than this is not remembered."""
_TRIES = 5
_FIRST_PAUSE = 0.5
R = TypeVar("R", bound=HasMetadata)


class ReviewUnavailable(Exception):
    """The API server could not be asked, or did not answer the question."""


class ReviewClient(Protocol):
    """What is needed of a client of the API server (`kube.client.ApiClient` is one)."""

    async def create(self, resource: Resource[R], obj: R, namespace: str = "") -> R:
        """Create an object and give it as the API server made it; raises KubeError."""
        ...


class _Asker:
    """Asks with patience: what the API server puts off is asked again, a few times."""

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
    """Whose a bearer token is; `seconds` is how long an answer, good or bad, is remembered."""

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
        """Give the owner of a token; raises BadCredentials for nobody's token, NoAnswer."""
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
                # Perhaps it could not be checked: ask again the next time.
                raise BadCredentials(f"the API server could not check the bearer token: {status.error}")
            return status


class AccessReviews:
    """Whether somebody may do something to this node."""

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
        """Whether the API server says yes; raises NoAnswer when it says nothing, or yes and no at once."""
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

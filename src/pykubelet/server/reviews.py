"""Asking the API server about the senders of requests: who they are, and what they may do.

Answers are remembered for the configured times, what is being asked already is not asked again, and
no more than a few questions are under way at once, so that strangers with made-up tokens cannot keep the
agent from its own work. Requests that wait for a review are few, too (`answer_cache.MOST_WAITING`): one more
evicts the one that has waited longest, and a review for which no request waits any more is cancelled. Tokens
are kept as keyed hashes only. When the API server gives no answer, `NoAnswer` is raised: the caller refuses.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import secrets
from collections.abc import Callable
from time import perf_counter
from typing import Protocol, TypeVar

from pykubelet.api.authentication import TokenReview, TokenReviewSpec, TokenReviewStatus
from pykubelet.api.authorization import (
    ResourceAttributes,
    SubjectAccessReview,
    SubjectAccessReviewSpec,
    SubjectAccessReviewStatus,
)
from pykubelet.api.meta import to_json
from pykubelet.kube.errors import ApiError, KubeError, ServerError, TooManyRequests
from pykubelet.kube.resources import HasMetadata, Resource
from pykubelet.kube.retrying import Complaints
from pykubelet.logs import get_logger
from pykubelet.server.answer_cache import AnswerCache, WaitEvicted
from pykubelet.server.attributes import Wish
from pykubelet.server.identity import BadCredentials, User
from pykubelet.server.metrics import Review, ServerMetrics
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

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


class NoAnswer(Exception):
    """The API server could not be asked, or did not answer the question."""


class Creator(Protocol):
    """What is needed of a client of the API server (`kube.client.ApiClient` is one)."""

    async def create(self, resource: Resource[R], obj: R, namespace: str = "") -> R:
        """Create an object and give it as the API server made it; raises KubeError."""
        ...


class _Asker:
    """Asks with patience: what the API server puts off is asked again, a few times."""

    def __init__(self, client: Creator, kind: Review, metrics: ServerMetrics) -> None:
        self._client = client
        self._kind: Review = kind
        self._metrics = metrics
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._complaints = Complaints(log, "Failed to ask the API server about a request", review=kind)

    async def ask(self, resource: Resource[R], question: R) -> R:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(LONGEST_SECONDS), self._turns:
                answer = await self._persist(resource, question)
        except (KubeError, TimeoutError) as err:
            self._complaints.failed(err, clock())
            raise NoAnswer(str(err) or f"no answer in {LONGEST_SECONDS:g} s") from err
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

    def __init__(self, client: Creator, scope: TaskScope, seconds: float, metrics: ServerMetrics) -> None:
        self._asker = _Asker(client, "authn", metrics)
        self._metrics = metrics
        self._key = secrets.token_bytes(32)
        self._answers: AnswerCache[bytes, TokenReviewStatus] = AnswerCache(
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
                    raise NoAnswer(str(err)) from None
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
        client: Creator,
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

        self._answers: AnswerCache[bytes, SubjectAccessReviewStatus] = AnswerCache(
            scope, seconds, most=MOST_REMEMBERED, name="access-review"
        )

    async def allowed(self, user: User, wish: Wish) -> bool:
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
                raise NoAnswer(str(err)) from None
        if status.allowed and status.denied:
            raise NoAnswer("the API server answered both yes and no")
        return status.allowed

    def _spec(self, user: User, wish: Wish) -> SubjectAccessReviewSpec:
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

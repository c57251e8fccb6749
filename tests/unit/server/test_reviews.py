"""Reviews by the API server: what is asked, for how long an answer is kept, and what is not kept."""

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import Forbidden, InvalidResponse, KubeError, ServerError, TimedOut
from pykubelet.server.auth.identity import AuthorizerAttributes, BadCredentials, User
from pykubelet.server.auth.reviews import (
    MAX_CACHED_REVIEWS,
    MAX_CONCURRENT_REVIEWS,
    MAX_WAITING,
    AccessReviews,
    ReviewCache,
    ReviewUnavailable,
    TokenReviews,
)
from pykubelet.util.tasks import TaskScope
from tests.unit.server import reviewing
from tests.unit.server.reviewing import Api, metrics, user_info

scope = reviewing.scope


@pytest.mark.looptime
async def test_review_cache_concurrent_gets_fetch_once_until_expiry(scope: TaskScope) -> None:
    asked: list[str] = []
    cache: ReviewCache[str, str] = ReviewCache(scope, lambda answer: len(answer), max_entries=2, name="test")

    async def ask(answer: str) -> str:
        asked.append(answer)
        await asyncio.sleep(0.5)
        return answer

    same = await asyncio.gather(*(cache.get("a", lambda: ask("long")) for _ in range(10)))
    assert (same, asked) == (["long"] * 10, ["long"])
    await asyncio.sleep(3.9)
    assert await cache.get("a", lambda: ask("other")) == "long"
    await asyncio.sleep(0.2)
    assert await cache.get("a", lambda: ask("other")) == "other"
    assert await cache.get("", lambda: ask("")) == ""
    assert cache.cached("") is None
    for key in "bcd":
        await cache.get(key, lambda: ask("x" * 60))
    assert len(cache) == 2
    assert cache.cached("b") is None
    assert cache.cached("d") is not None


@pytest.mark.looptime
async def test_review_cache_cancelled_waiter_others_get_result(scope: TaskScope) -> None:
    cache: ReviewCache[str, int] = ReviewCache(scope, lambda _: 60, max_entries=9, name="test")

    async def ask() -> int:
        await asyncio.sleep(1)
        return 7

    async with TaskScope() as others:
        first = others.start(cache.get("q", ask), name="first")
        second = others.start(cache.get("q", ask), name="second")
        await asyncio.sleep(0.1)
        first.cancel()
        assert await second == 7


@pytest.mark.looptime
async def test_review_cache_failure_reaches_all_waiters_not_cached(scope: TaskScope) -> None:
    cache: ReviewCache[str, int] = ReviewCache(scope, lambda _: 60, max_entries=9, name="test")

    async def fail() -> int:
        await asyncio.sleep(1)
        raise ReviewUnavailable("down")

    async def ask() -> int:
        return 7

    outcomes = await asyncio.gather(*(cache.get("q", fail) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ReviewUnavailable] * 3
    assert await cache.get("q", ask) == 7


@pytest.mark.looptime
async def test_token_reviews_same_token_reviewed_once_per_ttl(scope: TaskScope) -> None:
    api = Api(authenticated=True, user=user_info("jane"))
    reviews = TokenReviews(api, scope, 120, metrics())
    users = await asyncio.gather(*(reviews.user("secret") for _ in range(5)))
    assert users == [User("jane", "1", ("g",), {"k": ["v"]})] * 5
    assert [review.spec.token for review in api.asked] == ["secret"]
    await asyncio.sleep(119)
    await reviews.user("secret")
    assert len(api.asked) == 1
    await asyncio.sleep(2)
    await reviews.user("secret")
    assert len(api.asked) == 2
    assert "secret" not in repr(vars(reviews)) + repr(vars(reviews._cache))


@pytest.mark.looptime
async def test_token_reviews_rejected_token_cached_review_error_not_cached(scope: TaskScope) -> None:
    api = Api()
    reviews = TokenReviews(api, scope, 120, metrics())
    for _ in range(3):
        with pytest.raises(BadCredentials):
            await reviews.user("bad")
    assert len(api.asked) == 1
    api.status = {"error": "the issuer cannot be reached"}
    for _ in range(3):
        with pytest.raises(BadCredentials, match="issuer"):
            await reviews.user("odd")
    assert len(api.asked) == 4


@pytest.mark.looptime
async def test_token_reviews_zero_ttl_not_cached(scope: TaskScope) -> None:
    api = Api(authenticated=True)
    reviews = TokenReviews(api, scope, 0, metrics())
    await reviews.user("t")
    await reviews.user("t")
    assert len(api.asked) == 2


@pytest.mark.looptime
async def test_token_reviews_flood_of_tokens_bounded_cache(scope: TaskScope) -> None:
    reviews = TokenReviews(Api(), scope, 10**6, metrics())
    for start in range(0, MAX_CACHED_REVIEWS + 200, 20):
        await asyncio.gather(*(reviews.user(f"t{start + n}") for n in range(20)), return_exceptions=True)
    assert len(reviews._cache) == MAX_CACHED_REVIEWS


class Token(str):
    """A token whose memory can be watched."""

    __slots__ = ("__weakref__",)


class SilentApi(ApiClient):
    """An API server that never responds to a review, and retains none."""

    def __init__(self) -> None:
        self.open = 0

    async def create(self, resource: Any, obj: Any, namespace: str = "") -> Any:
        self.open += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.open -= 1


@pytest.mark.looptime
async def test_token_reviews_abandoned_review_cancelled_and_token_released(scope: TaskScope) -> None:
    api = SilentApi()
    reviews = TokenReviews(api, scope, 60, metrics())
    watched: list[weakref.ref[Token]] = []

    def begin(clients: TaskScope, token: Token) -> None:
        watched.append(weakref.ref(token))
        clients.start(reviews.user(token), name="client")

    async with TaskScope() as clients:
        for number in range(200):
            begin(clients, Token(f"token-{number}"))
        await asyncio.sleep(1)
        assert api.open == MAX_CONCURRENT_REVIEWS
        assert all(one() is not None for one in watched)
    await asyncio.sleep(0.1)
    gc.collect()
    assert api.open == 0
    assert [one() for one in watched if one() is not None] == []


@pytest.mark.looptime
@pytest.mark.parametrize("same", [False, True])
async def test_token_reviews_too_many_waiting_longest_evicted(scope: TaskScope, same: bool) -> None:
    reviews = TokenReviews(SilentApi(), scope, 60, metrics())
    async with TaskScope() as clients:
        waiting = []
        for number in range(MAX_WAITING + 40):
            user = reviews.user("same" if same else f"token-{number}")
            waiting.append(clients.start(refused(user), name="client"))
        await asyncio.sleep(1)
        assert [task.done() for task in waiting] == [True] * 40 + [False] * MAX_WAITING


async def refused(user: Coroutine[Any, Any, User]) -> str:
    with pytest.raises(ReviewUnavailable) as caught:
        await user
    return str(caught.value)


@pytest.mark.looptime
async def test_review_cache_get_after_cancelled_get_fetched_again(scope: TaskScope) -> None:
    cache: ReviewCache[str, int] = ReviewCache(scope, lambda _: 60, max_entries=9, name="test")

    async def fetch() -> int:
        await asyncio.sleep(1)
        return 7

    first = asyncio.create_task(cache.get("q", fetch))
    await asyncio.sleep(0.5)
    first.cancel()
    second = asyncio.create_task(cache.get("q", fetch))
    await asyncio.wait([first])
    assert await second == 7


def access(api: Api, scope: TaskScope, node: str = "n1") -> AccessReviews:
    return AccessReviews(api, scope, lambda: node, metrics(), allowed_ttl_seconds=300, denied_ttl_seconds=30)


@pytest.mark.looptime
async def test_access_reviews_allowed_and_denied_cached_for_own_ttl(scope: TaskScope) -> None:
    api = Api(allowed=True)
    reviews = access(api, scope)
    user, wish = User("jane", "1", ("g",), {"k": ["v"]}), AuthorizerAttributes("get", "proxy")
    assert await reviews.allowed(user, wish)
    spec = api.asked[0].spec
    assert (spec.user, spec.uid, spec.groups, spec.extra) == ("jane", "1", ["g"], {"k": ["v"]})
    wanted = spec.resource_attributes
    assert (wanted.verb, wanted.version, wanted.resource, wanted.subresource, wanted.name, wanted.group) == (
        *("get", "v1", "nodes", "proxy", "n1"),
        "",
    )
    api.status = {"allowed": False}
    await asyncio.sleep(299)
    assert await reviews.allowed(user, wish)
    await asyncio.sleep(2)
    assert not await reviews.allowed(user, wish)
    api.status = {"allowed": True}
    await asyncio.sleep(28)
    assert not await reviews.allowed(user, wish)
    await asyncio.sleep(2)
    assert await reviews.allowed(user, wish)
    assert len(api.asked) == 3
    # Somebody else, or something else, is another question.
    await reviews.allowed(User("jane", "2", ("g",), {"k": ["v"]}), wish)
    await reviews.allowed(user, AuthorizerAttributes("create", "proxy"))
    assert len(api.asked) == 5


@pytest.mark.looptime
async def test_access_reviews_contradictory_status_raises(scope: TaskScope) -> None:
    with pytest.raises(ReviewUnavailable):
        await access(Api(allowed=True, denied=True), scope).allowed(
            User("x"), AuthorizerAttributes("get", "proxy")
        )


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("errors", "asked", "fails"),
    [
        ([ServerError(500), ServerError(503)], 3, False),
        ([ServerError(500)] * 5, 5, True),
        ([Forbidden(403)], 1, True),
        ([TimedOut("https://x", "slow")], 1, True),
        ([InvalidResponse("?")], 1, True),
    ],
)
async def test_access_reviews_server_error_is_retried(
    scope: TaskScope, errors: list[KubeError], asked: int, fails: bool
) -> None:
    api = Api(allowed=True)
    api.errors = list(errors)
    reviews = access(api, scope)
    if fails:
        with pytest.raises(ReviewUnavailable):
            await reviews.allowed(User("x"), AuthorizerAttributes("get", "proxy"))
    else:
        assert await reviews.allowed(User("x"), AuthorizerAttributes("get", "proxy"))
    assert len(api.asked) == asked
    api.errors = []
    assert await reviews.allowed(User("x"), AuthorizerAttributes("get", "proxy"))


@pytest.mark.looptime
async def test_access_reviews_api_server_silent_times_out_after_30_seconds(scope: TaskScope) -> None:
    class Silent(Api):
        async def create(self, resource: Any, obj: Any, namespace: str = "") -> Any:
            await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    before = loop.time()
    with pytest.raises(ReviewUnavailable):
        await access(Silent(), scope).allowed(User("x"), AuthorizerAttributes("get", "proxy"))
    assert 29 < loop.time() - before < 31

"""Who is who and who may what: tables, and the caches against a clock that jumps."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pykubelet.api.authentication import TokenReview, UserInfo
from pykubelet.api.authorization import SubjectAccessReview
from pykubelet.config.types import KubeletConfiguration
from pykubelet.kube.errors import BadAnswer, Forbidden, KubeError, ServerError, TimedOut
from pykubelet.server.access import AccessProblem, make_authenticator, make_judge
from pykubelet.server.answer_cache import AnswerCache
from pykubelet.server.attributes import Wish, wishes
from pykubelet.server.authentication import Authenticator
from pykubelet.server.authorization import AlwaysAllow, authorize
from pykubelet.server.identity import (
    BadCredentials,
    Shown,
    User,
    bearer_token,
    certificate_user,
    websocket_token,
)
from pykubelet.server.metrics import ServerMetrics, path_label
from pykubelet.server.paths import is_plain
from pykubelet.server.refused import Refused
from pykubelet.server.reviews import MOST_REMEMBERED, AccessReviews, NoAnswer, TokenReviews
from pykubelet.tasks import TaskScope


@pytest.mark.parametrize(
    ("method", "path", "verb", "subresources"),
    [
        ("GET", "/pods", "get", ["pods", "proxy"]),
        ("GET", "/pods/x", "get", ["pods", "proxy"]),
        ("GET", "/podsy", "get", ["proxy"]),
        ("GET", "/runningpods/", "get", ["pods", "proxy"]),
        ("GET", "/runningpods", "get", ["pods", "proxy"]),
        ("GET", "/healthz", "get", ["healthz", "proxy"]),
        ("GET", "/healthz/syncloop", "get", ["healthz", "proxy"]),
        ("GET", "/configz", "get", ["configz", "proxy"]),
        ("GET", "/stats/summary", "get", ["stats"]),
        ("GET", "/metrics", "get", ["metrics"]),
        ("GET", "/metrics/probes", "get", ["metrics"]),
        ("GET", "/metricsx", "get", ["proxy"]),
        ("GET", "/logs", "get", ["log"]),
        ("GET", "/logs/kern.log", "get", ["log"]),
        ("POST", "/checkpoint/a/b/c", "create", ["checkpoint"]),
        ("GET", "/statusz", "get", ["statusz"]),
        ("GET", "/flagz", "get", ["configz"]),
        ("POST", "/exec/a/b/c", "create", ["proxy"]),
        ("GET", "/exec/a/b/c", "get", ["proxy"]),
        ("POST", "/run/a/b/c", "create", ["proxy"]),
        ("GET", "/containerLogs/a/b/c", "get", ["proxy"]),
        ("GET", "/debug/pprof/", "get", ["proxy"]),
        ("PUT", "/manifests/x", "update", ["proxy"]),
        ("PATCH", "/x", "patch", ["proxy"]),
        ("DELETE", "/manifests/x", "delete", ["proxy"]),
        ("HEAD", "/pods", "", ["pods", "proxy"]),
        ("OPTIONS", "/", "", ["proxy"]),
        ("BREW", "/pot", "", ["proxy"]),
    ],
)
def test_what_a_path_asks_for(method: str, path: str, verb: str, subresources: list[str]) -> None:
    assert wishes(method, path) == [Wish(verb, name) for name in subresources]


@given(st.text(), st.text())
def test_every_request_asks_for_something(method: str, path: str) -> None:
    assert wishes(method, path)


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer abc", "abc"),
        ("  BEARER abc  ", "abc"),
        ("Bearer abc def", "abc"),
        ("Bearer  abc", ""),
        ("Bearer", ""),
        ("Bearer ", ""),
        ("Basic abc", ""),
        ("", ""),
        ("Bearerabc", ""),
    ],
)
def test_bearer_tokens(header: str, token: str) -> None:
    assert bearer_token(header) == token


def hidden(token: str) -> str:
    return "base64url.bearer.authorization.k8s.io." + base64.urlsafe_b64encode(
        token.encode()
    ).decode().rstrip("=")


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ([f"{hidden('tök')}, v4.channel.k8s.io"], "tök"),
        (["v4.channel.k8s.io", hidden("abcd")], "abcd"),
        (["v4.channel.k8s.io"], ""),
        ([], ""),
        ([f"v4.channel.k8s.io,{hidden('')}"], ""),
    ],
)
def test_tokens_among_websocket_protocols(headers: list[str], token: str) -> None:
    assert websocket_token(headers) == token


@pytest.mark.parametrize(
    "headers",
    [
        [hidden("abc")],
        [hidden("a"), hidden("b"), "v4.channel.k8s.io"],
        ["base64url.bearer.authorization.k8s.io.!!!, x"],
        ["base64url.bearer.authorization.k8s.io._w, x"],
        ["base64url.bearer.authorization.k8s.io.é, x"],
    ],
)
def test_unusable_tokens_among_websocket_protocols(headers: list[str]) -> None:
    with pytest.raises(BadCredentials):
        websocket_token(headers)


UID = "1.3.6.1.4.1.57683.2"


def test_the_user_of_a_certificate() -> None:
    subject = (
        (("organizationName", "system:masters"),),
        (("commonName", "first"), ("organizationName", "other")),
        (("commonName", "admin"),),
        ((UID, "42"),),
    )
    user = certificate_user(subject, "ab" * 32)
    assert user is not None
    assert (user.name, user.groups, user.uid) == ("admin", ("system:masters", "other"), "42")
    assert user.extra == {"authentication.kubernetes.io/credential-id": ["X509SHA256=" + "ab" * 32]}
    assert certificate_user(((("organizationName", "x"),),), "") is None
    assert certificate_user(((("commonName", ""),),), "") is None
    for uids in (["", ""], ["1", "2"], [""]):
        with pytest.raises(BadCredentials):
            certificate_user(((("commonName", "x"),), *(((UID, uid),) for uid in uids)), "")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/pods",
        "/runningpods/",
        "/containerLogs/a/b/c",
        "/logs/a%20b.log",
        "/x/%C3%A9",
        "/logs/a..b",
        "/...",
    ],
)
def test_plain_paths(path: str) -> None:
    assert is_plain(path)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "pods",
            "*",
            "//",
            "//pods",
            "/pods//x",
            "/..",
            "/logs/../etc",
            "/logs/%2e%2e/etc",
            "/logs/.%2E/x",
        ),
        *("/pods%2Fx", "/pods%2fx", "/logs/a%00b", "/logs/a%0ab", "/logs/%5c..%5cx", "/logs/a\\b", "/./pods"),
        *("/x/%FF%FE", "/x/%7f", "/pods/.", "http://x/pods"),
    ],
)
def test_paths_that_could_be_read_in_two_ways(path: str) -> None:
    assert not is_plain(path)


@given(st.text())
def test_labels_of_metrics_are_few(path: str) -> None:
    assert path_label(f"/{path}") == "other" or len(path) < 20


def test_labels_of_metrics() -> None:
    assert [path_label(path) for path in ("/pods", "/exec/a/b/c", "/metrics", "/metrics/probes/x")] == [
        *("pods", "exec", "metrics", "metrics/probes")
    ]
    assert [path_label(path) for path in ("/metrics/nonsense", "/", "/PODS", "pods2")] == ["other"] * 4


# The caches.


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope


@pytest.mark.looptime
async def test_answers_are_kept_for_their_time_and_asked_for_once(scope: TaskScope) -> None:
    asked: list[str] = []
    cache: AnswerCache[str, str] = AnswerCache(scope, lambda answer: len(answer), most=2, name="test")

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
    assert cache.known("") is None
    for key in "bcd":
        await cache.get(key, lambda: ask("x" * 60))
    assert len(cache) == 2
    assert cache.known("b") is None
    assert cache.known("d") is not None


@pytest.mark.looptime
async def test_whoever_gives_up_does_not_take_the_answer_from_others(scope: TaskScope) -> None:
    cache: AnswerCache[str, int] = AnswerCache(scope, lambda _: 60, most=9, name="test")

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
async def test_failures_reach_everybody_and_are_not_kept(scope: TaskScope) -> None:
    cache: AnswerCache[str, int] = AnswerCache(scope, lambda _: 60, most=9, name="test")

    async def fail() -> int:
        await asyncio.sleep(1)
        raise NoAnswer("down")

    async def ask() -> int:
        return 7

    outcomes = await asyncio.gather(*(cache.get("q", fail) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NoAnswer] * 3
    assert await cache.get("q", ask) == 7


# Reviews.


class Api:
    """A client of an API server that answers as told, after a second."""

    def __init__(self, **status: Any) -> None:
        self.status = status
        self.errors: list[KubeError] = []
        self.asked: list[Any] = []

    async def create(self, resource: Any, obj: Any, namespace: str = "") -> Any:
        self.asked.append(obj)
        await asyncio.sleep(1)
        if self.errors:
            raise self.errors.pop(0)
        if isinstance(obj, TokenReview):
            return TokenReview(spec=obj.spec, status=type(obj.status)(**self.status))
        return SubjectAccessReview(spec=obj.spec, status=type(obj.status)(**self.status))


def metrics() -> ServerMetrics:
    return ServerMetrics(CollectorRegistry())


def user_info(name: str) -> Any:
    return UserInfo(username=name, uid="1", groups=["g"], extra={"k": ["v"]})


@pytest.mark.looptime
async def test_tokens_are_reviewed_once_in_their_time(scope: TaskScope) -> None:
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
    assert "secret" not in repr(vars(reviews)) + repr(vars(reviews._answers))


@pytest.mark.looptime
async def test_bad_tokens_are_remembered_but_not_those_that_could_not_be_checked(scope: TaskScope) -> None:
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
async def test_no_ttl_means_no_memory(scope: TaskScope) -> None:
    api = Api(authenticated=True)
    reviews = TokenReviews(api, scope, 0, metrics())
    await reviews.user("t")
    await reviews.user("t")
    assert len(api.asked) == 2


@pytest.mark.looptime
async def test_a_flood_of_tokens_costs_bounded_memory(scope: TaskScope) -> None:
    reviews = TokenReviews(Api(), scope, 10**6, metrics())
    for start in range(0, MOST_REMEMBERED + 200, 20):
        await asyncio.gather(*(reviews.user(f"t{start + n}") for n in range(20)), return_exceptions=True)
    assert len(reviews._answers) == MOST_REMEMBERED


def access(api: Api, scope: TaskScope, node: str = "n1") -> AccessReviews:
    return AccessReviews(api, scope, lambda: node, metrics(), yes_seconds=300, no_seconds=30)


@pytest.mark.looptime
async def test_yes_and_no_are_remembered_for_different_times(scope: TaskScope) -> None:
    api = Api(allowed=True)
    reviews = access(api, scope)
    user, wish = User("jane", "1", ("g",), {"k": ["v"]}), Wish("get", "proxy")
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
    await reviews.allowed(user, Wish("create", "proxy"))
    assert len(api.asked) == 5


@pytest.mark.looptime
async def test_both_yes_and_no_is_no_answer(scope: TaskScope) -> None:
    with pytest.raises(NoAnswer):
        await access(Api(allowed=True, denied=True), scope).allowed(User("x"), Wish("get", "proxy"))


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("errors", "asked", "fails"),
    [
        ([ServerError(500), ServerError(503)], 3, False),
        ([ServerError(500)] * 5, 5, True),
        ([Forbidden(403)], 1, True),
        ([TimedOut("https://x", "slow")], 1, True),
        ([BadAnswer("?")], 1, True),
    ],
)
async def test_what_is_put_off_is_asked_again(
    scope: TaskScope, errors: list[KubeError], asked: int, fails: bool
) -> None:
    api = Api(allowed=True)
    api.errors = list(errors)
    reviews = access(api, scope)
    if fails:
        with pytest.raises(NoAnswer):
            await reviews.allowed(User("x"), Wish("get", "proxy"))
    else:
        assert await reviews.allowed(User("x"), Wish("get", "proxy"))
    assert len(api.asked) == asked
    api.errors = []
    assert await reviews.allowed(User("x"), Wish("get", "proxy"))


@pytest.mark.looptime
async def test_an_api_server_that_never_answers_is_waited_for_half_a_minute(scope: TaskScope) -> None:
    class Silent(Api):
        async def create(self, resource: Any, obj: Any, namespace: str = "") -> Any:
            await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    before = loop.time()
    with pytest.raises(NoAnswer):
        await access(Silent(), scope).allowed(User("x"), Wish("get", "proxy"))
    assert 29 < loop.time() - before < 31


# Putting it together.


class Rules:
    def __init__(self, *allowed: str, broken: str = "") -> None:
        self.allowed_names, self.broken, self.asked = allowed, broken, list[str]()

    async def allowed(self, user: User, wish: Wish) -> bool:
        self.asked.append(wish.subresource)
        if wish.subresource == self.broken:
            raise NoAnswer("down")
        return wish.subresource in self.allowed_names


@pytest.mark.parametrize(
    ("rules", "status", "text", "asked"),
    [
        (Rules("pods"), 0, "", ["pods"]),
        (Rules("proxy"), 0, "", ["pods", "proxy"]),
        (
            Rules(),
            403,
            "Forbidden (user=jane, verb=get, resource=nodes, subresource(s)=[pods proxy])\n",
            ["pods", "proxy"],
        ),
        (
            Rules("proxy", broken="pods"),
            500,
            "Authorization error (user=jane, verb=get, resource=nodes, subresource=pods)",
            ["pods"],
        ),
    ],
)
async def test_any_one_wish_is_enough(rules: Rules, status: int, text: str, asked: list[str]) -> None:
    try:
        await authorize(rules, User("jane"), wishes("GET", "/pods"))
        outcome = (0, "")
    except Refused as refusal:
        outcome = (refusal.status, refusal.text)
    assert (outcome, rules.asked) == ((status, text), asked)


async def test_always_allow() -> None:
    await authorize(AlwaysAllow(), User("anybody"), wishes("POST", "/run/a/b/c"))


@pytest.mark.looptime
async def test_the_ways_to_be_known(scope: TaskScope) -> None:
    api = Api(authenticated=True, user=user_info("jane"))
    tokens = TokenReviews(api, scope, 60, metrics())
    strict, lax = Authenticator(None, tokens, anonymous=False), Authenticator(None, tokens, anonymous=True)
    jane = await strict.user(Shown(authorization="Bearer t"))
    assert jane is not None
    assert jane.groups == ("g", "system:authenticated")
    assert await strict.user(Shown(protocols=[hidden("t"), "v4"])) == jane
    assert await strict.user(Shown()) is None
    nobody = await lax.user(Shown())
    assert nobody == User("system:anonymous", groups=("system:unauthenticated",))
    api.status = {}
    # A bad token is worse than none.
    assert await lax.user(Shown(authorization="Bearer bad")) is None
    api.errors = [TimedOut("x", "down")]
    assert await lax.user(Shown(authorization="Bearer unknown")) is None
    # Without the means to check tokens they are as good as nothing.
    assert await Authenticator(None, None, anonymous=True).user(Shown(authorization="Bearer t")) == nobody


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"authentication.webhook.enabled": True}, "needs an API server"),
        ({}, "nobody could use the API"),
        ({"authentication.x509.client_ca_file": "/nowhere"}, "/nowhere cannot be used: No such file"),
        ({"authentication.x509.client_ca_file": "/etc/hostname"}, "no certificate in PEM"),
        ({"authentication.anonymous.enabled": True}, "authorization.mode Webhook needs an API server"),
    ],
)
async def test_configurations_that_cannot_work_are_explained(
    scope: TaskScope, change: dict[str, Any], words: str
) -> None:
    config = KubeletConfiguration()
    config.authentication.webhook.enabled = False
    for path, value in change.items():
        *parents, name = path.split(".")
        place: Any = config
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, name, value)
    with pytest.raises(AccessProblem, match=words):
        make_authenticator(config, None, scope, metrics())
        make_judge(config, None, lambda: "n", scope, metrics())

"""Who is who and who may what: tables of paths, tokens and rules, and how they are put together."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.apiserver.errors import TimedOut
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.server.auth.identity import (
    AuthorizerAttributes,
    BadCredentials,
    HttpError,
    RequestCredentials,
    User,
    bearer_token,
    certificate_user,
    required_attributes,
    websocket_token,
)
from pykubelet.server.auth.request_auth import (
    AlwaysAllow,
    AuthConfigError,
    Authenticator,
    authorize,
    make_authenticator,
    make_authorizer,
)
from pykubelet.server.auth.reviews import ReviewUnavailable, TokenReviews
from pykubelet.server.metrics.server_metrics import path_label
from pykubelet.server.pipeline import is_plain
from pykubelet.util.tasks import TaskScope
from tests.unit.server import reviewing
from tests.unit.server.reviewing import Api, metrics, user_info

scope = reviewing.scope


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
def test_required_attributes_path_returns_verb_and_subresources(
    method: str, path: str, verb: str, subresources: list[str]
) -> None:
    assert required_attributes(method, path) == [AuthorizerAttributes(verb, name) for name in subresources]


@given(st.text(), st.text())
def test_required_attributes_any_request_not_empty(method: str, path: str) -> None:
    assert required_attributes(method, path)


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
def test_bearer_token_header_returns_token(header: str, token: str) -> None:
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
def test_websocket_token_protocol_header_returns_token(headers: list[str], token: str) -> None:
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
def test_websocket_token_invalid_protocols_raise(headers: list[str]) -> None:
    with pytest.raises(BadCredentials):
        websocket_token(headers)


UID = "1.3.6.1.4.1.57683.2"


def test_certificate_user_subject_returns_name_groups_and_uid() -> None:
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
def test_is_plain_unambiguous_path_is_true(path: str) -> None:
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
def test_is_plain_ambiguous_path_is_false(path: str) -> None:
    assert not is_plain(path)


@given(st.text())
def test_path_label_any_path_is_bounded(path: str) -> None:
    assert path_label(f"/{path}") == "other" or len(path) < 20


def test_path_label_unknown_path_is_other() -> None:
    assert [path_label(path) for path in ("/pods", "/exec/a/b/c", "/metrics", "/metrics/probes/x")] == [
        *("pods", "exec", "metrics", "metrics/probes")
    ]
    assert [path_label(path) for path in ("/metrics/nonsense", "/", "/PODS", "pods2")] == ["other"] * 4


# Putting it together.


class Rules:
    def __init__(self, *allowed: str, broken: str = "") -> None:
        self.allowed_names, self.broken, self.asked = allowed, broken, list[str]()

    async def allowed(self, user: User, wish: AuthorizerAttributes) -> bool:
        self.asked.append(wish.subresource)
        if wish.subresource == self.broken:
            raise ReviewUnavailable("down")
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
async def test_authorize_any_allowed_attribute_suffices(
    rules: Rules, status: int, text: str, asked: list[str]
) -> None:
    try:
        await authorize(rules, User("jane"), required_attributes("GET", "/pods"))
        outcome = (0, "")
    except HttpError as refusal:
        outcome = (refusal.status, refusal.text)
    assert (outcome, rules.asked) == ((status, text), asked)


async def test_authorize_always_allow_permits_all() -> None:
    await authorize(AlwaysAllow(), User("anybody"), required_attributes("POST", "/run/a/b/c"))


@pytest.mark.looptime
async def test_authenticator_credentials_return_user(scope: TaskScope) -> None:
    api = Api(authenticated=True, user=user_info("jane"))
    tokens = TokenReviews(api, scope, 60, metrics())
    strict, lax = Authenticator(None, tokens, anonymous=False), Authenticator(None, tokens, anonymous=True)
    jane = await strict.user(RequestCredentials(authorization="Bearer t"))
    assert jane is not None
    assert jane.groups == ("g", "system:authenticated")
    assert await strict.user(RequestCredentials(protocols=[hidden("t"), "v4"])) == jane
    assert await strict.user(RequestCredentials()) is None
    nobody = await lax.user(RequestCredentials())
    assert nobody == User("system:anonymous", groups=("system:unauthenticated",))
    api.status = {}
    # A bad token is worse than none.
    assert await lax.user(RequestCredentials(authorization="Bearer bad")) is None
    api.errors = [TimedOut("x", "down")]
    assert await lax.user(RequestCredentials(authorization="Bearer unknown")) is None
    # Without the means to check tokens they are as good as nothing.
    assert (
        await Authenticator(None, None, anonymous=True).user(RequestCredentials(authorization="Bearer t"))
        == nobody
    )


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
async def test_make_authenticator_invalid_config_raises_with_reason(
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
    with pytest.raises(AuthConfigError, match=words):
        make_authenticator(config, FeatureGates(), None, scope, metrics())
        make_authorizer(config, None, lambda: "n", scope, metrics())

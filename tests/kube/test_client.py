import asyncio
import socket
import ssl
import time
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from pykubelet.api.event import Event
from pykubelet.api.lease import Lease, LeaseSpec
from pykubelet.api.meta import ObjectMeta
from pykubelet.kube.access import Access
from pykubelet.kube.client import ApiClient, PatchKind
from pykubelet.kube.clients import Limits, make_clients
from pykubelet.kube.errors import (
    AlreadyExists,
    ApiError,
    BadAnswer,
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    ServerError,
    TimedOut,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from pykubelet.kube.metrics import RestMetrics
from pykubelet.kube.rate import TokenBucket
from pykubelet.kube.resolver import SharedResolver
from pykubelet.kube.resources import EVENTS, LEASES, NODES, PODS, SERVICE_ACCOUNTS
from pykubelet.kube.tls import client_context
from pykubelet.kube.transport import USER_AGENT, Transport, _new_socket
from tests.kube.conftest import Opener
from tests.kube.servers import (
    Handler,
    Server,
    answer,
    cut,
    hang,
    listing,
    refuse,
    reset,
    serving,
    stream,
    text,
)

POD = {"metadata": {"name": "web", "namespace": "default", "uid": "u1", "resourceVersion": "7"}}


async def test_get(server: Server, client: ApiClient) -> None:
    server.say(answer(POD))
    pod = await client.get(PODS, "web", "default")
    assert (pod.full_name, pod.uid) == ("default/web", "u1")
    (seen,) = server.seen
    assert (seen.method, seen.path) == ("GET", "/api/v1/namespaces/default/pods/web")
    assert seen.header("Authorization") == "Bearer t0k3n"
    assert seen.header("User-Agent") == USER_AGENT
    assert seen.header("Accept") == "application/json"
    assert "kubelet/v1.36.0 (linux/" in USER_AGENT
    assert USER_AGENT.endswith(") pykubelet")


async def test_verbs_reach_their_places(server: Server, client: ApiClient) -> None:
    server.default = answer(POD)
    lease = Lease(
        metadata=ObjectMeta(name="one", namespace="kube-node-lease", resource_version="5"),
        spec=LeaseSpec(holder_identity="one"),
    )
    await client.create(LEASES, lease, "kube-node-lease")
    await client.update(LEASES, lease)
    await client.patch(NODES, "one", {"status": {"x": 1}}, subresource="status")
    await client.patch(PODS, "web", [{"op": "remove", "path": "/x"}], "default", kind=PatchKind.JSON)
    await client.patch(PODS, "web", {"a": None}, "default", kind=PatchKind.MERGE)
    await client.delete(PODS, "web", "default", grace_period_seconds=0, uid="u1")
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    assert [(s.method, s.path, s.header("Content-Type")) for s in server.seen] == [
        ("POST", leases, "application/json"),
        ("PUT", f"{leases}/one", "application/json"),
        ("PATCH", "/api/v1/nodes/one/status", "application/strategic-merge-patch+json"),
        ("PATCH", "/api/v1/namespaces/default/pods/web", "application/json-patch+json"),
        ("PATCH", "/api/v1/namespaces/default/pods/web", "application/merge-patch+json"),
        ("DELETE", "/api/v1/namespaces/default/pods/web", "application/json"),
    ]
    bodies = [s.json for s in server.seen]
    assert bodies[0]["kind"] == "Lease"
    assert bodies[0]["apiVersion"] == "coordination.k8s.io/v1"
    assert bodies[1]["metadata"]["resourceVersion"] == "5"
    assert bodies[2:5] == [{"status": {"x": 1}}, [{"op": "remove", "path": "/x"}], {"a": None}]
    assert bodies[5] == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": 0,
        "preconditions": {"uid": "u1"},
    }


async def test_list_pages(server: Server, client: ApiClient) -> None:
    server.say(listing([POD], "9", "more"), listing([], "9"))
    params = [("limit", "1"), ("fieldSelector", "spec.nodeName=one,status.phase!=Failed")]
    first = await client.list(PODS, params=params)
    assert ([p.full_name for p in first.items], first.resource_version) == (["default/web"], "9")
    assert (await client.list(PODS, params=[("continue", first.continues)])).items == []
    assert server.seen[0].query == {"limit": "1", "fieldSelector": "spec.nodeName=one,status.phase!=Failed"}
    assert server.seen[1].query == {"continue": "more"}


async def test_what_go_writes_as_null_is_absent(server: Server, client: ApiClient) -> None:
    images = {"images": [{"names": None, "sizeBytes": 3}], "conditions": None}
    server.say(answer({"metadata": {"name": "one", "labels": None}, "spec": None, "status": images}))
    node = await client.get(NODES, "one")
    # An image without names is written as null, as by Go; an empty list would be another status.
    assert (node.metadata.labels, node.spec.taints) == ({}, [])
    assert not node.status.images[0].names


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "BadRequest", BadRequest),
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (410, "Expired", Gone),
        (410, "Gone", Gone),
        (422, "Invalid", Invalid),
        (429, "TooManyRequests", TooManyRequests),
        (500, "InternalError", ServerError),
        (503, "ServiceUnavailable", ServerError),
        (418, "Teapot", ApiError),
    ],
)
async def test_refusals(
    server: Server, client: ApiClient, code: int, reason: str, kind: type[ApiError]
) -> None:
    server.default = refuse(code, reason, 'pods "web" said no', name="web", causes=[{"reason": "X"}])
    with pytest.raises(ApiError) as caught:
        await client.get(PODS, "web", "default")
    err = caught.value
    assert type(err) is kind
    assert (err.code, err.reason, err.message) == (code, reason, 'pods "web" said no')
    assert err.details.name == "web"
    assert err.details.has_cause("X")
    assert str(err).startswith(f"get /api/v1/namespaces/default/pods/web: {code} {reason}: pods")
    assert "\n" not in str(err)


async def test_a_refusal_that_is_not_a_status_is_quoted(server: Server, client: ApiClient) -> None:
    server.say(text("<html>\nBad   Gateway" + "x" * 5000, 502))
    with pytest.raises(ServerError, match=r"502: <html> Bad Gatewayx+$") as caught:
        await client.get(PODS, "web", "default")
    assert len(str(caught.value)) < 300


FORBIDDEN = 'pods is forbidden: User "system:node:one" cannot {} resource'


@pytest.mark.parametrize(
    ("ask", "rule"),
    [
        (lambda c: c.list(PODS), 'apiGroups: [""], resources: ["pods"], verbs: ["list"]'),
        (
            lambda c: c.patch(NODES, "one", {}, subresource="status"),
            'a ClusterRole with the rule {apiGroups: [""], resources: ["nodes/status"], verbs: ["patch"]}',
        ),
        (
            lambda c: c.get(LEASES, "one", "kube-node-lease"),
            "a Role in namespace kube-node-lease or a ClusterRole with the rule "
            '{apiGroups: ["coordination.k8s.io"], resources: ["leases"], verbs: ["get"]}',
        ),
        (lambda c: _open_watch(c), 'resources: ["pods"], verbs: ["watch"]'),
        (
            lambda c: c.create_below(
                SERVICE_ACCOUNTS, "default", "default", "token", Event(), api_version="v1"
            ),
            'resources: ["serviceaccounts/token"], verbs: ["create"]',
        ),
    ],
)
async def test_forbidden_names_the_rule(server: Server, client: ApiClient, ask: Any, rule: str) -> None:
    server.say(refuse(403, "Forbidden", FORBIDDEN.format("do")))
    with pytest.raises(Forbidden) as caught:
        await ask(client)
    assert rule in str(caught.value)
    assert "system:node:one" in str(caught.value)


async def test_forbidden_by_the_node_authorizer(server: Server, client: ApiClient) -> None:
    server.say(refuse(403, "Forbidden", "no relationship found between node 'one' and this object"))
    with pytest.raises(Forbidden, match=r"only use objects that pods bound to it refer to"):
        await client.get(PODS, "web", "default")


async def _open_watch(client: ApiClient) -> None:
    async with client.watch(PODS, "", [], seconds=5) as chunks:
        async for _ in chunks:
            pass


async def test_retry_after_is_obeyed(server: Server, client: ApiClient) -> None:
    server.say(
        refuse(429, "TooManyRequests", "later", {"Retry-After": "1"}),
        refuse(503, "ServiceUnavailable", "", {"Retry-After": "0"}),
        answer(POD),
    )
    begin = time.monotonic()
    assert (await client.get(PODS, "web", "default")).uid == "u1"
    assert 1 <= time.monotonic() - begin < 3
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("code", "wait", "asked"), [(429, "31", 1), (503, "", 1), (429, "0", 3), (409, "0", 1)]
)
async def test_when_a_retry_is_the_callers(
    server: Server, access: Access, opened: Opener, code: int, wait: str, asked: int
) -> None:
    server.default = refuse(code, "X", "later", {"Retry-After": wait} if wait else None)
    with pytest.raises(ApiError) as caught:
        await opened(access, retries=2).get(PODS, "web", "default")
    assert len(server.seen) == asked
    assert caught.value.retry_after == (float(wait) if wait else None)


async def test_retry_after_from_the_status(server: Server, access: Access, opened: Opener) -> None:
    server.say(refuse(429, "TooManyRequests", "later", retryAfterSeconds=7))
    with pytest.raises(TooManyRequests) as caught:
        await opened(access, retries=0).get(PODS, "web", "default")
    assert caught.value.retry_after == 7


@pytest.mark.parametrize(
    ("handler", "kind", "words"),
    [
        (reset, Unreachable, "closed without an answer"),
        (cut(b'{"metadata": {', 100), Unreachable, "broke in the middle"),
        (text('{"metadata": {"name": "w'), BadAnswer, "not a Pod"),
        (text('{"metadata": {"name": 3}}'), BadAnswer, "Expected `str`, got `int` - at `metadata.name`"),
        (text("<html>login</html>"), BadAnswer, "not a Pod"),
        (text(b"\xff\xfe"), BadAnswer, "not a Pod"),
        (answer(code=302, headers={"Location": "https://elsewhere.example/"}), ApiError, "302"),
    ],
)
async def test_bad_answers(
    server: Server, client: ApiClient, handler: Handler, kind: type[Exception], words: str
) -> None:
    # A GET on a connection that broke is repeated once by the HTTP library.
    server.default = handler
    with pytest.raises(kind, match=words) as caught:
        await client.get(PODS, "web", "default")
    assert "\n" not in str(caught.value)


async def test_an_answer_may_not_be_endless(
    server: Server, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykubelet.kube.calls.MAX_ANSWER_BYTES", 1000)
    server.say(text("x" * 1001))
    with pytest.raises(BadAnswer, match="longer than 1000 bytes"):
        await client.get(PODS, "web", "default")


async def test_timeout(server: Server, access: Access, opened: Opener) -> None:
    server.default = hang()
    with pytest.raises(TimedOut, match=r"get .*/pods/web: there was no answer in time \(0.2 s\)"):
        await opened(access, timeout=0.2).get(PODS, "web", "default")
    with pytest.raises(TimedOut, match=r"no answer in time"):
        async with opened(access).watch(PODS, "", [], seconds=0.2):
            pass


async def test_refused_connection_and_unknown_name(opened: Opener) -> None:
    async with serving(None) as server:
        url = server.url
    with pytest.raises(Unreachable, match=r"cannot be reached: .*([Rr]efused|Connect call failed)"):
        await opened(Access(url)).get(PODS, "web", "default")
    with pytest.raises(Unreachable, match=r"the name api.invalid cannot be resolved"):
        await opened(Access("https://api.invalid:6443", insecure=True)).get(PODS, "web", "default")


async def test_connections_are_reused(server: Server, client: ApiClient) -> None:
    server.default = answer(POD)
    for _ in range(5):
        await client.get(PODS, "web", "default")
    assert len({seen.peer for seen in server.seen}) == 1


async def test_close_all_frees_whoever_waits(server: Server, access: Access, opened: Opener) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        late = request.method == "PATCH"
        return await (hang() if late else stream(b'{"metadata"', end=False))(request)

    async def watch() -> None:
        async with client.watch(PODS, "", [], seconds=20) as chunks:
            async for _ in chunks:
                pass

    server.default = handle
    client = opened(access)
    waiting = asyncio.gather(
        client.patch(PODS, "web", {}, "default"),
        client.get(PODS, "web", "default"),
        watch(),
        return_exceptions=True,
    )
    while len(server.seen) < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    begin = time.monotonic()
    await client.transport.close_all()
    results = await waiting
    assert time.monotonic() - begin < 2
    assert [isinstance(result, Unreachable) for result in results] == [True] * 3, results
    server.default = answer(POD)
    assert (await client.get(PODS, "web", "default")).uid == "u1"


async def test_cancelling_a_request_leaves_the_client_usable(server: Server, client: ApiClient) -> None:
    server.default = hang()
    task = asyncio.ensure_future(client.get(PODS, "web", "default"))
    while not server.seen:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.default = answer(POD)
    assert (await client.get(PODS, "web", "default")).uid == "u1"


async def test_limit_spreads_requests(server: Server, access: Access, opened: Opener) -> None:
    server.default = answer(POD)
    client = opened(access, TokenBucket(20, 1))
    begin = time.monotonic()
    await asyncio.gather(*(client.get(PODS, "web", "default") for _ in range(5)))
    assert 0.2 <= time.monotonic() - begin < 2


async def test_metrics(server: Server, access: Access, opened: Opener) -> None:
    registry = CollectorRegistry()
    server.default = refuse(404, "NotFound")
    server.say(answer(POD), reset, reset)
    client = opened(access, metrics=RestMetrics(registry))
    await client.get(PODS, "web", "default")
    with pytest.raises(Unreachable):
        await client.patch(PODS, "web", {"x": 1}, "default")
    host = server.url.removeprefix("https://")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"host": host, **labels})

    assert value("rest_client_requests_total", code="200", method="GET") == 1
    assert value("rest_client_requests_total", code="<error>", method="PATCH") == 1
    assert value("rest_client_request_duration_seconds_count", verb="GET") == 1
    assert value("rest_client_rate_limiter_duration_seconds_count", verb="GET") == 1
    assert value("rest_client_request_size_bytes_sum", verb="PATCH") == len('{"x":1}')
    assert (value("rest_client_response_size_bytes_sum", verb="GET") or 0) > 50
    assert registry.get_sample_value("rest_client_exec_plugin_ttl_seconds") == float("inf")


async def test_three_clients(server: Server, access: Access) -> None:
    server.default = hang()
    async with Transport(access) as transport:
        clients = make_clients(
            transport, objects=Limits(50, 100), events=Limits(0, 0), lease_seconds=40, status_seconds=0.1
        )
        with pytest.raises(TimedOut, match=r"\(0.1 s\)"):
            await clients.heartbeats.get(LEASES, "one", "kube-node-lease")
        clients = make_clients(
            transport, objects=Limits(50, 100), events=Limits(0, 0), lease_seconds=5, status_seconds=10
        )
        server.default = refuse(429, "TooManyRequests", "", {"Retry-After": "1"})
        with pytest.raises(TooManyRequests):
            await clients.heartbeats.get(LEASES, "one", "kube-node-lease")
        server.default = answer({})
        begin = time.monotonic()
        await asyncio.gather(*(clients.heartbeats.get(LEASES, "x", "y") for _ in range(30)))
        assert time.monotonic() - begin < 1.5
        begin = time.monotonic()
        # Zero is the default of all clients: 5 a second after a burst of 10.
        await asyncio.gather(*(clients.events.get(EVENTS, "x", "y") for _ in range(12)))
        assert 0.4 <= time.monotonic() - begin < 2


async def test_without_compression(server: Server, authority: Any, opened: Opener) -> None:
    server.default = answer(POD)
    ca = authority.certificate.read_bytes()
    await opened(Access(server.url, ca=ca)).get(PODS, "web", "default")
    await opened(Access(server.url, ca=ca, compression=False)).get(PODS, "web", "default")
    assert "gzip" in server.seen[0].header("Accept-Encoding")
    assert server.seen[1].header("Accept-Encoding") == "identity"


async def test_a_server_below_a_path(server: Server, access: Access, opened: Opener) -> None:
    server.default = answer(POD)
    await opened(Access(server.url + "/k8s/clusters/c-1", ca=access.ca)).get(NODES, "one")
    assert server.seen[0].path == "/k8s/clusters/c-1/api/v1/nodes/one"


async def test_a_pause_ends_early_when_the_server_is_back(
    server: Server, access: Access, opened: Opener
) -> None:
    server.default = answer(POD)
    client = opened(access)
    begin = time.monotonic()
    await client.transport.pause(0.3, least=0.1)
    assert time.monotonic() - begin >= 0.3
    server.say(reset)
    with pytest.raises(Unreachable):
        await client.patch(PODS, "web", {}, "default")
    pause = asyncio.ensure_future(client.transport.pause(20, least=0.1))
    await asyncio.sleep(0.01)
    await client.get(PODS, "web", "default")
    begin = time.monotonic()
    await pause
    assert time.monotonic() - begin < 1


async def test_a_body_that_does_not_end(server: Server, access: Access, opened: Opener) -> None:
    server.default = stream(b'{"metadata": ', end=False)
    with pytest.raises(TimedOut):
        await opened(access, timeout=0.2).get(PODS, "web", "default")


async def test_a_hanging_server_counts_as_away(server: Server, access: Access, opened: Opener) -> None:
    registry = CollectorRegistry()
    server.say(hang())
    server.default = answer(POD)
    client = opened(access, timeout=0.2, metrics=RestMetrics(registry))
    with pytest.raises(TimedOut):
        await client.get(PODS, "web", "default")
    pause = asyncio.ensure_future(client.pause(20))
    await asyncio.sleep(0)
    await client.get(PODS, "web", "default")
    await asyncio.wait_for(pause, 3)
    labels = {"code": "<error>", "method": "GET", "host": server.url.removeprefix("https://")}
    assert registry.get_sample_value("rest_client_requests_total", labels) == 1


async def test_peers_that_vanish_are_noticed() -> None:
    made = _new_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1)))
    with made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 60


async def test_a_name_is_looked_up_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(*args: Any) -> Any:
        asked.append(args[0])
        time.sleep(0.2)
        if args[0] == "bad.test":
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", args[1]))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    resolver = SharedResolver()
    impatient = asyncio.ensure_future(resolver.resolve("api.test", 6443, socket.AF_UNSPEC))
    await asyncio.sleep(0.01)
    impatient.cancel()
    found = await asyncio.gather(*(resolver.resolve("api.test", 6443, socket.AF_UNSPEC) for _ in range(20)))
    assert asked == ["api.test"]
    assert {(r[0]["host"], r[0]["port"], r[0]["hostname"]) for r in found} == {
        ("192.0.2.1", 6443, "api.test")
    }
    await resolver.resolve("api.test", 6443, socket.AF_UNSPEC)
    assert asked == ["api.test"] * 2
    with pytest.raises(OSError, match="Temporary failure"):
        await resolver.resolve("bad.test", 6443)
    forgotten = asyncio.ensure_future(resolver.resolve("bad.test", 6443))
    await asyncio.sleep(0.01)
    forgotten.cancel()
    await asyncio.sleep(0.3)
    assert not resolver._pending


def test_paths() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert NODES.path(name="a/b") == "/api/v1/nodes/a%2Fb"
    assert SERVICE_ACCOUNTS.path("ns", "sa", "token") == "/api/v1/namespaces/ns/serviceaccounts/sa/token"
    with pytest.raises(ValueError, match="needs a namespace"):
        PODS.path(name="web")


def test_tls_is_at_least_1_2(authority: Any) -> None:
    context = client_context(ca=authority.certificate.read_bytes(), insecure=False, identity=None)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2

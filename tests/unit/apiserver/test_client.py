import ssl
import time
from typing import Any

import pytest

from pykubelet.api.core import Event
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.node import Lease, LeaseSpec
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import LEASES, NODES, PODS, SERVICE_ACCOUNTS, ApiClient, PatchKind
from pykubelet.apiserver.errors import (
    AlreadyExists,
    ApiError,
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    InvalidResponse,
    NotFound,
    ServerError,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.tls import client_context
from pykubelet.apiserver.transport import USER_AGENT
from tests.support.api_client import Opener
from tests.support.api_server import Handler, Server, answer, cut, listing, refuse, reset, text

POD = {"metadata": {"name": "web", "namespace": "default", "uid": "u1", "resourceVersion": "7"}}


async def test_client_get_sends_headers_and_decodes_object(server: Server, client: ApiClient) -> None:
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


async def test_client_verbs_use_expected_paths_and_bodies(server: Server, client: ApiClient) -> None:
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


async def test_client_list_follows_continue_token(server: Server, client: ApiClient) -> None:
    server.say(listing([POD], "9", "more"), listing([], "9"))
    params = [("limit", "1"), ("fieldSelector", "spec.nodeName=one,status.phase!=Failed")]
    first = await client.list(PODS, params=params)
    assert ([p.full_name for p in first.items], first.resource_version) == (["default/web"], "9")
    assert (await client.list(PODS, params=[("continue", first.continues)])).items == []
    assert server.seen[0].query == {"limit": "1", "fieldSelector": "spec.nodeName=one,status.phase!=Failed"}
    assert server.seen[1].query == {"continue": "more"}


async def test_client_get_null_fields_decode_as_empty(server: Server, client: ApiClient) -> None:
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
async def test_client_error_status_raises_matching_exception(
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


async def test_client_error_without_status_object_quotes_body(server: Server, client: ApiClient) -> None:
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
async def test_client_forbidden_error_names_rbac_rule(
    server: Server, client: ApiClient, ask: Any, rule: str
) -> None:
    server.say(refuse(403, "Forbidden", FORBIDDEN.format("do")))
    with pytest.raises(Forbidden) as caught:
        await ask(client)
    assert rule in str(caught.value)
    assert "system:node:one" in str(caught.value)


async def test_client_forbidden_by_node_authorizer_explains_relationship(
    server: Server, client: ApiClient
) -> None:
    server.say(refuse(403, "Forbidden", "no relationship found between node 'one' and this object"))
    with pytest.raises(Forbidden, match=r"only use objects that pods bound to it refer to"):
        await client.get(PODS, "web", "default")


@pytest.mark.parametrize(
    "message",
    [
        'pods "web" is forbidden: exceeded quota: few, requested: pods=1, used: pods=4, limited: pods=4',
        'pods "web" is forbidden: violates PodSecurity "restricted:latest": privileged (container "main" '
        "must not set securityContext.privileged=true)",
        "unable to create new content in namespace default because it is being terminated",
    ],
)
async def test_client_forbidden_by_admission_names_no_rbac_rule(
    server: Server, client: ApiClient, message: str
) -> None:
    server.say(refuse(403, "Forbidden", message))
    with pytest.raises(Forbidden) as caught:
        await client.create(PODS, Pod(metadata=ObjectMeta(name="web")), "default")
    assert str(caught.value).endswith(f": 403 Forbidden: {message}")


async def _open_watch(client: ApiClient) -> None:
    async with client.watch(PODS, "", [], seconds=5) as chunks:
        async for _ in chunks:
            pass


async def test_client_retry_after_header_delays_retry(server: Server, client: ApiClient) -> None:
    server.say(
        refuse(429, "TooManyRequests", "later", {"Retry-After": "1"}),
        refuse(503, "ServiceUnavailable", "", {"Retry-After": "0"}),
        answer(POD),
    )
    begin = time.monotonic()
    assert (await client.get(PODS, "web", "default")).uid == "u1"
    assert time.monotonic() - begin >= 1
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("code", "wait", "asked"), [(429, "31", 1), (503, "", 1), (429, "0", 3), (409, "0", 1)]
)
async def test_client_long_or_missing_retry_after_raises(
    server: Server, access: RestConfig, opened: Opener, code: int, wait: str, asked: int
) -> None:
    server.default = refuse(code, "X", "later", {"Retry-After": wait} if wait else None)
    with pytest.raises(ApiError) as caught:
        await opened(access, retries=2).get(PODS, "web", "default")
    assert len(server.seen) == asked
    assert caught.value.retry_after == (float(wait) if wait else None)


async def test_client_retry_after_read_from_status_details(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    server.say(refuse(429, "TooManyRequests", "later", retryAfterSeconds=7))
    with pytest.raises(TooManyRequests) as caught:
        await opened(access, retries=0).get(PODS, "web", "default")
    assert caught.value.retry_after == 7


@pytest.mark.parametrize(
    ("handler", "kind", "words"),
    [
        (reset, Unreachable, "closed without an answer"),
        (cut(b'{"metadata": {', 100), Unreachable, "broke in the middle"),
        (text('{"metadata": {"name": "w'), InvalidResponse, "not a Pod"),
        (
            text('{"metadata": {"name": 3}}'),
            InvalidResponse,
            "Expected `str`, got `int` - at `metadata.name`",
        ),
        (text("<html>login</html>"), InvalidResponse, "not a Pod"),
        (text(b"\xff\xfe"), InvalidResponse, "not a Pod"),
        (text(b"[" * 100_000), InvalidResponse, "not a Pod"),
        (text(b"[" * 100_000, 500), ServerError, r"500: \[\[\["),
        (answer(code=302, headers={"Location": "https://elsewhere.example/"}), ApiError, "302"),
    ],
)
async def test_client_malformed_response_raises(
    server: Server, client: ApiClient, handler: Handler, kind: type[Exception], words: str
) -> None:
    # A GET on a connection that broke is repeated once by the HTTP library.
    server.default = handler
    with pytest.raises(kind, match=words) as caught:
        await client.get(PODS, "web", "default")
    assert "\n" not in str(caught.value)


async def test_client_oversized_response_raises(
    server: Server, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykubelet.apiserver.client.MAX_RESPONSE_BYTES", 1000)
    server.say(text("x" * 1001))
    with pytest.raises(InvalidResponse, match="longer than 1000 bytes"):
        await client.get(PODS, "web", "default")


def test_resource_path_is_escaped_and_requires_namespace() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert NODES.path(name="a/b") == "/api/v1/nodes/a%2Fb"
    assert SERVICE_ACCOUNTS.path("ns", "sa", "token") == "/api/v1/namespaces/ns/serviceaccounts/sa/token"
    with pytest.raises(ValueError, match="needs a namespace"):
        PODS.path(name="web")


def test_client_context_minimum_tls_version_is_1_2(authority: Any) -> None:
    context = client_context(ca=authority.certificate.read_bytes(), insecure=False, identity=None)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2

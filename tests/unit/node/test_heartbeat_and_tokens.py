import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.core import Secret, TokenRequestStatus
from pykubelet.api.meta import ObjectMeta, OwnerReference, from_document, to_document
from pykubelet.api.node import (
    Lease,
    LeaseSpec,
    Node,
    NodeRuntimeHandler,
    NodeSwapStatus,
    NodeSystemInfo,
    micro_time,
)
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import CONFIG_MAPS, SECRETS, SERVICES, ApiClient, read_object
from pykubelet.apiserver.errors import Conflict, Forbidden, InvalidResponse
from pykubelet.node.lease import heartbeat, renewed
from pykubelet.objects.tokens import ServiceToken, request_token
from tests.support.api_server import Server, answer, refuse

GOLDEN = Path(__file__).parents[2] / "data/golden"
NOW = datetime(2026, 7, 24, 8, 30, 0, tzinfo=UTC)
LEASE = {
    "metadata": {"name": "one", "namespace": "kube-node-lease", "resourceVersion": "5", "uid": "l"},
    "spec": {"holderIdentity": "one", "leaseDurationSeconds": 40, "renewTime": "2026-07-24T08:00:00.000000Z"},
}
OWNER = {"apiVersion": "v1", "kind": "Node", "name": "one", "uid": "n1"}


def test_renewed_without_lease_returns_new_lease() -> None:
    assert to_document(renewed(None, "one", "n1", 40, NOW)) == {
        "metadata": {"name": "one", "namespace": "kube-node-lease", "ownerReferences": [OWNER]},
        "spec": {
            "holderIdentity": "one",
            "leaseDurationSeconds": 40,
            "renewTime": "2026-07-24T08:30:00.000000Z",
        },
    }


def test_renewed_existing_lease_keeps_foreign_fields() -> None:
    known = Lease(
        metadata=ObjectMeta(
            name="one", resource_version="5", labels={"a": "b"}, owner_references=[OwnerReference(name="x")]
        ),
        spec=LeaseSpec(holder_identity="other", acquire_time="t", lease_transitions=3),
    )
    lease = renewed(known, "one", "n1", 20, NOW)
    assert lease.metadata == known.metadata
    assert (lease.spec.holder_identity, lease.spec.lease_duration_seconds) == ("one", 20)
    assert (lease.spec.acquire_time, lease.spec.lease_transitions) == ("t", 3)
    assert known.spec.renew_time is None


def test_micro_time_has_six_fraction_digits() -> None:
    assert micro_time(NOW) == "2026-07-24T08:30:00.000000Z"
    assert micro_time(NOW.replace(microsecond=120)) == "2026-07-24T08:30:00.000120Z"


async def beat(client: ApiClient, known: Lease | None, uid: str = "n1") -> Lease | None:
    return await heartbeat(client, "one", uid, 40, known, NOW)


async def test_heartbeat_lease_missing_is_created(server: Server, client: ApiClient) -> None:
    server.say(refuse(404, "NotFound"), answer(LEASE, 201))
    lease = await beat(client, None)
    assert lease is not None
    assert lease.metadata.resource_version == "5"
    assert [seen.method for seen in server.seen] == ["GET", "POST"]
    assert server.seen[1].json["metadata"]["ownerReferences"] == [OWNER]


async def test_heartbeat_node_uid_unknown_creates_no_lease(server: Server, client: ApiClient) -> None:
    server.say(refuse(404, "NotFound"))
    assert await beat(client, None, uid="") is None


async def test_heartbeat_known_lease_sends_one_put(server: Server, client: ApiClient) -> None:
    server.say(answer(LEASE), answer(LEASE))
    known = from_document(Lease, LEASE)
    lease = await beat(client, known)
    assert lease is not None
    await beat(client, lease, uid="")
    assert [seen.method for seen in server.seen] == ["PUT", "PUT"]
    sent = server.seen[0].json
    assert sent["metadata"]["resourceVersion"] == "5"
    assert sent["metadata"]["ownerReferences"] == [OWNER]
    assert sent["spec"]["renewTime"] == "2026-07-24T08:30:00.000000Z"


@pytest.mark.parametrize("failure", [refuse(409, "Conflict"), refuse(404, "NotFound")])
async def test_heartbeat_lease_changed_or_deleted_is_reread_and_updated(
    server: Server, client: ApiClient, failure: Any
) -> None:
    newer = json.loads(json.dumps(LEASE))
    newer["metadata"]["resourceVersion"] = "9"
    server.say(failure, answer(newer), answer(newer))
    await beat(client, from_document(Lease, LEASE))
    assert [seen.method for seen in server.seen] == ["PUT", "GET", "PUT"]
    assert server.seen[2].json["metadata"]["resourceVersion"] == "9"


async def test_heartbeat_api_error_is_raised(server: Server, client: ApiClient) -> None:
    server.say(refuse(403, "Forbidden"))
    with pytest.raises(Forbidden):
        await beat(client, from_document(Lease, LEASE))
    server.say(answer(LEASE), refuse(409, "Conflict"))
    with pytest.raises(Conflict):
        await beat(client, None)


POD = Pod(metadata=ObjectMeta(name="web", namespace="team", uid="u1"))


async def test_request_token_returns_bound_token(server: Server, client: ApiClient) -> None:
    status = {"token": "s3cret", "expirationTimestamp": "2026-07-24T09:30:07Z"}
    server.say(answer({"spec": {"expirationSeconds": 3607, "audiences": ["vault"]}, "status": status}, 201))
    token = await request_token(client, POD, "builder", audiences=["vault"], seconds=3600)
    assert token.token == "s3cret"
    assert token.expires - token.issued == 3607
    assert "s3cret" not in repr(token)
    (seen,) = server.seen
    assert seen.path == "/api/v1/namespaces/team/serviceaccounts/builder/token"
    assert seen.json == {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "metadata": {},
        "status": {},
        "spec": {
            "audiences": ["vault"],
            "expirationSeconds": 3600,
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "web", "uid": "u1"},
        },
    }


async def test_request_token_empty_response_raises(server: Server, client: ApiClient) -> None:
    server.say(answer({"status": {}}))
    with pytest.raises(InvalidResponse, match="no token for service account team/builder"):
        await request_token(client, POD, "builder")


@pytest.mark.parametrize(
    ("life", "age", "chance", "due"),
    [
        (3600, 2879, 0.0, False),
        (3600, 2881, 0.0, True),
        (3600, 2871, 1.0, True),
        (10 * 86400, 86399, 0.0, False),
        (10 * 86400, 86401, 0.0, True),
        (10 * 86400, 86391, 1.0, True),
    ],
)
def test_service_token_is_due_before_expiry(life: float, age: float, chance: float, due: bool) -> None:
    token = ServiceToken("x", 1000, 1000 + life)
    assert token.is_due(1000 + age, chance) is due
    assert not token.is_expired(1000 + age)
    assert token.is_expired(1001 + life)


# The structs of what the API server keeps.


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text().replace('"TIME"', '"2026-01-01T00:00:00Z"'))


def test_node_of_upstream_round_trips() -> None:
    document = golden("node.json")
    written = to_document(from_document(Node, document))
    for image in document["status"]["images"]:
        if not image["names"]:
            del image["names"]
    del document["apiVersion"], document["kind"]
    assert written == document


def test_lease_of_upstream_round_trips() -> None:
    document = golden("lease.json")
    written = to_document(from_document(Lease, document))
    del document["apiVersion"], document["kind"]
    assert written == document


def test_read_object_upstream_nulls_are_accepted() -> None:
    document = golden("node.json")
    node = read_object(Node, json.dumps(document).encode())
    assert None in [image.names for image in node.status.images]
    document["metadata"]["labels"] = None
    assert read_object(Node, json.dumps(document).encode()).metadata.labels == {}


def test_to_document_required_empty_fields_are_written() -> None:
    assert to_document(NodeRuntimeHandler()) == {"name": ""}
    assert to_document(NodeSystemInfo())["kubeProxyVersion"] == ""
    assert "swap" not in to_document(NodeSystemInfo())
    assert to_document(NodeSystemInfo(swap=NodeSwapStatus(capacity=5)))["swap"] == {"capacity": 5}


def test_read_object_secret_is_decoded_and_repr_hides_data() -> None:
    secret = read_object(
        SECRETS.struct,
        b'{"metadata": {"name": "s", "namespace": "n"}, "type": "Opaque", "data": {"k": "czNjcmV0"}}',
    )
    assert secret.data == {"k": b"s3cret"}
    assert repr(secret) == "Secret(n/s, 1 keys)"
    assert "s3cret" not in f"{Secret(data={'a': b's3cret'})}{TokenRequestStatus(token='s3cret')}"


def test_read_object_config_map_and_service_are_decoded() -> None:
    found = read_object(
        CONFIG_MAPS.struct, b'{"data": {"a": "b"}, "binaryData": {"c": "AAE="}, "immutable": true}'
    )
    assert (found.data, found.binary_data, found.immutable) == ({"a": "b"}, {"c": b"\x00\x01"}, True)
    service = read_object(
        SERVICES.struct,
        b'{"spec": {"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], '
        b'"ports": [{"port": 80, "targetPort": "http"}]}}',
    )
    assert (service.spec.cluster_ip, service.spec.ports[0].port) == ("10.0.0.1", 80)

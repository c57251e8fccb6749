"""Pod certificates over their life: requested, issued, refreshed, denied, and lost requests."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.certificates import PodCertificateRequest
from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.api.volume import PodCertificateProjection
from pykubelet.apiserver.certificates.key_generation import StubRequest
from pykubelet.apiserver.client import Resource, T
from pykubelet.apiserver.errors import Unreachable
from pykubelet.objects import pod_certificates
from pykubelet.objects.base import CredentialBundle, NoObjects, ObjectError
from pykubelet.objects.cluster_objects import ClusterObjects
from pykubelet.objects.pod_certificates import (
    ASSUME_DELETED_SECONDS,
    ISSUE_SECONDS,
    JITTER_SECONDS,
    MAX_CHAIN_BYTES,
    MAX_SOURCES_PER_POD,
    OVERDUE_SECONDS,
    Issued,
    PodCertificateCollector,
    PodCertificates,
    clean_chain,
    outcome,
)
from pykubelet.util.tasks import TaskScope
from tests.support.object_api import ObjectApi, pod

pytestmark = pytest.mark.looptime
PEM = "-----BEGIN CERTIFICATE-----\nYWFh\n-----END CERTIFICATE-----\n"
SOURCE = PodCertificateProjection(
    signer_name="example.com/s",
    key_type="ED25519",
    max_expiration_seconds=7200,
    credential_bundle_path="b",
    user_annotations={"example.com/a": "b"},
)
DAY = 86400.0


class CertificateApi(ObjectApi):
    """An API server that names what it creates, and a signer that a test plays."""

    def __init__(self) -> None:
        super().__init__()
        self.put("serviceaccounts", "default")
        self._names = count(1)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [found for (kind, _, _), found in self.objects.items() if kind == "podcertificaterequests"]

    async def create(self, resource: Resource[T], obj: T, namespace: str = "") -> T:
        await self._answer("create", resource.plural, ())
        document = to_document(obj)
        name = f"{document['metadata']['generateName']}{next(self._names)}"
        self.put(resource.plural, name, namespace, spec=document["spec"])
        stored = self.objects[resource.plural, namespace, name]["metadata"]
        stored["ownerReferences"] = document["metadata"]["ownerReferences"]
        return from_document(resource.struct, {"metadata": stored, "spec": document["spec"]})

    def sign(self, request: dict[str, Any], kind: str = "Issued", *, life: float = DAY, **more: str) -> None:
        status: dict[str, Any] = {"conditions": [{"type": kind, "status": "True", **more}]}
        if kind == "Issued":
            status |= {
                "certificateChain": PEM,
                "beginRefreshAt": moment(self.clock + life / 2),
                "notAfter": moment(self.clock + life),
            }
        self.put("podcertificaterequests", request["metadata"]["name"], spec=request["spec"], status=status)


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class Signing:
    """Certificates of one node, with a signer."""

    def __init__(self, scope: TaskScope) -> None:
        self.api = CertificateApi()
        self.api.clock = 1_000_000.0
        self.notified: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.node_uid = "uid-node"
        self.certificates = PodCertificates(
            self.api,
            scope,
            "node-1",
            lambda: self.node_uid,
            self.notified.append,
            record_event=lambda pod, kind, reason, message: self.events.append((reason, message)),
            clock=lambda: self.api.clock,
            rng=lambda: 0.5,
        )

    async def get(self, of: Pod | None = None, index: int = 0) -> CredentialBundle:
        return await self.certificates.get(of or pod(), "v", index, SOURCE)

    async def fails(self, text: str, index: int = 0) -> None:
        with pytest.raises(ObjectError, match=text):
            await self.get(index=index)

    async def issued(self) -> CredentialBundle:
        """Have the first certificate."""
        task = asyncio.create_task(self.get())
        while not self.api.requests:
            await asyncio.sleep(0.01)
        self.api.sign(self.api.requests[0])
        return await task


@pytest.fixture
async def signing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Signing]:
    """Keys are counted instead of generated: a subprocess and loop time do not mix."""
    numbers = count(1)

    async def draft(key_type: str) -> Any:
        number = next(numbers)
        return StubRequest(f"key-{number}\n", f"request-{number}".encode())

    monkeypatch.setattr(pod_certificates, "draft_stub_request", draft)
    async with TaskScope() as scope:
        yield Signing(scope)


async def test_get_first_certificate_is_requested_and_awaited_briefly(signing: Signing) -> None:
    started = asyncio.get_running_loop().time()
    bundle = await signing.issued()
    assert asyncio.get_running_loop().time() - started < ISSUE_SECONDS
    assert bundle == CredentialBundle(private_key="key-1\n", certificate_chain=PEM)
    assert "key-1" not in repr(bundle)
    (request,) = signing.api.requests
    assert request["spec"] == {
        "signerName": "example.com/s",
        "podName": "web",
        "podUID": "uid-web",
        "serviceAccountName": "default",
        "serviceAccountUID": "uid-default",
        "nodeName": "node-1",
        "nodeUID": "uid-node",
        "maxExpirationSeconds": 7200,
        "stubPKCS10Request": "cmVxdWVzdC0x",
        "unverifiedUserAnnotations": {"example.com/a": "b"},
    }
    assert await signing.get() == bundle
    assert len(signing.api.requests) == 1


async def test_get_slow_signer_raises_until_listener_is_notified(signing: Signing) -> None:
    await signing.fails("^credential bundle is not issued yet$")
    await signing.fails("^credential bundle is not issued yet$")
    assert len(signing.api.requests) == 1, "it is requested once"
    signing.notified.clear()
    signing.api.sign(signing.api.requests[0])
    await asyncio.sleep(1)
    assert signing.notified == ["uid-web"]
    assert (await signing.get()).private_key == "key-1\n"


async def test_get_after_begin_refresh_replaces_key_and_certificate(signing: Signing) -> None:
    await signing.issued()
    signing.api.clock += DAY / 2 + JITTER_SECONDS / 2 - 1
    signing.certificates.notify_due()
    assert (await signing.get()).private_key == "key-1\n"
    assert len(signing.api.requests) == 1, "the refresh has a random delay"
    signing.api.clock += 1
    signing.notified.clear()
    signing.certificates.notify_due()
    assert signing.notified == ["uid-web"]
    assert (await signing.get()).private_key == "key-1\n", "the old one until the new one is issued"
    signing.api.sign(signing.api.requests[1])
    await asyncio.sleep(1)
    assert (await signing.get()).private_key == "key-2\n"
    assert signing.events == []


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("Denied", 'PodCertificateRequest shop/req-1 was denied, reason="No", message="not you"'),
        ("Failed", 'PodCertificateRequest shop/req-1 failed, reason="No", message="not you"'),
    ],
)
async def test_get_refused_request_is_final_with_one_event(signing: Signing, kind: str, event: str) -> None:
    await signing.fails("not issued yet")
    signing.api.sign(signing.api.requests[0], kind, reason="No", message="not you")
    await asyncio.sleep(1)
    for _ in range(2):
        await signing.fails(f'was permanently {kind.lower()}: reason="No" message="not you"$')
    assert signing.events == [(kind, event)]
    signing.api.clock += 10 * DAY
    await signing.fails("permanently")
    assert len(signing.api.requests) == 1


async def test_get_deleted_request_is_created_again(signing: Signing) -> None:
    await signing.fails("not issued yet")
    await asyncio.sleep(1)
    await signing.fails("not issued yet")
    signing.api.remove("podcertificaterequests", "req-1")
    await asyncio.sleep(1)
    await signing.fails("not issued yet")
    await asyncio.sleep(1)
    await signing.fails("not issued yet")
    assert [request["metadata"]["name"] for request in signing.api.requests] == ["req-2"]


async def test_get_requests_always_deleted_creates_with_growing_delay(signing: Signing) -> None:
    created = set()
    for _ in range(600):
        await signing.fails("not issued yet")
        for request in signing.api.requests:
            created.add(request["metadata"]["name"])
            signing.api.remove("podcertificaterequests", request["metadata"]["name"])
        await asyncio.sleep(1)
    assert 5 < len(created) < 12


async def test_get_unobserved_request_is_abandoned_after_deadline(signing: Signing) -> None:
    signing.api.behind.add("req-1")
    signing.api.watchers = _Deaf()
    await signing.fails("not issued yet")
    signing.api.clock += ASSUME_DELETED_SECONDS + JITTER_SECONDS / 2
    await signing.fails("not issued yet")
    assert len(signing.api.requests) == 1, "the watch may be behind"
    signing.api.clock += 1
    signing.certificates.notify_due()
    assert signing.notified == ["uid-web"]
    await signing.fails("not issued yet")
    await asyncio.sleep(1)
    await signing.fails("not issued yet")
    assert len(signing.api.requests) == 2


class _Deaf(list[Any]):
    """Watchers to which nothing is published."""

    def __iter__(self) -> Any:
        return iter(())


async def test_get_creation_fails_retries_with_backoff_and_same_key(signing: Signing) -> None:
    await asyncio.wait_for(signing.certificates._requests(), 10)
    signing.api.broken = Unreachable("https://api", "connection refused")
    await signing.fails("connection refused")
    asked = len(signing.api.asked)
    await signing.fails("connection refused")
    assert len(signing.api.asked) == asked, "the back-off delay has not expired"
    signing.api.broken = None
    signing.api.clock -= DAY  # the host's clock is corrected: the delay stays one second
    await asyncio.sleep(1)
    await signing.fails("not issued yet")
    assert signing.api.requests[0]["spec"]["stubPKCS10Request"] == "cmVxdWVzdC0x"


async def test_get_refresh_fails_keeps_certificate_and_reports_age(signing: Signing) -> None:
    await signing.issued()
    signing.api.broken = Unreachable("https://api", "connection refused")
    signing.api.clock += DAY / 2 + JITTER_SECONDS + OVERDUE_SECONDS
    for _ in range(2):
        assert (await signing.get()).private_key == "key-1\n"
    assert signing.events == [("CertificateOverdueForRefresh", "PodCertificate refresh overdue")]
    signing.api.clock += DAY
    await signing.get()
    assert signing.events[1:] == [("CertificateExpired", "PodCertificate expired")]


async def test_get_node_unknown_or_api_missing_raises_with_reason(signing: Signing) -> None:
    signing.node_uid = ""
    await signing.fails("Node object of this node is not known yet")
    async with TaskScope() as scope:
        other = Signing(scope)
        other.api.broken = Unreachable("https://api", "away")
        await other.fails("the API server must serve certificates.k8s.io/v1beta1")


async def test_get_too_many_sources_raises_and_forget_releases_them(signing: Signing) -> None:
    signing.node_uid = ""
    for index in range(MAX_SOURCES_PER_POD):
        await signing.fails("not known yet", index)
    await signing.fails(f"at most {MAX_SOURCES_PER_POD} podCertificate sources", MAX_SOURCES_PER_POD)
    signing.certificates.forget("uid-web")
    await signing.fails("not known yet", MAX_SOURCES_PER_POD)


async def test_states_are_reported_by_signer(signing: Signing) -> None:
    registry = CollectorRegistry()
    registry.register(PodCertificateCollector(signing.certificates))

    def count_of(state: str) -> float | None:
        labels = {"signer_name": "example.com/s", "state": state}
        return registry.get_sample_value("kubelet_podcertificate_states", labels)

    await signing.issued()
    await signing.fails("not issued yet", 1)
    assert (count_of("fresh"), count_of("not_yet_issued")) == (1, 1)
    signing.api.clock += DAY / 2 + JITTER_SECONDS + OVERDUE_SECONDS
    assert count_of("overdue_for_refresh") == 1
    signing.api.clock += DAY
    assert count_of("expired") == 1
    signing.api.sign(signing.api.requests[1], "Denied")
    await asyncio.sleep(1)
    await signing.fails("permanently denied", 1)
    assert count_of("denied") == 1


def request_with(**status: Any) -> PodCertificateRequest:
    return from_document(PodCertificateRequest, {"metadata": {"name": "r"}, "status": status})


def test_outcome_issued_without_times_or_with_oversized_chain_raises() -> None:
    issued = {"conditions": [{"type": "Issued", "status": "True"}]}
    assert outcome(request_with()) is None
    with pytest.raises(ValueError, match="no times"):
        outcome(request_with(**issued, certificateChain=PEM))
    times = {"beginRefreshAt": moment(10), "notAfter": moment(20)}
    assert outcome(request_with(**issued, **times, certificateChain=PEM)) == Issued(PEM, 10, 20)
    with pytest.raises(ValueError, match="longer than"):
        outcome(request_with(**issued, **times, certificateChain="x" * (MAX_CHAIN_BYTES + 1)))


def test_clean_chain_keeps_order_and_drops_text_between_blocks() -> None:
    second = PEM.replace("YWFh", "YmJi")
    assert clean_chain(f"note\n{second}between{PEM}after") == second + PEM
    with pytest.raises(ValueError, match="no certificate"):
        clean_chain("-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n")


def test_clean_chain_blocks_with_headers_drops_only_headers() -> None:
    second = PEM.replace("YWFh", "YmJi")
    headed = second.replace("-----\nY", "-----\nSubject: CN=a-b\nProc-Type: 4,CLEAR\n\nY")
    assert clean_chain(headed + PEM) == second + PEM
    assert clean_chain(headed.replace("\n", "\r\n") + PEM) == second + PEM


def test_clean_chain_many_unfinished_blocks_takes_linear_time() -> None:
    line = "-----BEGIN A:-----\n"
    hostile = line * ((MAX_CHAIN_BYTES - len(PEM)) // len(line))
    assert clean_chain(hostile + PEM) == PEM


async def test_cluster_objects_without_gate_or_cluster_raises_with_remedy() -> None:
    async with TaskScope() as scope:
        objects = ClusterObjects(CertificateApi(), scope)
        with pytest.raises(ObjectError, match="feature gate PodCertificateRequest"):
            await objects.pod_certificate(pod(), "v", 0, SOURCE)
    with pytest.raises(ObjectError, match="no API server to ask"):
        await NoObjects().pod_certificate(pod(), "v", 0, SOURCE)

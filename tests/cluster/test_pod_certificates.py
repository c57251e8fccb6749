"""Pod certificates with a real API server that has the feature; the test is the signer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pykubelet.devcluster.binaries import Binaries
from tests.cluster.conftest import fresh_namespace, running_plane
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.plane import Document, Plane, unique
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine
GATE = "PodCertificateRequest"
SIGNER = "example.com/test-signer"
REQUESTS = "/apis/certificates.k8s.io/v1beta1/namespaces/{}/podcertificaterequests"
SECONDS = 60


@pytest.fixture(scope="module")
def node(programs: Binaries, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    """A node with the feature, in a cluster with the feature."""
    flags = (
        f"--feature-gates={GATE}=true",
        "--runtime-config=certificates.k8s.io/v1beta1/podcertificaterequests=true",
    )
    settings = {"featureGates": {GATE: True}, "syncFrequency": "2s"}
    with (
        running_plane(programs, api_flags=flags) as plane,
        in_cluster(cluster_node(plane, runtime, settings=settings)) as started,
    ):
        yield started


@contextmanager
def namespace_of(plane: Plane) -> Iterator[str]:
    with fresh_namespace(plane) as name:
        yield name


class Signer:
    """An authority that answers PodCertificateRequests."""

    def __init__(self, plane: Plane, namespace: str) -> None:
        self._plane = plane
        self._path = REQUESTS.format(namespace)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test-signer")])

    def requests(self) -> list[Document]:
        """Return the requests, oldest first."""
        found = self._plane.request("GET", self._path)["items"]
        return sorted(found, key=lambda item: int(item["metadata"]["resourceVersion"]))

    def pending(self) -> list[Document]:
        return [item for item in self.requests() if not item.get("status", {}).get("conditions")]

    def issue(self, request: Document) -> None:
        """Issue a certificate of an hour for the public key of a request."""
        import base64

        stub = x509.load_der_x509_csr(base64.b64decode(request["spec"]["stubPKCS10Request"]))
        assert stub.is_signature_valid
        now = datetime.now(UTC).replace(microsecond=0)
        end = now + timedelta(hours=1, minutes=1)
        certificate = (
            x509.CertificateBuilder(self._name, x509.Name([]), stub.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(end)
            .sign(self._key, hashes.SHA256())
        )
        text = certificate.public_bytes(serialization.Encoding.PEM).decode()
        self._report(
            request,
            "Issued",
            certificateChain=text,
            notBefore=stamp(now),
            beginRefreshAt=stamp(now + timedelta(minutes=30)),
            notAfter=stamp(end),
        )

    def deny(self, request: Document) -> None:
        self._report(request, "Denied")

    def _report(self, request: Document, kind: str, **status: Any) -> None:
        condition = {
            "type": kind,
            "status": "True",
            "reason": "Testing",
            "message": "by the test",
            "lastTransitionTime": stamp(datetime.now(UTC)),
        }
        name = request["metadata"]["name"]
        request["status"] = {"conditions": [condition], **status}
        self._plane.request("PUT", f"{self._path}/{name}/status", request)


def stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def create_pod(node: ClusterNode, namespace: str, key_type: str = "ECDSAP256") -> Document:
    certificate = {
        "signerName": SIGNER,
        "keyType": key_type,
        "credentialBundlePath": "bundle.pem",
        "keyPath": "key.pem",
        "certificateChainPath": "chain.pem",
    }
    volume = {"name": "id", "projected": {"sources": [{"podCertificate": certificate}]}}
    document = node.pod_document(unique("p"), namespace, volumes=[volume])
    document["spec"]["containers"][0]["volumeMounts"] = [{"name": "id", "mountPath": "/id"}]
    return node.plane.create(document)


@pytest.mark.parametrize("key_type", ["ECDSAP256", "ED25519"])
def test_pod_certificate_issued_is_in_volume_and_matches_its_key(node: ClusterNode, key_type: str) -> None:
    with namespace_of(node.plane) as namespace:
        signer = Signer(node.plane, namespace)
        pod = create_pod(node, namespace, key_type)
        (request,) = node.wait("the request", signer.pending, SECONDS)
        assert request["spec"]["podUID"] == pod["metadata"]["uid"]
        assert request["spec"]["nodeName"] == node.name
        (owner,) = request["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Pod", pod["metadata"]["uid"])
        signer.issue(request)
        node.wait_pod_ready(pod, SECONDS)
        name = pod["metadata"]["name"]
        key_text, chain_text = (node.shell(name, f"cat /id/{file}") for file in ("key.pem", "chain.pem"))
        assert node.shell(name, "cat /id/bundle.pem") == key_text + chain_text
        key: Any = serialization.load_pem_private_key(key_text.encode(), None)
        assert x509.load_pem_x509_certificate(chain_text.encode()).public_key() == key.public_key()
        assert f'kubelet_podcertificate_states{{signer_name="{SIGNER}",state="fresh"}} 1' in node.page(
            "/metrics"
        )
        node.delete_pod(pod)


def test_pod_certificate_denied_pod_waits_with_event(node: ClusterNode) -> None:
    with namespace_of(node.plane) as namespace:
        signer = Signer(node.plane, namespace)
        pod = create_pod(node, namespace)
        (request,) = node.wait("the request", signer.pending, SECONDS)
        signer.deny(request)
        meta = pod["metadata"]

        def reasons() -> set[str]:
            return {
                event["reason"]
                for event in node.plane.items("event", namespace)
                if event["involvedObject"].get("uid") == meta["uid"]
            }

        node.wait("the events", lambda: {"Denied", "FailedMount"} <= reasons(), SECONDS)
        assert len(signer.requests()) == 1, json.dumps(signer.requests())
        node.delete_pod(pod)

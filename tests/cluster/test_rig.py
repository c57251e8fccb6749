"""The control plane that other tests stand on: that it is a real one, and nothing of it is relaxed."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.devcluster.admin_client import ApiStatusError
from pykubelet.devcluster.identities import Subject, issue_pem
from pykubelet.devcluster.layout import Component
from tests.cluster.conftest import fresh_namespace
from tests.support.node import is_ready
from tests.support.plane import Document, Plane, pod_document, unique

LATE = 90.0
"""In seconds: for controllers, which come back late after an outage that another test made."""


@pytest.fixture
def fake_node(plane: Plane) -> Iterator[str]:
    """A node that nobody runs."""
    name = unique("fake")
    plane.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    yield name
    plane.delete("node", name)


def certificate_request(name: str, usages: list[str], signer: str, subject: Subject) -> Document:
    """A CertificateSigningRequest as a kubelet makes it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in subject.groups]
    whole = x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, subject.name)])
    signed = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(whole)
        .sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    )
    return {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {
            "request": base64.b64encode(signed.public_bytes(Encoding.PEM)).decode(),
            "signerName": signer,
            "usages": usages,
        },
    }


def test_plane_pod_bound_to_node_stays_until_node_confirms_deletion(
    plane: Plane, namespace: str, fake_node: str
) -> None:
    pod = plane.create(pod_document("waits", namespace, fake_node))
    assert pod["spec"]["nodeName"] == fake_node
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == ["/var/run/secrets/kubernetes.io/serviceaccount"]
    assert plane.kubectl("get", "pod", "waits", "-n", namespace, "-o", "name") == "pod/waits\n"
    # A deletion stays open until the node says that the pod has ended.
    plane.delete("pod", "waits", namespace)
    assert plane.get("pod", "waits", namespace)["metadata"]["deletionGracePeriodSeconds"] == 30


def test_plane_node_receives_pod_cidr(plane: Plane, fake_node: str) -> None:
    node = plane.wait_for("node", fake_node, "", lambda node: node["spec"].get("podCIDR"), LATE)
    assert node["spec"]["podCIDR"].startswith("10.244.")


def test_plane_scheduler_binds_pod_to_ready_node(plane: Plane, namespace: str, fake_node: str) -> None:
    plane.patch("node", fake_node, "", {"metadata": {"labels": {"pick": fake_node}}})
    status = {
        "capacity": {"cpu": "1", "memory": "1Gi", "pods": "10"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
    }
    plane.patch("node", fake_node, "", {"status": status}, subresource="status")
    # The node controller lifts its own taint from a node that is ready.
    plane.create(pod_document("chosen", namespace, nodeSelector={"pick": fake_node}))

    def is_bound() -> bool:
        # Nobody says again that the node lives: one who comes late would not believe it.
        if not is_ready(plane.get("node", fake_node)):
            plane.patch("node", fake_node, "", {"status": status}, subresource="status")
        return bool(plane.get("pod", "chosen", namespace)["spec"].get("nodeName") == fake_node)

    plane.wait("the pod to be bound", is_bound, LATE)


def test_plane_deployment_creates_pods(plane: Plane, namespace: str) -> None:
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": pod_document("x", namespace)["spec"]}
    plane.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web", "namespace": namespace},
            "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
        }
    )
    plane.wait("two pods", lambda: len(plane.items("pod", namespace)) == 2, LATE)


def test_plane_service_account_token_issued_only_to_node_of_pod(
    plane: Plane, namespace: str, fake_node: str
) -> None:
    token = {"serviceAccountToken": {"path": "token", "audience": "somewhere"}}
    volumes = [{"name": "v", "projected": {"sources": [token]}}]
    pod = plane.create(pod_document("asks", namespace, fake_node, volumes=volumes))
    ask = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": ["somewhere"],
            "expirationSeconds": 600,
            "boundObjectRef": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": "asks",
                "uid": pod["metadata"]["uid"],
            },
        },
    }
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token"

    def answer(node: str) -> str:
        kubeconfig = plane.node_kubeconfig(node)
        command = ("create", "--raw", path, "-f", "-")
        return plane.kubectl(*command, input=json.dumps(ask), kubeconfig=kubeconfig, check=False)

    def given() -> str | None:
        told = answer(fake_node)
        return told if told.startswith("{") else None

    # The authorizer hears of a new pod a moment later.
    told = json.loads(plane.wait("the node to get its pod's token", given))
    claims = json.loads(base64.urlsafe_b64decode(told["status"]["token"].split(".")[1] + "=="))
    assert claims["sub"] == f"system:serviceaccount:{namespace}:default"
    assert claims["aud"] == ["somewhere"]
    assert "no relationship found between node" in answer(unique("other"))


def test_plane_node_authorizer_secret_of_other_pod_forbidden(
    plane: Plane, namespace: str, fake_node: str
) -> None:
    for name in ("mine", "foreign"):
        plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": namespace},
                "stringData": {"word": name},
            }
        )
    volumes = [{"name": "v", "secret": {"secretName": "mine"}}]
    plane.create(pod_document("owner", namespace, fake_node, volumes=volumes))
    kubeconfig = plane.node_kubeconfig(fake_node)

    def ask(name: str) -> str:
        where = ("get", "secret", name, "-n", namespace, "-o", "name")
        return plane.kubectl(*where, kubeconfig=kubeconfig, check=False)

    plane.wait("the node to see its secret", lambda: ask("mine") == "secret/mine\n")
    assert "Forbidden" in ask("foreign")


def test_plane_node_restriction_other_node_forbidden(plane: Plane, fake_node: str) -> None:
    kubeconfig = plane.node_kubeconfig(unique("other"))
    refusal = plane.kubectl("label", "node", fake_node, "a=b", kubeconfig=kubeconfig, check=False)
    assert "only its own Node object" in refusal


def test_plane_bootstrap_token_client_csr_auto_approved(plane: Plane, tmp_path: Path) -> None:
    kubeconfig = plane.bootstrap_kubeconfig()
    told = json.loads(plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=kubeconfig))
    groups = told["status"]["userInfo"]["groups"]
    assert "system:bootstrappers:kubeadm:default-node-token" in groups
    assert "Forbidden" in plane.kubectl("get", "secrets", "-A", kubeconfig=kubeconfig, check=False)
    name, node = unique("csr"), unique("joins")
    request = certificate_request(
        name,
        ["digital signature", "client auth"],
        "kubernetes.io/kube-apiserver-client-kubelet",
        Subject(f"system:node:{node}", ("system:nodes",)),
    )
    plane.kubectl("create", "-f", "-", input=json.dumps(request), kubeconfig=kubeconfig)
    signed = plane.wait_for(
        "certificatesigningrequest", name, "", lambda csr: csr.get("status", {}).get("certificate"), LATE
    )
    assert [one["reason"] for one in signed["status"]["conditions"]] == ["AutoApproved"]
    plane.delete("certificatesigningrequest", name)


def test_plane_invalid_bootstrap_token_unauthorized(plane: Plane) -> None:
    kubeconfig = plane.bootstrap_kubeconfig("abcdef.0123456789abcdef")
    told = plane.kubectl("get", "nodes", kubeconfig=kubeconfig, check=False)
    assert "Unauthorized" in told or "must be logged in" in told


def test_plane_serving_csr_requires_manual_approval(plane: Plane) -> None:
    node, name = unique("serves"), unique("csr")
    signer, subject = "kubernetes.io/kubelet-serving", Subject(f"system:node:{node}", ("system:nodes",))
    # Without an address in it the signer would refuse it; approval does not look at that.
    request = certificate_request(name, ["digital signature", "server auth"], signer, subject)
    kubeconfig = plane.node_kubeconfig(node)
    plane.kubectl("create", "-f", "-", input=json.dumps(request), kubeconfig=kubeconfig)
    plane.kubectl("certificate", "approve", name)
    conditions = plane.get("certificatesigningrequest", name)["status"]["conditions"]
    assert conditions[0]["reason"] == "KubectlApprove"
    plane.delete("certificatesigningrequest", name)


def test_plane_client_certificate_of_other_ca_unauthorized(plane: Plane) -> None:
    authority, key = issue_pem_elsewhere(plane)
    told = plane.kubectl(
        "get",
        "nodes",
        f"--client-certificate={authority}",
        f"--client-key={key}",
        kubeconfig=plane.bootstrap_kubeconfig("x"),
        check=False,
    )
    assert "Unauthorized" in told or "must be logged in" in told


def issue_pem_elsewhere(plane: Plane) -> tuple[Path, Path]:
    """An admin's certificate of another authority than the cluster's: etcd's."""
    from pykubelet.devcluster.identities import Authority

    layout = plane.cluster.layout
    authority = Authority(layout.certificate("etcd-ca"), layout.key("etcd-ca"))
    certificate, key = issue_pem(authority, Subject("admin", ("system:masters",)))
    paths = layout.directory / "strange.crt", layout.directory / "strange.key"
    for path, data in zip(paths, (certificate, key), strict=True):
        path.write_bytes(data)
    return paths


def test_plane_signing_duration_limits_certificate_lifetime(plane: Plane) -> None:
    from cryptography import x509

    with plane.signing("2m"):
        node, name = unique("brief"), unique("csr")
        request = certificate_request(
            name,
            ["digital signature", "client auth"],
            "kubernetes.io/kube-apiserver-client-kubelet",
            Subject(f"system:node:{node}", ("system:nodes",)),
        )
        kubeconfig = plane.node_kubeconfig(node)
        plane.kubectl("create", "-f", "-", input=json.dumps(request), kubeconfig=kubeconfig)
        csr = plane.wait_for(
            "certificatesigningrequest", name, "", lambda csr: csr.get("status", {}).get("certificate"), LATE
        )
    signed = x509.load_pem_x509_certificate(base64.b64decode(csr["status"]["certificate"]))
    assert signed.not_valid_after_utc.timestamp() - time.time() < 121
    plane.delete("certificatesigningrequest", name)


def test_plane_api_server_killed_and_restarted_keeps_state(plane: Plane, namespace: str) -> None:
    before = plane.get("namespace", namespace)["metadata"]["uid"]
    with plane.without_server():
        assert plane.find("namespace", namespace) is None
        assert Component.APISERVER not in plane.cluster.running()
    assert plane.get("namespace", namespace)["metadata"]["uid"] == before
    with fresh_namespace(plane):
        pass  # The controllers are there again: while they start, they give up on a server that is away.
    plane.stop_server()
    plane.start_server()
    plane.check()


def test_plane_audit_records_requests_and_writes(plane: Plane, namespace: str) -> None:
    mark = plane.audit_mark()
    name = unique("counted")
    with pytest.raises(ApiStatusError, match="not found"):
        plane.get("configmap", name, namespace)
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}
    plane.create(document)
    plane.delete("configmap", name, namespace)

    def asked() -> list[tuple[str, int]]:
        return [
            (event["verb"], event["responseStatus"]["code"])
            for event in plane.audit(mark)
            if event.get("objectRef", {}).get("name") == name
        ]

    plane.wait("three requests", lambda: asked() == [("get", 404), ("create", 201), ("delete", 200)])
    # What was asked for before may be written down after the mark.
    written = plane.writes("kubernetes-admin", mark)
    changed = [event["verb"] for event in written if event["objectRef"]["resource"] == "configmaps"]
    assert changed == ["create", "delete"]

"""Requests for certificates, by which a node gets its identity: only what the agent writes and reads."""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct

CLIENT_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
SERVING_SIGNER = "kubernetes.io/kubelet-serving"


class CertificateSigningRequestSpec(ObjectStruct):
    """What is asked for; `request` is PEM."""

    request: bytes = b""
    signer_name: str = ""
    usages: list[str] = []
    expiration_seconds: int | None = None


class CertificateSigningRequestCondition(ObjectStruct):
    """One judgement about a request: Approved, Denied or Failed."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class CertificateSigningRequestStatus(ObjectStruct):
    """What became of a request; `certificate` is PEM."""

    conditions: list[CertificateSigningRequestCondition] = []
    certificate: bytes = b""


class CertificateSigningRequest(ObjectStruct):
    """A request for a certificate."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: CertificateSigningRequestSpec = field(default_factory=CertificateSigningRequestSpec)
    status: CertificateSigningRequestStatus = field(default_factory=CertificateSigningRequestStatus)

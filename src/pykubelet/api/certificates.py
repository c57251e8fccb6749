"""CertificateSigningRequest of certificates.k8s.io: the fields that the kubelet reads and writes."""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct

CLIENT_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
SERVING_SIGNER = "kubernetes.io/kubelet-serving"


class CertificateSigningRequestSpec(ObjectStruct):
    """The requested certificate; `request` is PEM."""

    request: bytes = b""
    signer_name: str = ""
    usages: list[str] = []
    expiration_seconds: int | None = None


class CertificateSigningRequestCondition(ObjectStruct):
    """A condition of a CSR: Approved, Denied or Failed."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class CertificateSigningRequestStatus(ObjectStruct):
    """Conditions of a CSR, and the issued certificate as PEM."""

    conditions: list[CertificateSigningRequestCondition] = []
    certificate: bytes = b""


class CertificateSigningRequest(ObjectStruct):
    """A certificate signing request."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: CertificateSigningRequestSpec = field(default_factory=CertificateSigningRequestSpec)
    status: CertificateSigningRequestStatus = field(default_factory=CertificateSigningRequestStatus)

"""CertificateSigningRequest and PodCertificateRequest of certificates.k8s.io: the fields in use."""

from __future__ import annotations

from datetime import datetime

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct

CLIENT_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
SERVING_SIGNER = "kubernetes.io/kubelet-serving"
DENIED = "Denied"
FAILED = "Failed"
ISSUED = "Issued"
"""Condition types of a PodCertificateRequest."""


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


class PodCertificateRequestSpec(ObjectStruct):
    """The requested certificate; `stub_pkcs10_request` is DER, without a subject, for the pod's key."""

    signer_name: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    service_account_name: str = ""
    service_account_uid: str = ""
    node_name: str = ""
    node_uid: str = ""
    max_expiration_seconds: int | None = None
    stub_pkcs10_request: bytes = field(name="stubPKCS10Request", default=b"")
    unverified_user_annotations: dict[str, str] = {}


class PodCertificateRequestStatus(ObjectStruct):
    """Conditions of a request, and the issued certificate chain as PEM with its times."""

    conditions: list[CertificateSigningRequestCondition] = []
    certificate_chain: str = ""
    begin_refresh_at: datetime | None = None
    not_after: datetime | None = None


class PodCertificateRequest(ObjectStruct):
    """A request for a certificate of a pod, in its namespace."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: PodCertificateRequestSpec = field(default_factory=PodCertificateRequestSpec)
    status: PodCertificateRequestStatus = field(default_factory=PodCertificateRequestStatus)

"""API objects that pods depend on, and events: the fields that the kubelet uses.

Secrets and ConfigMaps with their data, Services for environment variables, ServiceAccounts for pull secrets
and tokens, RuntimeClasses for handler and overhead, ClusterTrustBundles, TokenRequests, and Events, which are
written with all fields.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, PartialObjectMeta, Resources


class Secret(ObjectStruct):
    """A secret with decoded data; its repr shows neither keys nor values."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    type: str = ""
    data: dict[str, bytes] = {}
    immutable: bool | None = None

    def __repr__(self) -> str:
        return f"Secret({self.metadata.namespace}/{self.metadata.name}, {len(self.data)} keys)"


class ConfigMap(ObjectStruct):
    """A ConfigMap with text and binary data."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    data: dict[str, str] = {}
    binary_data: dict[str, bytes] = {}
    immutable: bool | None = None


class ServicePort(ObjectStruct, gc=False):
    """A port of a service."""

    name: str = ""
    protocol: str = "TCP"
    port: int = 0


class ServiceSpec(ObjectStruct):
    """Cluster IP and ports of a service."""

    cluster_ip: str = ""
    ports: tuple[ServicePort, ...] = ()


class Service(ObjectStruct):
    """A service; a node caches all services of the cluster, so only the fields of variables are kept."""

    metadata: PartialObjectMeta = field(default_factory=PartialObjectMeta)
    spec: ServiceSpec = field(default_factory=ServiceSpec)


class LocalObjectReference(ObjectStruct):
    """Reference by name to an object in the same namespace."""

    name: str = ""


class ServiceAccount(ObjectStruct):
    """A service account: a pod's identity towards the API server."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    secrets: list[LocalObjectReference] = []
    image_pull_secrets: list[LocalObjectReference] = []
    automount_service_account_token: bool | None = None


class Overhead(ObjectStruct):
    """Resources that a runtime needs per pod, in addition to its containers."""

    pod_fixed: Resources = {}


class RuntimeClass(ObjectStruct):
    """A runtime class with the name of its CRI handler."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    handler: str = ""
    overhead: Overhead | None = None


class BoundObjectReference(ObjectStruct):
    """The object that a token is bound to: the token is invalid once the object is deleted."""

    kind: str = ""
    api_version: str = ""
    name: str = ""
    uid: str = ""


class ClusterTrustBundleSpec(ObjectStruct):
    """Root certificates as PEM, and the signer that they belong to, if any."""

    signer_name: str = ""
    trust_bundle: str = ""


class ClusterTrustBundle(ObjectStruct):
    """Cluster-wide root certificates."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ClusterTrustBundleSpec = field(default_factory=ClusterTrustBundleSpec)


class TokenRequestSpec(ObjectStruct, omit_defaults=False):
    """The requested token; without audiences it is for the API server."""

    audiences: list[str] = []
    expiration_seconds: int | None = None
    bound_object_ref: BoundObjectReference | None = None


class TokenRequestStatus(ObjectStruct):
    """The issued token; its repr masks it."""

    token: str = ""
    expiration_timestamp: datetime | None = None

    def __repr__(self) -> str:
        return f"TokenRequestStatus(token=<masked>, expiration_timestamp={self.expiration_timestamp})"


class TokenRequest(ObjectStruct):
    """A request for a service account token, and its result."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: TokenRequestSpec = field(default_factory=TokenRequestSpec)
    status: TokenRequestStatus = field(default_factory=TokenRequestStatus)


class ObjectReference(ObjectStruct):
    """The object that an event is about; `field_path` is a part of it, such as `spec.containers{main}`."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    api_version: str = ""
    resource_version: str = ""
    field_path: str = ""


class EventSource(ObjectStruct):
    """The component and host that report an event."""

    component: str = ""
    host: str = ""


class Event(ObjectStruct, omit_defaults=False):
    """An event; the API server requires empty fields to be present."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    involved_object: ObjectReference = field(default_factory=ObjectReference)
    reason: str = ""
    message: str = ""
    source: EventSource = field(default_factory=EventSource)
    first_timestamp: datetime | None = None
    last_timestamp: datetime | None = None
    count: int = 0
    type: str = ""
    event_time: datetime | None = None
    reporting_component: str = ""
    reporting_instance: str = ""

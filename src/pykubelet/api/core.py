"""The objects of the API that pods lean on: only what the agent reads.

Secrets and configMaps with their contents, services for the environment of containers, service
accounts for pull secrets and tokens, runtime classes for handler and overhead, bundles of root
certificates.

Events of the API: something that happened to an object, counted when it happens again.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, PartialObjectMeta, Resources


class Secret(ObjectStruct):
    """A secret, decoded; it shows neither keys nor values when printed."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    type: str = ""
    data: dict[str, bytes] = {}
    immutable: bool | None = None

    def __repr__(self) -> str:
        return f"Secret({self.metadata.namespace}/{self.metadata.name}, {len(self.data)} keys)"


class ConfigMap(ObjectStruct):
    """A configMap: texts, and contents that are no text."""

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
    """Where a service is reached inside the cluster."""

    cluster_ip: str = ""
    ports: tuple[ServicePort, ...] = ()


class Service(ObjectStruct):
    """A service; a node knows all of the cluster, so nothing is kept that no variable needs."""

    metadata: PartialObjectMeta = field(default_factory=PartialObjectMeta)
    spec: ServiceSpec = field(default_factory=ServiceSpec)


class LocalObjectReference(ObjectStruct):
    """An object of the same namespace, by name."""

    name: str = ""


class ServiceAccount(ObjectStruct):
    """A pod's identity towards the API server."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    secrets: list[LocalObjectReference] = []
    image_pull_secrets: list[LocalObjectReference] = []
    automount_service_account_token: bool | None = None


class Overhead(ObjectStruct):
    """What a runtime itself needs for each pod."""

    pod_fixed: Resources = {}


class RuntimeClass(ObjectStruct):
    """A way to run pods: the runtime's handler."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    handler: str = ""
    overhead: Overhead | None = None


class BoundObjectReference(ObjectStruct):
    """The object with whose end a token ends."""

    kind: str = ""
    api_version: str = ""
    name: str = ""
    uid: str = ""


class ClusterTrustBundleSpec(ObjectStruct):
    """Root certificates as PEM, and the signer that they belong to, if any."""

    signer_name: str = ""
    trust_bundle: str = ""


class ClusterTrustBundle(ObjectStruct):
    """Root certificates for all of the cluster."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ClusterTrustBundleSpec = field(default_factory=ClusterTrustBundleSpec)


class TokenRequestSpec(ObjectStruct, omit_defaults=False):
    """The token that is wanted; no audiences mean those of the API server."""

    audiences: list[str] = []
    expiration_seconds: int | None = None
    bound_object_ref: BoundObjectReference | None = None


class TokenRequestStatus(ObjectStruct):
    """The token that was given; it is not shown when printed."""

    token: str = ""
    expiration_timestamp: datetime | None = None

    def __repr__(self) -> str:
        return f"TokenRequestStatus(token=<masked>, expiration_timestamp={self.expiration_timestamp})"


class TokenRequest(ObjectStruct):
    """A request for a service account's token, and its answer."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: TokenRequestSpec = field(default_factory=TokenRequestSpec)
    status: TokenRequestStatus = field(default_factory=TokenRequestStatus)


class ObjectReference(ObjectStruct):
    """The object that an event is about; `field_path` is a part of it, `spec.containers{main}`."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    api_version: str = ""
    resource_version: str = ""
    field_path: str = ""


class EventSource(ObjectStruct):
    """Who says it."""

    component: str = ""
    host: str = ""


class Event(ObjectStruct, omit_defaults=False):
    """An event; the API server wants to see the empty fields too."""

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

"""The kinds of objects that the agent asks the API server for, and where they are.

A `Resource` knows its place in the API's paths and the struct that its objects become; all requests
are made in its terms, so that a path is never put together twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from pykubelet.api.core import ConfigMap, RuntimeClass, Secret, Service, ServiceAccount
from pykubelet.api.csr import CertificateSigningRequest
from pykubelet.api.event import Event
from pykubelet.api.lease import Lease
from pykubelet.api.meta import from_document, from_json
from pykubelet.api.node import Node
from pykubelet.api.persistent import PersistentVolume, PersistentVolumeClaim
from pykubelet.api.pod import Pod


class Metadata(Protocol):
    """Which object, and in which version: an ObjectMeta, or less where there are many."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def namespace(self) -> str:
        """Its namespace, if it has one."""

    @property
    def uid(self) -> str:
        """Tells it from others of the same name."""

    @property
    def resource_version(self) -> str:
        """Its version."""


class HasMetadata(Protocol):
    """Anything that the API server keeps."""

    @property
    def metadata(self) -> Metadata:
        """Identity and version."""


T = TypeVar("T", bound=HasMetadata)
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """One kind of object: `Resource(Lease, "Lease", "leases", "coordination.k8s.io")`."""

    struct: type[T]
    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`v1`, or `group/version`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Give the path of an object, or of all of a namespace or of the cluster without a name."""
        if name and self.namespaced and not namespace:
            raise ValueError(f"{self.kind} {name} needs a namespace")
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += filter(None, (self.plural, name, subresource))
        return "/" + "/".join(quote(part, safe="") for part in parts)


PODS = Resource(Pod, "Pod", "pods")
NODES = Resource(Node, "Node", "nodes", namespaced=False)
LEASES = Resource(Lease, "Lease", "leases", "coordination.k8s.io")
EVENTS = Resource(Event, "Event", "events")
SECRETS = Resource(Secret, "Secret", "secrets")
CONFIG_MAPS = Resource(ConfigMap, "ConfigMap", "configmaps")
SERVICES = Resource(Service, "Service", "services")
SERVICE_ACCOUNTS = Resource(ServiceAccount, "ServiceAccount", "serviceaccounts")
CLAIMS = Resource(PersistentVolumeClaim, "PersistentVolumeClaim", "persistentvolumeclaims")
PERSISTENT_VOLUMES = Resource(PersistentVolume, "PersistentVolume", "persistentvolumes", namespaced=False)
RUNTIME_CLASSES = Resource(RuntimeClass, "RuntimeClass", "runtimeclasses", "node.k8s.io", namespaced=False)
CERTIFICATE_REQUESTS = Resource(
    CertificateSigningRequest,
    "CertificateSigningRequest",
    "certificatesigningrequests",
    "certificates.k8s.io",
    namespaced=False,
)


def read_object(struct: type[S], data: bytes) -> S:
    """Make an object of what the API server sent; raises ValueError with the field that does not fit.

    Where a list, a map or a text is null, as Go writes those that were never set, it is absent.
    """
    try:
        return from_json(struct, data)
    except ValueError:
        try:
            document = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            document = None
        if document is None:
            raise
        return from_document(struct, _without_nulls(document))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value

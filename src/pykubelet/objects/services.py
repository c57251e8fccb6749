"""Service informer, and the environment variables by which containers find services without DNS.

Each service of the pod's namespace yields `NAME_SERVICE_HOST`, `NAME_SERVICE_PORT` and, in the format of
Docker links, `NAME_PORT_80_TCP` with its variants. The service `kubernetes` of the namespace `default` is
always included: client libraries find the API server by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from pykubelet.api.core import Service
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import SERVICES, ApiClient
from pykubelet.apiserver.reflector import Reflector, StoreDelta

API_SERVER = ("default", "kubernetes")
"""Namespace and name of the service that every pod sees."""


@dataclass(frozen=True, slots=True)
class ServicePort:
    """A port of a service."""

    port: int
    name: str = ""
    protocol: str = "TCP"


@dataclass(frozen=True, slots=True)
class ClusterService:
    """The fields of a service that its variables need."""

    namespace: str
    name: str
    cluster_ip: str
    ports: tuple[ServicePort, ...] = ()


def service_env(services: Iterable[ClusterService], namespace: str, links: bool) -> dict[str, str]:
    """Return the service variables of a pod; `links` is its `enableServiceLinks`."""
    seen: dict[str, ClusterService] = {}
    for service in services:
        if service.cluster_ip in ("", "None"):
            continue
        if (service.namespace, service.name) == API_SERVER:
            seen.setdefault(service.name, service)
        elif links and service.namespace == namespace:
            seen[service.name] = service
    return {key: value for name in sorted(seen) for key, value in _variables(seen[name]).items()}


def _variables(service: ClusterService) -> dict[str, str]:
    prefix = _variable_name(service.name)
    variables = {f"{prefix}_SERVICE_HOST": service.cluster_ip}
    if service.ports:
        variables[f"{prefix}_SERVICE_PORT"] = str(service.ports[0].port)
    for port in service.ports:
        if port.name:
            variables[f"{prefix}_SERVICE_PORT_{_variable_name(port.name)}"] = str(port.port)
    for port in service.ports:
        protocol = port.protocol or "TCP"
        host = f"[{service.cluster_ip}]" if ":" in service.cluster_ip else service.cluster_ip
        address = f"{protocol.lower()}://{host}:{port.port}"
        variables.setdefault(f"{prefix}_PORT", address)
        part = f"{prefix}_PORT_{port.port}_{protocol.upper()}"
        variables |= {
            part: address,
            f"{part}_PROTO": protocol.lower(),
            f"{part}_PORT": str(port.port),
            f"{part}_ADDR": service.cluster_ip,
        }
    return variables


def _variable_name(name: str) -> str:
    return name.replace("-", "_").upper()


WITH_ADDRESS = "spec.clusterIP!=None"
"""Field selector: headless services have no variables."""


class Services:
    """Informer of all services of the cluster with a cluster IP."""

    def __init__(self, client: ApiClient) -> None:
        self._reflector = Reflector(client, SERVICES, _ignore_update, field_selector=WITH_ADDRESS)

    async def run(self) -> NoReturn:
        """List and watch until cancelled."""
        await self._reflector.run()

    @property
    def has_synced(self) -> bool:
        """Whether the services have been listed."""
        return self._reflector.has_synced

    def env(self, pod: Pod) -> Mapping[str, str] | None:
        """Return the variables for a pod's containers; None until the services have been listed."""
        if not self.has_synced:
            return None
        namespace = pod.metadata.namespace
        seen = [
            _to_cluster_service(service)
            for key, service in self._reflector.objects.items()
            if key[0] == namespace or key == API_SERVER
        ]
        return service_env(seen, namespace, pod.spec.enable_service_links is not False)


def no_services(pod: Pod) -> Mapping[str, str] | None:
    """Return no variables, for a node without an API server."""
    return {}


def _to_cluster_service(service: Service) -> ClusterService:
    meta, spec = service.metadata, service.spec
    ports = tuple(ServicePort(port.port, port.name, port.protocol) for port in spec.ports)
    return ClusterService(meta.namespace, meta.name, spec.cluster_ip, ports)


async def _ignore_update(update: StoreDelta[Service]) -> None:
    """Ignore the update: a starting container reads the current state."""

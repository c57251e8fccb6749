"""The variables by which containers find services without DNS.

Each service of the pod's namespace gives `NAME_SERVICE_HOST`, `NAME_SERVICE_PORT` and, for software
that expects the links of old container engines, `NAME_PORT_80_TCP` and its parts. The service
`kubernetes` of the namespace `default` is always among them: client libraries find the API server
by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    """A service as far as its variables need it."""

    namespace: str
    name: str
    cluster_ip: str
    ports: tuple[ServicePort, ...] = ()


def service_env(services: Iterable[ClusterService], namespace: str, links: bool) -> dict[str, str]:
    """Give the variables for a pod; `links` is its `enableServiceLinks`."""
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

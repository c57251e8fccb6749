"""The cluster's services, mirrored for the variables by which containers find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from pykubelet.api.core import Service
from pykubelet.api.pod import Pod
from pykubelet.kube.client import ApiClient
from pykubelet.kube.object_copy import Update
from pykubelet.kube.reflector import Reflector
from pykubelet.kube.resources import SERVICES
from pykubelet.pods.service_env import API_SERVER, ClusterService, ServicePort, service_env

WITH_ADDRESS = "spec.clusterIP!=None"
"""Headless services have no variables."""


class Services:
    """All services of the cluster that have an address; `run` mirrors them."""

    def __init__(self, client: ApiClient) -> None:
        self._reflector = Reflector(client, SERVICES, _take_note, field_selector=WITH_ADDRESS)

    async def run(self) -> NoReturn:
        """Mirror until cancelled."""
        await self._reflector.run()

    @property
    def has_synced(self) -> bool:
        """Whether the services are known."""
        return self._reflector.has_synced

    def env(self, pod: Pod) -> Mapping[str, str] | None:
        """Give the variables for a pod's containers; None while the services are not known."""
        if not self.has_synced:
            return None
        namespace = pod.metadata.namespace
        seen = [
            _reduced(service)
            for key, service in self._reflector.objects.items()
            if key[0] == namespace or key == API_SERVER
        ]
        return service_env(seen, namespace, pod.spec.enable_service_links is not False)


def no_services(pod: Pod) -> Mapping[str, str] | None:
    """Give the variables of a node without an API server: none."""
    return {}


def _reduced(service: Service) -> ClusterService:
    meta, spec = service.metadata, service.spec
    ports = tuple(ServicePort(port.port, port.name, port.protocol) for port in spec.ports)
    return ClusterService(meta.namespace, meta.name, spec.cluster_ip, ports)


async def _take_note(update: Update[Service]) -> None:
    """Nobody waits for services: a container that starts looks at what is known then."""

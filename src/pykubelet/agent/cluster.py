"""Builds and starts the connection of the node to its cluster: identity, clients, objects, node status.

A standalone node has no `Cluster`. With one, only what needs the API server waits for it: running pods keep
running, static pods start, and events and statuses are sent when the API server responds.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry

from pykubelet.api.node import Node, NodeAddress
from pykubelet.apiserver.certificates.bootstrap import ensure_client_config
from pykubelet.apiserver.certificates.rotation import ClientCertificateRotation
from pykubelet.apiserver.certificates.serving import (
    CertificateFiles,
    RequestedCertificate,
    ServingCertificate,
)
from pykubelet.apiserver.certificates.store import CertificateMetrics
from pykubelet.apiserver.client import NODES, ApiClient, Clients, Limits, make_clients
from pykubelet.apiserver.credentials import follow_kubeconfig
from pykubelet.apiserver.events import EventRecorder, node_reference
from pykubelet.apiserver.metrics import RestMetrics
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.kubeconfig_file import load_kubeconfig
from pykubelet.config.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.logs import get_logger
from pykubelet.node.conditions import RuntimeHealth
from pykubelet.node.informer import CachedNode
from pykubelet.node.registration import NodeStartup
from pykubelet.node.reporter import NodeReporter
from pykubelet.node.settings import node_settings
from pykubelet.node.status import DeviceCapacity
from pykubelet.node.status_inputs import node_sources
from pykubelet.objects.base import PodObjects
from pykubelet.objects.cluster_objects import ClusterObjects, object_ttl
from pykubelet.objects.runtime_classes import RuntimeClasses
from pykubelet.objects.services import Services
from pykubelet.podconfig.checkpoints import CheckpointedObjects, Checkpoints
from pykubelet.podworkers.api_server_sync import ClusterParts
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.runtime_state import RuntimeState
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.csi.plugin import CsiPlugin
from pykubelet.volumes.manager import PodVolumes

log = get_logger(__name__)
IDLE_ROUNDS = 5
"""Resyncs without a read after which the watch of a configMap or secret ends."""
REVIEW_SECONDS = 10.0
FAREWELL_SECONDS = 2.0
"""Seconds that a stopping kubelet waits for unsent events."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Configuration and flags of the kubelet."""

    flags: KubeletFlags
    config: KubeletConfiguration
    gates: FeatureGates
    node_name: str


class Cluster:
    """Connection of a node to its cluster; built by `join_cluster`."""

    def __init__(
        self,
        settings: AgentSettings,
        clients: Clients,
        registry: CollectorRegistry,
        tasks: TaskScope,
        cri: RuntimeConnection,
        health: RuntimeHealth,
        runtime_state: RuntimeState,
        startup: NodeStartup,
    ) -> None:
        flags, config = settings.flags, settings.config
        self._settings = settings
        self._tasks = tasks
        self._registry = registry
        self.clients = clients
        self.recorder = EventRecorder(clients.events, settings.node_name, tries=None)
        self._about = node_reference(settings.node_name)
        self.reporter = NodeReporter(
            clients,
            node_settings(flags, config, settings.gates, settings.node_name),
            replace(
                node_sources(cri, flags, config, health, runtime_state.refresh),
                volumes_in_use=self._volumes_in_use,
                volumes_reported=self._volumes_reported,
                problems=self._problems,
                devices=lambda: self.devices(),
            ),
            self.node_event,
            startup,
        )
        self._read: tuple[CachedNode | None, Node | None] = (None, None)
        """The cached node object and its parsed form; parsed again only when it changes."""
        self._volumes: PodVolumes | None = None
        self.devices: Callable[[], DeviceCapacity] = DeviceCapacity
        """Returns the device capacity of the node."""
        self.is_crowded: Callable[[], bool] = lambda: False
        """Returns whether events are delayed because of a burst of starting or terminating pods."""
        self._services = Services(clients.objects)
        self._classes = RuntimeClasses(clients.objects, tasks)
        self._objects = ClusterObjects(
            clients.objects,
            tasks,
            strategy=config.config_map_and_secret_change_detection_strategy,
            ttl=self._object_ttl,
            idle_seconds=IDLE_ROUNDS * config.sync_frequency.seconds,
        )
        self.checkpoints = Checkpoints(Path(flags.pod_checkpoint_dir)) if flags.pod_checkpoint_dir else None
        self.objects: PodObjects = self._objects
        self._handler_of = self._classes.handler
        if self.checkpoints is not None:
            kept = CheckpointedObjects(self._objects, self.checkpoints, self._classes.handler)
            self.objects, self._handler_of = kept, kept.handler
            self.reporter.informer.add_listener(lambda _: self._keep_node())

    def parts(self) -> ClusterParts:
        """Dependencies of the pod engine on the cluster."""
        return ClusterParts(
            client=self.clients.objects,
            node_uid=self._node_uid,
            objects=self.objects,
            handler_of=self._handler_of,
            services=self._services.env,
            accounts=self._objects,
            node_ready=self.reporter.informer.synced,
            checkpoints=self.checkpoints,
        )

    def start(self, engine: PodEngine) -> None:
        """Start the watches and the node status; from now on pod events are sent to the API server."""
        engine.book.add_listener(self.recorder.pod_event)
        self.is_crowded = engine.crowd.is_there
        self._tasks.start(self._services.run(), name="services")
        self._tasks.start(self.reporter.run(), name="node")

    def use_volumes(self, volumes: PodVolumes) -> None:
        """Report volumes in use in the node status, so that the attach controller does not detach them."""
        self._volumes = volumes
        volumes.listen_in_use(self.reporter.wake)
        self.reporter.informer.add_listener(
            lambda node: volumes.node_changed(bytes(node.status)) if node is not None else None
        )
        csi = volumes.kinds.get("csi")
        if isinstance(csi, CsiPlugin):
            health = self._settings.gates.enabled("CSIVolumeHealth")
            csi.listen(self.recorder.record, health=health, ready=self.reporter.wake)
            self.reporter.informer.add_listener(
                lambda node: csi.node_changed(bytes(node.status)) if node is not None else None
            )

    def node_labels(self) -> Mapping[str, str] | None:
        """Labels of the node in the API server; None while they are not known."""
        node = self.reporter.informer.node
        return node.metadata.labels if node is not None else None

    def node(self) -> Node | None:
        """Return the last observed node object of the API server; None before the first one."""
        known = self.reporter.informer.node
        if self.checkpoints is not None and not self.reporter.informer.has_synced:
            return self.checkpoints.node
        if known is not self._read[0]:
            try:
                self._read = known, known.to_node() if known is not None else None
            except ValueError as err:
                log.error(err, "Failed to parse the node object", node=self._settings.node_name)
                self._read = known, None
        return self._read[1]

    def _keep_node(self) -> None:
        node = self.node()
        if node is not None and self.checkpoints is not None:
            self.checkpoints.save_node(node)

    async def fetch_node(self) -> Node:
        """Request the node object from the API server. Raises KubeError."""
        return await self.clients.objects.get(NODES, self._settings.node_name)

    def review_client(self) -> ApiClient:
        """Return a client for token and access reviews, which must not wait for requests of pods' objects."""
        config = self._settings.config
        limit = Limits(config.kube_api_qps, config.kube_api_burst).bucket()
        return ApiClient(self.clients.objects.transport, limit, timeout=REVIEW_SECONDS)

    def serving_certificate(self, given: CertificateFiles | None) -> ServingCertificate:
        """Return the serving certificate that the cluster issues (`serverTLSBootstrap`)."""
        return RequestedCertificate(
            self.clients.objects,
            Path(self._settings.flags.cert_dir),
            self._settings.node_name,
            self._addresses,
            fallback=given.current() if given is not None else None,
            dns_only=self._settings.gates.enabled("AllowDNSOnlyNodeCSR"),
            metrics=CertificateMetrics(self._registry, "server"),
        )

    def node_event(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Record an event about the node."""
        self.recorder.record(self._about, kind, reason, message)

    def _volumes_in_use(self) -> list[str] | None:
        return self._volumes.in_use() if self._volumes is not None else None

    def _volumes_reported(self, names: list[str]) -> None:
        if self._volumes is not None:
            self._volumes.reported(names)

    def _problems(self) -> list[str]:
        csi = self._volumes.kinds.get("csi") if self._volumes is not None else None
        return [csi.problem] if isinstance(csi, CsiPlugin) and csi.problem else []

    def _node_uid(self) -> str:
        node = self.reporter.informer.node
        return node.metadata.uid if node is not None else ""

    def _object_ttl(self) -> float | None:
        node = self.reporter.informer.node
        return object_ttl(node.metadata.annotations) if node is not None else None

    def _addresses(self) -> Iterable[NodeAddress]:
        node = self.node()
        return node.status.addresses if node is not None else ()


@contextlib.asynccontextmanager
async def join_cluster(
    settings: AgentSettings,
    registry: CollectorRegistry,
    cri: RuntimeConnection,
    health: RuntimeHealth,
    runtime_state: RuntimeState,
    started: datetime,
) -> AsyncIterator[Cluster]:
    """Obtain the node's identity, by a TLS bootstrap if necessary, and connect. Raises KubeconfigError.

    `started`: the time at which the kubelet started.
    """
    config, metrics = settings.config, RestMetrics(registry)
    async with contextlib.AsyncExitStack() as stack:
        identity = await stack.enter_async_context(TaskScope())
        access = await _identity(settings, registry, identity)
        transport = await stack.enter_async_context(Transport(access, metrics=metrics))
        tasks = await stack.enter_async_context(TaskScope())
        clients = make_clients(
            transport,
            objects=Limits(config.kube_api_qps, config.kube_api_burst),
            events=Limits(config.event_record_qps, config.event_burst),
            lease_seconds=config.node_lease_duration_seconds,
            status_seconds=config.node_status_update_frequency.seconds,
            metrics=metrics,
        )
        startup = NodeStartup(registry, started=started.timestamp())
        cluster = Cluster(settings, clients, registry, tasks, cri, health, runtime_state, startup)
        log.info("Joining the cluster", server=access.server, node=settings.node_name)
        tasks.start(cluster.recorder.run(lambda: cluster.is_crowded()), name="events")
        if not config.rotate_certificates:
            path = Path(settings.flags.kubeconfig)
            following = follow_kubeconfig(path, load_kubeconfig, access, transport.credentials)
            tasks.start(following, name="kubeconfig")
        try:
            yield cluster
        finally:
            await cluster.recorder.flush(FAREWELL_SECONDS)


async def _identity(settings: AgentSettings, registry: CollectorRegistry, tasks: TaskScope) -> RestConfig:
    flags = settings.flags
    path, folder = Path(flags.kubeconfig), Path(flags.cert_dir)
    bootstrap = Path(flags.bootstrap_kubeconfig) if flags.bootstrap_kubeconfig else None
    if not settings.config.rotate_certificates:
        return await ensure_client_config(path, bootstrap, folder, settings.node_name, load_kubeconfig)
    rotation = ClientCertificateRotation(
        path,
        bootstrap,
        folder,
        settings.node_name,
        load_kubeconfig,
        metrics=CertificateMetrics(registry, "client"),
    )
    access = rotation.prepare()
    tasks.start(rotation.run(), name="client-certificate")
    return access

"""Builds and starts the connection of the node to its cluster: identity, clients, objects, node status.

A standalone node has no `Cluster`. With one, only what needs the API server waits for it: running pods keep
running, static pods start, and events and statuses are sent when the API server responds.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from pykubelet.apiserver.client import NODES, ApiClient, Clients, Limits, heartbeat_timeout, make_clients
from pykubelet.apiserver.credentials import follow_kubeconfig
from pykubelet.apiserver.events import EventRecorder, node_reference
from pykubelet.apiserver.metrics import RestMetrics
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.kubeconfig_file import load_kubeconfig
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.node.informer import CachedNode, NodeInformer
from pykubelet.node.registration import NodeStartup
from pykubelet.node.reporter import NodeReporter
from pykubelet.node.settings import node_settings
from pykubelet.node.status_inputs import NodeSources
from pykubelet.objects.base import PodObjects, RecordPodEvent
from pykubelet.objects.cluster_objects import ClusterObjects, object_ttl
from pykubelet.objects.pod_certificates import PodCertificateCollector
from pykubelet.objects.runtime_classes import RuntimeClasses
from pykubelet.objects.services import Services
from pykubelet.podconfig.checkpoints import CheckpointedObjects, Checkpoints
from pykubelet.podworkers.api_server_sync import ClusterAccess
from pykubelet.podworkers.workers import PodChurn
from pykubelet.tracing.span import Tracer
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.attach import ClusterNode
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
    tracer: Tracer | None = None
    """None when tracing is off."""


class Cluster:
    """Connection of a node to its cluster; built by `join_cluster`."""

    def __init__(
        self,
        settings: AgentSettings,
        clients: Clients,
        registry: CollectorRegistry,
        tasks: TaskScope,
    ) -> None:
        """Initialize; `devices` returns the device capacity of the node."""
        flags, config = settings.flags, settings.config
        self._settings = settings
        self._tasks = tasks
        self._registry = registry
        self.clients = clients
        self.recorder = EventRecorder(clients.events, settings.node_name, tries=None)
        self._about = node_reference(settings.node_name)
        self.informer = NodeInformer(clients.objects, settings.node_name)
        self._status_listeners: list[Callable[[], None]] = []
        self._review_clients: list[ApiClient] = []
        self._parsed: tuple[CachedNode | None, Node | None] = (None, None)
        """The cached node object and its parsed form; parsed again only when it changes."""
        self.services = Services(clients.objects)
        self._classes = RuntimeClasses(clients.objects, tasks)
        self._objects = ClusterObjects(
            clients.objects,
            tasks,
            strategy=config.config_map_and_secret_change_detection_strategy,
            ttl=self._object_ttl,
            idle_seconds=IDLE_ROUNDS * config.sync_frequency.seconds,
            node=(settings.node_name, self._node_uid)
            if settings.gates.enabled("PodCertificateRequest")
            else None,
            trust_bundles=settings.gates.enabled("ClusterTrustBundleProjection"),
        )
        if self._objects.certificates is not None:
            registry.register(PodCertificateCollector(self._objects.certificates))
        self.checkpoints = Checkpoints(Path(flags.pod_checkpoint_dir)) if flags.pod_checkpoint_dir else None
        self.objects: PodObjects = self._objects
        self._handler_of = self._classes.handler
        if self.checkpoints is not None:
            checkpointed = CheckpointedObjects(self._objects, self.checkpoints, self._classes.handler)
            self.objects, self._handler_of = checkpointed, checkpointed.handler
            self.informer.add_listener(lambda _: self._checkpoint_node())

    def access(self) -> ClusterAccess:
        """Return what the pod engine uses of the cluster."""
        return ClusterAccess(
            client=self.clients.objects,
            node_uid=self._node_uid,
            objects=self.objects,
            handler_of=self._handler_of,
            services=self.services.env,
            node_event=self.node_event,
            node_ready=self.informer.synced,
            checkpoints=self.checkpoints,
        )

    @property
    def accounts(self) -> ClusterObjects:
        """Service accounts of pods, for credential providers that use their tokens."""
        return self._objects

    def add_pod_event_listener(self, record: RecordPodEvent) -> None:
        """Record events about pods that concern their API objects."""
        self._objects.add_event_listener(record)

    def volume_node(self) -> ClusterNode:
        """Return this node's membership in the cluster, for the volume manager."""
        return ClusterNode(
            self.clients.objects,
            self.node_labels,
            attach_detach=self._settings.config.enable_controller_attach_detach,
            on_in_use_change=self.request_node_status,
            record_object_event=self.recorder.record,
            checkpoints=self.checkpoints,
            volume_health=self._settings.gates.enabled("CSIVolumeHealth"),
        )

    def request_node_status(self) -> None:
        """Request a report of the node status, because an input has changed."""
        for listener in self._status_listeners:
            listener()

    def add_status_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a report of the node status is requested; it must not block."""
        self._status_listeners.append(listener)

    def node_labels(self) -> Mapping[str, str] | None:
        """Labels of the node in the API server; None while they are not known."""
        node = self.informer.node
        return node.metadata.labels if node is not None else None

    def node(self) -> Node | None:
        """Return the last observed node object of the API server; None before the first one."""
        known = self.informer.node
        if self.checkpoints is not None and not self.informer.has_synced:
            return self.checkpoints.node
        if known is not self._parsed[0]:
            try:
                self._parsed = known, known.to_node() if known is not None else None
            except ValueError as err:
                log.error(err, "Failed to parse the node object", node=self._settings.node_name)
                self._parsed = known, None
        return self._parsed[1]

    def _checkpoint_node(self) -> None:
        node = self.node()
        if node is not None and self.checkpoints is not None:
            self.checkpoints.save_node(node)

    async def fetch_node(self) -> Node:
        """Request the node object from the API server. Raises KubeError."""
        return await self.clients.objects.get(NODES, self._settings.node_name)

    def review_client(self) -> ApiClient:
        """Return a client for token and access reviews, which must not wait for requests of pods' objects."""
        limit = _object_limits(self._settings.config).bucket()
        client = ApiClient(
            self.clients.objects.transport, limit, timeout=REVIEW_SECONDS, tracer=self._settings.tracer
        )
        self._review_clients.append(client)
        return client

    def set_rates(self, config: KubeletConfiguration) -> None:
        """Change the rate limits of all clients and the timeout of heartbeats."""
        for client in (self.clients.objects, *self._review_clients):
            client.set_limits(_object_limits(config))
        self.clients.events.set_limits(_event_limits(config))
        self.clients.heartbeats.set_timeout(
            heartbeat_timeout(config.node_lease_duration_seconds, config.node_status_update_frequency.seconds)
        )

    def set_sync_frequency(self, seconds: float) -> None:
        """Change the resync period of pods, after some of which the watch of an unused object ends."""
        self._objects.set_idle_seconds(IDLE_ROUNDS * seconds)

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

    def _node_uid(self) -> str:
        node = self.informer.node
        return node.metadata.uid if node is not None else ""

    def _object_ttl(self) -> float | None:
        node = self.informer.node
        return object_ttl(node.metadata.annotations) if node is not None else None

    def _addresses(self) -> Iterable[NodeAddress]:
        node = self.node()
        return node.status.addresses if node is not None else ()


@contextlib.asynccontextmanager
async def join_cluster(
    settings: AgentSettings,
    registry: CollectorRegistry,
    churn: PodChurn,
) -> AsyncIterator[Cluster]:
    """Obtain the node's identity, by a TLS bootstrap if necessary, and connect. Raises KubeconfigError.

    Normal events are delayed during a burst of starting or terminating pods (`churn`).
    """
    config, metrics = settings.config, RestMetrics(registry)
    async with contextlib.AsyncExitStack() as stack:
        identity = await stack.enter_async_context(TaskScope())
        access = await _identity(settings, registry, identity)
        transport = await stack.enter_async_context(Transport(access, metrics=metrics))
        tasks = await stack.enter_async_context(TaskScope())
        clients = make_clients(
            transport,
            objects=_object_limits(config),
            events=_event_limits(config),
            lease_seconds=config.node_lease_duration_seconds,
            status_seconds=config.node_status_update_frequency.seconds,
            metrics=metrics,
            tracer=settings.tracer,
            streams_lists=settings.gates.enabled("WatchListClient"),
        )
        cluster = Cluster(settings, clients, registry, tasks)
        log.info("Joining the cluster", server=access.server, node=settings.node_name)
        tasks.start(cluster.recorder.run(churn.is_bursting), name="events")
        if not config.rotate_certificates:
            path = Path(settings.flags.kubeconfig)
            following = follow_kubeconfig(path, load_kubeconfig, access, transport.credentials)
            tasks.start(following, name="kubeconfig")
        try:
            yield cluster
        finally:
            await cluster.recorder.flush(FAREWELL_SECONDS)


def _object_limits(config: KubeletConfiguration) -> Limits:
    return Limits(config.kube_api_qps, config.kube_api_burst)


def _event_limits(config: KubeletConfiguration) -> Limits:
    return Limits(config.event_record_qps, config.event_burst)


def build_node_reporter(
    cluster: Cluster,
    settings: AgentSettings,
    sources: NodeSources,
    volumes: PodVolumes,
    startup: NodeStartup,
) -> NodeReporter:
    """Return the reporter of the node's status, which wakes when volumes or CSI drivers change.

    Volumes in use are in the status, so that the attach controller does not detach them.
    """
    csi = volumes.plugins.get("csi")

    def problems() -> list[str]:
        storage = [csi.problem] if isinstance(csi, CsiPlugin) and csi.problem else []
        return [*storage, *sources.problems()]

    reporter = NodeReporter(
        cluster.clients,
        node_settings(settings.flags, settings.config, settings.gates, settings.node_name),
        replace(
            sources,
            volumes_in_use=volumes.attached.in_use,
            volumes_reported=volumes.attached.set_reported,
            problems=problems,
        ),
        cluster.node_event,
        cluster.informer,
        startup,
    )
    cluster.add_status_listener(reporter.wake)
    cluster.informer.add_listener(
        lambda node: volumes.attached.node_changed(bytes(node.status)) if node is not None else None
    )
    if isinstance(csi, CsiPlugin):
        cluster.informer.add_listener(
            lambda node: csi.node_changed(bytes(node.status)) if node is not None else None
        )
    return reporter


async def _identity(settings: AgentSettings, registry: CollectorRegistry, tasks: TaskScope) -> RestConfig:
    flags = settings.flags
    path, cert_dir = Path(flags.kubeconfig), Path(flags.cert_dir)
    bootstrap = Path(flags.bootstrap_kubeconfig) if flags.bootstrap_kubeconfig else None
    if not settings.config.rotate_certificates:
        return await ensure_client_config(path, bootstrap, cert_dir, settings.node_name, load_kubeconfig)
    rotation = ClientCertificateRotation(
        path,
        bootstrap,
        cert_dir,
        settings.node_name,
        load_kubeconfig,
        metrics=CertificateMetrics(registry, "client"),
    )
    access = rotation.prepare()
    tasks.start(rotation.run(), name="client-certificate")
    return access

"""Node registration: creates the Node object or reconciles an existing one; startup latency metrics.

An existing node keeps the values of other writers; only what the kubelet owns is corrected: its own labels,
the attach/detach annotation, huge pages, and extended resources that may no longer exist. Registration is
retried until it succeeds, with exponential back-off from 0.1 s to 7 s.

`NodeStartup` measures the time from host boot to the first Ready. Like upstream, it measures only nodes that
are new to the cluster: the registration of an existing node does not measure node startup.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from pykubelet.api.meta import ObjectMeta, Resources
from pykubelet.api.names import is_extended_resource
from pykubelet.api.node import Node, NodeSpec, Taint
from pykubelet.apiserver.client import NODES, PatchKind, Resource
from pykubelet.apiserver.errors import AlreadyExists, Forbidden, KubeError, NotFound
from pykubelet.cm.qos import HUGE_PAGES_PREFIX
from pykubelet.linux.host_info import boot_time
from pykubelet.logs import get_logger
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import ZERO, node_patch
from pykubelet.util.backoff import ErrorLogLimiter, ExponentialDelay

log = get_logger(__name__)
FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 7.0
ATTACH_DETACH = "volumes.kubernetes.io/controller-managed-attach-detach"
_OWN_LABELS = (
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
)
_UNSCHEDULABLE = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
_UNINITIALIZED = Taint(
    key="node.cloudprovider.kubernetes.io/uninitialized", value="true", effect="NoSchedule"
)


class NodeWriter(Protocol):
    """API client for nodes: an ApiClient."""

    async def get(self, resource: Resource[Node], name: str) -> Node:
        """Get a node."""

    async def create(self, resource: Resource[Node], obj: Node) -> Node:
        """Create a node."""

    async def patch(
        self,
        resource: Resource[Node],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        kind: PatchKind = PatchKind.STRATEGIC,
        subresource: str = "",
    ) -> Node:
        """Patch a node."""

    async def pause(self, seconds: float) -> None:
        """Wait `seconds` before the next try, less if the server becomes reachable earlier."""


def blank_node(settings: NodeSettings, architecture: str) -> Node:
    """Return the node as it registers, without its status."""
    registration = settings.registration
    labels = {
        "kubernetes.io/hostname": settings.hostname,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": architecture,
        "beta.kubernetes.io/os": "linux",
        "beta.kubernetes.io/arch": architecture,
        **registration.labels,
    }
    taints = list(registration.taints)
    if not registration.schedulable and not any(_same_taint(taint, _UNSCHEDULABLE) for taint in taints):
        taints.append(_UNSCHEDULABLE)
    if settings.external_cloud:
        taints.append(_UNINITIALIZED)
    return Node(
        metadata=ObjectMeta(
            name=settings.name,
            labels=labels,
            annotations={ATTACH_DETACH: "true"} if registration.attach_detach else {},
        ),
        # The node lifecycle controller derives the taint from this field and would remove the taint alone.
        spec=NodeSpec(
            provider_id=registration.provider_id, taints=taints, unschedulable=not registration.schedulable
        ),
    )


def reconciled(existing: Node, ours: Node, *, reset_extended: bool = False) -> Node:
    """Return the existing node with the fields that the kubelet owns corrected.

    `reset_extended`: the device manager has no checkpoint, so extended resources are set to zero until
    their device plugins register again.
    """
    meta = existing.metadata
    own = {name: value for name, value in ours.metadata.labels.items() if name in _OWN_LABELS}
    labels = {name: value for name, value in {**meta.labels, **own}.items() if value or name not in own}
    annotations = {name: value for name, value in meta.annotations.items() if name != ATTACH_DETACH}
    if value := ours.metadata.annotations.get(ATTACH_DETACH):
        annotations[ATTACH_DETACH] = value
    capacity = existing.status.capacity or ours.status.capacity
    return Node(
        metadata=msgspec.structs.replace(meta, labels=labels, annotations=annotations),
        spec=existing.spec,
        status=msgspec.structs.replace(
            existing.status,
            capacity=_corrected(capacity, capacity, ours.status.capacity, reset_extended),
            allocatable=_corrected(
                existing.status.allocatable or ours.status.allocatable,
                capacity,
                ours.status.allocatable,
                reset_extended,
            ),
        ),
    )


async def try_register(
    store: NodeWriter,
    ours: Node,
    settings: NodeSettings,
    *,
    reset_extended: bool,
    created: Callable[[], None] = lambda: None,
) -> Node:
    """Create or reconcile the node and return it as the API server has it. Raises KubeError."""
    forbidden: Forbidden | None = None
    try:
        node = await store.create(NODES, ours)
        created()
        return node
    except AlreadyExists:
        pass
    except Forbidden as err:
        # Another component may create the nodes of this cluster.
        if settings.gates.enabled("KubeletRegistrationGetOnExistsOnly"):
            raise
        forbidden = err
    try:
        existing = await store.get(NODES, settings.name)
    except (NotFound, Forbidden):
        if forbidden is not None:
            raise forbidden from None
        raise
    log.info("Node was previously registered", node=settings.name)
    if patch := node_patch(existing, reconciled(existing, ours, reset_extended=reset_extended)):
        return await store.patch(NODES, settings.name, patch, subresource="status")
    return existing


async def register(
    store: NodeWriter,
    settings: NodeSettings,
    build_node: Callable[[], Awaitable[Node]],
    *,
    reset_extended: Callable[[], bool] = lambda: False,
    created: Callable[[], None] = lambda: None,
) -> Node:
    """Register the node, retrying until it succeeds; `build_node` builds the local Node for each try.

    `created` is called if the Node object did not exist before.
    """
    error_log = ErrorLogLimiter(log, "Failed to register the node", node=settings.name)
    clock = asyncio.get_running_loop().time
    delay = ExponentialDelay(FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS)
    while True:
        ours = await build_node()
        log.v(2).info("Attempting to register node", node=settings.name)
        try:
            node = await try_register(store, ours, settings, reset_extended=reset_extended(), created=created)
        except KubeError as err:
            error_log.failed(err, clock())
            await store.pause(delay.next())
            continue
        error_log.succeeded(clock())
        log.info("Successfully registered node", node=settings.name)
        return node


def _corrected(existing: Resources, capacity: Resources, ours: Resources, reset: bool) -> Resources:
    """Return corrected capacity or allocatable; `capacity` determines which extended resources exist."""
    pages = {name: amount for name, amount in ours.items() if name.startswith(HUGE_PAGES_PREFIX)}
    retained = {
        name: amount
        for name, amount in existing.items()
        if not name.startswith(HUGE_PAGES_PREFIX) or name in pages
    }
    zeroed = dict.fromkeys(filter(is_extended_resource, capacity), ZERO) if reset else {}
    return {**retained, **pages, **zeroed}


def _same_taint(taint: Taint, other: Taint) -> bool:
    return (taint.key, taint.effect) == (other.key, other.effect)


class NodeStartup:
    """Startup latency metrics of one node; each time is recorded once."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        started: float | None = None,
        boot: Callable[[], float] = boot_time,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Initialize with the kubelet's start time and clocks, in seconds since the Unix epoch."""
        self._clock = clock
        self._boot = boot
        self._started = clock() if started is None else started
        self._attempted: float | None = None
        self._registered: float | None = None
        self._ready = False

        def gauge(part: str, text: str) -> Gauge:
            return Gauge(f"kubelet_node_startup_{part}duration_seconds", text, registry=registry)

        self._pre_kubelet = gauge("pre_kubelet_", "From the machine's boot to the agent's start.")
        self._pre_registration = gauge("pre_registration_", "From the agent's start to its registering.")
        self._registration = gauge("registration_", "How long the registration took.")
        self._post_registration = gauge("post_registration_", "From the registration to the first Ready.")
        self._total = gauge("", "From the machine's boot to the node's first Ready.")

    def attempted(self) -> None:
        """Record that the kubelet starts to register the node."""
        if self._attempted is None:
            self._attempted = self._clock()

    def registered(self) -> None:
        """Record that the Node object was created."""
        if self._attempted is None or self._registered is not None:
            return
        self._registered = self._clock()
        self._pre_kubelet.set(self._started - self._boot())
        self._pre_registration.set(self._attempted - self._started)
        self._registration.set(self._registered - self._attempted)

    def ready(self) -> None:
        """Record that Ready was reported to the API server."""
        if self._registered is None or self._ready:
            return
        self._ready = True
        now = self._clock()
        self._post_registration.set(now - self._registered)
        self._total.set(now - self._boot())

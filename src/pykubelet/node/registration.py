"""Becoming a node of the cluster: creating the Node object, or taking over the one that is there.

A node that exists keeps what others gave it; only what the agent alone knows is corrected: its own
labels, who attaches volumes, and resources that may be gone since. An API server that is away or
refuses is asked again for as long as it takes, after pauses from a tenth of a second to seven.

How long it took this node to become one: from the boot of the machine to the first Ready.

Measured only for a node that is new to its cluster, as the reference does: an agent that takes over an
existing node says nothing about how long nodes take to come.
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
from pykubelet.node.status import NOTHING, node_patch
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 7.0
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
    """Where nodes are kept: an ApiClient."""

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
        """Change a node."""

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, or until the server is back."""


def blank_node(settings: NodeSettings, architecture: str) -> Node:
    """Give the node as it registers, without its status."""
    labels = {
        "kubernetes.io/hostname": settings.hostname,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": architecture,
        "beta.kubernetes.io/os": "linux",
        "beta.kubernetes.io/arch": architecture,
        **settings.labels,
    }
    taints = list(settings.taints)
    if not settings.schedulable and not any(_same_taint(taint, _UNSCHEDULABLE) for taint in taints):
        taints.append(_UNSCHEDULABLE)
    if settings.external_cloud:
        taints.append(_UNINITIALIZED)
    return Node(
        metadata=ObjectMeta(
            name=settings.name,
            labels=labels,
            annotations={ATTACH_DETACH: "true"} if settings.attach_detach else {},
        ),
        # The taint alone would be taken away by the cluster, which sets it by this field.
        spec=NodeSpec(
            provider_id=settings.provider_id, taints=taints, unschedulable=not settings.schedulable
        ),
    )


def reconciled(existing: Node, ours: Node, *, reset_extended: bool = False) -> Node:
    """Give the node that exists, with what the agent alone knows corrected.

    `reset_extended`: nothing is known of devices that were here before, so what was offered of them
    is zero until their plugins are back.
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
    """Create the node or take over the existing one, and give it as the server has it; raises KubeError."""
    refusal: Forbidden | None = None
    try:
        node = await store.create(NODES, ours)
        created()
        return node
    except AlreadyExists:
        pass
    except Forbidden as err:
        # Somebody else may create the nodes of this cluster.
        if settings.gates.enabled("KubeletRegistrationGetOnExistsOnly"):
            raise
        refusal = err
    try:
        existing = await store.get(NODES, settings.name)
    except (NotFound, Forbidden):
        if refusal is not None:
            raise refusal from None
        raise
    log.info("Node was previously registered", node=settings.name)
    if patch := node_patch(existing, reconciled(existing, ours, reset_extended=reset_extended)):
        return await store.patch(NODES, settings.name, patch, subresource="status")
    return existing


async def register(
    store: NodeWriter,
    settings: NodeSettings,
    make: Callable[[], Awaitable[Node]],
    *,
    reset_extended: Callable[[], bool] = lambda: False,
    created: Callable[[], None] = lambda: None,
) -> Node:
    """Register until it is done; `make` gives our node anew for each try.

    `created` is called when the cluster did not have the node before.
    """
    complaints = ErrorLogLimiter(log, "Failed to register the node", node=settings.name)
    clock, pause = asyncio.get_running_loop().time, FIRST_PAUSE_SECONDS
    while True:
        ours = await make()
        log.v(2).info("Attempting to register node", node=settings.name)
        try:
            node = await try_register(store, ours, settings, reset_extended=reset_extended(), created=created)
        except KubeError as err:
            complaints.failed(err, clock())
            await store.pause(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            continue
        complaints.succeeded(clock())
        log.info("Successfully registered node", node=settings.name)
        return node


def _corrected(existing: Resources, capacity: Resources, ours: Resources, reset: bool) -> Resources:
    """Correct either capacity or allocatable; `capacity` decides which resources there are."""
    pages = {name: amount for name, amount in ours.items() if name.startswith(HUGE_PAGES_PREFIX)}
    kept = {
        name: amount
        for name, amount in existing.items()
        if not name.startswith(HUGE_PAGES_PREFIX) or name in pages
    }
    zeroed = dict.fromkeys(filter(is_extended_resource, capacity), NOTHING) if reset else {}
    return {**kept, **pages, **zeroed}


def _same_taint(one: Taint, other: Taint) -> bool:
    return (one.key, one.effect) == (other.key, other.effect)


class NodeStartup:
    """The moments of one node's beginning; each counts once."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        started: float | None = None,
        boot: Callable[[], float] = boot_time,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take when the agent started, and clocks that give seconds since 1970."""
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
        """Take note that the agent begins to register the node."""
        if self._attempted is None:
            self._attempted = self._clock()

    def registered(self) -> None:
        """Take note that the API server has the node, which is new."""
        if self._attempted is None or self._registered is not None:
            return
        self._registered = self._clock()
        self._pre_kubelet.set(self._started - self._boot())
        self._pre_registration.set(self._attempted - self._started)
        self._registration.set(self._registered - self._attempted)

    def ready(self) -> None:
        """Take note that the API server was told that the node is ready."""
        if self._registered is None or self._ready:
            return
        self._ready = True
        now = self._clock()
        self._post_registration.set(now - self._registered)
        self._total.set(now - self._boot())

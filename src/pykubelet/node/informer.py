"""Informer for the node's own Node object, and the local Node object used before the API server has one.

Every status that the kubelet writes comes back through the watch, so only metadata and spec are decoded
here; the status stays raw JSON until `CachedNode.whole` is called.

`own_node` builds the Node from local settings alone, for pod admission before the API server's is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import msgspec

from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources
from pykubelet.api.node import Node, NodeSpec, NodeStatus
from pykubelet.apiserver.client import Resource, read_object
from pykubelet.apiserver.reflector import ListerWatcher, Reflector, StoreDelta
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.node.registration import blank_node
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import declared_features, runtime_features


class CachedNode(ObjectStruct):
    """The Node object as last observed, with its status not decoded."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: msgspec.Raw = msgspec.Raw(b"{}")
    """Raw JSON, decoded by `to_node()`."""

    def to_node(self) -> Node:
        """Return the node with its decoded status. Raises ValueError if the status is invalid."""
        return Node(
            metadata=self.metadata, spec=self.spec, status=read_object(NodeStatus, bytes(self.status))
        )


CACHED_NODES = Resource(CachedNode, "Node", "nodes", namespaced=False)
Listener = Callable[[CachedNode | None], None]


class NodeInformer:
    """Informer for one Node object; `node` is None until it is observed and after it is deleted."""

    def __init__(self, source: ListerWatcher, name: str) -> None:
        self._listeners: list[Listener] = []
        self._reflector = Reflector(
            source, CACHED_NODES, self._handle_update, field_selector=f"metadata.name={name}"
        )
        self.node: CachedNode | None = None

    @property
    def has_synced(self) -> bool:
        """Whether the initial list has completed."""
        return self._reflector.has_synced

    async def synced(self) -> None:
        """Wait until the initial list has completed."""
        await self._reflector.synced()

    def add_listener(self, listener: Listener) -> None:
        """Add a listener, called with the node at each change and with None when it is deleted."""
        self._listeners.append(listener)

    async def run(self) -> NoReturn:
        """Watch the node until cancelled."""
        await self._reflector.run()

    async def _handle_update(self, update: StoreDelta[CachedNode]) -> None:
        if not update.changed and not update.removed:
            return
        self.node = next(iter(self._reflector.objects.values()), None)
        for listener in self._listeners:
            listener(self.node)


def own_node(
    settings: NodeSettings, architecture: str, allocatable: Resources, runtime: pb.StatusResponse
) -> Node:
    """Return the node as it registers, with its allocatable resources and features in the status."""
    status = NodeStatus(
        allocatable=allocatable,
        features=runtime_features(runtime, settings.gates),
        declared_features=declared_features(runtime, settings.gates),
    )
    return msgspec.structs.replace(blank_node(settings, architecture), status=status)

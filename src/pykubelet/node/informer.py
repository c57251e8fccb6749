"""The node's own object as the API server has it, kept up to date by a watch.

Every status that the agent writes comes back through the watch, so only identity, labels and spec are
read here; the status stays as the server wrote it until somebody wants it.

This node as its agent knows it without asking anybody: what pods are judged by before a cluster has it.
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
    """The node as it was last seen."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: msgspec.Raw = msgspec.Raw(b"{}")
    """Not read yet: `whole()` does."""

    def whole(self) -> Node:
        """Give the node with its status; raises ValueError when that cannot be read."""
        return Node(
            metadata=self.metadata, spec=self.spec, status=read_object(NodeStatus, bytes(self.status))
        )


KNOWN_NODES = Resource(CachedNode, "Node", "nodes", namespaced=False)
Listener = Callable[[CachedNode | None], None]


class NodeInformer:
    """Watches one node; `node` is None while there is none, or none was seen yet."""

    def __init__(self, source: ListerWatcher, name: str) -> None:
        self._listeners: list[Listener] = []
        self._reflector = Reflector(
            source, KNOWN_NODES, self._updated, field_selector=f"metadata.name={name}"
        )
        self.node: CachedNode | None = None

    @property
    def has_synced(self) -> bool:
        """Whether the API server was asked with success since the start."""
        return self._reflector.has_synced

    async def synced(self) -> None:
        """Wait until the API server was asked with success."""
        await self._reflector.synced()

    def listen(self, listener: Listener) -> None:
        """Call this with the node at each change of it, and with None when it is deleted."""
        self._listeners.append(listener)

    async def run(self) -> NoReturn:
        """Watch until cancelled."""
        await self._reflector.run()

    async def _updated(self, update: StoreDelta[CachedNode]) -> None:
        if not update.changed and not update.removed:
            return
        self.node = next(iter(self._reflector.objects.values()), None)
        for listener in self._listeners:
            listener(self.node)


def own_node(
    settings: NodeSettings, architecture: str, allocatable: Resources, runtime: pb.StatusResponse
) -> Node:
    """Give the node as it registers, with what it has to give and what it can do."""
    status = NodeStatus(
        allocatable=allocatable,
        features=runtime_features(runtime, settings.gates),
        declared_features=declared_features(runtime, settings.gates),
    )
    return msgspec.structs.replace(blank_node(settings, architecture), status=status)

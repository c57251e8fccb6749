"""Reporter of one node: registers it, patches its status, renews its lease and watches its Node object.

    health = RuntimeHealth(cri.runtime.status)
    state = RuntimeState(health.status)
    reporter = NodeReporter(clients, node_settings(...), node_sources(...), record, informer)
    scope.start(reporter.run(), name="node")

Created only when an API server is configured; `run` starts the loops and cancels them when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from pykubelet.api.meta import Resources, now
from pykubelet.api.node import Node
from pykubelet.apiserver.client import Clients
from pykubelet.node.informer import CachedNode, NodeInformer
from pykubelet.node.lease import LeaseLoop
from pykubelet.node.registration import NodeStartup, blank_node, register
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import next_node
from pykubelet.node.status_inputs import NodeSources, NodeStatusCollector
from pykubelet.node.status_loop import AddressListener, NodeEvents, Record, StatusLoop
from pykubelet.util.tasks import TaskScope


class NodeReporter:
    """Owner of the node's registration, status loop and lease loop; runs the shared informer."""

    def __init__(
        self,
        clients: Clients,
        settings: NodeSettings,
        sources: NodeSources,
        record: Record,
        informer: NodeInformer,
        startup: NodeStartup | None = None,
    ) -> None:
        self._startup = startup or NodeStartup()
        self._clients = clients
        self._settings = settings
        self._sources = sources
        self._collector = NodeStatusCollector(sources, settings)
        self._events = NodeEvents(record, settings.name)
        close_all = clients.heartbeats.transport.close_all
        self._status = StatusLoop(
            clients.heartbeats,
            settings,
            sources,
            self._collector,
            self._events,
            close_all,
            ready=self._startup.ready,
        )
        self._lease = LeaseLoop(clients.heartbeats, settings, lambda: self._status.node_uid, close_all)
        self._registered = asyncio.Event()
        self._informer = informer
        informer.add_listener(self._node_updated)
        sources.runtime.health.add_listener(self.wake)

    def add_address_listener(self, listener: AddressListener) -> None:
        """Add a listener, called with the addresses of the node status; it must not block."""
        self._status.add_address_listener(listener)

    def set_settings(self, settings: NodeSettings, capacity: Resources) -> None:
        """Replace periods, reservations and capacity; a status round and a renewal of the lease follow soon.

        What the node has registered with (name, labels, taints, addresses) must be the same.
        """
        self._settings = settings
        self._collector.set_settings(settings, capacity)
        self._status.set_settings(settings)
        self._lease.set_settings(settings)

    async def registered(self) -> None:
        """Wait until the API server has the node."""
        await self._registered.wait()

    def wake(self) -> None:
        """Start a status round immediately because an input has changed. Never blocks."""
        self._status.wake()

    async def run(self) -> NoReturn:
        """Register the node, then report its status and renew its lease until cancelled."""
        self._events.starting()
        async with TaskScope() as tasks:
            tasks.start(self._informer.run(), name="node-informer")
            # Started before registration completes: an existing node must not lose its lease.
            tasks.start(self._lease.run(), name="node-lease")
            if self._settings.registration.enabled:
                await self._collector.refresh()
                self._startup.attempted()
                node = await register(
                    self._clients.objects,
                    self._settings,
                    self._local_node,
                    reset_extended=self._sources.reset_extended,
                    created=self._startup.registered,
                )
                self._status.set_latest(node)
                self._lease.wake()
                self._registered.set()
            await self._status.run()

    async def _local_node(self) -> Node:
        blank = blank_node(self._settings, self._sources.machine.architecture)
        node, transitions = next_node(blank, await self._collector.facts(), self._settings, now())
        self._events.transitions(transitions)
        return node

    def _node_updated(self, node: CachedNode | None) -> None:
        before = self._status.node_uid
        self._status.handle_update(node)
        if node is not None:
            self._registered.set()
            if node.metadata.uid != before:
                self._lease.wake()
            if self._settings.external_cloud:
                self._publish_addresses(node)

    def _publish_addresses(self, node: CachedNode) -> None:
        """Publish the cloud provider's addresses; the first pod of the API server waits for the node."""
        with contextlib.suppress(ValueError):  # The status loop logs this and gets the node again.
            self._status.publish_addresses(node.to_node().status.addresses)

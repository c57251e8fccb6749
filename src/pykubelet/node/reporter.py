"""The node in its cluster: registers it, reports its status, keeps its lease, follows its object.

    health = RuntimeHealth(cri.runtime.status)
    state = RuntimeState(health.status)
    reporter = NodeReporter(clients, node_settings(...), node_sources(...), record)
    scope.start(reporter.run(), name="node")

A node without an API server has none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from pykubelet.api.meta import now
from pykubelet.api.node import Node
from pykubelet.apiserver.client import Clients
from pykubelet.node.informer import CachedNode, NodeInformer
from pykubelet.node.lease import LeaseLoop
from pykubelet.node.registration import NodeStartup, blank_node, register
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import next_node
from pykubelet.node.status_inputs import NodeSources, NodeStatusCollector
from pykubelet.node.status_loop import NodeEvents, Record, StatusLoop
from pykubelet.util.tasks import TaskScope


class NodeReporter:
    """Speaks for one node; `informer` shows its object to everyone else."""

    def __init__(
        self,
        clients: Clients,
        settings: NodeSettings,
        sources: NodeSources,
        record: Record,
        startup: NodeStartup | None = None,
    ) -> None:
        self._startup = startup or NodeStartup()
        self._clients = clients
        self._settings = settings
        self._sources = sources
        self._observer = NodeStatusCollector(sources, settings)
        self._events = NodeEvents(record, settings.name)
        close_all = clients.heartbeats.transport.close_all
        self._status = StatusLoop(
            clients.heartbeats,
            settings,
            sources,
            self._observer,
            self._events,
            close_all,
            ready=self._startup.ready,
        )
        self._lease = LeaseLoop(clients.heartbeats, settings, lambda: self._status.node_uid, close_all)
        self._registered = asyncio.Event()
        self.informer = NodeInformer(clients.objects, settings.name)
        self.informer.listen(self._seen)
        sources.health.listen(self.wake)

    async def registered(self) -> None:
        """Wait until the API server has the node."""
        await self._registered.wait()

    def wake(self) -> None:
        """Report at once: something about the node has changed. Cheap, and never waits."""
        self._status.wake()

    async def run(self) -> NoReturn:
        """Speak for the node until cancelled."""
        self._events.starting()
        async with TaskScope() as tasks:
            tasks.start(self.informer.run(), name="node-informer")
            # Also before the registration is done: the node may have been there for long.
            tasks.start(self._lease.run(), name="node-lease")
            if self._settings.register:
                await self._observer.refresh()
                self._startup.attempted()
                node = await register(
                    self._clients.objects,
                    self._settings,
                    self._initial,
                    reset_extended=self._sources.reset_extended,
                    created=self._startup.registered,
                )
                self._status.answered(node)
                self._lease.wake()
                self._registered.set()
            await self._status.run()

    async def _initial(self) -> Node:
        blank = blank_node(self._settings, self._sources.machine.architecture)
        node, transitions = next_node(blank, await self._observer.facts(), self._settings, now())
        self._events.transitions(transitions)
        return node

    def _seen(self, node: CachedNode | None) -> None:
        before = self._status.node_uid
        self._status.seen(node)
        if node is not None:
            self._registered.set()
            if node.metadata.uid != before:
                self._lease.wake()
            if self._settings.external_cloud:
                self._tell_addresses(node)

    def _tell_addresses(self, node: CachedNode) -> None:
        """Tell what the cloud wrote before the first pod of the cluster comes, which waits for the node."""
        with contextlib.suppress(ValueError):  # The status loop says it, and asks.
            self._sources.addressed(node.whole().status.addresses)

"""Node status loop: computes the status periodically and patches it when it has changed.

A round compares the current state with the API server's Node object and patches the difference; if only
heartbeat times differ, only every `nodeStatusReportFrequency` (5 minutes). After startup, until the node is
ready for the first time, the runtime status is polled every 0.1 s, because pods wait for it. `wake` starts a
round immediately. A failed round is retried in the next one.

`NodeEvents` records each node event once: a status may be computed several times before the API server
accepts it, and the event is recorded with the first computation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Literal, NoReturn

import pykubelet.api.meta
from pykubelet.api.node import Node, NodeAddress
from pykubelet.apiserver.client import NODES
from pykubelet.apiserver.errors import KubeError, NotFound, Unreachable
from pykubelet.logs import get_logger
from pykubelet.node.conditions import Transition, is_ready
from pykubelet.node.informer import CachedNode
from pykubelet.node.lease import RETRIABLE_ERRORS, TRIES, CloseConnections, WakeupTimer, jittered
from pykubelet.node.registration import NodeWriter
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import has_changed, next_node, node_patch
from pykubelet.node.status_inputs import NodeSources, NodeStatusCollector, PodCidr
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
Record = Callable[[Literal["Normal", "Warning"], str, str], None]
"""Records an event with the given type, reason and message."""
AddressListener = Callable[[list[NodeAddress]], None]
"""Called with the addresses of the node status."""


class NodeEvents:
    """Recorder of the events of one node, each once."""

    def __init__(self, record: Record, node: str) -> None:
        self._record = record
        self._node = node
        self._recorded: dict[str, Transition] = {}
        self._recorded_boot_id = ""
        self._schedulable = True

    def starting(self) -> None:
        """Record that the kubelet is starting."""
        self._record("Normal", "Starting", "Starting kubelet.")

    def transitions(self, transitions: Iterable[Transition]) -> None:
        """Record changed conditions, computed against the API server's Node object."""
        for transition in transitions:
            if self._recorded.get(transition.event) != transition:
                self._recorded[transition.event] = transition
                self._status(transition.event)

    def booted(self, before: str, now: str) -> None:
        """Record a reboot if the boot ID differs from the one in the API server's Node object."""
        if before and before != now != self._recorded_boot_id:
            self._recorded_boot_id = now
            self._record("Warning", "Rebooted", f"Node {self._node} has been rebooted, boot id: {now}")

    def schedulable(self, schedulable: bool) -> None:
        """Record a change of whether pods may be scheduled on this node."""
        if schedulable != self._schedulable:
            self._schedulable = schedulable
            self._status("NodeSchedulable" if schedulable else "NodeNotSchedulable")

    def _status(self, event: str) -> None:
        log.v(2).info("Recording event message for node", node=self._node, event=event)
        self._record("Normal", event, f"Node {self._node} status is now: {event}")


FAST_SECONDS = 0.1
FAST_RETRY_SECONDS = 1.0
FAST_FOR_SECONDS = 120.0
"""Maximum seconds of fast polling for the node to become ready."""
STARTUP_GRACE_SECONDS = 1.0
"""Seconds after startup in which problems (no CSINode or runtime status yet) are not reported."""
MIN_ROUND_SECONDS = 1.0
"""Minimum seconds between rounds started by `wake`."""
ECHO_SECONDS = 8.0
"""Seconds for a write to come back through the watch; after that the watch may be dead or the cache stale."""


class StatusLoop:
    """Loop that keeps the status of one node up to date at the API server."""

    def __init__(
        self,
        store: NodeWriter,
        settings: NodeSettings,
        sources: NodeSources,
        collector: NodeStatusCollector,
        events: NodeEvents,
        close_connections: CloseConnections,
        *,
        ready: Callable[[], None] = lambda: None,
        clock: Callable[[], datetime] = pykubelet.api.meta.now,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._settings = settings
        self._sources = sources
        self._collector = collector
        self._events = events
        self._close_connections = close_connections
        self._ready = ready
        self._clock = clock
        self._rng = rng
        self._wakeup = WakeupTimer()
        self._pod_cidr = PodCidr(sources.runtime.update_runtime_config)
        self._error_log = ErrorLogLimiter(log, "Failed to update the node's status", node=settings.name)
        self._address_listeners: list[AddressListener] = []
        self._watched: CachedNode | None = None
        self._latest: Node | None = None
        self._latest_at = 0.0
        self._next_report = 0.0
        self._reported = False

    @property
    def node_uid(self) -> str:
        """The node's UID; empty while no Node object is known."""
        known = self._latest or self._watched
        return known.metadata.uid if known is not None else ""

    def set_settings(self, settings: NodeSettings) -> None:
        """Replace periods and reservations, and start a round with them immediately."""
        self._settings = settings
        # The next report is scheduled with the new period.
        self._next_report = 0.0
        self.wake()

    def wake(self) -> None:
        """Start a round immediately because an input has changed."""
        self._wakeup.wake()

    def add_address_listener(self, listener: AddressListener) -> None:
        """Add a listener, called with the addresses of the node status in each round; it must not block."""
        self._address_listeners.append(listener)

    def publish_addresses(self, addresses: list[NodeAddress]) -> None:
        """Call the address listeners."""
        for listener in self._address_listeners:
            listener(addresses)

    def handle_update(self, node: CachedNode | None) -> None:
        """Handle an update of the watched Node object; None if it was deleted."""
        self._watched = node
        if node is None:
            self._latest = None
            log.warning(
                "Node object was deleted, restart the kubelet to register the node again",
                node=self._settings.name,
            )
        elif self._latest is None or not _is_as_new(self._latest, node):
            self.wake()

    def set_latest(self, node: Node) -> None:
        """Store the Node object from a response of the API server."""
        self._latest, self._latest_at = node, asyncio.get_running_loop().time()

    async def run(self) -> NoReturn:
        """Report the status until cancelled."""
        await self._poll_until_ready()
        clock = asyncio.get_running_loop().time
        while True:
            started_at = clock()
            if await self.round():
                if await self._wakeup.sleep(jittered(self._settings.update_seconds, self._rng)):
                    await asyncio.sleep(wait_seconds(started_at + MIN_ROUND_SECONDS - clock()))
            else:
                await self._store.pause(self._settings.update_seconds)

    async def round(self) -> bool:
        """Update the status at the API server in up to `TRIES` tries and return whether that succeeded."""
        clock = asyncio.get_running_loop().time
        for number in range(TRIES):
            try:
                await self._update(fetch=number > 0)
            except NotFound as err:
                self._latest = None
                self._error_log.failed(err, clock())
                return False
            except KubeError as err:
                self._error_log.failed(err, clock())
                if not isinstance(err, RETRIABLE_ERRORS):
                    return False
                if number > 0 and isinstance(err, Unreachable):
                    await self._close_connections()
            except OSError as err:
                # Inputs are read from host files, which may disappear or fail to read.
                self._error_log.failed(err, clock())
                return False
            else:
                self._error_log.succeeded(clock())
                return True
        return False

    async def _poll_until_ready(self) -> None:
        """Poll the runtime every `FAST_SECONDS` until the node is ready, for at most `FAST_FOR_SECONDS`."""
        clock = asyncio.get_running_loop().time
        end, due = clock() + FAST_FOR_SECONDS, clock() + STARTUP_GRACE_SECONDS
        while clock() < end:
            if not self._collector.problems() or clock() >= due:
                if not await self.round():
                    await self._store.pause(FAST_RETRY_SECONDS)
                elif self._latest is not None and is_ready(self._latest.status.conditions):
                    return
                due = clock() + self._settings.update_seconds
            await asyncio.sleep(FAST_SECONDS)
            await self._collector.refresh()
        log.error(None, "Node not becoming ready in time after startup", node=self._settings.name)

    async def _update(self, *, fetch: bool) -> None:
        old = None if fetch else self._newest_node()
        if old is None:
            old = await self._store.get(NODES, self._settings.name)
            self.set_latest(old)
        await self._pod_cidr.update(old.spec.pod_cidrs)
        new, transitions = next_node(old, await self._collector.facts(), self._settings, self._clock())
        self.publish_addresses(new.status.addresses)
        self._events.transitions(transitions)
        self._events.booted(old.status.node_info.boot_id, new.status.node_info.boot_id)
        self._events.schedulable(not old.spec.unschedulable)
        changed = has_changed(old, new)
        now = asyncio.get_running_loop().time()
        if changed or now >= self._next_report:
            patch = node_patch(old, new)
            response = await self._store.patch(NODES, self._settings.name, patch, subresource="status")
            self.set_latest(response)
            if is_ready(response.status.conditions):
                self._ready()
            self._schedule(changed, now)
        self._sources.volumes_reported(new.status.volumes_in_use)

    def _schedule(self, changed: bool, now: float) -> None:
        """Set the time of the next report that is due without a change.

        After a change the interval is randomized by ±50 %, since all nodes of a cluster may have changed
        simultaneously; from then on it is constant.
        """
        frequency = self._settings.report_seconds
        shift = self._rng() - 0.5 if changed or not self._reported else 0.0
        self._next_report, self._reported = now + frequency * (1 + shift), True

    def _newest_node(self) -> Node | None:
        """Return the newest known node, from the watch or a response; None if it must be fetched."""
        watched = self._watched
        if watched is not None and (self._latest is None or not _is_as_new(self._latest, watched)):
            try:
                self._latest = watched.to_node()
            except ValueError as err:
                log.v(2).info("Failed to decode the watched node status, getting the node instead", err=err)
                return None
        elif self._latest is not None and not self._is_echoed(self._latest):
            return None
        return self._latest

    def _is_echoed(self, latest: Node) -> bool:
        """Return whether the watch has delivered the last response or is still within `ECHO_SECONDS`."""
        if (
            self._watched is not None
            and self._watched.metadata.resource_version == latest.metadata.resource_version
        ):
            return True
        return asyncio.get_running_loop().time() - self._latest_at < ECHO_SECONDS


def _is_as_new(node: Node, watched: CachedNode) -> bool:
    """Return whether a response is at least as new as the watched object."""
    if node.metadata.uid != watched.metadata.uid:
        return False
    try:
        return int(node.metadata.resource_version) >= int(watched.metadata.resource_version)
    except ValueError:
        return node.metadata.resource_version == watched.metadata.resource_version

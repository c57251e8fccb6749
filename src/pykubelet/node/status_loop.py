"""Reporting the node: computed often, sent when it differs, and now and then in any case.

A round compares what is true with what the API server has and sends the differences; when nothing but
heartbeat times differs, only every five minutes. In the beginning, until the node is ready for the
first time, the runtime is looked at ten times a second, because pods wait for it. Whoever knows of a
change rings (`wake`), and a round is made at once.

Telling people what happens to the node, each thing once.

A status may be computed many times before the API server takes it; the event is recorded with the first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Literal, NoReturn

import pykubelet.api.meta
from pykubelet.api.node import Node
from pykubelet.apiserver.client import NODES
from pykubelet.apiserver.errors import KubeError, NotFound, Unreachable
from pykubelet.logs import get_logger
from pykubelet.node.conditions import Transition, is_ready
from pykubelet.node.informer import CachedNode
from pykubelet.node.lease import TRIES, WORTH_ANOTHER_TRY, CloseConnections, WakeupTimer, stretched
from pykubelet.node.registration import NodeWriter
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import has_changed, next_node, node_patch
from pykubelet.node.status_inputs import NodeSources, NodeStatusCollector, PodCidr
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
Record = Callable[[Literal["Normal", "Warning"], str, str], None]
"""Takes an event's type, reason and message."""


class NodeEvents:
    """Records events about one node."""

    def __init__(self, record: Record, node: str) -> None:
        self._record = record
        self._node = node
        self._told: dict[str, Transition] = {}
        self._told_boot = ""
        self._schedulable = True

    def starting(self) -> None:
        """The agent starts."""
        self._record("Normal", "Starting", "Starting kubelet.")

    def transitions(self, transitions: Iterable[Transition]) -> None:
        """Conditions changed, as computed against what the API server has."""
        for transition in transitions:
            if self._told.get(transition.event) != transition:
                self._told[transition.event] = transition
                self._status(transition.event)

    def booted(self, before: str, now: str) -> None:
        """The machine's boot id, as the API server has it and as it is."""
        if before and before != now != self._told_boot:
            self._told_boot = now
            self._record("Warning", "Rebooted", f"Node {self._node} has been rebooted, boot id: {now}")

    def schedulable(self, schedulable: bool) -> None:
        """Whether the cluster lets pods be scheduled here."""
        if schedulable != self._schedulable:
            self._schedulable = schedulable
            self._status("NodeSchedulable" if schedulable else "NodeNotSchedulable")

    def _status(self, event: str) -> None:
        log.v(2).info("Recording event message for node", node=self._node, event=event)
        self._record("Normal", event, f"Node {self._node} status is now: {event}")


FAST_SECONDS = 0.1
FAST_RETRY_SECONDS = 1.0
FAST_FOR_SECONDS = 120.0
"""How long to wait in a hurry for the node to become ready."""
MOMENT_SECONDS = 1.0
"""What the first moment lacks (the node's CSINode, the runtime's first word) is not told of a ready node."""
SHORTEST_SECONDS = 1.0
"""Rounds that somebody rang for are at least so far apart."""
ECHO_SECONDS = 8.0
"""What was written comes back by the watch within this; else the watch may be dead, or the server of old."""


class StatusLoop:
    """Keeps the status of one node true."""

    def __init__(
        self,
        store: NodeWriter,
        settings: NodeSettings,
        sources: NodeSources,
        observer: NodeStatusCollector,
        events: NodeEvents,
        close_connections: CloseConnections,
        *,
        ready: Callable[[], None] = lambda: None,
        clock: Callable[[], datetime] = pykubelet.api.meta.now,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._settings = settings
        self._sources = sources
        self._observer = observer
        self._events = events
        self._close_connections = close_connections
        self._ready = ready
        self._clock = clock
        self._chance = chance
        self._bell = WakeupTimer()
        self._pod_cidr = PodCidr(sources.tell_pod_cidr)
        self._complaints = ErrorLogLimiter(log, "Failed to update the node's status", node=settings.name)
        self._seen: CachedNode | None = None
        self._latest: Node | None = None
        self._answered_at = 0.0
        self._next_report = 0.0
        self._reported = False

    @property
    def node_uid(self) -> str:
        """The node's uid; empty while the API server has none."""
        known = self._latest or self._seen
        return known.metadata.uid if known is not None else ""

    def wake(self) -> None:
        """Make a round at once: something about the node has changed."""
        self._bell.ring()

    def seen(self, node: CachedNode | None) -> None:
        """Take the node as the watch shows it; None: it is gone."""
        self._seen = node
        if node is None:
            self._latest = None
            log.warning(
                "The Node object was deleted: restart the agent to register the node again",
                node=self._settings.name,
            )
        elif self._latest is None or not _is_as_new(self._latest, node):
            self.wake()

    def answered(self, node: Node) -> None:
        """Take the node as the API server answered."""
        self._latest, self._answered_at = node, asyncio.get_running_loop().time()

    async def run(self) -> NoReturn:
        """Report until cancelled."""
        await self._hurry()
        clock = asyncio.get_running_loop().time
        while True:
            begin = clock()
            if await self.round():
                if await self._bell.sleep(stretched(self._settings.update_seconds, self._chance)):
                    await asyncio.sleep(wait_seconds(begin + SHORTEST_SECONDS - clock()))
            else:
                await self._store.pause(self._settings.update_seconds)

    async def round(self) -> bool:
        """Bring the API server up to date, in a few tries; says whether that went well."""
        clock = asyncio.get_running_loop().time
        for number in range(TRIES):
            try:
                await self._update(ask=number > 0)
            except NotFound as err:
                self._latest = None
                self._complaints.failed(err, clock())
                return False
            except KubeError as err:
                self._complaints.failed(err, clock())
                if not isinstance(err, WORTH_ANOTHER_TRY):
                    return False
                if number > 0 and isinstance(err, Unreachable):
                    await self._close_connections()
            except OSError as err:
                # Facts come from everywhere on the machine: files go away, disks fail.
                self._complaints.failed(err, clock())
                return False
            else:
                self._complaints.succeeded(clock())
                return True
        return False

    async def _hurry(self) -> None:
        """Look at the runtime in short steps until the node is ready, or for two minutes."""
        clock = asyncio.get_running_loop().time
        end, due = clock() + FAST_FOR_SECONDS, clock() + MOMENT_SECONDS
        while clock() < end:
            if not self._observer.problems() or clock() >= due:
                if not await self.round():
                    await self._store.pause(FAST_RETRY_SECONDS)
                elif self._latest is not None and is_ready(self._latest.status.conditions):
                    return
                due = clock() + self._settings.update_seconds
            await asyncio.sleep(FAST_SECONDS)
            await self._observer.refresh()
        log.error(None, "Node not becoming ready in time after startup", node=self._settings.name)

    async def _update(self, *, ask: bool) -> None:
        old = None if ask else self._freshest()
        if old is None:
            old = await self._store.get(NODES, self._settings.name)
            self.answered(old)
        await self._pod_cidr.follow(old.spec.pod_cidrs)
        new, transitions = next_node(old, await self._observer.facts(), self._settings, self._clock())
        self._sources.addressed(new.status.addresses)
        self._events.transitions(transitions)
        self._events.booted(old.status.node_info.boot_id, new.status.node_info.boot_id)
        self._events.schedulable(not old.spec.unschedulable)
        changed = has_changed(old, new)
        now = asyncio.get_running_loop().time()
        if changed or now >= self._next_report:
            patch = node_patch(old, new)
            answer = await self._store.patch(NODES, self._settings.name, patch, subresource="status")
            self.answered(answer)
            if is_ready(answer.status.conditions):
                self._ready()
            self._schedule(changed, now)
        self._sources.volumes_reported(new.status.volumes_in_use)

    def _schedule(self, changed: bool, now: float) -> None:
        """Set the time of the next report that is due without a change.

        After a change at a random one, since a whole cluster may have changed at once; from then on
        at even distances.
        """
        frequency = self._settings.report_seconds
        shift = self._chance() - 0.5 if changed or not self._reported else 0.0
        self._next_report, self._reported = now + frequency * (1 + shift), True

    def _freshest(self) -> Node | None:
        """Give the node as last heard of, by the watch or in an answer; None when it has to be asked for."""
        seen = self._seen
        if seen is not None and (self._latest is None or not _is_as_new(self._latest, seen)):
            try:
                self._latest = seen.whole()
            except ValueError as err:
                log.v(2).info("The node's status as watched cannot be read, asking for it", err=err)
                return None
        elif self._latest is not None and not self._is_echoed(self._latest):
            return None
        return self._latest

    def _is_echoed(self, latest: Node) -> bool:
        """Whether the watch shows the last answer, or still has time to."""
        if (
            self._seen is not None
            and self._seen.metadata.resource_version == latest.metadata.resource_version
        ):
            return True
        return asyncio.get_running_loop().time() - self._answered_at < ECHO_SECONDS


def _is_as_new(node: Node, seen: CachedNode) -> bool:
    """Whether an answer is at least as new as what the watch shows."""
    if node.metadata.uid != seen.metadata.uid:
        return False
    try:
        return int(node.metadata.resource_version) >= int(seen.metadata.resource_version)
    except ValueError:
        return node.metadata.resource_version == seen.metadata.resource_version

"""Telling people what happens to the node, each thing once.

A status may be computed many times before the API server takes it; the event is recorded with the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from pykubelet.logs import get_logger
from pykubelet.node.conditions import Transition

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

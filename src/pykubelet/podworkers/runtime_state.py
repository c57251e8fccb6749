"""Health of the container runtime, refreshed by polling and read by the main loop.

The loop does not sync pods while the runtime reports that it is not ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pykubelet.cri.runtime_pb2 import StatusResponse
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError

log = get_logger(__name__)
POLL_SECONDS = 5.0
AWAITED_SECONDS = 1.0
"""Seconds between polls while pods wait for the runtime or its network."""
GRACE_SECONDS = 30.0
"""Maximum age of the last successful response in seconds; beyond it the runtime counts as down."""
StatusCall = Callable[[], Awaitable[StatusResponse]]


def problems_in(response: StatusResponse) -> tuple[list[str], list[str]]:
    """Return the problems of the runtime and those of its network, from its conditions."""
    runtime: list[str] = []
    network: list[str] = []
    conditions = {condition.type: condition for condition in response.status.conditions}
    for kind, found in (("RuntimeReady", runtime), ("NetworkReady", network)):
        condition = conditions.get(kind)
        if condition is None:
            found.append(f"{kind} is missing from the runtime's status")
        elif not condition.status:
            found.append(f"{kind}=false reason:{condition.reason} message:{condition.message}")
    return runtime, network


@dataclass
class RuntimeState:
    """Last known health of the runtime; `errors()` is empty when pods may be synced."""

    status: StatusCall
    last_good: float | None = None
    _runtime: list[str] = field(
        default_factory=lambda: ["container runtime status check may not have completed yet"]
    )
    _network: list[str] = field(default_factory=list)
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the runtime and its network have become ready: pods may wait for it."""
        self._listeners.append(listener)

    def errors(self) -> list[str]:
        """Return the reasons why no pod can be synced now."""
        if self._runtime:
            return self._runtime
        now = asyncio.get_running_loop().time()
        if self.last_good is None or now - self.last_good > GRACE_SECONDS:
            return ["container runtime is down"]
        return []

    def network_errors(self) -> list[str]:
        """Return the reasons why pods without hostNetwork cannot start now."""
        return self._network

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(AWAITED_SECONDS if self._runtime or self._network else POLL_SECONDS)

    async def refresh(self) -> None:
        """Query the runtime's status once; log changes only."""
        before = (self._runtime, self._network)
        try:
            response = await self.status()
        except CriError as err:
            self._runtime = [str(err)]
        else:
            self._runtime, self._network = problems_in(response)
            if not self._runtime:
                self.last_good = asyncio.get_running_loop().time()
        if (self._runtime, self._network) != before:
            if self._runtime or self._network:
                log.error("; ".join([*self._runtime, *self._network]), "Container runtime is not ready")
            else:
                log.info("Container runtime is ready")
                for listener in self._listeners:
                    listener()

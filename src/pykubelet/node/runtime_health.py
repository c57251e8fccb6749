"""Whether the runtime lets the node be ready, in the words of the node's Ready condition.

It stands between the runtime and whoever polls its status: every answer passes through here and is
remembered, so that the node's status needs no questions of its own. One answer that did not come does
not make a node unready; half a minute without one does.

    health = RuntimeHealth(cri.runtime.status)
    state = RuntimeState(health.status)     # polls
    health.listen(reporter.wake)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pykubelet.cri import runtime_pb2 as pb

GRACE_SECONDS = 30.0
"""How old the last good answer may be before the runtime counts as down."""

Check = Callable[[], str | None]


class RuntimeHealth:
    """What the runtime last said; times are the loop's."""

    def __init__(self, ask: Callable[[], Awaitable[pb.StatusResponse]]) -> None:
        self._ask = ask
        self._last_good: float | None = None
        self._listeners: list[Callable[[], None]] = []
        self._checks: dict[str, Check] = {}
        self.last: pb.StatusResponse | None = None
        """The last answer of a ready runtime: its handlers and features."""
        self._runtime = ""
        self._network = "network state unknown"

    async def status(self) -> pb.StatusResponse:
        """Ask the runtime and remember what it said; raises CriError."""
        answer = await self._ask()
        before = self.problems()
        conditions = {condition.type: condition for condition in answer.status.conditions}
        self._network = _problem(conditions.get("NetworkReady"), "container runtime network not ready")
        self._runtime = _problem(conditions.get("RuntimeReady"), "container runtime not ready")
        if not self._runtime:
            self.last = answer
            self._last_good = asyncio.get_running_loop().time()
        if self.problems() != before:
            for listener in self._listeners:
                listener()
        return answer

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this whenever what the runtime says makes a difference to the node."""
        self._listeners.append(listener)

    def add_check(self, name: str, check: Check) -> None:
        """Let something else that pods depend on (`PLEG`) say what is wrong with it; None: nothing."""
        self._checks[name] = check

    def problems(self) -> list[str]:
        """Reasons why the node is not ready; empty when it is."""
        found = []
        if self._last_good is None:
            found.append("container runtime status check may not have completed yet")
        elif asyncio.get_running_loop().time() - self._last_good >= GRACE_SECONDS:
            found.append("container runtime is down")
        for name, check in self._checks.items():
            if (reason := check()) is not None:
                found.append(f"{name} is not healthy: {reason}")
        return [*found, *filter(None, (self._runtime, self._network))]


def _problem(condition: pb.RuntimeCondition | None, what: str) -> str:
    if condition is None:
        return f"{what}: the runtime does not say"
    if condition.status:
        return ""
    return f"{what}: {condition.type}=false reason:{condition.reason} message:{condition.message}"

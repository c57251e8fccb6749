"""Node conditions (pressure and Ready), and the runtime health that the Ready condition reports.

`next_conditions` is pure. A pressure condition keeps its reason, message and last transition time until its
status changes; only the heartbeat time advances. Conditions of other writers (network plugin,
node-problem-detector) are kept. Reasons and messages are upstream's, because tools and alerts match on them.

`RuntimeHealth` wraps the CRI Status call of the component that polls it and caches each response, so that
the node status needs no call of its own. A single failed poll does not make the node NotReady; no ready
response for `GRACE_SECONDS` does.

    health = RuntimeHealth(cri.runtime.status)
    state = RuntimeState(health.status)     # polls
    health.add_listener(reporter.wake)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from pykubelet.api.node import NodeCondition
from pykubelet.cri import runtime_pb2 as pb

READY = "Ready"


@dataclass(frozen=True, slots=True)
class NodePressure:
    """Resources that are under pressure."""

    memory: bool = False
    disk: bool = False
    pids: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition change to record as an event; equal values are the same change."""

    event: str
    """Event reason: NodeReady, NodeHasDiskPressure…"""
    since: datetime | None
    """Previous `lastTransitionTime` of the condition; None for a new condition."""


@dataclass(frozen=True, slots=True)
class _ConditionText:
    reason: str
    message: str
    event: str


_PRESSURES: dict[str, tuple[_ConditionText, _ConditionText]] = {
    "MemoryPressure": (
        _ConditionText(
            "KubeletHasSufficientMemory", "kubelet has sufficient memory available", "NodeHasSufficientMemory"
        ),
        _ConditionText(
            "KubeletHasInsufficientMemory",
            "kubelet has insufficient memory available",
            "NodeHasInsufficientMemory",
        ),
    ),
    "DiskPressure": (
        _ConditionText("KubeletHasNoDiskPressure", "kubelet has no disk pressure", "NodeHasNoDiskPressure"),
        _ConditionText("KubeletHasDiskPressure", "kubelet has disk pressure", "NodeHasDiskPressure"),
    ),
    "PIDPressure": (
        _ConditionText(
            "KubeletHasSufficientPID", "kubelet has sufficient PID available", "NodeHasSufficientPID"
        ),
        _ConditionText(
            "KubeletHasInsufficientPID", "kubelet has insufficient PID available", "NodeHasInsufficientPID"
        ),
    ),
}


def next_conditions(
    old: Sequence[NodeCondition],
    pressures: NodePressure,
    problems: Sequence[str],
    now: datetime,
    *,
    warning: str = "",
) -> tuple[list[NodeCondition], list[Transition]]:
    """Return the current conditions and the transitions since `old`.

    `problems` are the reasons why the node is not ready; `warning` is appended to the message of the
    Ready condition.
    """
    known = {condition.type: condition for condition in old}
    transitions = []
    under = zip(_PRESSURES, (pressures.memory, pressures.disk, pressures.pids), strict=True)
    for kind, under_pressure in under:
        before = known.get(kind)
        text = _PRESSURES[kind][under_pressure]
        status = "True" if under_pressure else "False"
        if before is not None and before.status == status:
            known[kind] = msgspec.structs.replace(before, last_heartbeat_time=now)
        else:
            known[kind] = NodeCondition(
                type=kind,
                status=status,
                last_heartbeat_time=now,
                last_transition_time=now,
                reason=text.reason,
                message=text.message,
            )
            transitions.append(Transition(text.event, before.last_transition_time if before else None))
    before = known.get(READY)
    # A new Ready condition is appended last, where older clients expect it.
    ready = known[READY] = _ready(before, problems, warning, now)
    if before is not None and before.status != ready.status:
        event = "NodeReady" if ready.status == "True" else "NodeNotReady"
        transitions.append(Transition(event, before.last_transition_time))
    return list(known.values()), transitions


def joined(problems: Sequence[str]) -> str:
    """Join the distinct reasons into one message: `[one, other]`."""
    different = list(dict.fromkeys(problems))
    return different[0] if len(different) == 1 else f"[{', '.join(different)}]"


def is_ready(conditions: Sequence[NodeCondition]) -> bool:
    """Return whether the Ready condition is True."""
    return any(condition.type == READY and condition.status == "True" for condition in conditions)


def _ready(
    before: NodeCondition | None, problems: Sequence[str], warning: str, now: datetime
) -> NodeCondition:
    status = "False" if problems else "True"
    message = joined(problems) if problems else "kubelet is posting ready status"
    same = before is not None and before.status == status
    return NodeCondition(
        type=READY,
        status=status,
        last_heartbeat_time=now,
        last_transition_time=before.last_transition_time if before is not None and same else now,
        reason="KubeletNotReady" if problems else "KubeletReady",
        message=f"{message}. WARNING: {warning}" if warning else message,
    )


GRACE_SECONDS = 30.0
"""Maximum age in seconds of the last ready response before the runtime is reported as down."""
Check = Callable[[], str | None]


class RuntimeHealth:
    """Cached health of the container runtime; times are event loop times."""

    def __init__(self, call_status: Callable[[], Awaitable[pb.StatusResponse]]) -> None:
        self._call_status = call_status
        self._last_good: float | None = None
        self._listeners: list[Callable[[], None]] = []
        self._checks: dict[str, Check] = {}
        self.last: pb.StatusResponse | None = None
        """Last Status response of a ready runtime, with its handlers and features."""
        self._runtime = ""
        self._network = "network state unknown"

    async def status(self) -> pb.StatusResponse:
        """Call the runtime's Status and cache the response. Raises CriError."""
        response = await self._call_status()
        before = self.problems()
        conditions = {condition.type: condition for condition in response.status.conditions}
        self._network = _problem(conditions.get("NetworkReady"), "container runtime network not ready")
        self._runtime = _problem(conditions.get("RuntimeReady"), "container runtime not ready")
        if not self._runtime:
            self.last = response
            self._last_good = asyncio.get_running_loop().time()
        if self.problems() != before:
            for listener in self._listeners:
                listener()
        return response

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener, called when a response changes the list of problems."""
        self._listeners.append(listener)

    def add_check(self, name: str, check: Check) -> None:
        """Add a health check of another component (`PLEG`) that returns its problem or None."""
        self._checks[name] = check

    def problems(self) -> list[str]:
        """Return the reasons why the node is not ready; empty if it is."""
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

"""The node's conditions: under which pressure it is, and whether it takes pods.

Pure. A condition keeps its words and the time of its last transition until its status changes; the
heartbeat time alone moves on. Conditions of others (a network plugin, a problem detector) are left
as they are. Whoever drains nodes or pages people matches on the reasons, so they are the reference's.

Whether the runtime lets the node be ready, in the words of the node's Ready condition.

It stands between the runtime and whoever polls its status: every answer passes through here and is
remembered, so that the node's status needs no questions of its own. One answer that did not come does
not make a node unready; half a minute without one does.

    health = RuntimeHealth(cri.runtime.status)
    state = RuntimeState(health.status)     # polls
    health.listen(reporter.wake)
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
    """What the node runs short of."""

    memory: bool = False
    disk: bool = False
    pids: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """A change that people are told of; it is the same one as long as all of this is."""

    event: str
    """The event's reason: NodeReady, NodeHasDiskPressure…"""
    since: datetime | None
    """When the condition last changed before; None for a new one."""


@dataclass(frozen=True, slots=True)
class _Words:
    reason: str
    message: str
    event: str


_PRESSURES: dict[str, tuple[_Words, _Words]] = {
    "MemoryPressure": (
        _Words(
            "KubeletHasSufficientMemory", "kubelet has sufficient memory available", "NodeHasSufficientMemory"
        ),
        _Words(
            "KubeletHasInsufficientMemory",
            "kubelet has insufficient memory available",
            "NodeHasInsufficientMemory",
        ),
    ),
    "DiskPressure": (
        _Words("KubeletHasNoDiskPressure", "kubelet has no disk pressure", "NodeHasNoDiskPressure"),
        _Words("KubeletHasDiskPressure", "kubelet has disk pressure", "NodeHasDiskPressure"),
    ),
    "PIDPressure": (
        _Words("KubeletHasSufficientPID", "kubelet has sufficient PID available", "NodeHasSufficientPID"),
        _Words(
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
    """Give the conditions as they are now, and what changed since `old`.

    `problems` are the reasons why the node cannot take pods; `warning` is something that a ready
    node's people should know.
    """
    known = {condition.type: condition for condition in old}
    transitions = []
    under = zip(_PRESSURES, (pressures.memory, pressures.disk, pressures.pids), strict=True)
    for kind, pressed in under:
        before = known.get(kind)
        words = _PRESSURES[kind][pressed]
        status = "True" if pressed else "False"
        if before is not None and before.status == status:
            known[kind] = msgspec.structs.replace(before, last_heartbeat_time=now)
        else:
            known[kind] = NodeCondition(
                type=kind,
                status=status,
                last_heartbeat_time=now,
                last_transition_time=now,
                reason=words.reason,
                message=words.message,
            )
            transitions.append(Transition(words.event, before.last_transition_time if before else None))
    before = known.get(READY)
    # A new one comes last, where clients of old expect it.
    ready = known[READY] = _ready(before, problems, warning, now)
    if before is not None and before.status != ready.status:
        event = "NodeReady" if ready.status == "True" else "NodeNotReady"
        transitions.append(Transition(event, before.last_transition_time))
    return list(known.values()), transitions


def joined(problems: Sequence[str]) -> str:
    """Put several reasons into one text, each once: `[one, other]`."""
    different = list(dict.fromkeys(problems))
    return different[0] if len(different) == 1 else f"[{', '.join(different)}]"


def is_ready(conditions: Sequence[NodeCondition]) -> bool:
    """Whether the node takes pods."""
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

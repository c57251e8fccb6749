"""The node's conditions: under which pressure it is, and whether it takes pods.

Pure. A condition keeps its words and the time of its last transition until its status changes; the
heartbeat time alone moves on. Conditions of others (a network plugin, a problem detector) are left
as they are. Whoever drains nodes or pages people matches on the reasons, so they are the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from pykubelet.api.node import NodeCondition

READY = "Ready"


@dataclass(frozen=True, slots=True)
class Pressures:
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
    pressures: Pressures,
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

"""Rows of the tables of pods, and aligned columns of text that is safe for terminals.

Text from containers and registries is printed on a root terminal, so escape sequences in it are made
visible instead of being sent (`escape_unprintable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pykubelet.api.pod import Pod
from pykubelet.status.columns import (
    format_age,
    format_duration,
    has_condition,
    is_finished,
    is_terminating,
    pod_creation_time,
    ready_count,
    restart_count,
    restarts,
    restarts_text,
    status_text,
    termination_reason,
)
from pykubelet.util.text import escape_unprintable

__all__ = [
    "escape_unprintable",
    "format_age",
    "format_columns",
    "format_duration",
    "has_condition",
    "is_finished",
    "is_terminating",
    "pod_creation_time",
    "pod_row",
    "ready_count",
    "restart_count",
    "restarts",
    "restarts_text",
    "status_text",
    "termination_reason",
]
NONE = "<none>"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table of `ps`; usage is shown with `-o wide`."""

    name: str
    namespace: str
    ready: str
    status: str
    restarts: str
    ip: str
    age: str
    cpu: str = ""
    memory: str = ""


def pod_row(pod: Pod, state: str, now: datetime) -> Row:
    """Return the table row of a pod; `state` is that of its pod worker."""
    ready, total = ready_count(pod)
    return Row(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        ready=f"{ready}/{total}",
        status=status_text(pod, state),
        restarts=restarts(pod, now),
        ip=pod.status.pod_ip or NONE,
        age=format_age(pod_creation_time(pod), now),
    )


_GAP = "   "


def format_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the heading."""
    cells = [[escape_unprintable(cell, lines=False) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]

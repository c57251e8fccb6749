"""Progress output of `pykubelet run`: redrawn in place on a terminal, one line per change elsewhere.

Pulls of the images that pods wait for are shown with the bytes that the node reports: one line per image that
is updated on a terminal, and a line every LINE_SECONDS elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cli.images.progress import LINE_SECONDS
from pykubelet.cli.pods.describe import state_text
from pykubelet.cli.printers import escape_unprintable, status_text
from pykubelet.images.pull_progress import PullProgress
from pykubelet.podconfig.pod_history import Event
from pykubelet.util.text import format_size

_LAST_EVENTS = 3
_MAX_PULLS = 5
"""Pulls that are shown at once."""


def statuses_of(pod: Pod) -> Iterator[ContainerStatus]:
    """Yield the statuses of the init containers and containers of a pod."""
    yield from pod.status.init_container_statuses
    yield from pod.status.container_statuses


@dataclass(frozen=True, slots=True)
class ContainerProgress:
    """Current state of one container, as text."""

    container: str
    description: str


def container_progress(pod: Pod, now: datetime) -> list[ContainerProgress]:
    """Return the state of each container that has a status, init containers first."""
    init_names = {container.name for container in pod.spec.init_containers if not is_sidecar(container)}
    found = []
    for status in statuses_of(pod):
        if status.state.running is not None:
            readiness = "" if status.name in init_names else ", ready" if status.ready else ", not ready yet"
            description = f"running{readiness}"
        else:
            description = state_text(status.state, now)
        restart_note = f" (restart {status.restart_count})" if status.restart_count else ""
        found.append(ContainerProgress(status.name, description + restart_note))
    return found


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """Observed state of one pod; `pod` is None until the node has read the manifest."""

    name: str
    pod: Pod | None = None
    state: str = "syncing"
    events: Sequence[Event] = ()

    @property
    def status(self) -> str:
        """STATUS column of the pod."""
        return status_text(self.pod, self.state) if self.pod is not None else "handed over"

    def steps(self) -> list[ContainerProgress]:
        """Return the states of its containers."""
        return container_progress(self.pod, datetime.now(UTC)) if self.pod is not None else []


def relevant_pulls(snapshots: Sequence[PodSnapshot], pulls: Sequence[PullProgress]) -> list[PullProgress]:
    """Return the pulls of the pods' images, at most _MAX_PULLS, the longest-running first."""
    images = {
        container.image
        for snapshot in snapshots
        if snapshot.pod is not None
        for container in (*snapshot.pod.spec.init_containers, *snapshot.pod.spec.containers)
    }
    found = {pull.image: pull for pull in reversed(pulls) if pull.image in images}
    return sorted(found.values(), key=lambda pull: pull.started)[:_MAX_PULLS]


def pull_text(pull: PullProgress) -> str:
    """Return the progress of a pull, as far as the runtime reports it."""
    text = f"pulling {pull.image}"
    if pull.total_bytes:
        done = min(pull.done_bytes or 0, pull.total_bytes)
        text += f": {format_size(done)} of {format_size(pull.total_bytes)}"
        text += f" ({done * 100 // pull.total_bytes}%)"
    if pull.total_layers:
        text += f", {pull.done_layers or 0} of {pull.total_layers} layers"
    return escape_unprintable(text, lines=False)


class PlainView:
    """Progress output for logs and pipes: each change is printed once."""

    def __init__(self) -> None:
        self._shown: set[tuple[str, str]] = set()
        self._last_status: dict[str, str] = {}
        self._pulls_shown: dict[str, tuple[float, str]] = {}
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, snapshots: Sequence[PodSnapshot], pulls: Sequence[PullProgress] = ()) -> None:
        """Print status changes and new events, and the progress of each pull every LINE_SECONDS."""
        for snapshot in snapshots:
            if self._last_status.get(snapshot.name) != snapshot.status:
                self._last_status[snapshot.name] = snapshot.status
                self._print(f"{snapshot.name}: {snapshot.status}")
            for event in snapshot.events:
                if (snapshot.name, line := f"{event.reason}: {event.message}") not in self._shown:
                    self._shown.add((snapshot.name, line))
                    self._print(f"{snapshot.name}: {escape_unprintable(line, lines=False)}")

        for pull in relevant_pulls(snapshots, pulls):
            now, text = time.monotonic(), pull_text(pull)
            since, last = self._pulls_shown.setdefault(pull.image, (now, ""))
            if now - since >= LINE_SECONDS and text != last:
                self._pulls_shown[pull.image] = now, text
                self._print(text)

    def _print(self, line: str) -> None:
        print(f"{time.monotonic() - self._started_at:6.1f}s  {line}", flush=True)


class LiveView:
    """Progress output for terminals: pods, their containers and the last events, redrawn in place."""

    def __init__(self) -> None:
        # Imported here: only terminal output needs rich.
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(highlight=False), refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, snapshots: Sequence[PodSnapshot], pulls: Sequence[PullProgress] = ()) -> None:
        """Redraw the current state."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Text | Table] = []
        for snapshot in snapshots:
            parts.append(Text.assemble((snapshot.name, "bold"), "  ", snapshot.status))
            table = Table.grid(padding=(0, 2))
            for progress in snapshot.steps():
                table.add_row(
                    Text(f"  {progress.container}"),
                    Text(escape_unprintable(progress.description, lines=False)),
                )
            parts.append(table)
            for event in list(snapshot.events)[-_LAST_EVENTS:]:
                style = "red" if event.kind == "Warning" else "dim"
                line = escape_unprintable(f"    {event.reason}: {event.message}", lines=False)
                parts.append(Text(line, style=style, no_wrap=True, overflow="ellipsis"))
        for pull in relevant_pulls(snapshots, pulls):
            parts.append(Text(f"  {pull_text(pull)}", style="cyan", no_wrap=True, overflow="ellipsis"))
        self._live.update(Group(*parts))

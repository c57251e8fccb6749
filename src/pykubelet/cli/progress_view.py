"""Progress on the screen: a picture that changes on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from pykubelet.api.pod import Pod
from pykubelet.cli.guard import end_politely
from pykubelet.cli.pod_words import status_word
from pykubelet.cli.progress import Step, steps
from pykubelet.cli.tables import visible
from pykubelet.pods.journal import Event

_LAST_EVENTS = 3


@dataclass(frozen=True, slots=True)
class Sight:
    """One pod at one look; without a pod the node has not taken it up yet."""

    name: str
    pod: Pod | None = None
    state: str = "syncing"
    events: Sequence[Event] = ()

    @property
    def word(self) -> str:
        """How the pod is."""
        return status_word(self.pod, self.state) if self.pod is not None else "handed over"

    def steps(self) -> list[Step]:
        """What its containers do."""
        return steps(self.pod, datetime.now(UTC)) if self.pod is not None else []


class PlainView:
    """Prints each change once: for logs and pipes."""

    def __init__(self) -> None:
        self._shown: set[tuple[str, str]] = set()
        self._words: dict[str, str] = {}
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, sights: Sequence[Sight]) -> None:
        """Print what is new."""
        for sight in sights:
            if self._words.get(sight.name) != sight.word:
                self._words[sight.name] = sight.word
                self._print(f"{sight.name}: {sight.word}")
            for event in sight.events:
                if (sight.name, line := f"{event.reason}: {event.message}") not in self._shown:
                    self._shown.add((sight.name, line))
                    self._print(f"{sight.name}: {visible(line, lines=False)}")

    def _print(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f}s  {line}", flush=True)


class LiveView:
    """Draws the pods, their containers and the last events, over and over in the same place."""

    def __init__(self) -> None:
        # Imported here: most commands need none of it.
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(highlight=False), refresh_per_second=8)

    def __enter__(self) -> Self:
        end_politely()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, sights: Sequence[Sight]) -> None:
        """Draw what is there now."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Text | Table] = []
        for sight in sights:
            parts.append(Text.assemble((sight.name, "bold"), "  ", sight.word))
            table = Table.grid(padding=(0, 2))
            for step in sight.steps():
                table.add_row(Text(f"  {step.container}"), Text(visible(step.doing, lines=False)))
            parts.append(table)
            for event in list(sight.events)[-_LAST_EVENTS:]:
                style = "red" if event.kind == "Warning" else "dim"
                line = visible(f"    {event.reason}: {event.message}", lines=False)
                parts.append(Text(line, style=style, no_wrap=True, overflow="ellipsis"))
        self._live.update(Group(*parts))

"""Progress of a long transfer: a bar on terminals, a line every few seconds elsewhere.

Progress goes to standard error, so that standard output has only the result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pykubelet.cli.client import signals_deferred
from pykubelet.util.text import format_size

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 5.0
"""Seconds between two lines where there is no terminal."""


class Display(Protocol):
    """A display of one transfer."""

    def update(self, step: str, done: int | None, total: int | None) -> None:
        """Show the step and the bytes; None while they are unknown."""
        ...


class _Lines:
    def __init__(self) -> None:
        self._step = ""
        self._shown = time.monotonic()

    def update(self, step: str, done: int | None, total: int | None) -> None:
        now = time.monotonic()
        if step == self._step and now - self._shown < LINE_SECONDS:
            return
        if total:
            step_text = f"{step}: {format_size(done or 0)} of {format_size(total)}"
        elif self._step == step:
            return
        else:
            step_text = step
        self._step, self._shown = step, now
        print(step_text, file=sys.stderr, flush=True)


class _Nothing:
    def update(self, step: str, done: int | None, total: int | None) -> None:
        pass


@contextmanager
def display(*, quiet: bool = False) -> Iterator[Display]:
    """Yield the display that suits standard error; a terminal is restored however the context ends."""
    if quiet:
        yield _Nothing()
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        # Imported here: only terminal output needs rich.
        from rich.console import Console

        with _bar(Console(stderr=True)) as bar:
            yield bar


@contextmanager
def _bar(console: Console) -> Iterator[Display]:
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
    )
    task = progress.add_task("", total=None)

    class Bar:
        def update(self, step: str, done: int | None, total: int | None) -> None:
            with signals_deferred():
                progress.update(
                    task, description=escape(step), completed=done or 0, total=total or None, refresh=True
                )

    with signals_deferred():
        progress.start()
    try:
        yield Bar()
    finally:
        with signals_deferred():
            progress.stop()

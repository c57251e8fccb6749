"""What is installed beside the agent to extend it: entry points, by their group.

Nearly always there are none, and Python's own way to find that out costs 0.8 MB of memory. So the files that
would name them are looked through first, as text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class EntryPoint(Protocol[T_co]):
    """Where somebody else's extension is."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def value(self) -> str:
        """The module and the object in it."""

    def load(self) -> T_co:
        """Import it; anything may go wrong."""


def installed(group: str) -> Iterable[EntryPoint[Any]]:
    """Give the entry points of a group."""
    if not any(_names(group, Path(folder)) for folder in sys.path):
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _names(group: str, folder: Path) -> bool:
    return any(
        f"[{group}]" in offered.read_text(errors="replace")
        for info in ("dist-info", "egg-info")
        for offered in folder.glob(f"*.{info}/entry_points.txt")
    )

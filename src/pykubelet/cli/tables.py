"""Tables and text for terminals: plain columns, and nothing that a terminal would obey.

What containers and registries say ends up on the screen of root. Escape sequences in it are shown,
not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_GAP = "   "


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Write rows as lines with aligned columns, the first row being the heading."""
    cells = [[visible(cell, lines=False) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def visible(text: str, *, lines: bool = True) -> str:
    """Show what a terminal would take for a command; `lines` lets line breaks and tabs through."""
    kept = "\n\t" if lines else ""
    return "".join(
        character if character.isprintable() or character in kept else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()

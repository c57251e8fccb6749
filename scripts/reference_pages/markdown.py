"""Markdown that several generated pages share."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Return a text as the content of a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Return a text as code in a table cell; nothing for an empty one."""
    return f"`{' '.join(text.split()).replace('|', chr(92) + '|')}`" if text else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

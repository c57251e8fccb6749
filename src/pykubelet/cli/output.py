"""Output formats of listing commands: a table, a wide one, JSON, YAML, or only names.

JSON and YAML are ASCII with escapes, and cells of tables are escaped by `format_columns`: text of pods,
registries and images cannot send control sequences to a terminal. Colours are only drawn on terminals, and
not at all when NO_COLOR is set (https://no-color.org), which rich honours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from pykubelet.cli.printers import escape_unprintable, format_columns


class Output(StrEnum):
    """Output format of a listing command."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Go on showing what changes.")]
OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="A table, one with more columns, all fields, or only the names."),
]


def require_table(watch: bool, output: Output) -> None:
    """Raise BadParameter for a watch in a format that has no end."""
    if watch and output not in (Output.TABLE, Output.WIDE):
        raise typer.BadParameter("--watch shows a table: leave out one of the two")


def serialized(document: Any, output: Output | str) -> str:
    """Return a document of plain values as JSON or YAML, in ASCII, with a line break at its end."""
    if output == Output.JSON:
        return json.dumps(document, indent=2) + "\n"
    # Imported here: only this format needs it.
    import yaml

    return yaml.safe_dump(document, sort_keys=False)


def print_listing(
    output: Output,
    *,
    document: Callable[[], Any],
    names: Iterable[str],
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    empty: str,
) -> None:
    """Print a list in its format; `empty` is printed to standard error in place of a table without rows."""
    if output in (Output.JSON, Output.YAML):
        print(serialized(document(), output), end="")
    elif output == Output.NAME:
        for name in names:
            print(escape_unprintable(name, lines=False))
    elif cells := [list(row) for row in rows]:
        print("\n".join(format_columns([heading, *cells])))
    else:
        print(empty, file=sys.stderr)

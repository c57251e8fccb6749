"""One flag as a row of data, and the few ways of writing such a row.

Every flag goes to exactly one place: a field of KubeletConfiguration, an attribute of `KubeletFlags`,
or nowhere, when it is accepted only because old command lines carry it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pykubelet.config.flag_types import Kind

Status = Literal["current", "file", "deprecated", "ignored"]
"""`file`: works, and belongs in the configuration file. `ignored`: accepted without effect."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Everything there is to know about one flag."""

    name: str
    kind: Kind
    help: str
    status: Status
    field: str = ""
    """Path of Python names in KubeletConfiguration, such as `authentication.anonymous.enabled`."""
    attribute: str = ""
    """Name in KubeletFlags."""
    default: str = ""
    """Shown in the help of flags that go nowhere; all others have the default of their target."""
    note: str = ""
    """What a user of a deprecated or ignored flag should know or do."""
    short: str = ""
    secret: bool = False
    """The value must never be shown."""
    group: str = ""


def group(title: str, *rows: Flag) -> tuple[Flag, ...]:
    """Put rows under one heading of the help."""
    return tuple(replace(row, group=title) for row in rows)


def in_file(name: str, kind: Kind, field: str, text: str, *, secret: bool = False) -> Flag:
    """Make a row for a flag that sets a field of the configuration file, where it should be set."""
    return Flag(name, kind, text, "file", field=field, secret=secret)


def in_both(name: str, kind: Kind, field: str, text: str, *, short: str = "") -> Flag:
    """Make a row for a flag that sets a field of the configuration file, and is fine as a flag too."""
    return Flag(name, kind, text, "current", field=field, short=short)


def here(name: str, kind: Kind, text: str, *, short: str = "") -> Flag:
    """Make a row for a flag that exists only on the command line."""
    return Flag(name, kind, text, "current", attribute=name.replace("-", "_"), short=short)


def old(name: str, kind: Kind, text: str, note: str) -> Flag:
    """Make a row for a deprecated flag that still works."""
    return Flag(name, kind, text, "deprecated", attribute=name.replace("-", "_"), note=note)


def gone(name: str, kind: Kind, default: str, note: str, *, secret: bool = False) -> Flag:
    """Make a row for a flag that is accepted and does nothing."""
    return Flag(name, kind, "No effect.", "ignored", default=default, note=note, secret=secret)

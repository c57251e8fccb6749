"""Configuration errors, which report all problems of the input together.

An operator should not need one run per mistake. So the modules of this package collect `Problem`s and
continue, and the few functions that must stop raise one `ConfigError` with all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pykubelet.util.text import quoted

_SIMPLE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One invalid setting: its location, and one sentence on the allowed values."""

    path: str
    """Field (`evictionHard[memory.available]`), flag (`--max-pods`) or file."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(Exception):
    """Raised when the configuration is invalid; `str()` returns one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


def field_path(parent: str, name: str) -> str:
    """Return the path of a field below another: `a.b`, or `a[b.c]` for a name with dots."""
    if not _SIMPLE_NAME.fullmatch(name):
        return key_path(parent, name)
    return f"{parent}.{name}" if parent else name


def key_path(parent: str, key: str | int) -> str:
    """Return the path of an entry of a map or list: `a[b.c]`, `a[0]`; always on one line."""
    return f"{parent}[{quoted(str(key))[1:-1]}]"

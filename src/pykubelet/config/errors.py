"""What is wrong with a configuration, told all at once.

A person who fixes one mistake per run loses patience; so everything in this room that looks at
input collects `Problem`s, and the few places that must stop raise one `ConfigError` with all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pykubelet.util.text import quoted

_SIMPLE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake: where it is, and one sentence that says what is allowed there."""

    path: str
    """A field (`evictionHard[memory.available]`), a flag (`--max-pods`) or a file."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(Exception):
    """The configuration cannot be used; `str()` gives one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


def field_path(parent: str, name: str) -> str:
    """Give the path of a field below another: `a.b`, or `a[b.c]` where a dot would mislead."""
    if not _SIMPLE_NAME.fullmatch(name):
        return key_path(parent, name)
    return f"{parent}.{name}" if parent else name


def key_path(parent: str, key: str | int) -> str:
    """Give the path of an entry of a map or list: `a[b.c]`, `a[0]`; always on one line."""
    return f"{parent}[{quoted(str(key))[1:-1]}]"

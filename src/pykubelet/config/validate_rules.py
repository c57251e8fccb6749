"""Rules about single fields as data, so that a check is a row in a table and not a branch.

Fields are named by their path of Python names; problems carry the JSON path.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pykubelet.api.casing import wire_name
from pykubelet.api.duration import Duration
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem
from pykubelet.config.types import KubeletConfiguration

Gates = Callable[[str], bool]
"""Tells whether a feature gate is on."""


class Between(NamedTuple):
    """A number or duration with a smallest and perhaps a largest value."""

    field: str
    low: int
    high: int | None = None

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        if value is not None and not self.low <= value <= (value if self.high is None else self.high):
            allowed = f"{self.low} or more" if self.high is None else f"between {self.low} and {self.high}"
            yield Problem(path, f"must be {allowed}, not {value}")


class Positive(NamedTuple):
    """A number or duration above zero."""

    field: str

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        if value <= 0:
            yield Problem(path, f"must be more than zero, not {value}")


class OneOf(NamedTuple):
    """A text with a few allowed values."""

    field: str
    allowed: tuple[str, ...]

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        if value not in self.allowed:
            yield Problem(path, f"must be {_or(self.allowed)}, not {quoted(value)}")


class Readable(NamedTuple):
    """A text, or every text of a list or map, that a reader accepts; empty means not set."""

    field: str
    read: Callable[[str], object]
    """Raises ValueError with the sentence for the operator."""

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        for where, text in _texts(value, path):
            try:
                self.read(text)
            except ValueError as err:
                yield Problem(where, str(err))


class Shaped(NamedTuple):
    """A text, or every text of a list, that has a certain shape; empty means not set."""

    field: str
    problem: Callable[[str], str | None]
    """Gives the sentence that says what is allowed, or None."""

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        for where, text in _texts(value, path):
            if message := self.problem(text):
                yield Problem(where, f"{message}, not {quoted(text)}")


Rule = Between | Positive | OneOf | Readable | Shaped


def check(rules: Iterable[Rule], config: KubeletConfiguration) -> Iterator[Problem]:
    """Apply the rows of a table."""
    for rule in rules:
        yield from rule.problems(operator.attrgetter(rule.field)(config), json_path(rule.field))


def json_path(field: str) -> str:
    """Give the JSON path of a path of Python names."""
    return ".".join(wire_name(name) for name in field.split("."))


def at_least(span: str) -> Duration:
    """Read a duration that is a limit in a table."""
    return Duration.parse(span)


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if value:
            yield path, value
    elif isinstance(value, dict):
        yield from ((f"{path}[{key}]", text) for key, text in value.items())
    else:
        yield from ((f"{path}[{index}]", text) for index, text in enumerate(value))


def _or(words: Iterable[str]) -> str:
    *first, last = (word or '""' for word in words)
    return f"{', '.join(first)} or {last}" if first else last

"""Validation rules for single fields as data: a check is a row of a table instead of a branch.

Fields are identified by their path of Python names; problems contain the JSON path. A rule for a list or a
map applies to each of its values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pykubelet.api.meta import wire_name
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.util.text import quoted

Gates = Callable[[str], bool]
"""Function that returns whether a feature gate is enabled."""


class Rule(NamedTuple):
    """A field, and a function that returns the error message for its value, or None."""

    field: str
    fault: Callable[[Any], str | None]


def between(field: str, low: int, high: int | None = None) -> Rule:
    """Return a rule for a number or duration with a minimum and optionally a maximum."""
    allowed = f"{low} or more" if high is None else f"between {low} and {high}"

    def fault(value: int | None) -> str | None:
        if value is None or (low <= value and (high is None or value <= high)):
            return None
        return f"must be {allowed}, not {value}"

    return Rule(field, fault)


def positive(field: str) -> Rule:
    """Return a rule for a number or duration above zero."""
    return Rule(field, lambda value: None if value > 0 else f"must be more than zero, not {value}")


def one_of(field: str, *allowed: str) -> Rule:
    """Return a rule for a string with a fixed set of values."""
    words = ", ".join(word or '""' for word in allowed)
    return Rule(
        field, lambda text: None if text in allowed else f"must be one of {words}, not {quoted(text)}"
    )


def readable(field: str, read: Callable[[str], object]) -> Rule:
    """Return a rule for a string that `read` parses; `read` raises ValueError with the message."""

    def fault(text: str) -> str | None:
        try:
            read(text)
        except ValueError as err:
            return str(err)
        return None

    return Rule(field, fault)


def shaped(field: str, problem: Callable[[str], str | None]) -> Rule:
    """Return a rule for a string with a format; `problem` returns the message, or None."""

    def fault(text: str) -> str | None:
        message = problem(text)
        return f"{message}, not {quoted(text)}" if message else None

    return Rule(field, fault)


def unless_empty(rule: Rule) -> Rule:
    """Return the rule for a field that may also be empty, which means that it is not set."""
    return Rule(rule.field, lambda value: rule.fault(value) if value else None)


def check(rules: Iterable[Rule], config: KubeletConfiguration) -> Iterator[Problem]:
    """Yield the problems of all rules."""
    for rule in rules:
        path = ".".join(wire_name(name) for name in rule.field.split("."))
        for where, value in _values(operator.attrgetter(rule.field)(config), path):
            if message := rule.fault(value):
                yield Problem(where, message)


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((key_path(path, key), item) for key, item in value.items())
    elif isinstance(value, list):
        yield from ((key_path(path, index), item) for index, item in enumerate(value))
    else:
        yield path, value

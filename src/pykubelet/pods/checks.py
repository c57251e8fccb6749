"""The bricks that the checks of pods are built of.

Each gives the problems that it finds, none for a good value, so that a check of many fields is a
list of lines. Messages say what is allowed; the path in front says where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from pykubelet.api.ip import parse_ip
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem

Problems = Iterator[Problem]

LARGEST_INT32 = 2**31 - 1

_VARIABLE = re.compile(r"[ -<>-~]+")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])(?!.*--)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")


def refused(path: str, message: str, when: object) -> Problems:
    """Give the problem when there is one."""
    if when:
        yield Problem(path, message)


def required(path: str, value: object) -> Problems:
    """A value must be written."""
    return refused(path, "must be set", not value)


def choice(path: str, value: str, allowed: Collection[str]) -> Problems:
    """A value must be one of a few words."""
    names = ", ".join(word or '""' for word in allowed)
    return refused(path, f"is {quoted(value)}, but must be one of {names}", value not in allowed)


def optional_choice(path: str, value: str | None, allowed: Collection[str]) -> Problems:
    """A value must be one of a few words, or absent."""
    return choice(path, value, allowed) if value is not None else iter(())


def in_range(path: str, value: int | None, low: int, high: int = LARGEST_INT32) -> Problems:
    """A number must lie between two others, or be absent."""
    message = f"is {value}, but must be from {low} to {high}"
    return refused(path, message, value is not None and not low <= value <= high)


def named(path: str, value: str, problem: Callable[[str], str | None]) -> Problems:
    """A name must have the shape that a function of `api/names.py` asks for."""
    if not value:
        yield Problem(path, "must be set")
    elif sentence := problem(value):
        yield Problem(path, f"{quoted(value)} {sentence}")


def unique(paths_and_values: Iterable[tuple[str, str]]) -> Problems:
    """No value may appear twice; the later one is the problem."""
    first: dict[str, str] = {}
    for path, value in paths_and_values:
        if value in first:
            yield Problem(path, f"{quoted(value)} is already used by {first[value]}")
        first.setdefault(value, path)


def exactly_one(path: str, what: str, given: dict[str, Any]) -> Problems:
    """Of several fields exactly one must be set."""
    names = [name for name, value in given.items() if value is not None]
    if not names:
        yield Problem(path, f"must have {what}: one of {', '.join(given)}")
    elif len(names) > 1:
        yield Problem(path, f"has {' and '.join(names)}, but must have only one {what}")


def no_steps_back(path: str, value: str) -> Problems:
    """A path must not climb out of where it is put."""
    return refused(path, f"{quoted(value)} must not contain '..'", ".." in value.split("/"))


def inside(path: str, value: str) -> Problems:
    """A path must stay below the folder that it is joined to."""
    yield from refused(path, f"{quoted(value)} must be a relative path", value.startswith("/"))
    yield from no_steps_back(path, value)


def address(path: str, value: str) -> Problems:
    """A text must be an IP address."""
    try:
        parse_ip(value)
    except ValueError as err:
        yield Problem(path, str(err))


def port(path: str, value: int | str) -> Problems:
    """A port must be a number, or the name of one of the container's ports."""
    return (
        in_range(path, value, 1, 65535) if isinstance(value, int) else named(path, value, port_name_problem)
    )


def port_name_problem(name: str) -> str | None:
    """Say what is wrong with the name of a port."""
    if _PORT_NAME.fullmatch(name):
        return None
    return "must be 1 to 15 lower case letters, digits or single '-', with at least one letter, such as http"


def variable_problem(name: str) -> str | None:
    """Say what is wrong with the name of an environment variable."""
    return None if _VARIABLE.fullmatch(name) else "must be printable ASCII characters without '='"


def key_problem(key: str) -> str | None:
    """Say what is wrong with a key of a configMap or secret, which becomes a file's name."""
    if len(key) <= 253 and _KEY.fullmatch(key) and key != "." and not key.startswith(".."):
        return None
    return "must be 1 to 253 letters, digits, '-', '_' or '.', and not begin with '..'"

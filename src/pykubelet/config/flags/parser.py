"""Command line parser with upstream's syntax, which reports all problems together.

`--flag value`, `--flag=value`, `-v 4`, `-v=4` and `-v4` are equivalent; so are `--node_ip` and `--node-ip`.
A flag that needs no value (`--runonce`) never consumes the next argument. `--` ends the flags. argparse
differs in all of these, accepts abbreviations, and stops at the first error.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pykubelet.config.errors import Problem
from pykubelet.config.flags.flag import Flag
from pykubelet.config.flags.flag_table import BY_NAME, FLAGS
from pykubelet.util.text import LONGEST_SHOWN, quoted

_SHORT = {flag.short: flag for flag in FLAGS if flag.short}


@dataclass(frozen=True, slots=True)
class FlagOccurrence:
    """One occurrence of a flag on the command line."""

    flag: Flag
    text: str


@dataclass(slots=True)
class ParsedFlags:
    """A parsed command line."""

    values: dict[str, Any] = field(default_factory=dict)
    """Typed value of every flag that is set; repeated flags are combined."""
    occurrences: list[FlagOccurrence] = field(default_factory=list)
    """All occurrences in order, valid or not."""
    problems: list[Problem] = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the names of the flags that are set, each once, in order."""
        return list(dict.fromkeys(occurrence.flag.name for occurrence in self.occurrences))


def parse_flags(argv: Sequence[str]) -> ParsedFlags:
    """Parse the arguments, without the name of the command."""
    parsed = ParsedFlags()
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument == "--":
            for extra in arguments:
                parsed.problems.append(_unexpected(extra))
            break
        if argument.startswith("--"):
            _long(argument, arguments, parsed)
        elif argument.startswith("-") and argument != "-":
            _shorts(argument, arguments, parsed)
        else:
            parsed.problems.append(_unexpected(argument))
    return parsed


def _long(argument: str, arguments: list[str], parsed: ParsedFlags) -> None:
    name, equals, text = argument[2:].partition("=")
    flag = BY_NAME.get(name.replace("_", "-"))
    if flag is None:
        parsed.problems.append(_unknown(argument, name))
        if not equals and arguments and not arguments[0].startswith("-"):
            # Most likely the value of the unknown flag; a second error for it would only confuse.
            arguments.pop(0)
    elif equals:
        _set(flag, text, parsed)
    elif flag.kind.bare:
        _set(flag, flag.kind.bare, parsed)
    else:
        _set_next(flag, argument, arguments, parsed)


def _shorts(argument: str, arguments: list[str], parsed: ParsedFlags) -> None:
    letters = argument[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        flag = _SHORT.get(letter)
        if flag is None:
            parsed.problems.append(_unknown(argument, argument[1:].partition("=")[0]))
            return
        if letters.startswith("=") and len(letters) > 1:
            _set(flag, letters[1:], parsed)
            return
        if flag.kind.bare:
            _set(flag, flag.kind.bare, parsed)
        elif letters:
            _set(flag, letters, parsed)
            return
        else:
            _set_next(flag, argument, arguments, parsed)


def _set_next(flag: Flag, argument: str, arguments: list[str], parsed: ParsedFlags) -> None:
    if arguments:
        _set(flag, arguments.pop(0), parsed)
    else:
        parsed.problems.append(
            Problem(argument, f"it needs a value ({flag.kind.name}): write {argument}=VALUE")
        )


def _set(flag: Flag, text: str, parsed: ParsedFlags) -> None:
    parsed.occurrences.append(FlagOccurrence(flag, text))
    try:
        value = flag.kind.parse(text)
    except ValueError as fault:
        parsed.problems.append(Problem(f"--{flag.name}", str(fault)))
        return
    if value is None:
        return
    if flag.kind.join and flag.name in parsed.values:
        value = flag.kind.join(parsed.values[flag.name], value)
    parsed.values[flag.name] = value


def _unknown(argument: str, name: str) -> Problem:
    plain = name.lstrip("-").replace("_", "-")
    # Only an invalid command line needs this table.
    from pykubelet.config.flags.removed_flags import REMOVED_BY_NAME

    if (removed := REMOVED_BY_NAME.get(plain)) is not None:
        return Problem(f"--{plain}", removed.problem)
    close = difflib.get_close_matches(plain[:80], BY_NAME, n=1)
    hint = f"did you mean --{close[0]}?" if close else "see --help for the flags there are"
    shown = argument.partition("=")[0] if argument.startswith("--") else argument
    return Problem(_safe(shown), f"there is no such flag: {hint}")


def _unexpected(argument: str) -> Problem:
    return Problem(
        quoted(argument),
        "it is not a flag, and there are no commands here: write the value of a flag as --flag=value",
    )


def _safe(argument: str) -> str:
    """Return the argument for use in a problem's path; quote it if it is very long or not printable."""
    return argument if argument.isprintable() and len(argument) < LONGEST_SHOWN else quoted(argument)

"""Reads a command line the way the reference does, and reports everything wrong with it at once.

`--flag value`, `--flag=value`, `-v 4`, `-v=4` and `-v4` are the same; so are `--node_ip` and
`--node-ip`. A flag that means something alone (`--runonce`) never takes the next word. `--` ends
the flags. argparse is not used because it differs in all of these, abbreviates, and stops at the
first mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pykubelet.config.errors import Problem
from pykubelet.config.flag import Flag
from pykubelet.config.flag_table import BY_NAME, FLAGS
from pykubelet.util.text import LONGEST_SHOWN, quoted

_SHORT = {flag.short: flag for flag in FLAGS if flag.short}


@dataclass(frozen=True, slots=True)
class FlagOccurrence:
    """One occurrence of a flag."""

    flag: Flag
    text: str


@dataclass(slots=True)
class ParsedFlags:
    """A command line, read."""

    values: dict[str, Any] = field(default_factory=dict)
    """The typed value of every flag that was given, occurrences put together."""
    given: list[FlagOccurrence] = field(default_factory=list)
    """The occurrences, in order, valid or not."""
    problems: list[Problem] = field(default_factory=list)

    def names(self) -> list[str]:
        """The flags that were given, each once, in order."""
        return list(dict.fromkeys(given.flag.name for given in self.given))


def parse_flags(argv: Sequence[str]) -> ParsedFlags:
    """Read the arguments of the command, without the command itself."""
    parsed = ParsedFlags()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            for extra in words:
                parsed.problems.append(_stray(extra))
            break
        if word.startswith("--"):
            _long(word, words, parsed)
        elif word.startswith("-") and word != "-":
            _shorts(word, words, parsed)
        else:
            parsed.problems.append(_stray(word))
    return parsed


def _long(word: str, words: list[str], parsed: ParsedFlags) -> None:
    name, equals, text = word[2:].partition("=")
    flag = BY_NAME.get(name.replace("_", "-"))
    if flag is None:
        parsed.problems.append(_unknown(word, name))
        if not equals and words and not words[0].startswith("-"):
            # Most likely the value of the unknown flag; complaining about it too would only confuse.
            words.pop(0)
    elif equals:
        _set(flag, text, parsed)
    elif flag.kind.bare:
        _set(flag, flag.kind.bare, parsed)
    else:
        _set_next(flag, word, words, parsed)


def _shorts(word: str, words: list[str], parsed: ParsedFlags) -> None:
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        flag = _SHORT.get(letter)
        if flag is None:
            parsed.problems.append(_unknown(word, word[1:].partition("=")[0]))
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
            _set_next(flag, word, words, parsed)


def _set_next(flag: Flag, word: str, words: list[str], parsed: ParsedFlags) -> None:
    if words:
        _set(flag, words.pop(0), parsed)
    else:
        parsed.problems.append(Problem(word, f"it needs a value ({flag.kind.name}): write {word}=VALUE"))


def _set(flag: Flag, text: str, parsed: ParsedFlags) -> None:
    parsed.given.append(FlagOccurrence(flag, text))
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


def _unknown(word: str, name: str) -> Problem:
    plain = name.lstrip("-").replace("_", "-")
    close = difflib.get_close_matches(plain[:80], BY_NAME, n=1)
    hint = f"did you mean --{close[0]}?" if close else "see --help for the flags there are"
    shown = word.partition("=")[0] if word.startswith("--") else word
    return Problem(_safe(shown), f"there is no such flag: {hint}")


def _stray(word: str) -> Problem:
    return Problem(
        quoted(word),
        "it is not a flag, and there are no commands here: write the value of a flag as --flag=value",
    )


def _safe(word: str) -> str:
    """Keep what cannot be printed, or is very long, out of the path of a problem."""
    return word if word.isprintable() and len(word) < LONGEST_SHOWN else quoted(word)

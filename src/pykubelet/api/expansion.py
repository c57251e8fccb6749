"""`$(VAR)` in commands, arguments, variables, sub-paths and probes.

`$(NAME)` becomes the variable's value, `$$` a single `$` (so `$$(NAME)` is the text `$(NAME)`), and
a name that is not known stays as it was written. Nothing else is special, and no input is an error
but one that grows beyond reason: values that double each other could otherwise fill the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

LONGEST = 1 << 20
"""Characters that an expansion may grow by. The kernel takes 128 KiB per string."""

LARGEST = 16 << 20
"""Characters of all arguments, or all variables, of a container: no runtime takes a larger request."""


class TooLong(ValueError):
    """A text grew beyond what any process can be given."""


_ESCAPE_OR_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def expand(text: str, *variables: Mapping[str, str]) -> str:
    """Replace references; the first mapping that knows a name wins.

    Raises TooLong when the result is absurd.
    """

    def value(name: str) -> str:
        return next((known[name] for known in variables if name in known), f"$({name})")

    return expand_with(text, value)


def expand_all(texts: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """Replace references in a command; raises TooLong as `expand` does."""
    expanded: list[str] = []
    size = 0
    for text in texts:
        expanded.append(expand(text, variables))
        size = checked_size(size + len(expanded[-1]))
    return expanded


def checked_size(size: int) -> int:
    """Give the size back unless it is too large for a request; raises TooLong."""
    if size > LARGEST:
        raise TooLong(f"the arguments or variables have more than {LARGEST} characters together")
    return size


def expand_with(text: str, value: Callable[[str], str]) -> str:
    """Replace references by what a function says; raises TooLong as `expand` does."""
    # Behind the last ")" no reference can end: only escapes are left there. Searching it for one
    # from every "$(" would take quadratic time.
    end = text.rfind(")") + 1
    growth = 0

    def replacement(match: re.Match[str]) -> str:
        nonlocal growth
        if match[1] is None:
            return "$"
        result = value(match[1])
        growth += len(result) - len(match[0])
        if growth > LONGEST:
            raise TooLong(f"the expansion of {text[:40]!r} has more than {LONGEST} characters")
        return result

    return _ESCAPE_OR_REFERENCE.sub(replacement, text[:end]) + text[end:].replace("$$", "$")

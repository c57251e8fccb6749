"""Environment files in volumes: a strict little subset of the shell's assignments.

    NAME='value'   # a comment

Values stand in single quotes, are taken as they are and may span lines. `NAME= 'x'` assigns nothing,
as in a shell. Anything else is refused, so that no file means one thing here and another in a shell.
"""

from __future__ import annotations

import re

_BLANK = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_NAME = re.compile(r"[ \t]*([^=\n]*)=")
_VALUE = re.compile(r"'([^']*)'[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_EMPTY = re.compile(r"[ \t][^\n]*(?:\n|\Z)")


def value_in_env_file(text: str, key: str) -> str:
    """Give the first value of a variable; "" when the file does not set it.

    Raises ValueError, with the line, for anything before it that is no assignment.
    """
    text = text.replace("\r\n", "\n")
    position = 0
    while position < len(text):
        if blank := _BLANK.match(text, position):
            position = blank.end()
            continue
        name = _NAME.match(text, position)
        if name is None or not name[1] or name[1] != name[1].rstrip(" \t"):
            raise _refusal(text, position, "write NAME='value', with no space before the =")
        if empty := _EMPTY.match(text, name.end()):
            value, position = "", empty.end()
        elif quoted := _VALUE.match(text, name.end()):
            value, position = quoted[1], quoted.end()
        else:
            raise _refusal(
                text, position, "write the value in single quotes, and nothing but a # comment after it"
            )
        if name[1] == key:
            return value
    return ""


def _refusal(text: str, position: int, remedy: str) -> ValueError:
    line = text.count("\n", 0, position) + 1
    return ValueError(f"line {line} of the environment file is no assignment: {remedy}")

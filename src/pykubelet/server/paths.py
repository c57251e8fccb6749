"""Paths that mean one thing only.

A permission is decided by the path, and so is the handler; if the two could read a path differently,
`/pods/../run/…` or `/pods%2F…` would be a hole. So only plain paths are answered: no empty, `.` or `..`
parts, no encoded slashes, no NUL or other control characters.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

_BAD = re.compile(r"[\x00-\x1f\x7f/\\]")
_DOTS = frozenset({".", ".."})


def is_plain(raw_path: str) -> bool:
    """Whether a path, as it came in the request (still encoded, without the query), is plain."""
    if not raw_path.startswith("/"):
        return False
    *folders, last = raw_path.removeprefix("/").split("/")
    if not all(folders):
        return False
    return all(_is_plain_part(part) for part in (*folders, last))


def _is_plain_part(part: str) -> bool:
    try:
        decoded = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        return False
    return decoded not in _DOTS and _BAD.search(decoded) is None

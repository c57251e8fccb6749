"""Keeps secrets out of the logs.

Two nets: by the name of a key (`token=…`), and by the look of a text (`Bearer …`,
`https://user:password@…`). What is caught is replaced as a whole; nothing of it is shown.
"""

import re
from typing import Any

MASK = "<masked>"

_SECRET_KEY = re.compile(
    r"(?i)(passw(or)?d|secret(?!s?(name|ref|key)s?$)|token(?!s?(path|file|ttl)$)|authorization|bearer"
    r"|credential|private.?key$|url.?header|api.?key|cookie)"
)
_SECRET_TEXT = [
    (re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"(?i)(://[^/\s:@]*:)[^/\s@]+@"), rf"\1{MASK}@"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"), MASK),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.S),
        MASK,
    ),
]


def is_secret_key(key: str) -> bool:
    """Whether the value under this name must not be shown."""
    return _SECRET_KEY.search(key) is not None


def mask_text(text: str) -> str:
    """Replace whatever in a text looks like a secret."""
    for pattern, replacement in _SECRET_TEXT:
        text = pattern.sub(replacement, text)
    return text


def mask_value(key: str, value: Any) -> Any:
    """Give what may be shown of a value logged under `key`; empty values are no secret."""
    secret = is_secret_key(key)
    if isinstance(value, dict):
        return {name: mask_value(key if secret else str(name), inner) for name, inner in value.items()}
    if secret and value not in (None, "", (), [], False, True):
        return MASK
    if isinstance(value, list | tuple):
        return [mask_value(key, inner) for inner in value]
    return value

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
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.S),
        MASK,
    ),
]

_TOKEN_LIKE = re.compile(r"[A-Za-z0-9_.-]{13,}+")
_TOKEN_START = re.compile(r"\beyJ")
_TOKEN_END = re.compile(r"[A-Za-z0-9_-]*+")
_SHORTEST_HEADER = len("eyJ") + 8


def is_secret_key(key: str) -> bool:
    """Whether the value under this name must not be shown."""
    return _SECRET_KEY.search(key) is not None


def mask_text(text: str) -> str:
    """Replace whatever in a text looks like a secret."""
    for pattern, replacement in _SECRET_TEXT:
        text = pattern.sub(replacement, text)
    return _TOKEN_LIKE.sub(_mask_tokens, text) if "eyJ" in text else text


def _mask_tokens(run: re.Match[str]) -> str:
    """Replace the JSON web tokens (`eyJ….….…`) in a run of their characters, in linear time."""
    text, position = run[0], 0
    shown: list[str] = []
    while start := _TOKEN_START.search(text, position):
        header = text.find(".", start.start())
        claims = text.find(".", header + 1)
        if header < 0 or claims < 0:
            break
        if header - start.start() < _SHORTEST_HEADER or claims == header + 1:
            shown.append(text[position : header + 1])
            position = header + 1
            continue
        end = _TOKEN_END.match(text, claims + 1)
        assert end is not None
        shown += (text[position : start.start()], MASK)
        position = end.end()
    return "".join((*shown, text[position:]))


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

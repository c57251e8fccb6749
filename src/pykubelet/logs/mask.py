"""Masking of secrets in log lines.

Secrets are detected by the name of a key (`token=…`) and by patterns in a text (`Bearer …`,
`https://user:password@…`), at every level of lists and maps. A match is replaced completely.

Both formats call `mask_value` for each key, on the event loop, also with text that pods control. The patterns
take time linear in the text, and at most `MAX_PARTS` parts of a nested value are shown.
"""

import re
from collections.abc import Mapping
from typing import Any

MASK = "<masked>"
MAX_PARTS = 10_000
"""Maximum parts of one nested value that are shown."""
REST = "<more>"
"""Placeholder of the parts that are not shown."""
_DEEPEST = 32
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
    """Return whether the value under this name must not be shown."""
    return _SECRET_KEY.search(key) is not None


def mask_text(text: str) -> str:
    """Replace everything in a text that looks like a secret, in time linear in its length."""
    for pattern, replacement in _SECRET_TEXT:
        text = pattern.sub(replacement, text)
    return _TOKEN_LIKE.sub(_mask_tokens, text) if "eyJ" in text else text


def mask_value(key: str, value: Any) -> Any:
    """Return the loggable form of a value logged under `key`: strings, numbers, and lists and maps of them.

    Empty values are not secret.
    """
    return _Masker().mask(key, value, 0)


def plain(value: Any) -> str:
    """Return the text of a value that is neither a number nor a container."""
    if isinstance(value, BaseException):
        return str(value) or type(value).__name__
    return str(value)


class _Masker:
    """Masking of one value; counts its parts."""

    def __init__(self) -> None:
        self._remaining = MAX_PARTS

    def mask(self, key: str, value: Any, depth: int) -> Any:
        secret = is_secret_key(key)
        if depth > _DEEPEST:
            return REST
        if isinstance(value, Mapping):
            return self._mask_map(key if secret else "", value, depth)
        if secret and value not in (None, "", (), [], False, True):
            return MASK
        if isinstance(value, list | tuple):
            return self._mask_list(key, value, depth)
        if value is None or isinstance(value, bool | int | float):
            return value
        return mask_text(plain(value))

    def _mask_map(self, secret_key: str, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for name, inner in value.items():
            if self._remaining <= 0:
                shown[REST] = REST
                break
            self._remaining -= 1
            text = mask_text(str(name))
            shown[text] = self.mask(secret_key or text, inner, depth + 1)
        return shown

    def _mask_list(self, key: str, value: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        shown: list[Any] = []
        for inner in value:
            if self._remaining <= 0:
                shown.append(REST)
                break
            self._remaining -= 1
            shown.append(self.mask(key, inner, depth + 1))
        return shown


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

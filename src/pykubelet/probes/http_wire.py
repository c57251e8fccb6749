"""The request of a probe: one GET, with its author's headers where they may stand."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pykubelet.host.http_answer import WireError

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def write_request(target: str, host: str, headers: Iterable[tuple[str, str]], agent: str) -> bytes:
    """Write a GET. `headers` may override host, user agent and accept; the last two with nothing.

    Raises WireError for a header that would break out of its line.
    """
    own = {"Host": host, "User-Agent": agent, "Accept": "*/*", "Connection": "close"}
    lines: list[tuple[str, str]] = []
    seen: set[str] = set()
    for name, value in headers:
        if not _NAME.fullmatch(name):
            raise WireError(f'net/http: invalid header field name "{name}"')
        if _CONTROL.search(value):
            raise WireError(f'net/http: invalid header field value for "{name}"')
        proper = "-".join(word.capitalize() for word in name.split("-"))
        if proper in ("Content-Length", "Transfer-Encoding", "Trailer"):
            continue  # there is no body that they could speak of
        if proper in ("Host", "User-Agent") and (proper in seen or (proper == "Host" and not value)):
            continue
        seen.add(proper)
        if value or proper not in ("User-Agent", "Accept"):
            lines.append((proper, value))
    lines += [(name, value) for name, value in own.items() if name not in seen]
    lines.sort(key=lambda line: line[0] != "Host")  # where servers look for it
    text = "".join(f"{name}: {value.strip()}\r\n" for name, value in lines)
    return f"GET {target} HTTP/1.1\r\n{text}\r\n".encode()

"""A request that is not answered as the client wished: what to say instead."""

from __future__ import annotations

from collections.abc import Mapping


class Refused(Exception):
    """Ends a request with a status, and with a text that the client may see."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})

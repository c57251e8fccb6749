"""A runtime's address: which spellings are accepted and which are refused, with the reason.

Only unix sockets, as on any Linux node. Pure: nothing is opened here, so configuration checks can
use it without a runtime.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from pykubelet.transport.errors import EndpointError

# The kernel's sockaddr_un has 108 bytes, and the last one is the terminating zero.
MAX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a runtime listens."""

    path: str
    """The socket's absolute path."""
    deprecated: bool = False
    """Written as a bare path, which is accepted but should become a URL."""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `unix:///path` or a bare `/path`.

        Raises EndpointError, one line with the cause and the remedy.
        """
        if not text:
            raise EndpointError(
                "no container runtime endpoint is given; "
                "set --container-runtime-endpoint, such as unix:///run/containerd/containerd.sock"
            )
        bare = text.startswith("/")
        path = text if bare else _path_of_url(text)
        if not path.strip("/"):
            raise EndpointError(f"endpoint {text!r} names no socket; write unix:///path/to/socket")
        try:
            size = len(os.fsencode(path))
        except UnicodeEncodeError:
            raise EndpointError(
                f"endpoint {text!r} is not valid text; write unix:///path/to/socket"
            ) from None
        if "\0" in path:
            raise EndpointError(f"endpoint {text!r} holds a zero byte; write unix:///path/to/socket")
        if size > MAX_PATH_BYTES:
            raise EndpointError(
                f"endpoint {text!r} is too long: a socket's path has at most {MAX_PATH_BYTES} bytes, "
                f"this one has {size}; move the socket to a shorter path"
            )
        return cls(path, deprecated=bare)

    @property
    def target(self) -> str:
        """The address as gRPC wants it: a URL, so special characters are quoted."""
        return "unix:" + quote(os.fsencode(self.path))

    def __str__(self) -> str:
        return "unix://" + quote(os.fsencode(self.path))


def _path_of_url(text: str) -> str:
    if any(ord(character) < 32 for character in text):
        raise EndpointError(f"endpoint {text!r} holds a control character; write unix:///path/to/socket")
    try:
        url = urlsplit(text)
    except ValueError as err:
        raise EndpointError(f"endpoint {text!r} is not a URL ({err}); write unix:///path/to/socket") from None
    if not url.scheme:
        raise EndpointError(
            f"endpoint {text!r} is neither a URL nor an absolute path; write unix:///path/to/socket"
        )
    if url.scheme != "unix":
        raise EndpointError(
            f"endpoint {text!r}: protocol {url.scheme!r} is not supported, only unix sockets are; "
            "write unix:///path/to/socket"
        )
    if url.netloc or not url.path.startswith("/"):
        raise EndpointError(
            f"endpoint {text!r} is not an absolute path; write unix:///path/to/socket, three slashes"
        )
    if url.query or url.fragment:
        raise EndpointError(f"endpoint {text!r} has something after the path; write unix:///path/to/socket")
    return unquote(url.path, errors="surrogateescape")

"""Endpoint of a container runtime: accepted spellings, and the reason why another one is rejected.

Only Unix sockets are supported. Pure: nothing is opened, so that configuration validation works without a
runtime.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from pykubelet.transport.errors import EndpointError

# sun_path of sockaddr_un has 108 bytes, including the terminating zero.
MAX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of a container runtime."""

    path: str
    """Absolute path of the socket."""
    deprecated: bool = False
    """Whether it was written as a bare path, which is accepted but deprecated in favour of a URL."""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse `unix:///path` or a bare `/path`.

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
        """gRPC target: a URL, so that special characters are percent-encoded."""
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

"""What one look at a container gives, and whom to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pykubelet.api.meta import IntOrString
from pykubelet.api.pod import Container

OUTPUT_LIMIT = 10 * 1024
"""How much of an answer is kept, in bytes; it ends up in events and logs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer. An *errored* one says nothing about the container and is asked again."""

    result: Literal["success", "warning", "failure", "unknown"]
    output: str = ""
    errored: bool = False

    @property
    def passed(self) -> bool:
        """Whether the container did well; a warning is for people only."""
        return self.result in ("success", "warning")


@dataclass(frozen=True, slots=True)
class Target:
    """The container that is asked, and where its pod can be reached."""

    container: Container
    container_id: str
    ip: str
    """The pod's address, or the host's for a pod in its network."""


class BadTarget(Exception):
    """The probe cannot be sent: no such port, no address. The text is one line."""


def resolve_host(host: str, target: Target) -> str:
    """Give the address to connect to: the author's, or the pod's.

    Raises BadTarget while the pod has none.
    """
    if host or target.ip:
        return host or target.ip
    raise BadTarget("the pod has no IP address yet")


def resolve_port(port: IntOrString, container: Container) -> int:
    """Give a port's number; names are those of the container's ports.

    Raises BadTarget when there is no such port.
    """
    number = port
    if isinstance(port, str):
        named = (entry.container_port for entry in container.ports if entry.name == port)
        try:
            number = next(named, None) or int(port)
        except ValueError:
            raise BadTarget(f"port {port} not found") from None
    assert isinstance(number, int)
    if not 0 < number < 65536:
        raise BadTarget(f"invalid port number: {number}")
    return number


def join_host_port(host: str, port: int) -> str:
    """Write an address as URLs and messages do: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

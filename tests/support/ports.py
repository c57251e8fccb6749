"""TCP ports for servers of tests, on a host where several runs share the ports."""

import contextlib
import os
import random
import socket
from collections.abc import Iterator

_FIRST = 11_000
_PER_WORKER = 2_000
"""Below the kernel's ephemeral ports and those of control planes, whose clients would reach a pod instead."""

_reserved: set[int] = set()
"""Ports that this process has chosen: a server may bind its port much later."""


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Reserve a port for a block: connections are refused until a server with SO_REUSEADDR listens on it.

    A process never chooses a port twice, and no two workers of pytest-xdist choose from the same range.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker % 4 * _PER_WORKER
    while True:
        port = random.randrange(first, first + _PER_WORKER)
        if port in _reserved:
            continue
        with socket.socket() as holder:
            try:
                holder.bind(("0.0.0.0", port))
            except OSError:
                continue
            _reserved.add(port)
            # After bind, which would succeed with it where another socket holds the port the same way.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            yield port
            return


def free_port() -> int:
    """Return a port that is free now, for a server or a hostPort that cannot share it with a holder."""
    with held_port() as port:
        return port

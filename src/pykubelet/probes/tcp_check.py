"""The TCP probe: does somebody accept a connection?

The failures are worded as every other kubelet words them, because alerts and people search for
`connection refused` and `i/o timeout`.
"""

from __future__ import annotations

import asyncio
import os
import socket

from pykubelet.api.pod import TCPSocketAction
from pykubelet.probes.outcome import Outcome, Target, join_host_port, resolve_host, resolve_port


async def tcp_check(action: TCPSocketAction, target: Target, timeout: float) -> Outcome:
    """Connect and hang up. Raises BadTarget."""
    host, port = resolve_host(action.host, target), resolve_port(action.port, target.container)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
    except (OSError, ValueError) as err:  # ValueError: a host that can be no name
        return Outcome("failure", dial_failure(err, host, port))
    transport.close()
    return Outcome("success")


def dial_failure(err: OSError | ValueError, host: str, port: int) -> str:
    """Word why a connection could not be made."""
    address = join_host_port(host, port)
    if isinstance(err, socket.gaierror):
        return f"dial tcp: lookup {host}: {_lower(err.strerror or 'no such host')}"
    if isinstance(err, TimeoutError) and err.errno is None:
        return f"dial tcp {address}: i/o timeout"
    if isinstance(err, OSError) and err.errno:
        return f"dial tcp {address}: connect: {_lower(os.strerror(err.errno))}"
    return f"dial tcp {address}: {err}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]

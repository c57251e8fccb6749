"""Listening sockets, with an error that says who holds the port."""

from __future__ import annotations

import errno
import ipaddress
import socket

from pykubelet.host.ports import port_holder

_BACKLOG = 1024


class PortError(Exception):
    """A port could not be opened; the text says why and what to do."""


def listening_socket(name: str, address: str, port: int) -> socket.socket:
    """Listen on `address:port` for the server of this name; raises PortError.

    "All addresses", of either family, means those of both.
    """
    try:
        where = ipaddress.ip_address(address)
    except ValueError:
        raise PortError(
            f"the {name} server cannot listen on {address!r}: that is not an IP address"
        ) from None
    try:
        if where.is_unspecified:
            try:
                return _listen(socket.AF_INET6, "::", port, both=True)
            except OSError as err:
                # A kernel without IPv6, or with all of its addresses switched off.
                if err.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                return _listen(socket.AF_INET, "0.0.0.0", port)
        return _listen(socket.AF_INET6 if where.version == 6 else socket.AF_INET, str(where), port)
    except OSError as err:
        raise PortError(_why(name, address, port, err)) from err


def _listen(family: socket.AddressFamily, address: str, port: int, *, both: bool = False) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _why(name: str, address: str, port: int, err: OSError) -> str:
    where = f"the {name} server cannot listen on {address}:{port}"
    if err.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        by = f" by {holder}" if holder else ""
        return f"{where}: the port is taken{by}; stop that program or choose another port"
    if err.errno == errno.EADDRNOTAVAIL:
        return f"{where}: this machine has no such address; choose one that `ip address` shows"
    return f"{where}: {err.strerror or err}"

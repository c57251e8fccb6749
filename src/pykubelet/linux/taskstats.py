"""Number of tasks of a cgroup by state, from the kernel's taskstats over generic netlink.

A client owns one socket, which `close` closes. The kernel counts the tasks of a cgroup itself, not those of
the cgroups below it, and only on cgroup v1: of a directory of cgroup v2 it returns EINVAL. A request does not
wait for anything; it takes a few microseconds and the time in which the kernel passes over the tasks.
"""

from __future__ import annotations

import os
import socket
import struct

import msgspec

_GENERIC_NETLINK = 16
_CONTROLLER, _GET_FAMILY = 0x10, 3
_ATTRIBUTE_FAMILY_ID, _ATTRIBUTE_FAMILY_NAME = 1, 2
_CGROUP_STATS_GET, _ATTRIBUTE_CGROUP_FD = 4, 1
_ERROR = 2
_VERSION = 1
_REQUEST = 1
_MESSAGE = struct.Struct("=IHHII")
"""Header of a message: length, type, flags, sequence number, port."""
_GENERIC = struct.Struct("=BBH")
_ATTRIBUTE = struct.Struct("=HH")
_STATES = struct.Struct("=5Q")
_MAX_BYTES = 8192
_TIMEOUT_SECONDS = 1.0


class TaskStates(msgspec.Struct, frozen=True, gc=False):
    """Number of tasks by state."""

    sleeping: int = 0
    running: int = 0
    stopped: int = 0
    uninterruptible: int = 0
    io_wait: int = 0


class TaskstatsClient:
    """Client of the kernel's taskstats. One thread at a time uses it."""

    def __init__(self) -> None:
        """Open the socket. Raises OSError if the kernel has no taskstats."""
        self._sequence = 0
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _GENERIC_NETLINK)
        try:
            self._socket.settimeout(_TIMEOUT_SECONDS)
            self._socket.bind((0, 0))
            self._family = self._find_family()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def read(self, directory: str) -> TaskStates:
        """Return the tasks of a cgroup by its directory. Raises OSError, EINVAL if it is not of cgroup v1."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            request = _attribute(_ATTRIBUTE_CGROUP_FD, struct.pack("=I", descriptor))
            body = self._call(self._family, _CGROUP_STATS_GET, request)
        finally:
            os.close(descriptor)
        if len(body) < _ATTRIBUTE.size + _STATES.size:
            raise OSError(f"taskstats returned {len(body)} bytes")
        return TaskStates(*_STATES.unpack_from(body, _ATTRIBUTE.size))

    def _find_family(self) -> int:
        body = self._call(_CONTROLLER, _GET_FAMILY, _attribute(_ATTRIBUTE_FAMILY_NAME, b"TASKSTATS\0"))
        offset = 0
        while offset + _ATTRIBUTE.size <= len(body):
            length, kind = _ATTRIBUTE.unpack_from(body, offset)
            if kind == _ATTRIBUTE_FAMILY_ID:
                (family,) = struct.unpack_from("=H", body, offset + _ATTRIBUTE.size)
                return int(family)
            offset += max(_aligned(length), _ATTRIBUTE.size)
        raise OSError("netlink returned no family for taskstats")

    def _call(self, family: int, command: int, attributes: bytes) -> bytes:
        """Send a request and return the attributes of its response. Raises OSError."""
        self._sequence += 1
        body = _GENERIC.pack(command, _VERSION, 0) + attributes
        head = _MESSAGE.pack(_MESSAGE.size + len(body), family, _REQUEST, self._sequence, 0)
        self._socket.send(head + body)
        while True:
            response = self._socket.recv(_MAX_BYTES)
            length, kind, _, sequence, _ = _MESSAGE.unpack_from(response)
            if sequence != self._sequence:
                continue  # the response to a request that timed out
            if kind == _ERROR:
                (number,) = struct.unpack_from("=i", response, _MESSAGE.size)
                raise OSError(-number, os.strerror(-number))
            return response[_MESSAGE.size + _GENERIC.size : length]


def _attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(_aligned(length) - length)


def _aligned(length: int) -> int:
    return length + -length % 4

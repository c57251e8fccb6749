"""Counters of network interfaces: those of the host, and those of a pod's network namespace.

A pod's interfaces are read in /proc/<pid>/net/dev of a process of its sandbox. The reader keeps the directory
/proc/<pid> open: it refers to that process and to no later one with the same pid, and once the process has
ended, nothing can be opened in it. An open net/dev would be faster, but it pins the network namespace: the
interfaces of a dead sandbox would remain until the file is closed, and would be reported.
"""

from __future__ import annotations

import errno
import os
from itertools import islice
from pathlib import Path

from pykubelet.stats.samples import NetworkInterface

HOST_PID = 1
"""Process in whose network namespace the interfaces of the host are, as for cAdvisor."""

MAX_INTERFACES = 1000
"""Interfaces of a namespace that are reported; a privileged pod can create any number."""
MAX_BYTES = 1 << 20
"""Bytes of net/dev that are read; enough for about 8,000 interfaces."""

IGNORED_PREFIXES = ("lo", "veth", "docker", "nerdctl")
"""Prefixes of interfaces that cAdvisor does not report, in lower case."""

_CHUNK = 1 << 14
_ENDED = frozenset({errno.ENOENT, errno.ESRCH, errno.EINVAL})
_OPEN_PROCESS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NamespaceGone(Exception):
    """Raised when the process whose network namespace is read has ended."""


class NetworkReader:
    """A reader of the interfaces in the network namespace of a process."""

    def __init__(self, pid: int, *, cgroup: str | None = None, proc: Path = Path("/proc")) -> None:
        """Open the process; `cgroup` is a path that it must be in, to detect a pid that was reused before.

        Raises NamespaceGone if the process does not exist or is not in the cgroup, OSError for other causes.
        """
        try:
            self._directory = os.open(proc / str(pid), _OPEN_PROCESS)
        except (FileNotFoundError, ProcessLookupError):
            raise NamespaceGone(f"process {pid} has ended") from None
        try:
            if cgroup is not None and not self._is_in(cgroup):
                raise NamespaceGone(f"process {pid} is not in cgroup {cgroup}")
        except BaseException:
            self.close()
            raise

    def read(self) -> tuple[NetworkInterface, ...]:
        """Return the interfaces that are reported.

        Raises NamespaceGone if the process has ended, OSError if there is no free descriptor.
        """
        data = self._content("net/dev")
        if not data:
            self.close()
            raise NamespaceGone("the process has ended")
        return parse_net_dev(data)

    def close(self) -> None:
        """Close the process; later reads raise NamespaceGone."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _is_in(self, cgroup: str) -> bool:
        lines = self._content("cgroup").decode(errors="surrogateescape").splitlines()
        return any(line.split(":", 2)[-1] == cgroup for line in lines)

    def _content(self, name: str) -> bytes:
        """Return the content of a file of the process, empty if the process has ended."""
        data = bytearray()
        if self._directory < 0:
            return b""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory)
            try:
                while len(data) < MAX_BYTES and (chunk := os.read(fd, _CHUNK)):
                    data += chunk
            finally:
                os.close(fd)
        except OSError as err:
            if err.errno not in _ENDED:
                raise
            return b""
        return bytes(data)


def parse_net_dev(data: bytes) -> tuple[NetworkInterface, ...]:
    """Parse /proc/<pid>/net/dev, without the interfaces that cAdvisor ignores; at most `MAX_INTERFACES`.

    Lines of another format are ignored.
    """
    lines = data.decode(errors="replace").splitlines()[2:]
    return tuple(islice(filter(None, map(_interface, lines)), MAX_INTERFACES))


def _interface(line: str) -> NetworkInterface | None:
    # The colon may be followed by the first number without a space; the name may contain a colon (an alias).
    name, colon, numbers = line.rpartition(":")
    name = name.strip()
    if not colon or name.lower().startswith(IGNORED_PREFIXES):
        return None
    try:
        values = list(map(int, numbers.split()))
    except ValueError:
        return None
    if len(values) != 16 or not name:
        return None
    return NetworkInterface(
        name=name,
        rx_bytes=values[0],
        rx_packets=values[1],
        rx_errors=values[2],
        rx_dropped=values[3],
        tx_bytes=values[8],
        tx_packets=values[9],
        tx_errors=values[10],
        tx_dropped=values[11],
    )

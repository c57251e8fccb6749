"""Processes of cgroups: their number, open file descriptors and sockets.

cAdvisor reads the target of every descriptor of every process of a cgroup. That is unbounded: a pod can have
50,000 processes, and a process a million descriptors. A `ProcessScan` limits the system calls for one
process, one cgroup and all of its cgroups together. Up to the limits all numbers are exact. Beyond them,
descriptors and sockets are those that were examined, a lower bound; only the number of processes is still
exact. Linux 6.2 and later also report the exact number of descriptors of a process of which not all were
examined.

Everything here blocks and is called in a thread. The thread sleeps briefly after some hundred system calls,
because a thread that only makes short ones can take the interpreter lock back before the event loop gets it.
A process that ends while it is examined counts as a process without descriptors.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import msgspec

from pykubelet.stats.samples import CgroupError, CgroupGone, Details

MAX_LINKS_PER_PROCESS = 10_000
"""Descriptors of one process whose target is read."""
MAX_CALLS_PER_CGROUP = 20_000
"""System calls for the processes of one cgroup, about 50 ms of processor time."""
MAX_CALLS_PER_SCAN = 100_000
"""System calls for the processes of all cgroups of a scan."""
MAX_CANDIDATES = 64
"""Processes of a cgroup among which its first one is searched."""
MAX_PROCS_BYTES = 1 << 20
"""Bytes of a cgroup.procs that are read; enough for more than 130,000 processes."""

_CALLS_BETWEEN_SLEEPS = 250
_SLEEP_SECONDS = 0.0002

_CHUNK = 1 << 16
_MAX_OPEN_FILES = b"Max open files"
_CALLS_PER_PROCESS = 5
"""System calls for a process without descriptors: open, fstat, getdents, close, lseek."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ProcessCounts(msgspec.Struct, frozen=True, gc=False):
    """Processes of a cgroup, and their open file descriptors and sockets."""

    processes: int = 0
    file_descriptors: int = 0
    sockets: int = 0

    def add_to(self, details: Details) -> Details:
        """Return the details with these numbers."""
        return msgspec.structs.replace(
            details,
            processes=self.processes,
            file_descriptors=self.file_descriptors,
            sockets=self.sockets,
        )


def read_pids(procs_file: Path) -> list[int]:
    """Return the processes in a cgroup, not below it; at most those in `MAX_PROCS_BYTES`.

    The list is empty for a threaded cgroup v2. Raises CgroupGone if the cgroup was removed, CgroupError if
    the file cannot be read. Blocks.
    """
    data = bytearray()
    try:
        fd = os.open(procs_file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(data) < MAX_PROCS_BYTES and (chunk := os.read(fd, _CHUNK)):
                data += chunk
        finally:
            os.close(fd)
    except OSError as err:
        if err.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENODEV):
            raise CgroupGone(f"cgroup {procs_file.parent} was removed") from None
        if err.errno == errno.EOPNOTSUPP:
            return []
        raise CgroupError(f"cannot read {procs_file}: {err.strerror or err}") from err
    # The limit may have cut off the last number.
    complete = data[: data.rfind(b"\n") + 1]
    return [int(pid) for pid in complete.split() if pid.isdigit()]


class ProcessScan:
    """One scan of the processes of some cgroups, with a budget of system calls."""

    def __init__(self, *, proc: Path = Path("/proc"), max_calls: int = MAX_CALLS_PER_SCAN) -> None:
        self._proc = proc
        self._calls_before_sleep = _CALLS_BETWEEN_SLEEPS
        self.calls_left = max_calls

    def count_all(self, files: Mapping[str, Path]) -> dict[str, ProcessCounts]:
        """Return the numbers of each cgroup, given its cgroup.procs; cgroups that cannot be read are omitted.

        Blocks.
        """
        found = {}
        for name, procs_file in files.items():
            try:
                found[name] = self.count(procs_file)
            except CgroupError:
                continue
        return found

    def count(self, procs_file: Path) -> ProcessCounts:
        """Return the numbers of a cgroup. Raises CgroupGone and CgroupError. Blocks."""
        pids = read_pids(procs_file)
        limit = min(self.calls_left, MAX_CALLS_PER_CGROUP)
        left = limit
        descriptors = sockets = 0
        for pid in pids:
            left -= _CALLS_PER_PROCESS
            if left < 0:
                break
            total, examined, found = self._count_descriptors(pid, min(left, MAX_LINKS_PER_PROCESS))
            descriptors += total
            sockets += found
            left -= examined
        self.calls_left -= limit - max(left, 0)
        return ProcessCounts(len(pids), descriptors, sockets)

    def _count_descriptors(self, pid: int, limit: int) -> tuple[int, int, int]:
        """Return the descriptors of a process, how many were examined, and the sockets among those."""
        self._yield(_CALLS_PER_PROCESS)
        examined = sockets = 0
        try:
            directory = os.open(f"{self._proc}/{pid}/fd", _OPEN_DIRECTORY)
        except OSError:
            return 0, 0, 0
        try:
            total = os.fstat(directory).st_size
            with os.scandir(directory) as entries:
                for entry in islice(entries, limit):
                    examined += 1
                    self._yield(1)
                    try:
                        target = os.readlink(entry.name, dir_fd=directory)
                    except OSError:
                        continue
                    if target.startswith("socket"):
                        sockets += 1
        except OSError:
            return examined, examined, sockets
        finally:
            os.close(directory)
        return (max(total, examined) if examined >= limit else examined), examined, sockets

    def _yield(self, calls: int) -> None:
        """Count system calls, and let other threads run after some."""
        self._calls_before_sleep -= calls
        if self._calls_before_sleep <= 0:
            self._calls_before_sleep = _CALLS_BETWEEN_SLEEPS
            time.sleep(_SLEEP_SECONDS)


def first_process(procs_file: Path, proc: Path = Path("/proc")) -> int:
    """Return the oldest of the first `MAX_CANDIDATES` processes of a cgroup, 0 if it has none.

    The lowest pid may belong to a child: pids start over. Raises CgroupGone and CgroupError. Blocks.
    """
    found = []
    for pid in read_pids(procs_file)[:MAX_CANDIDATES]:
        try:
            stat = (proc / str(pid) / "stat").read_bytes()
            # The name in parentheses may contain anything; the start time is the 20th field after it.
            found.append((int(stat.rpartition(b")")[2].split()[19]), pid))
        except (OSError, ValueError, IndexError):
            continue
    return min(found, default=(0, 0))[1]


def max_open_files(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return the soft limit on open files of a process, -1 for no limit, None if it has ended.

    The file needs no privilege; prlimit(2) of another user's process needs CAP_SYS_RESOURCE. Blocks.
    """
    try:
        lines = (proc / str(pid) / "limits").read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(_MAX_OPEN_FILES):
            soft = (line.removeprefix(_MAX_OPEN_FILES).split() or [b""])[0]
            return -1 if soft == b"unlimited" else int(soft) if soft.isdigit() else None
    return None

"""Files of cgroups: reading with kept descriptors, and parsing.

Opening a file of a cgroup takes about ten times as long as reading it again, so a file stays open and is
read with pread(2). An open file costs a descriptor and a page of kernel memory, hence `DescriptorBudget`:
beyond it a file is opened and closed for each read. An open file does not prevent the removal of its cgroup;
reading it fails with ENODEV afterwards.

The kernel generates most of these files as one record, which a single read(2) returns completely.
"""

from __future__ import annotations

import errno
import os
import resource
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from pykubelet.stats.samples import CgroupError, CgroupGone

NO_LIMIT: Final = (1 << 64) - 1
"""Number that `max` in a file stands for."""

MAX_DESCRIPTORS: Final = 8192
"""Files of cgroups that stay open at most, whatever the limit of the process."""

SMALL: Final = 256
"""First buffer for files with one number or a few short lines, in bytes."""
STAT: Final = 4096
"""First buffer for memory.stat and for files with a line per block device, in bytes."""
MAX_BYTES: Final = 65536
"""Bytes of a file that are read at most."""

_SKIPPED_READS = 10
"""Reads for which a file that the cgroup does not have is not looked up again."""

_OPEN = os.O_RDONLY | os.O_CLOEXEC
_REMOVED = frozenset({errno.ENODEV, errno.ENOENT, errno.ENOTDIR})


class DescriptorBudget:
    """Number of descriptors that all readers together may keep open."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft // 4, MAX_DESCRIPTORS)
        self.limit = limit
        self.used = 0

    def acquire(self, *, low_priority: bool) -> bool:
        """Return whether a descriptor may stay open; low priority has only the first half of the limit."""
        if self.used >= (self.limit // 2 if low_priority else self.limit):
            return False
        self.used += 1
        return True

    def release(self) -> None:
        """Record that a kept descriptor was closed."""
        self.used -= 1


class CgroupFile:
    """A file in the directory of a cgroup."""

    __slots__ = ("_budget", "_fd", "_keep", "_low_priority", "_seen", "_size", "_skip", "directory", "name")

    def __init__(
        self,
        directory: str,
        name: str,
        budget: DescriptorBudget,
        *,
        size: int = SMALL,
        low_priority: bool = True,
        required: bool = False,
    ) -> None:
        """Initialize without opening.

        `size` is the expected size in bytes. A file of low priority stays open from the second read on, if
        half of the budget is free. `required` means that without the directory the cgroup was removed.
        """
        self.directory = directory
        self.name = name
        self._size = size
        self._budget = budget
        self._low_priority = low_priority
        self._keep = not low_priority
        self._seen = required
        self._fd = -1
        self._skip = 0

    @property
    def path(self) -> str:
        """Path of the file."""
        return f"{self.directory}/{self.name}"

    def read(self) -> bytes | None:
        """Return the content, None if the cgroup does not have the file.

        Raises CgroupGone if the directory was removed, or is absent although `required`; CgroupError if the
        file cannot be read.
        """
        if self._fd >= 0:
            try:
                data = os.pread(self._fd, self._size, 0)
                return data if len(data) < self._size else self._read_more(self._fd)
            except OSError as err:
                self.close()
                if err.errno != errno.ENODEV:
                    raise self._error(err) from err
                # The cgroup was removed, or only the file (the controller, or pressure was disabled).
        elif self._skip:
            self._skip -= 1
            return None
        return self._open_and_read()

    def _open_and_read(self) -> bytes | None:
        try:
            fd = os.open(self.path, _OPEN)
        except OSError as err:
            self._raise_unless_missing(err)
            return None
        keep = False
        try:
            data = os.pread(fd, self._size, 0)
            if len(data) >= self._size:
                data = self._read_more(fd)
            keep = self._keep and self._budget.acquire(low_priority=self._low_priority)
        except OSError as err:
            self._raise_unless_missing(err)
            return None
        finally:
            if not keep:
                os.close(fd)
        if keep:
            self._fd = fd
        self._keep = self._seen = True
        return data

    def _read_more(self, fd: int) -> bytes:
        """Read a file again that is larger than expected, and remember its size. Raises OSError."""
        data = b""
        while self._size < MAX_BYTES:
            self._size *= 4
            data = os.pread(fd, self._size, 0)
            if len(data) < self._size:
                break
        return data[:MAX_BYTES]

    def _raise_unless_missing(self, err: OSError) -> None:
        if err.errno == errno.EOPNOTSUPP:
            # Pressure of kernels that need psi=1 on their command line.
            self._skip = _SKIPPED_READS
        elif err.errno not in _REMOVED:
            raise self._error(err) from err
        elif Path(self.directory).is_dir():
            self._skip = _SKIPPED_READS
        elif self._seen:
            raise CgroupGone(f"cgroup {self.directory} was removed") from None

    def _error(self, err: OSError) -> CgroupError:
        return CgroupError(f"cannot read {self.path}: {err.strerror or err}")

    def number(self) -> int | None:
        """Return the number in the file, `NO_LIMIT` for `max`, None if the cgroup does not have the file.

        Raises as `read`, and CgroupError if the content is not a number.
        """
        data = self.read()
        if data is None:
            return None
        if data == b"max\n":
            return NO_LIMIT
        try:
            value = int(data)
        except ValueError:
            raise self.invalid(data) from None
        # Kernels with accounting errors report negative numbers.
        return max(value, 0)

    def limit(self) -> int:
        """Return the number in the file as cAdvisor reads limits: `NO_LIMIT` for `max`, 0 for other texts.

        Raises as `read`.
        """
        return to_limit((self.read() or b"").decode(errors="replace").strip())

    def invalid(self, data: bytes) -> CgroupError:
        """Return the error for content that cannot be parsed."""
        return CgroupError(f"cannot parse {self.path}: {data[:80]!r}")

    def close(self) -> None:
        """Close the kept descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._budget.release()


class StatParser:
    """A parser of `key value` lines that selects some keys.

    The kernel writes the same keys in the same order each time. Their positions are determined once per
    number of lines, and verified at each use.
    """

    _MAX_LAYOUTS = 16

    def __init__(self, *keys: str) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._layouts: dict[int, tuple[itemgetter[Any], itemgetter[Any], tuple[bytes, ...]]] = {}

    def zeros(self) -> list[int]:
        """Return the values for a file that does not exist."""
        return [0] * len(self._keys)

    def parse(self, file: CgroupFile, data: bytes) -> list[int]:
        """Return the values of the keys, 0 for those that are missing.

        Raises CgroupError if the content of the file has another format.
        """
        fields = data.split()
        count = len(fields)
        # The positions of missing keys point to this pair.
        fields += _ABSENT
        layout = self._layouts.get(count)
        if layout is None or layout[0](fields) != layout[2]:
            layout = self._learn(fields, count)
        try:
            values = list(map(int, layout[1](fields)))
        except ValueError:
            raise file.invalid(data) from None
        if count % 2:
            raise file.invalid(data)
        return values if min(values) >= 0 else [max(value, 0) for value in values]

    def _learn(
        self, fields: list[bytes], count: int
    ) -> tuple[itemgetter[Any], itemgetter[Any], tuple[bytes, ...]]:
        positions = {fields[index]: index for index in range(0, count - 1, 2)}
        indices = [positions.get(key, count) for key in self._keys]
        expected = tuple(fields[index] for index in indices)
        layout = itemgetter(*indices), itemgetter(*(index + 1 for index in indices)), expected
        if len(self._layouts) >= self._MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[count] = layout
        return layout


_ABSENT = (b"", b"0")


def to_limit(text: str) -> int:
    """Convert a number, or `max`; 0 for anything else."""
    if text == "max":
        return NO_LIMIT
    return int(text) if text.isascii() and text.isdigit() else 0

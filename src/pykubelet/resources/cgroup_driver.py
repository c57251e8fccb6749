"""The two ways to make and set cgroups, as one: through the kernel's files alone, or systemd's units first.

Which one a node uses must be the runtime's, too (`cgroupDriver`; containerd: `SystemdCgroup`): two
managers of one tree undo each other's work. With `systemd` each change is told to systemd before the
files are written, which then carry also what systemd has no word for.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pykubelet.host import systemd
from pykubelet.host.cgroups import Cgroups
from pykubelet.host.systemd import Systemd, SystemdError
from pykubelet.resources.cgroup_files import CgroupError, CgroupFiles
from pykubelet.resources.cgroup_names import CgroupName, parse_path, parse_systemd_path
from pykubelet.resources.cgroup_systemd import Slices, in_whole_percent
from pykubelet.resources.cgroup_values import CgroupValues
from pykubelet.resources.metrics import CgroupMetrics


class CgroupDriver:
    """The cgroups of one machine, by name, through the driver that the node is set to."""

    def __init__(
        self,
        cgroups: Cgroups,
        driver: str = "cgroupfs",
        metrics: CgroupMetrics | None = None,
        manager: Systemd | None = None,
    ) -> None:
        self._metrics = metrics or CgroupMetrics()
        self.files = CgroupFiles(cgroups, driver)
        """For looking: what exists, and what is used."""
        self._slices: Slices | None = None
        if driver == "systemd":
            self._slices = Slices(manager or Systemd(), unified=cgroups.unified)

    def check(self) -> None:
        """Raise CgroupError with a remedy when the machine does not have what the driver needs."""
        if self._slices is not None and not systemd.is_running():
            raise CgroupError(
                errno.ENOSYS,
                "cgroupDriver is systemd, but systemd does not run this machine: set it to cgroupfs, "
                "here and in the runtime (containerd: SystemdCgroup = false)",
            )

    def parse(self, text: str) -> CgroupName:
        """Take the name of an existing cgroup apart: a path, or a slice (`/system.slice`)."""
        return parse_path(text) if self._slices is None else parse_systemd_path(text)

    def granted(self, values: CgroupValues) -> CgroupValues:
        """Give what a cgroup gets of these values: systemd is coarser."""
        return values if self._slices is None else in_whole_percent(values)

    async def make(self, name: CgroupName, values: CgroupValues) -> None:
        """Make a cgroup, and those above it, and set it; raises CgroupError."""
        with self._metrics.timed("create"):
            if self._slices is not None:
                with _told("make"):
                    await self._slices.start(name)
            self.files.make(name, CgroupValues())
            await self._set(name, values)

    async def write(self, name: CgroupName, values: CgroupValues) -> None:
        """Set a cgroup that exists; raises CgroupError with what refused its value."""
        with self._metrics.timed("update"):
            await self._set(name, values)

    async def remove(self, name: CgroupName) -> None:
        """Remove a cgroup with everything below it, and kill what is still inside; raises CgroupError."""
        if self._slices is None:
            await self.files.remove(name)
            return
        # systemd would ask the processes politely first, and wait for a minute and a half.
        await self.files.kill(name)
        try:
            with _told("stop"):
                await self._slices.stop(name)
        finally:
            await self.files.remove(name)

    async def _set(self, name: CgroupName, values: CgroupValues) -> None:
        values = self.granted(values)
        self.files.check(name, values)
        if self._slices is not None:
            with _told("set"):
                await self._slices.set(name, values)
        self.files.write(name, values)


@contextmanager
def _told(doing: str) -> Iterator[None]:
    try:
        yield
    except SystemdError as err:
        raise CgroupError(err.errno, f"cannot {doing} a slice: {err}") from err
    except ValueError as err:
        # A name that no unit can have.
        raise CgroupError(errno.EINVAL, f"cannot {doing} a slice: {err}") from err

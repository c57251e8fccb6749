"""File systems of the host: capacity, usage and disk counters, as cAdvisor reports them for the root cgroup.

`Filesystems` owns the latest measurement. `refresh` measures again if the last result is too old; concurrent
calls share one measurement, and a cancelled caller does not end it. Nothing blocks the event loop: the mount
table is read and statvfs(2) is called in threads.

- The mount table is read again only when the kernel reports a change (poll(2) on its file).
- Local file systems are measured by one thread, each NFS mount by a thread of its own, because its server
  may not respond. After the time limit the rest is omitted. A call that hangs is not repeated, and its file
  system is omitted, until it returns.

A file system that cannot be measured is omitted; old numbers are never returned for it.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pykubelet.linux.mounts import MOUNTINFO
from pykubelet.logs import get_logger
from pykubelet.stats.cached_call import SharedWork
from pykubelet.stats.container_hints import NO_HINTS, Hints
from pykubelet.stats.samples import DiskIo, FilesystemUsage
from pykubelet.stats.storage.mounted_filesystems import (
    MountedFilesystem,
    MountTable,
    mount_of_directory,
    parse_mount_table,
)
from pykubelet.util.tasks import TaskScope, in_own_thread, wait_seconds

log = get_logger(__name__)
STATVFS_TIMEOUT_SECONDS = 2.0
"""Seconds for calls that may wait for a file server; cAdvisor's value."""
LOCAL_TIMEOUT_SECONDS = 10.0
"""Seconds for reading the mount table and for all local file systems, which take long on a busy host only."""
MAX_HANGING = 32
"""NFS mounts with hanging calls, each of which occupies a thread, above which no others are measured."""
DEVICE_NAMES_SECONDS = 300.0
"""Seconds for which device names are cached; cAdvisor reads them as often."""
_MAX_DIRECTORIES = 100
_MAX_DEVICE_NAMES = 4096
_IGNORED_DISKS = ("loop", "ram", "sr")
_COUNTERS = 11


class Filesystems:
    """File systems of the host; `kubelet_root` is the kubelet's root directory.

    `hints` are mount points of cgroups, for the metrics. The rest is for tests.
    """

    def __init__(
        self,
        kubelet_root: Path,
        tasks: TaskScope,
        *,
        hints: Hints = NO_HINTS,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        statvfs: Callable[[bytes], os.statvfs_result] = os.statvfs,
    ) -> None:
        self.hints = hints
        self._kubelet_root = kubelet_root
        self._mountinfo = MOUNTINFO if proc == Path("/proc") else proc / "self/mountinfo"
        self._diskstats = proc / "diskstats"
        self._block_devices = sys / "dev/block"
        self._has_zfs_tools = Path("/dev/zfs").exists()
        self._statvfs = statvfs
        self._table = MountTable()
        self._changes: _TableChanges | None = None
        self._stale = True
        self._usages: tuple[FilesystemUsage, ...] = ()
        self._measured_at = float("-inf")
        self._tasks = tasks
        self._refresh = SharedWork("filesystems-refresh", tasks)
        self._table_lock = threading.Lock()
        self._in_progress: set[bytes] = set()
        """Mount points for which a thread waits for statvfs."""
        self._lookups: dict[Path, tuple[asyncio.Task[FilesystemUsage | None], float]] = {}
        """Searches for the file systems of directories, with their start times."""
        self._directories: dict[Path, tuple[int, MountedFilesystem]] = {}
        """File systems of directories that were measured alone, with the device number of the directory."""
        self._names: dict[tuple[int, int], str] = {}
        self._names_read_at = float("-inf")

    def all(self) -> tuple[FilesystemUsage, ...]:
        """Return the result of the last `refresh`, in the order of the mount table."""
        return self._usages

    async def refresh(self, max_age: float) -> None:
        """Measure all file systems unless the last measurement started less than `max_age` seconds ago.

        Takes up to two seconds when a file server does not respond, and longer only on a host that is busy or
        whose local file system hangs. Raises nothing.
        """
        if time.monotonic() - self._measured_at < max_age:
            return
        await self._refresh.run(self._measure_all)

    async def of_directory(self, path: Path, max_age: float = 10.0) -> FilesystemUsage | None:
        """Return the file system that contains a directory, not older than `max_age` seconds.

        With 0, only this file system is measured, otherwise all of them if necessary. A file system of a type
        that cAdvisor does not know is measured, too. Returns None if the directory does not exist or its file
        system does not respond.
        """
        is_fresh = max_age <= 0
        if not is_fresh:
            await self.refresh(max_age)
        task, started_at = self._lookups.get(path, (None, 0.0))
        if task is None or task.done():
            task, started_at = (
                self._tasks.start(self._look_up(path, is_fresh=is_fresh), name="filesystem-of"),
                time.monotonic(),
            )
            self._lookups[path] = task, started_at
        remaining = started_at + STATVFS_TIMEOUT_SECONDS - time.monotonic()
        if remaining > 0:
            await asyncio.wait({task}, timeout=wait_seconds(remaining))
        if not task.done():
            return None
        self._lookups.pop(path, None)
        return None if task.cancelled() else task.result()

    async def _look_up(self, path: Path, *, is_fresh: bool) -> FilesystemUsage | None:
        find = self._measure_directory if is_fresh else self._find
        try:
            return await in_own_thread(lambda: find(path), name="filesystem-of", cancel_timeout=0)
        except (OSError, ValueError) as err:
            log.v(4).info("Failed to find file system", path=path, err=err)
            return None

    def device_name(self, major: int, minor: int, *, filesystems_first: bool = False) -> str:
        """Return the name of a block device as in cAdvisor's `device` label; empty if it is unknown.

        Disks precede file systems (`/dev/dm-0`), but for the root cgroup it is the other way round
        (`filesystems_first`, `/dev/mapper/root`).
        """
        if filesystems_first and (name := self._name_in_table(major, minor)):
            return name
        return self._disk_name(major, minor) or self._name_in_table(major, minor)

    def _name_in_table(self, major: int, minor: int) -> str:
        found = self._table.for_device(major, minor)
        return found.device if found is not None else ""

    def _disk_name(self, major: int, minor: int) -> str:
        """Return the path of a whole disk; empty for partitions and other devices."""
        now = time.monotonic()
        if now - self._names_read_at >= DEVICE_NAMES_SECONDS or len(self._names) >= _MAX_DEVICE_NAMES:
            self._names.clear()
            self._names_read_at = now
        key = major, minor
        if (known := self._names.get(key)) is not None:
            return known
        name = ""
        with suppress(OSError):
            # Of a partition the link ends in `block/sda/sda1`; reading it takes a few microseconds.
            target = (self._block_devices / f"{major}:{minor}").readlink()
            if target.parent.name == "block" and not target.name.startswith(_IGNORED_DISKS):
                name = f"/dev/{target.name}"
        self._names[key] = name
        return name

    async def _measure_all(self) -> None:
        started_at = time.monotonic()
        try:
            if self._is_table_stale():
                async with asyncio.timeout(LOCAL_TIMEOUT_SECONDS):
                    await in_own_thread(self._update_table, name="mount-table", cancel_timeout=0)
        except (OSError, TimeoutError) as err:
            log.warning("Failed to read mount table", err=err if str(err) else "timeout")
        filesystems = self._table.filesystems
        hanging = frozenset(self._in_progress)  # of earlier measurements
        local = [fs for fs in filesystems if not fs.is_remote and fs.point not in hanging]
        remote = [fs for fs in filesystems if fs.is_remote and fs.point not in hanging]
        threads = max(min(MAX_HANGING - len(hanging), len(remote)), 0)
        results = await asyncio.gather(
            self._measure(local, LOCAL_TIMEOUT_SECONDS),
            *(self._measure(remote[index::threads], STATVFS_TIMEOUT_SECONDS) for index in range(threads)),
        )
        found = {device: usage for result in results for device, usage in result.items()}
        self._usages = tuple(found[fs.device] for fs in filesystems if fs.device in found)
        self._measured_at = started_at

    async def _measure(
        self, filesystems: list[MountedFilesystem], limit: float
    ) -> dict[str, FilesystemUsage]:
        """Measure file systems in a thread; return those that were measured within the time limit."""
        found: dict[str, FilesystemUsage] = {}
        stop = threading.Event()

        def work() -> None:
            counters = _read_counters(self._diskstats)
            for fs in filesystems:
                if stop.is_set():
                    return
                self._in_progress.add(fs.point)
                try:
                    found[fs.device] = self._usage(fs, counters)
                except OSError as err:
                    log.v(4).info("Failed to measure file system", device=fs.device, err=err)
                finally:
                    self._in_progress.discard(fs.point)

        try:
            async with asyncio.timeout(limit):
                await in_own_thread(work, name="statvfs", cancel_timeout=0)
        except TimeoutError:
            stop.set()
            points = sorted(fs.device for fs in filesystems if fs.point in self._in_progress)
            log.warning("File system does not respond", devices=points)
        except OSError as err:
            log.warning("Failed to measure file systems", err=err)
        return found.copy()

    def _usage(self, fs: MountedFilesystem, counters: _DiskCounters) -> FilesystemUsage:
        sizes = self._statvfs(fs.point)
        # cAdvisor reads sizes of ZFS with its tools, which count no inodes.
        has_inodes = fs.type != "zfs" or not self._has_zfs_tools
        return FilesystemUsage(
            time=time.time(),
            device=fs.device,
            major=fs.major,
            minor=fs.minor,
            capacity=sizes.f_frsize * sizes.f_blocks,
            available=sizes.f_frsize * sizes.f_bavail,
            used=sizes.f_frsize * (sizes.f_blocks - sizes.f_bfree),
            inodes=sizes.f_files if has_inodes else None,
            inodes_free=sizes.f_ffree if has_inodes else None,
            io=counters.find(fs),
            mount_point=os.fsdecode(fs.point),
        )

    def _measure_directory(self, path: Path) -> FilesystemUsage:
        """Measure the file system of a directory. Blocks. Raises as `_filesystem_of`."""
        device = path.stat().st_dev
        known = self._directories.get(path)
        if known is None or known[0] != device:
            if len(self._directories) >= _MAX_DIRECTORIES:
                self._directories.clear()
            known = self._directories[path] = device, self._filesystem_of(path, device)
        return self._usage(known[1], _read_counters(self._diskstats))

    def _find(self, path: Path) -> FilesystemUsage:
        """Return the file system of a directory as last measured. Blocks. Raises as `_filesystem_of`."""
        known = self._filesystem_of(path, path.stat().st_dev)
        measured = next((usage for usage in self._usages if usage.device == known.device), None)
        return measured or self._usage(known, _read_counters(self._diskstats))

    def _filesystem_of(self, path: Path, device: int) -> MountedFilesystem:
        """Return the file system of a directory. Blocks. Raises OSError, and ValueError without a mount."""
        major, minor = os.major(device), os.minor(device)
        known = self._table.for_device(major, minor)
        if known is None:
            # A btrfs subvolume, a mount of a pod, or a type that cAdvisor does not know.
            mount = mount_of_directory(self._mountinfo.read_bytes(), os.fsencode(path.resolve()))
            if mount is None:
                raise ValueError(f'no mount contains "{path}"')
            known = mount
            if mount.source.startswith("/dev/"):
                known = next((fs for fs in self._table.filesystems if fs.source == mount.source), mount)
        return known

    def _is_table_stale(self) -> bool:
        """Return whether the mount table must be read. Raises OSError."""
        if self._changes is None:
            self._changes = _TableChanges(self._mountinfo)
        elif self._changes.has_changed():
            self._stale = True
        return self._stale

    def _update_table(self) -> None:
        """Read the mount table, unless another thread does. Blocks. Raises OSError."""
        if not self._table_lock.acquire(blocking=False):
            return
        try:
            self._stale = False
            table = parse_mount_table(self._mountinfo.read_bytes(), self._kubelet_root.resolve())
        except OSError:
            self._stale = True
            raise
        finally:
            self._table_lock.release()
        if table.omitted and not self._table.omitted:
            log.warning("Too many file systems, some are not measured", omitted=table.omitted)
        self._table = table


class _TableChanges:
    """An open mount table, of which the kernel reports changes; a regular file counts as always changed."""

    _opened = -1

    def __init__(self, path: Path) -> None:
        self._opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._opened, select.POLLPRI | select.POLLERR)
        self._is_kernels = path == MOUNTINFO

    def __del__(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)

    def has_changed(self) -> bool:
        """Return whether the table has changed since the last call."""
        return not self._is_kernels or bool(self._poll.poll(0))


class _DiskCounters:
    """Counters of /proc/diskstats, parsed when they are used."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._by_number: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._by_name: dict[str, list[bytes]] = {}
        for line in lines:
            words = line.split()
            if len(words) >= 3 + _COUNTERS and all(word.isdigit() for word in words[3:]):
                self._by_number[words[0], words[1]] = words
                self._by_name[f"/dev/{words[2].decode(errors='replace')}"] = words

    def find(self, fs: MountedFilesystem) -> DiskIo:
        """Return the counters of a file system's device, or zeros."""
        number = str(fs.major).encode(), str(fs.minor).encode()
        words = self._by_name.get(fs.device) or self._by_number.get(number)
        if words is None:
            return DiskIo()
        counters = map(int, words[3 : 3 + _COUNTERS])
        return DiskIo(**dict(zip(DiskIo.__struct_fields__, counters, strict=True)))


def _read_counters(path: Path) -> _DiskCounters:
    try:
        return _DiskCounters(path.read_bytes().splitlines())
    except OSError:
        return _DiskCounters(())

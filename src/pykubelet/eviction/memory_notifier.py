"""Notification by the kernel that memory runs short (`kernelMemcgNotification`), between two rounds.

| cgroup | mechanism |
|---|---|
| v1 | eventfd on `memory.usage_in_bytes` of the root or of all pods, where a threshold is met |
| v2 | PSI trigger on `/proc/pressure/memory` and on `memory.pressure` of all pods |
| v2 without PSI | changes of `memory.events` of all pods |

The usage of a v1 cgroup includes inactive page cache, which does not count as used, so the watched usage
moves with it: `update` is called with new samples. A notification is only a hint: the round that follows
measures. What cannot be watched is logged once; the regular rounds remain. The watch of a
cgroup that was removed ends, because its PSI trigger stays readable for ever; `update` watches the next one
with that name."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pykubelet.eviction.observations import NodeMeasurements
from pykubelet.eviction.signals import MEMORY, Threshold, is_allocatable_signal
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.logs import get_logger
from pykubelet.stats.samples import UNLIMITED, Record

log = get_logger(__name__)
PSI_TRIGGER = b"some 200000 2000000"
"""Some task waited for memory for 0.2 of 2 seconds, in microseconds. Without CAP_SYS_RESOURCE the kernel
accepts only windows that are a multiple of 2 seconds."""
MIN_CHANGE_BYTES = 1 << 20
"""Change of the watched usage that is worth a new registration."""


def usage_at_threshold(threshold: Threshold, record: Record | None) -> int | None:
    """Return the charged memory, with page cache, at which a threshold is met; None if it is unknown."""
    if record is None or record.usage is None or not 0 < record.limits.memory_limit <= UNLIMITED:
        return None
    limit, usage = record.limits.memory_limit, record.usage
    cache = usage.memory - usage.working_set
    if threshold.signal.endswith("WithCache"):
        cache += usage.active_file
    return max(0, limit - threshold.amount(limit) + cache)


class MemoryNotifier:
    """Watches of the kernel on memory usage; `on_event` is called in the event loop and must not block."""

    def __init__(self, cgroups: Cgroups, pods_cgroup: str, on_event: Callable[[], None]) -> None:
        self._cgroups = cgroups
        self._pods_cgroup = pods_cgroup
        self._on_event = on_event
        self._watches: dict[object, _Watch] = {}
        self._failed: set[object] = set()

    def update(self, thresholds: Iterable[Threshold], node: NodeMeasurements) -> None:
        """Watch the memory thresholds, for the latest samples. Raises nothing."""
        memory = [threshold for threshold in thresholds if threshold.resource == MEMORY]
        for threshold in memory:
            is_allocatable = is_allocatable_signal(threshold.signal)
            if self._cgroups.unified:
                self._watch(is_allocatable, 0, partial(self._open_v2, is_allocatable))
                continue
            usage = usage_at_threshold(threshold, node.pods if is_allocatable else node.root)
            if usage is not None:
                self._watch(threshold, usage, partial(self._open_v1, is_allocatable, usage))

    def close(self) -> None:
        """Stop watching."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

    def _watch(self, key: object, usage: int, open_watch: Callable[[], _Watch]) -> None:
        known = self._watches.get(key)
        if known is not None and (known.is_closed or known.is_gone()):
            del self._watches[key]
            known.close()
            known = None
        if known is not None and abs(known.usage - usage) < MIN_CHANGE_BYTES:
            return
        try:
            watch = open_watch()
        except OSError as err:
            if key not in self._failed:
                self._failed.add(key)
                log.warning("Failed to watch memory, only the regular rounds remain", err=str(err))
            return
        self._failed.discard(key)
        if known is not None:
            known.close()
        self._watches[key] = watch
        watch.start(self._on_event)

    def _open_v1(self, is_allocatable: bool, usage: int) -> _Watch:
        directory = self._cgroups.path("memory", self._pods_cgroup if is_allocatable else "/")
        path = directory / "memory.usage_in_bytes"
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            watched = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                inode = os.fstat(watched).st_ino
                (directory / "cgroup.event_control").write_bytes(b"%d %d %d" % (event, watched, usage))
            finally:
                os.close(watched)
        except BaseException:
            os.close(event)
            raise
        return _Watch(event, event, usage, path, inode)

    def _open_v2(self, is_allocatable: bool) -> _Watch:
        directory = self._cgroups.path("memory", self._pods_cgroup)
        pressure = directory / "memory.pressure" if is_allocatable else Path("/proc/pressure/memory")
        try:
            return _open_polled(pressure, PSI_TRIGGER)
        except OSError as err:
            log.v(2).info("No PSI trigger, watching memory.events", path=str(pressure), err=str(err))
            return _open_polled(directory / "memory.events", None)


def _open_polled(path: Path, trigger: bytes | None) -> _Watch:
    """Watch a file for POLLPRI, which event loops do not support, through an epoll descriptor."""
    file = os.open(path, (os.O_RDWR if trigger is not None else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        inode = os.fstat(file).st_ino
        if trigger is not None:
            os.write(file, trigger + b"\0")
        poller = select.epoll(1, select.EPOLL_CLOEXEC)
        try:
            poller.register(file, select.EPOLLPRI)
        except BaseException:
            poller.close()
            raise
    except BaseException:
        os.close(file)
        raise
    return _Watch(file, poller.fileno(), 0, path, inode, poller, rereads=trigger is None)


@dataclass(slots=True, eq=False)
class _Watch:
    """An open descriptor that the kernel notifies."""

    file: int
    readable: int
    """Descriptor that becomes readable."""
    usage: int
    """Charged memory that is watched."""
    path: Path
    """File of the cgroup that is watched."""
    inode: int
    poller: select.epoll | None = None
    rereads: bool = False
    """Whether the file must be read before its next change is reported."""
    is_closed: bool = False

    def start(self, on_event: Callable[[], None]) -> None:
        def notified() -> None:
            if self.is_gone():
                log.info("Watched cgroup was removed", path=str(self.path))
                self.close()
                return
            self._consume()
            log.v(4).info("Kernel notified of memory usage", usage=self.usage)
            on_event()

        if self.rereads:
            self._consume()
        asyncio.get_running_loop().add_reader(self.readable, notified)

    def is_gone(self) -> bool:
        """Return whether the watched file was removed, also if another one has its name now."""
        try:
            return self.path.stat().st_ino != self.inode
        except OSError:
            return True

    def _consume(self) -> None:
        with suppress(OSError):
            if self.poller is not None:
                self.poller.poll(0)
                if self.rereads:
                    os.pread(self.file, 4096, 0)
            else:
                os.read(self.file, 8)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        with suppress(RuntimeError):  # the loop is closed
            asyncio.get_running_loop().remove_reader(self.readable)
        if self.poller is not None:
            self.poller.close()
        os.close(self.file)

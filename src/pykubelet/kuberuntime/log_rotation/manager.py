"""Container log manager: keeps the logs of all containers within their limits.

Logs of running containers that grow are checked once a second with one lstat(2) each. One that has not grown
for a monitoring interval is checked once per interval, and inotify reports its next change. A log that
reaches `containerLogMaxSize` is rotated at the end of the monitoring interval, as upstream, or immediately if
it has at least 1 MiB; one that grows so fast that a second is too long is checked by a task of its own when
it is expected to reach its limit. A rotation renames the file and calls ReopenContainerLog; if that fails,
the file gets its name back, unless the runtime has created the new file nevertheless.

Rotated files are compressed when they are older than the monitoring interval, except the newest one. Files of
a fast log are removed before that, so that processor time is not spent on them.

The directory is the memory: a kubelet may be killed at any point. When a log is first seen, temporary files
and other remnants are removed; a log that does not exist, because the kubelet was killed between the rename
and the reopening, is reopened. Logs of exited containers are compressed and trimmed once, one interval after
their end. Logs of attempts that the runtime has lost are removed except the newest.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from pykubelet.kuberuntime.log_rotation.directory import CompressionStopped, FileChangedError, LogDirectory
from pykubelet.kuberuntime.log_rotation.plan import (
    TEMPORARY,
    TICK_SECONDS,
    LogDirectoryEntry,
    RotationPolicy,
    attempt_of,
    classify,
    find_excess,
    find_uncompressed,
    next_check_seconds,
    next_stem,
    stale_attempts,
)
from pykubelet.kuberuntime.log_rotation.readers import LogReaders
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.linux.inotify import Inotify, Mask
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope, finish_in_thread, in_own_thread, seconds_to_tick

log = get_logger(__name__)
_MISSING, _NOT_REGULAR, _UNKNOWN = -1, -2, -3
_CHANGES = Mask.MODIFY | Mask.ATTRIB | Mask.MOVE_SELF | Mask.DELETE_SELF | Mask.DONT_FOLLOW | Mask.ONESHOT
_UNREPAIRED_SECONDS = 600.0
"""Seconds until another attempt to replace something that is not a regular file."""
_MAX_ROTATIONS = 8
"""Maximum of concurrent renames and reopenings; one that hangs must not delay all others."""
_MAX_NAMES = 100_000
"""Maximum of names of a directory that are searched for logs of lost attempts."""
_SCAN_SHARE = 20
"""How much longer than the listing of a directory its result is used at least."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """Rotated files of a log, oldest first, as last listed and changed since."""

    rotated: tuple[LogDirectoryEntry, ...]
    valid_until: float
    """On the monotonic clock."""


@dataclass(slots=True, eq=False)
class _Log:
    """A container's log and what is known of it; only the event loop changes it."""

    container_id: str
    path: Path
    path_text: str
    is_running: bool
    size: int = 0
    checked_at: float = 0.0
    rate: float = 0.0
    """Bytes per second."""
    is_due_at: float = 0.0
    """End of the current monitoring interval, on the loop's clock as all times."""
    retry_at: float = 0.0
    tidy_at: float | None = 0.0
    """When to compress and to clean up; None without need."""
    changed_at: float = 0.0
    """When the size was last found to have changed."""
    watch: int | None = None
    """Watch descriptor of a log that does not grow, until its next change."""
    is_rotating: bool = False
    is_tidying: bool = False
    compressing: str = ""
    """Name of the file that is being compressed."""
    listing: _Listing | None = None

    def record_size(self, size: int, now: float) -> None:
        """Record the size at `now`, and the growth since the last check."""
        elapsed = now - self.checked_at
        if self.checked_at and elapsed > 0:
            grown = size - self.size if size >= self.size else size
            self.rate = max(grown / elapsed, self.rate / 2)
        if size != self.size or not self.checked_at:
            self.changed_at = now
        self.size, self.checked_at = size, now


@dataclass(slots=True)
class _Pod:
    observed: ObservedPod
    container_ids: list[str] = field(default_factory=list)


class ContainerLogManager:
    """Rotates, compresses and bounds the logs of all containers."""

    def __init__(
        self,
        reopen: Callable[[str], Awaitable[None]],
        pods: Callable[[], Iterable[ObservedPod]],
        pod_logs_dir: str | Path,
        policy: RotationPolicy,
        readers: LogReaders,
        *,
        workers: int,
        interval: float,
        version: Callable[[], object] = object,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Initialize; `reopen` calls ReopenContainerLog, `pods` returns the last observed state of all pods.

        `version` returns a value that is equal to the last one while `pods` returns the same.
        `workers` is the maximum of concurrent compressions, `interval` the monitoring interval in seconds.
        """
        self._reopen = reopen
        self._pods = pods
        self._root = Path(os.path.normpath(pod_logs_dir))
        self._policy = policy
        self._readers = readers
        self._interval = interval
        self._version = version
        self._last_version: object = None
        self._clock = clock
        self._rotations = asyncio.Semaphore(_MAX_ROTATIONS)
        self._workers = workers
        self._compressions = asyncio.Semaphore(workers)
        self._enabled = asyncio.Event()
        """Set while rotation is not disabled."""
        self._stopping = threading.Event()
        self._changes: Inotify | None = None
        self._watched: dict[int, _Log] = {}
        self._early: set[int] = set()
        """Watch descriptors whose event came before the thread that has added them returned."""
        self._logs: dict[str, _Log] = {}
        self._seen: dict[str, _Pod] = {}

        self.set_policy(policy, workers=workers, interval=interval)

    def set_policy(self, policy: RotationPolicy, *, workers: int, interval: float) -> None:
        """Change the limits from the next check on; a negative size disables rotation.

        Compressions that are in progress do not count in a new maximum.
        """
        self._policy = policy
        self._interval = interval
        if workers != self._workers:
            self._workers = workers
            self._compressions = asyncio.Semaphore(workers)
        if policy.max_size >= 0:
            self._enabled.set()
        else:
            self._enabled.clear()
            log.info("Container log rotation is disabled", containerLogMaxSize=policy.max_size)

    async def run(self) -> None:
        """Monitor all logs until cancelled, while rotation is enabled."""
        await self._enabled.wait()
        async with AsyncExitStack() as stack:
            try:
                self._changes = stack.enter_context(Inotify())
            except OSError as err:
                log.error(err, "Failed to watch container logs, all are checked once a second")
            scope = await stack.enter_async_context(TaskScope())
            if self._changes is not None:
                scope.start(self._handle_changes(self._changes), name="log-changes")
            try:
                while True:
                    await self._enabled.wait()
                    await self._check_all(scope)
                    await asyncio.sleep(seconds_to_tick(TICK_SECONDS))
            finally:
                self._stopping.set()

    # Monitoring

    async def _check_all(self, scope: TaskScope) -> None:
        self._update_logs()
        now = asyncio.get_running_loop().time()
        checked = self._due(now)
        if checked:
            idle = [entry for entry in checked if self._is_idle(entry, now)]
            sizes = await finish_in_thread(lambda: self._measure(checked, idle))
            now = asyncio.get_running_loop().time()
            for entry, (size, watch) in zip(checked, sizes, strict=True):
                if watch is not None and watch not in self._early:
                    entry.watch = watch
                    self._watched[watch] = entry
                self._check(entry, size, now, scope)
            self._early.clear()
        for entry in self._logs.values():
            if entry.tidy_at is not None and now >= entry.tidy_at and not entry.is_tidying:
                entry.is_tidying, entry.tidy_at = True, None
                scope.start(self._tidy(entry), name="log-tidying")

    def _due(self, now: float) -> list[_Log]:
        """Return the logs to check: those that are not watched, and every interval those that are.

        When one that is watched is due, so are all that will be within half an interval: each check of some
        logs starts a thread.
        """
        logs = [entry for entry in self._logs.values() if entry.is_running and not entry.is_rotating]
        oldest = min((entry.checked_at for entry in logs if entry.watch is not None), default=now)
        half = now - self._interval / 2 if now - oldest >= self._interval else -math.inf
        return [entry for entry in logs if entry.watch is None or entry.checked_at <= half]

    def _is_idle(self, entry: _Log, now: float) -> bool:
        """Return whether the log is to be watched, because it has not grown for an interval."""
        return (
            self._changes is not None
            and entry.watch is None
            and entry.checked_at > 0
            and now - entry.changed_at >= self._interval
        )

    def _measure(self, checked: list[_Log], idle: list[_Log]) -> list[tuple[int, int | None]]:
        """Return the sizes of logs, and the watch descriptors of those that are idle. Blocks."""
        watches: dict[str, int] = {}
        for entry in idle:
            # Before its size is read, so that no change is missed; without watches left, it is just checked.
            with suppress(OSError):
                assert self._changes is not None
                watches[entry.container_id] = self._changes.watch(entry.path_text, _CHANGES)
        return [(_size(entry.path_text), watches.get(entry.container_id)) for entry in checked]

    async def _handle_changes(self, changes: Inotify) -> None:
        """Check logs again once a second that were idle and have changed."""
        async for event in changes:
            if event.overflowed:
                for entry in self._watched.values():
                    entry.watch = None
                self._watched.clear()
            elif (found := self._watched.pop(event.watch, None)) is not None:
                found.watch, found.changed_at = None, asyncio.get_running_loop().time()
            elif Mask.IGNORED not in event.mask:
                self._early.add(event.watch)

    def _update_logs(self) -> None:
        """Update the logs of pods that have changed since the last call."""
        version = self._version()
        if version == self._last_version:
            return
        self._last_version = version
        present = set()
        for observed in self._pods():
            present.add(observed.uid)
            pod = self._seen.get(observed.uid)
            if pod is None or pod.observed is not observed:
                self._update_pod(observed, pod)
        for uid in self._seen.keys() - present:
            self._forget(self._seen.pop(uid).container_ids)

    def _update_pod(self, observed: ObservedPod, pod: _Pod | None) -> None:
        now = asyncio.get_running_loop().time()
        ids = []
        for container in observed.containers:
            if not container.log_path or container.phase == "created":
                continue
            ids.append(container.id)
            is_running, entry = container.phase == "running", self._logs.get(container.id)
            if entry is None:
                path = Path(os.path.normpath(container.log_path))
                entry = _Log(container.id, path, str(path), is_running)
                # An exited container may still be followed, and its message is read from its log.
                entry.tidy_at = now if is_running else now + self._interval
                self._logs[container.id] = entry
            elif entry.is_running and not is_running:
                entry.is_running, entry.tidy_at = False, now + self._interval
        if pod is not None:
            self._forget(set(pod.container_ids) - set(ids))
        self._seen[observed.uid] = _Pod(observed, ids)

    def _forget(self, container_ids: Iterable[str]) -> None:
        for container_id in container_ids:
            entry = self._logs.pop(container_id)
            entry.is_running = False
            if entry.watch is not None and self._watched.pop(entry.watch, None) is not None:
                with suppress(OSError):
                    assert self._changes is not None
                    self._changes.unwatch(entry.watch)
            self._readers.set_held(entry.path_text, 0)

    def _check(self, entry: _Log, size: int, now: float, scope: TaskScope) -> None:
        if now < entry.retry_at or size == _UNKNOWN:
            return
        is_due = now >= entry.is_due_at
        if size >= 0:
            entry.record_size(size, now)
            if is_due:
                entry.is_due_at = now + self._interval
            limit = self._policy.max_size if is_due else self._policy.urgent_size
            if size < max(limit, 1) and self._is_slow(entry):
                return
            if size >= max(limit, 1):
                entry.is_due_at = now + self._interval
        entry.is_rotating = True
        scope.start(self._watch(entry, size, is_due=is_due), name="log-rotation")

    def _is_slow(self, entry: _Log) -> bool:
        """Return whether the check of all logs is frequent enough for this one."""
        return entry.size + entry.rate * TICK_SECONDS < self._policy.urgent_size

    # Rotation

    async def _watch(self, entry: _Log, size: int, *, is_due: bool) -> None:
        """Rotate a log, and again while it grows so fast that it cannot wait for the next check."""
        loop = asyncio.get_running_loop()
        limit = max(self._policy.max_size, 1) if is_due else self._policy.urgent_size
        try:
            while entry.is_running:
                if size == _MISSING:
                    await self._reopen_missing(entry)
                    return
                if size == _NOT_REGULAR or size >= limit:
                    async with self._rotations:
                        await self._rotate(entry, is_regular=size != _NOT_REGULAR)
                    # Also while another file is being compressed.
                    entry.size, entry.checked_at = 0, loop.time()
                limit = self._policy.urgent_size
                if self._is_slow(entry):
                    return
                await asyncio.sleep(next_check_seconds(entry.size, entry.rate, limit))
                size = await finish_in_thread(partial(_size, entry.path_text))
                if size >= 0:
                    entry.record_size(size, loop.time())
        except (CriError, OSError, ValueError) as err:
            entry.listing = None
            is_repair = size == _NOT_REGULAR
            entry.retry_at = loop.time() + (_UNREPAIRED_SECONDS if is_repair else self._interval)
            log.error(
                err,
                "Failed to rotate log for container",
                containerID=entry.container_id,
                path=entry.path_text,
            )
        finally:
            entry.is_rotating = False

    async def _reopen_missing(self, entry: _Log) -> None:
        """Have the runtime create a log that was removed, or that an interrupted rotation has renamed."""
        entry.retry_at = asyncio.get_running_loop().time() + self._interval
        log.v(2).info("Reopening missing container log", containerID=entry.container_id, path=entry.path_text)
        await self._reopen(entry.container_id)

    async def _rotate(self, entry: _Log, *, is_regular: bool) -> None:
        """Rename the log and have the runtime create a new one. Raises CriError, OSError and ValueError."""
        unread, hold = self._readers.unread_after(entry.path_text), self._readers.available(entry.path_text)
        stem, entry.listing, held = await finish_in_thread(
            lambda: self._rename_log(entry, entry.listing, entry.compressing, unread, hold)
        )
        self._readers.set_held(entry.path_text, held)
        try:
            await self._reopen(entry.container_id)
        except BaseException:
            # Also if cancelled: until the log is reopened, its path does not exist.
            await finish_in_thread(lambda: self._restore_log(entry, stem))
            raise
        self._readers.on_rotated(entry.path_text, stem)
        log.v(4).info("Rotated container log", containerID=entry.container_id, path=entry.path_text)
        loop = asyncio.get_running_loop()
        if not is_regular:
            log.info("Replaced container log that was not a regular file", path=entry.path_text)
            entry.listing, entry.tidy_at = None, loop.time()
        elif entry.tidy_at is None:
            entry.tidy_at = loop.time() + self._interval

    def _rename_log(
        self, entry: _Log, listing: _Listing | None, compressing: str, unread: str | None, hold: int
    ) -> tuple[str, _Listing, int]:
        """Remove what exceeds the limits and rename the log; return its stem and the bytes held. Blocks."""
        name = entry.path.name
        with LogDirectory(self._root, entry.path.parent) as directory:
            if listing is not None and time.monotonic() < listing.valid_until:
                # Another process may have created files since.
                with suppress(FileExistsError):
                    return self._rename_listed(directory, name, listing, unread, hold)
            listing = self._list(directory, name, compressing)
            return self._rename_listed(directory, name, listing, unread, hold)

    def _rename_listed(
        self, directory: LogDirectory, name: str, listing: _Listing, unread: str | None, hold: int
    ) -> tuple[str, _Listing, int]:
        now, policy = self._clock(), self._policy
        stem = next_stem((file.stem for file in listing.rotated), now)
        size, inode = directory.size(name) or 0, directory.inode(name) or (0, 0)
        files = (*listing.rotated, LogDirectoryEntry(stem, size, now, inode))
        excess = find_excess(
            files, policy.max_rotated, policy.max_rotated_bytes, unread_after=unread, hold_bytes=hold
        )
        for file in excess.remove:
            directory.remove(f"{name}.{file.suffix}")
        directory.rename(name, f"{name}.{stem}")
        removed = set(excess.remove)
        kept = tuple(file for file in files if file not in removed)
        return stem, _Listing(kept, listing.valid_until), excess.held_bytes

    def _restore_log(self, entry: _Log, stem: str) -> None:
        """Undo a rename after a failed reopening. Blocks."""
        name = entry.path.name
        try:
            with LogDirectory(self._root, entry.path.parent) as directory:
                directory.rename(f"{name}.{stem}", name)
        except (FileExistsError, FileNotFoundError):
            # The runtime has created the new file before it failed or before its response was lost, or the
            # pod was deleted.
            return
        except OSError as err:
            log.error(err, "Failed to rename rotated log", path=entry.path_text, rotatedLog=f"{name}.{stem}")

    def _list(self, directory: LogDirectory, name: str, compressing: str) -> _Listing:
        """List the rotated files of a log and remove the remnants of interrupted rotations."""
        started = time.monotonic()
        files = classify(directory.scan(name), directory.inode(name), self._clock())
        for suffix in files.unused:
            if f"{name}.{suffix}" != f"{compressing}{TEMPORARY}":
                directory.remove(f"{name}.{suffix}")
        ended = time.monotonic()
        # A pod can fill the directory with files that take long to list.
        return _Listing(files.rotated, ended + max(self._interval, _SCAN_SHARE * (ended - started)))

    # Compression and cleanup

    async def _tidy(self, entry: _Log) -> None:
        """Remove remnants and what exceeds the limits, compress rotated files, trim the log if it is over."""
        loop = asyncio.get_running_loop()
        is_over = not entry.is_running
        directory = f"{entry.path.parent}/"
        known = [other.path.name for other in self._logs.values() if other.path_text.startswith(directory)]
        again = False
        try:
            async with self._compressions:
                unread = self._readers.unread_after(entry.path_text)
                hold = self._readers.available(entry.path_text)
                is_read = self._readers.is_read(entry.path_text)
                names, again, held = await finish_in_thread(
                    lambda: self._clean(entry, known, unread, hold, is_over=is_over, is_read=is_read)
                )
                self._readers.set_held(entry.path_text, held)
                for name in names:
                    entry.compressing = name
                    await in_own_thread(partial(self._compress, entry.path, name), name="log-compression")
                    entry.listing = None
        except FileNotFoundError:
            log.v(4).info("Log directory was removed", path=entry.path_text)
        except FileChangedError as err:
            log.v(4).info("Container log is compressed later", path=entry.path_text, err=err)
            again = True
        except (OSError, ValueError) as err:
            log.error(err, "Failed to compress container logs", path=entry.path_text)
            again = True
        finally:
            entry.compressing, entry.is_tidying = "", False
            entry.listing = None
        if again and entry.tidy_at is None:
            entry.tidy_at = loop.time() + self._interval

    def _clean(
        self,
        entry: _Log,
        known: Iterable[str],
        unread: str | None,
        hold: int,
        *,
        is_over: bool,
        is_read: bool,
    ) -> tuple[list[str], bool, int]:
        """Remove files, trim; return the files to compress, whether more will be, and bytes held. Blocks."""
        name, now, policy = entry.path.name, self._clock(), self._policy
        with LogDirectory(self._root, entry.path.parent) as directory:
            _remove_stale_attempts(directory, known)
            listing = self._list(directory, name, "")
            excess = find_excess(
                listing.rotated,
                policy.max_rotated,
                policy.max_rotated_bytes,
                unread_after=unread,
                hold_bytes=hold,
            )
            for file in excess.remove:
                directory.remove(f"{name}.{file.suffix}")
            if is_over and not is_read:
                _trim(directory, name, policy.max_exited_bytes)
                for file in listing.rotated[-1:]:
                    if not file.is_compressed:
                        _trim(directory, f"{name}.{file.suffix}", policy.max_rotated_bytes)
        rotated = [file for file in listing.rotated if file not in excess.remove]
        to_compress = find_uncompressed(rotated, now, self._interval, include_newest=is_over)
        pending = find_uncompressed(rotated, now, 0.0, include_newest=is_over)
        again = len(pending) > len(to_compress) or excess.held_bytes > 0 or (is_over and is_read)
        return [f"{name}.{file.suffix}" for file in to_compress], again, excess.held_bytes

    def _compress(self, path: Path, name: str) -> None:
        try:
            with LogDirectory(self._root, path.parent) as directory:
                directory.compress(name, self._stopping.is_set)
        except (CompressionStopped, FileNotFoundError):
            # A file that has been removed in between, as the oldest one or with its container.
            return


def _remove_stale_attempts(directory: LogDirectory, known: Iterable[str]) -> None:
    """Remove the logs of attempts that the runtime has lost, except the newest."""
    names = list(islice(directory.names(), _MAX_NAMES))
    if stale := stale_attempts(names, known):
        for name in names:
            if attempt_of(name) in stale:
                directory.remove(name)


def _trim(directory: LogDirectory, name: str, max_bytes: int) -> None:
    if (directory.size(name) or 0) > max_bytes:
        directory.trim(name, max_bytes)
        log.info("Trimmed log of exited container", file=name, maxBytes=max_bytes)


def _size(path: str) -> int:
    """Return the size of a log, or the reason why it has none. Blocks."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return _MISSING
    except OSError:
        return _UNKNOWN
    return facts.st_size if stat.S_ISREG(facts.st_mode) else _NOT_REGULAR

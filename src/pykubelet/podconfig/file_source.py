"""Static pods from a manifest file or directory (`staticPodPath`).

`FileSource` emits the full set of pods of all readable files, ordered by file name. inotify reports changes
within a tenth of a second; the periodic check (`fileCheckFrequency`) detects what inotify misses, such as a
mount over the directory or a rename of a distant parent.

- A path that does not exist has no pods, and is picked up when it appears.
- A path that exists but cannot be listed changes nothing: the last set stays.
- A file that was removed and recreated before a scan is a pod that was removed and added again.
- A file that cannot be used (incomplete, invalid, unreadable) keeps its last valid contents, together with
  the problem, as long as it exists. Upstream drops such a pod at its next listing; but a typo must not stop a
  running pod, and a file can be removed to stop it.
- Of two pods with the same name or UID, the first file's is used and the other is a problem.

ConfigMaps and Secrets are delivered before the pods, so that they exist when a pod starts; a warning is
logged for a file with a Secret that other users can read. On a cluster node, whose objects come from the API
server, they are ignored, which is logged once. Every problem is emitted with the set and logged once.

`scan` reads the path, blocking, in a thread; files that are unchanged since the last scan are not opened.

`PathWatch` wraps inotify, which watches directories, while administrators replace directories and symlinks.
So the parent of a path is watched too, and the directories that symlinks point to; every event only triggers
a scan. A burst of events causes one wake-up, at most `MAX_BURST_SECONDS` after its first event. Files that
are open and being written are not read until they are closed, or `SETTLED_SECONDS` after the last write.
Removed files are recorded, because a file of the same name and contents may exist again at the next scan.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.linux.inotify import Event, Inotify, Mask
from pykubelet.logs import get_logger
from pykubelet.podconfig.local_objects import LOCAL_KINDS, LocalObject
from pykubelet.podconfig.manifests import Contents, read_bytes
from pykubelet.podconfig.static_pods import static_contents, without_duplicates
from pykubelet.podconfig.validate import DEFAULT_OPTIONS, PodValidationOptions

if TYPE_CHECKING:
    from pykubelet.podconfig.workloads.kinds import Workload

log = get_logger(__name__)
QUIET_SECONDS = 0.02
"""Seconds without an event that end a burst."""
MAX_BURST_SECONDS = 0.06
SETTLED_SECONDS = 1.0
Names = frozenset[str]
"""Relevant file names in a watched directory; empty means all."""
_ALL: Names = frozenset()
_REMOVED = Mask.DELETE | Mask.MOVED_FROM
_CLOSED = Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE
_MASK = _CLOSED | Mask.CREATE | Mask.MODIFY | Mask.ATTRIB | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_MAX_LINKS = 10
IMAGES_DIRECTORY = "images"
"""Subdirectory of image archives, which `images/archive_directory` imports."""


class PathWatch:
    """inotify watch of several paths; a context manager for use by one task.

    Without inotify it logs an error and only sleeps, so that its owner scans periodically. A file that is not
    written for `settled_seconds` counts as complete although it was not closed.
    """

    def __init__(self, settled_seconds: float = SETTLED_SECONDS) -> None:
        self._settled_seconds = settled_seconds
        self._inotify: Inotify | None = None
        self._armed: dict[int, tuple[Path, Names]] = {}
        self._writing: dict[Path, float] = {}
        self._removed: set[Path] = set()
        self._woken = False
        """Whether a relevant event was read outside of `wait`."""
        self._deadline: asyncio.Timeout | None = None
        """End of the current wait."""
        self._logged_error = ""

    def __enter__(self) -> Self:
        try:
            self._inotify = Inotify()
        except OSError as err:
            log.error(err, "Failed to initialize inotify, polling for file changes")
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def arm(self, directories: Mapping[Path, Names]) -> None:
        """Watch exactly these directories. Call it before a scan, otherwise a change may be missed."""
        if self._inotify is None:
            return
        armed: dict[int, tuple[Path, Names]] = {}
        for directory, names in directories.items():
            try:
                number = self._inotify.watch(directory, _MASK)
            except OSError as err:
                self._log_error(err)
                continue
            # Two paths may lead to the same directory.
            known = armed.get(number)
            armed[number] = (directory, names if known is None else _union(names, known[1]))
        for number in self._armed.keys() - armed.keys():
            self._inotify.unwatch(number)
        self._armed = armed

    def being_written(self) -> frozenset[Path]:
        """Return the files that have been written to and not closed yet, according to inotify."""
        now = asyncio.get_running_loop().time()
        self._writing = {path: until for path, until in self._writing.items() if until > now}
        return frozenset(self._writing)

    def take_removed(self) -> set[Path]:
        """Return the files that were deleted or moved away between the last call and this one.

        They may exist again. The next `wait` returns soon if anything else happened up to now.
        """
        for event in self._inotify.read_queued() if self._inotify is not None else ():
            self._woken = self._is_relevant(event) or self._woken
        removed, self._removed = self._removed, set()
        return removed

    async def wait(self, timeout: float) -> None:
        """Return shortly after a possible change, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        woken, self._woken = self._woken, False
        if woken or await self._wait_for_event(timeout):
            end = loop.time() + MAX_BURST_SECONDS
            while (left := end - loop.time()) > 0 and await self._wait_for_event(min(QUIET_SECONDS, left)):
                pass

    def end_wait(self) -> None:
        """End the current `wait`, if any, as after its timeout."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def _wait_for_event(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout) as self._deadline:
                if self._inotify is None:
                    await asyncio.get_running_loop().create_future()
                    return False
                async for event in self._inotify:
                    if self._is_relevant(event):
                        return True
                    # A flood of irrelevant events must not starve the event loop.
                    await asyncio.sleep(0)
        except TimeoutError:
            pass
        finally:
            self._deadline = None
        return False

    def _is_relevant(self, event: Event) -> bool:
        if event.overflowed:
            self._writing.clear()
            return True
        directory, names = self._armed.get(event.watch, (None, _ALL))
        if directory is None or (event.name and names and event.name not in names):
            return False
        path = directory / event.name
        if event.mask & _REMOVED:
            self._removed.add(path)
        if event.mask & Mask.MODIFY:
            self._writing[path] = asyncio.get_running_loop().time() + self._settled_seconds
        elif event.mask & _CLOSED:
            self._writing.pop(path, None)
        return True

    def _log_error(self, err: OSError) -> None:
        # A missing directory is handled by the following scan.
        if err.errno not in (errno.ENOENT, errno.ENOTDIR) and str(err) != self._logged_error:
            self._logged_error = str(err)
            log.error(err, "Failed to watch directory, polling for file changes")


def directories_to_watch(path: Path) -> dict[Path, Names]:
    """Return the directories to watch for a file or directory that may not exist yet, or be a symlink."""
    directories: dict[Path, Names] = {}

    def add(directory: Path, names: Names) -> None:
        directories[directory] = _union(names, directories[directory]) if directory in directories else names

    for link in links(path):
        directory, name = link.parent, link.name
        while not directory.is_dir() and directory != directory.parent:
            directory, name = directory.parent, directory.name
        add(directory, frozenset((name,)))
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            add(path, _ALL)
            for file in path.iterdir():
                if not file.name.startswith(".") and file.is_symlink():
                    for link in list(links(file))[1:]:
                        add(link.parent, frozenset((link.name,)))
    except OSError as err:
        log.v(4).info("Failed to scan directory to watch", path=path, err=err)
    return directories


def links(path: Path) -> Iterator[Path]:
    """Yield a path and, while it is a symlink, the paths that it points to."""
    for _ in range(_MAX_LINKS):
        yield path
        try:
            path = path.parent / path.readlink()
        except OSError:
            return


def _union(first: Names, second: Names) -> Names:
    return first | second if first and second else _ALL


Load = Callable[[bytes, Path], Contents]
"""Decodes a file into pods and objects. Raises ConfigError."""
_SECOND = 1_000_000_000

# Within this time a file may change again with the same timestamp and size.
_UNCERTAIN = _SECOND // 10
_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH


@dataclass(frozen=True, slots=True)
class Manifest:
    """State of one file at the last scan."""

    contents: Contents = field(default_factory=Contents)
    problems: tuple[Problem, ...] = ()
    stamp: tuple[int, ...] | None = None
    """Fingerprint from `stat`; None if the file may have changed undetectably."""
    digest: bytes = b""
    exposed: str = ""
    """Command that restricts the file to root; empty if it is restricted."""


@dataclass(frozen=True, slots=True)
class DirectorySnapshot:
    """Result of a scan."""

    manifests: dict[Path, Manifest]
    """Ordered by file name."""
    exists: bool = True
    unsettled: bool = False
    """Whether a file is being written, so that a scan should follow soon."""


def scan(
    path: Path, known: Mapping[Path, Manifest], load: Load, being_written: Set[Path] = frozenset()
) -> DirectorySnapshot:
    """Scan a file or a directory; hidden files are ignored, and subdirectories are not scanned.

    `known` is the result of the previous scan. Raises OSError if the path exists but cannot be listed: its
    contents are then unknown.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        elif stat.S_ISREG(mode):
            files = [path]
        else:
            raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))
    except (FileNotFoundError, NotADirectoryError):
        return DirectorySnapshot({}, exists=False)
    manifests, unsettled = {}, False
    for file in files:
        if _is_being_written(file, being_written):
            unsettled = True
            manifests[file] = known.get(file, Manifest())
        elif (manifest := _read(file, known.get(file, Manifest()), load)) is not None:
            manifests[file] = manifest
    return DirectorySnapshot(manifests, unsettled=unsettled)


def _is_being_written(file: Path, being_written: Set[Path]) -> bool:
    if being_written and not being_written.isdisjoint(links(file)):
        return True
    try:
        info = file.stat()
    except OSError:
        return False
    # A new file is empty until the first write.
    empty = stat.S_ISREG(info.st_mode) and info.st_size == 0
    return empty and 0 <= time.time_ns() - info.st_mtime_ns < SETTLED_SECONDS * _SECOND


def _read(file: Path, known: Manifest, load: Load) -> Manifest | None:
    """Read one file if it changed; return None if it does not exist any more."""
    try:
        info = file.stat()
        if stat.S_ISDIR(info.st_mode):
            if file.name == IMAGES_DIRECTORY:
                return None
            return Manifest(problems=(Problem(str(file), "is a folder: only files beside it are read"),))
        stamp = _stamp(info)
        if stamp is not None and stamp == known.stamp:
            return known
    except FileNotFoundError:
        if not os.path.lexists(file):
            return None
        return Manifest(problems=(Problem(str(file), "is a link to a file that does not exist"),))
    except OSError as err:
        return _unreadable(file, known, err)
    exposed = _exposed(file, info)
    digest = b""
    try:
        data = read_bytes(file)
        digest = hashlib.blake2b(data).digest()
        if digest == known.digest:
            return replace(known, stamp=stamp, exposed=exposed)
        return Manifest(load(data, file), (), stamp, digest, exposed)
    except ConfigError as err:
        return Manifest(known.contents, tuple(err.problems), stamp, digest, exposed)
    except FileNotFoundError:
        return None
    except OSError as err:
        return _unreadable(file, known, err)


def _unreadable(file: Path, known: Manifest, err: OSError) -> Manifest:
    # Without stamp and digest it is read again at every scan: no event announces that it becomes readable.
    return Manifest(known.contents, (Problem(str(file), f"cannot be read: {err.strerror}"),))


def _exposed(file: Path, info: os.stat_result) -> str:
    remedies = []
    if info.st_uid not in (0, os.geteuid()):
        remedies.append(f"chown root {file}")
    if info.st_mode & _OTHERS_READ:
        remedies.append(f"chmod 600 {file}")
    return " && ".join(remedies)


def _stamp(info: os.stat_result) -> tuple[int, ...] | None:
    if abs(time.time_ns() - info.st_ctime_ns) < _UNCERTAIN:
        return None
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


Emit = Callable[[str, list[Pod], list[Problem]], None]
"""Callback with the name of a source, its full set of pods, and the problems."""
Serve = Callable[[Iterable[tuple[str, LocalObject]]], list[Problem]]
"""Callback with the full set of ConfigMaps and Secrets, each with its file; returns the problems."""
OfferWorkloads = Callable[[Iterable[tuple[str, "Workload"]]], list[Problem]]
"""Callback with the full set of Jobs and CronJobs, each with its file; returns the problems."""
_MIN_PERIOD_SECONDS = 0.1
_RESCAN_SECONDS = 0.25
_MAX_WARNINGS = 20
"""Warnings that are logged for a file."""


class FileSource:
    """Static pod source of a file or directory; emits immediately and after every change.

    `serve` makes the ConfigMaps and Secrets of the manifests available to pods on a node without an API
    server, and `offer_workloads` receives their Jobs and CronJobs; `clock` returns Unix time in nanoseconds.
    """

    name = "file"

    def __init__(
        self,
        path: Path,
        period: Duration,
        node_name: str,
        emit: Emit,
        *,
        serve: Serve | None = None,
        offer_workloads: OfferWorkloads | None = None,
        served: frozenset[str] = frozenset(),
        options: PodValidationOptions = DEFAULT_OPTIONS,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = path
        self._period = max(period.seconds, _MIN_PERIOD_SECONDS)
        self._watch: PathWatch | None = None
        self._node_name = node_name
        self._emit = emit
        self._serve = serve
        self._served = served
        self._options = options
        self._offer_workloads = offer_workloads
        self._clock = clock
        self._known: dict[Path, Manifest] = {}
        self._removed: set[Path] = set()
        """Files removed since the last scan that was used."""
        self._discarded = False
        """Whether the last scan was discarded."""
        self._emitted: object = None
        self._problems: frozenset[Problem] = frozenset()
        self._logged_error = ""
        self._exposed: dict[Path, tuple[bytes, str]] = {}
        self._unused_logged = False

    def set_period(self, period: Duration) -> None:
        """Change the time between two checks, and check immediately."""
        self._period = max(period.seconds, _MIN_PERIOD_SECONDS)
        if self._watch is not None:
            self._watch.end_wait()

    async def run(self) -> None:
        """Watch until cancelled."""
        log.v(1).info("Watching path", path=self._path)
        with PathWatch() as self._watch:
            watch = self._watch
            while True:
                watch.arm(await asyncio.to_thread(directories_to_watch, self._path))
                unsettled = await self._scan(watch)
                await watch.wait(min(self._period, _RESCAN_SECONDS) if unsettled else self._period)

    async def _scan(self, watch: PathWatch) -> bool:
        """Scan once and emit changes; return whether another scan should follow soon."""
        self._removed |= watch.take_removed()
        known = {file: manifest for file, manifest in self._known.items() if file not in self._removed}
        try:
            snapshot = await asyncio.to_thread(scan, self._path, known, self._load, watch.being_written())
        except OSError as err:
            self._log_error(err.strerror or str(err))
            return False
        late = watch.take_removed()
        self._discarded = not self._discarded and bool(
            late & (self._known.keys() | snapshot.manifests.keys())
        )
        if self._discarded:
            # It is unknown whether these files were read before or after their removal.
            self._removed |= late
            return True
        self._log_error("" if snapshot.exists else "it does not exist; pods start when it appears")
        removed = self._removed & self._known.keys()
        self._known, self._removed = snapshot.manifests, late
        self._warn(snapshot)
        if removed:
            # Report the removal separately, so that a recreated file restarts its pod.
            self._report(
                DirectorySnapshot(
                    {file: _without_pods(m) if file in removed else m for file, m in self._known.items()}
                )
            )
        self._report(snapshot)
        return snapshot.unsettled

    def _report(self, snapshot: DirectorySnapshot) -> None:
        content = [(manifest.contents, manifest.problems) for manifest in snapshot.manifests.values()]
        if content == self._emitted:
            return
        self._emitted = content
        problems = [problem for manifest in snapshot.manifests.values() for problem in manifest.problems]
        if self._serve is not None:
            problems += self._serve(
                (str(file), found)
                for file, manifest in snapshot.manifests.items()
                for found in manifest.contents.all_objects
            )
        if self._offer_workloads is not None:
            problems += self._offer_workloads(
                (str(file), workload)
                for file, manifest in snapshot.manifests.items()
                for workload in manifest.contents.workloads
                if workload.is_job
            )
        pods, duplicates = without_duplicates(
            (str(file), pod)
            for file, manifest in snapshot.manifests.items()
            for pod in manifest.contents.pods
        )
        problems += duplicates
        self._log(problems)
        self._emit(self.name, pods, problems)

    def _load(self, data: bytes, file: Path) -> Contents:
        log.v(3).info("Reading manifest", path=file)
        contents = static_contents(
            data,
            source="file",
            origin=str(file),
            node_name=self._node_name,
            now=self._clock(),
            served=LOCAL_KINDS if self._serve is not None else self._served,
            options=self._options,
            objects=self._serve is not None,
        )
        for warning in contents.warnings[:_MAX_WARNINGS]:
            log.warning("Ignored field of manifest", path=file, field=warning.path, reason=warning.message)
        return contents

    def _warn(self, snapshot: DirectorySnapshot) -> None:
        """Warn once per file and change about Secrets that other users can read, and about unused objects."""
        exposed = {}
        for file, manifest in snapshot.manifests.items():
            if manifest.exposed and manifest.contents.has_secret:
                exposed[file] = manifest.digest, manifest.exposed
                if self._exposed.get(file) != exposed[file]:
                    log.warning(
                        "Manifest with Secret is readable by other users",
                        path=file,
                        remedy=manifest.exposed,
                    )
            if manifest.contents.unused and not self._unused_logged:
                self._unused_logged = True
                log.warning(
                    "Ignored ConfigMaps and Secrets in manifests of a cluster node, "
                    "create them through the API server",
                    path=file,
                )
        self._exposed = exposed

    def _log(self, problems: Iterable[Problem]) -> None:
        problems = frozenset(problems)
        for problem in sorted(problems - self._problems):
            log.error(problem.message, "Failed to use manifest", path=problem.path)
        self._problems = problems

    def _log_error(self, message: str) -> None:
        if message and message != self._logged_error:
            log.warning("Failed to read static pod path", path=self._path, err=message)
        elif self._logged_error and not message:
            log.info("Static pod path is readable again", path=self._path)
        self._logged_error = message


def _without_pods(manifest: Manifest) -> Manifest:
    """Return a manifest without its pods; Jobs stay, because a changed one is known by its template."""
    return replace(manifest, contents=replace(manifest.contents, pods=()))

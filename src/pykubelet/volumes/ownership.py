"""fsGroup: applies the pod's group and permissions to the files of a volume.

Other pods may write to the volume concurrently. Directories are therefore opened from their open parents and
never through a symlink, and changes apply to the open file, not to whatever has its name by then. The
volume's root directory is changed last: while it does not match, the rest is incomplete (`OnRootMismatch`),
also after an interrupted walk. Files that already match are not changed.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pykubelet.api.core import ObjectReference
from pykubelet.api.pod import Pod
from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, open_subdirectory, walk_tree
from pykubelet.logs import get_logger
from pykubelet.util.tasks import TaskScope, in_own_thread

log = get_logger(__name__)
EventType = Literal["Normal", "Warning"]
RecordEvent = Callable[[Pod, EventType, str, str], None]
"""Callback that records an event about a pod: its type, reason and message."""
RecordObjectEvent = Callable[[ObjectReference, EventType, str, str], None]
"""Callback that records an event about any object."""
ON_ROOT_MISMATCH = "OnRootMismatch"
IN_PROGRESS = "VolumePermissionChangeInProgress"
"""Reason of the events about a walk that takes long."""
FIRST_EVENT_SECONDS = 30.0
"""Seconds until the first event about a walk."""
EVENT_INTERVAL_SECONDS = 60.0
"""Seconds between the events about its progress."""
_READ = 0o440
_WRITE = 0o220
_ENTER = 0o110 | stat.S_ISGID
_NAMED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ADVICE = (
    "is taking longer than expected, consider using OnRootMismatch - "
    "https://kubernetes.io/docs/tasks/configure-pod-container/security-context/"
    "#configure-volume-permission-and-ownership-change-policy-for-pods"
)


def record_no_event(reference: ObjectReference, kind: EventType, reason: str, message: str) -> None:
    """Record no event."""


async def apply_fs_group(pod: Pod, path: Path, record_event: RecordEvent, *, read_only: bool = False) -> None:
    """Apply the pod's fsGroup to a volume, as the pod's fsGroupChangePolicy requires. Raises OSError.

    Runs in a thread of its own. A caller that is cancelled does not wait for the end of the walk.
    """
    context = pod.spec.security_context
    if context.fs_group is None:
        return
    walk = OwnershipWalk(context.fs_group, read_only=read_only)
    always = context.fs_group_change_policy != ON_ROOT_MISMATCH

    def work() -> OSError | None:
        try:
            if always or walk.differs(path):
                walk.apply(path)
            else:
                log.v(3).info("Skipping permission and ownership change for volume", path=path)
        except OSError as err:
            return err
        return None

    async def in_thread() -> OSError | None:
        try:
            return await in_own_thread(work, name="ownership")
        except OSError as err:  # raised in the scope, it would be an exception group
            return err

    async with TaskScope() as scope:
        scope.start(_report_progress(pod, path, walk, record_event), name=f"telling of {path}")
        walk_task = scope.start(in_thread(), name=f"owning {path}")
        try:
            await asyncio.wait([walk_task])
        finally:
            walk.stop = True
    if err := walk_task.result():
        raise err


def group_mode(mode: int, *, is_directory: bool, read_only: bool) -> int:
    """Return the mode that a file or directory needs so that its group can use it."""
    return mode | _READ | (0 if read_only else _WRITE) | (_ENTER if is_directory else 0)


def apply_group(path: Path, group: int) -> None:
    """Make everything below a path readable and writable for a group, which also owns new files there.

    Raises OSError; failures on single files are logged and skipped. Blocks.
    """
    OwnershipWalk(group).apply(path)


def set_group(at: int, group: int) -> None:
    """Set the group of an open file; a failure is only logged."""
    try:
        os.fchown(at, -1, group)
    except OSError as err:
        log.error(err, "Failed to set ownership of volume file", group=group)


@dataclass(slots=True)
class OwnershipWalk:
    """A walk over a volume's files; other threads may read its progress and stop it at the next file."""

    group: int
    read_only: bool = False
    files: int = 0
    """Number of files visited."""
    failures: int = 0
    """Number of failed changes; some file systems do not support ownership."""
    stop: bool = False

    def differs(self, path: Path) -> bool:
        """Return whether the volume's root differs; True also if it is not a directory or cannot be read."""
        try:
            facts = path.lstat()
        except OSError as err:
            log.error(err, "Failed to stat volume, changing ownership of all its files", path=path)
            return True
        return not stat.S_ISDIR(facts.st_mode) or not self._matches(facts)

    def apply(self, path: Path) -> None:
        """Apply the group to everything below a path. Raises OSError. Blocks.

        Files that are deleted concurrently are skipped.
        """
        if stat.S_ISDIR(path.lstat().st_mode):
            self._apply_tree(path)
        else:
            self._apply_named(str(path), None)
        if self.failures:
            log.info("Failed to set ownership of volume files", path=path, failures=self.failures)

    def _apply_tree(self, path: Path) -> None:
        with suppress(_StoppedError):
            walk_tree(os.open(path, OPEN_DIRECTORY), self)

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        """Change an entry that is not a directory; return whether it is a directory."""
        if self.stop:
            raise _StoppedError
        if entry.is_dir(follow_symlinks=False):
            return True
        self.files += 1
        self._apply_entry(entry, parent)
        return False

    def enter(self, name: str, parent: int) -> int | None:
        """Open a directory; return None if it was removed or replaced."""
        return open_subdirectory(name, parent)

    def leave(self, opened: int) -> None:
        """Change a directory after everything in it."""
        self.files += 1
        self._apply_opened(opened, os.fstat(opened))

    def _apply_entry(self, entry: os.DirEntry[str], directory: int) -> None:
        try:
            if not self._matches(entry.stat(follow_symlinks=False)):
                self._apply_named(entry.name, directory)
        except FileNotFoundError:
            return

    def _apply_named(self, name: str, directory: int | None) -> None:
        """Apply the group to what has this name now, which may have been replaced since the check."""
        at = os.open(name, _NAMED, dir_fd=directory)
        try:
            facts = os.fstat(at)
            if stat.S_ISLNK(facts.st_mode):
                self._try(at, lambda: os.chown(name, -1, self.group, dir_fd=directory, follow_symlinks=False))
            else:
                self._apply_opened(at, facts)
        finally:
            os.close(at)

    def _apply_opened(self, at: int, facts: os.stat_result) -> None:
        if self._matches(facts):
            return
        # An O_PATH descriptor cannot be changed with fchown or fchmod; this path is exactly its file.
        path = _path_of(at)
        # chown may clear bits of the mode, so the mode is set after it.
        mode = self._mode(facts)
        self._try(at, lambda: os.chown(path, -1, self.group))
        self._try(at, lambda: path.chmod(mode))

    def _try(self, at: int, change: Callable[[], None]) -> None:
        try:
            change()
        except FileNotFoundError:
            return
        except OSError as err:
            if not self.failures:
                log.error(
                    err, "Failed to set ownership of volume file", path=_display_path(at), group=self.group
                )
            self.failures += 1

    def _matches(self, facts: os.stat_result) -> bool:
        matches = stat.S_ISLNK(facts.st_mode) or stat.S_IMODE(facts.st_mode) == self._mode(facts)
        return matches and facts.st_gid == self.group

    def _mode(self, facts: os.stat_result) -> int:
        is_directory = stat.S_ISDIR(facts.st_mode)
        return group_mode(stat.S_IMODE(facts.st_mode), is_directory=is_directory, read_only=self.read_only)


def _path_of(at: int) -> Path:
    return Path(f"/proc/self/fd/{at}")


def _display_path(at: int) -> Path:
    """Return the path of an open file for a message; "..." if it is longer than PATH_MAX."""
    try:
        return _path_of(at).readlink()
    except OSError:
        return Path("...")


class _StoppedError(Exception):
    """Raised in a walk whose caller no longer waits for it."""


async def _report_progress(pod: Pod, path: Path, walk: OwnershipWalk, record_event: RecordEvent) -> None:
    before, uid, after = str(path).partition(pod.uid)
    shown = f"{uid}{after}" or before
    await asyncio.sleep(FIRST_EVENT_SECONDS)
    log.info("Setting volume ownership is taking longer than expected", pod=pod.full_name, path=path)
    record_event(pod, "Warning", IN_PROGRESS, f"Setting volume ownership for {shown} {_ADVICE}")
    while True:
        await asyncio.sleep(EVENT_INTERVAL_SECONDS)
        message = f"Setting volume ownership for {shown}, processed {walk.files} files."
        record_event(pod, "Warning", IN_PROGRESS, message)

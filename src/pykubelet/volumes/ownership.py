"""fsGroup: letting the group of a pod's processes at the files of a volume.

Other pods may be writing to the same volume meanwhile. So folders are opened one from the other and
never through a link, and what is changed is the opened file, not whatever has its name by then. The
volume's own folder is done last: as long as it is not right, neither is the rest (`OnRootMismatch`),
also after a walk that was cut off. What is right already is not touched.
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

from pykubelet.api.pod import Pod
from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, open_subdirectory, walk_tree
from pykubelet.logs import get_logger
from pykubelet.util.tasks import TaskScope, in_own_thread

log = get_logger(__name__)
Tell = Callable[[Pod, Literal["Normal", "Warning"], str, str], None]
"""Records an event about a pod: its type, reason and message."""
ON_ROOT_MISMATCH = "OnRootMismatch"
IN_PROGRESS = "VolumePermissionChangeInProgress"
"""The reason of the events about a walk that takes long."""
FIRST_WORD = 30.0
"""Seconds after which a walk is worth an event."""
NEXT_WORDS = 60.0
"""Seconds between the events that tell how far it is."""
_READ = 0o440
_WRITE = 0o220
_ENTER = 0o110 | stat.S_ISGID
_NAMED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ADVICE = (
    "is taking longer than expected, consider using OnRootMismatch - "
    "https://kubernetes.io/docs/tasks/configure-pod-container/security-context/"
    "#configure-volume-permission-and-ownership-change-policy-for-pods"
)


async def own(pod: Pod, path: Path, tell: Tell, *, read_only: bool = False) -> None:
    """Give a volume to the pod's fsGroup, as far as the pod's policy wants it; raises OSError.

    In a thread of its own. A caller that is cancelled does not wait for the whole walk.
    """
    context = pod.spec.security_context
    if context.fs_group is None:
        return
    walk = Walk(context.fs_group, read_only=read_only)
    everything = context.fs_group_change_policy != ON_ROOT_MISMATCH

    def work() -> OSError | None:
        try:
            if everything or walk.differs(path):
                walk.give(path)
            else:
                log.v(3).info("Skipping permission and ownership change for volume", path=path)
        except OSError as err:
            return err
        return None

    async with TaskScope() as scope:
        scope.start(_keep_telling(pod, path, walk, tell), name=f"telling of {path}")
        walking = scope.start(in_own_thread(work, name="ownership"), name=f"owning {path}")
        try:
            await asyncio.wait([walking])
        finally:
            walk.stop = True
    if err := walking.result():
        raise err


def group_mode(mode: int, *, folder: bool, read_only: bool) -> int:
    """Give the permissions that a file or folder needs so that its group can use it."""
    return mode | _READ | (0 if read_only else _WRITE) | (_ENTER if folder else 0)


def give_to_group(path: Path, group: int) -> None:
    """Let a group read and write everything below a path, and own what will be made there.

    Raises OSError; what cannot be given is told and kept. Blocks.
    """
    Walk(group).give(path)


def give_opened(at: int, group: int) -> None:
    """Let a group have an opened file; what cannot be given is told and kept."""
    try:
        os.fchown(at, -1, group)
    except OSError as err:
        log.error(err, "Failed to give a volume's file to its group", group=group)


@dataclass(slots=True)
class Walk:
    """One walk through a volume, that others may look at and stop: it stops at the next file."""

    group: int
    read_only: bool = False
    files: int = 0
    """How many were seen."""
    failures: int = 0
    """How many could not be given: some file systems know no owners."""
    stop: bool = False

    def differs(self, path: Path) -> bool:
        """Whether a volume's own folder is not yet the group's; what is no folder always counts as such."""
        try:
            facts = path.lstat()
        except OSError as err:
            log.error(err, "Cannot see whose a volume is, so all of it is given to its group", path=path)
            return True
        return not stat.S_ISDIR(facts.st_mode) or not self._is_right(facts)

    def give(self, path: Path) -> None:
        """Let the group use everything below a path; raises OSError. Blocks.

        What others delete meanwhile is passed over.
        """
        if stat.S_ISDIR(path.lstat().st_mode):
            self._give_tree(path)
        else:
            self._give_named(str(path), None)
        if self.failures:
            log.info("Files of a volume could not be given to its group", path=path, files=self.failures)

    def _give_tree(self, path: Path) -> None:
        with suppress(_StoppedError):
            walk_tree(os.open(path, OPEN_DIRECTORY), self)

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        """Change an entry that is not a directory; return whether it is one."""
        if self.stop:
            raise _StoppedError
        if entry.is_dir(follow_symlinks=False):
            return True
        self.files += 1
        self._give_entry(entry, parent)
        return False

    def enter(self, name: str, parent: int) -> int | None:
        """Open a directory; None when it is gone, or something else has replaced it."""
        return open_subdirectory(name, parent)

    def leave(self, opened: int) -> None:
        """Change a directory after everything in it."""
        self.files += 1
        self._give(opened, os.fstat(opened))

    def _give_entry(self, entry: os.DirEntry[str], folder: int) -> None:
        try:
            if not self._is_right(entry.stat(follow_symlinks=False)):
                self._give_named(entry.name, folder)
        except FileNotFoundError:
            return

    def _give_named(self, name: str, folder: int | None) -> None:
        """Give what has this name now, which may be another than a moment ago."""
        at = os.open(name, _NAMED, dir_fd=folder)
        try:
            facts = os.fstat(at)
            if stat.S_ISLNK(facts.st_mode):
                self._try(at, lambda: os.chown(name, -1, self.group, dir_fd=folder, follow_symlinks=False))
            else:
                self._give(at, facts)
        finally:
            os.close(at)

    def _give(self, at: int, facts: os.stat_result) -> None:
        if self._is_right(facts):
            return
        # A descriptor that only names a file cannot be changed by itself; this path is exactly that file.
        path = _path_of(at)
        # Changing the owner may clear bits of the mode, which are set again then.
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
                    err, "Failed to give a volume's file to its group", path=_shown(at), group=self.group
                )
            self.failures += 1

    def _is_right(self, facts: os.stat_result) -> bool:
        right = stat.S_ISLNK(facts.st_mode) or stat.S_IMODE(facts.st_mode) == self._mode(facts)
        return right and facts.st_gid == self.group

    def _mode(self, facts: os.stat_result) -> int:
        folder = stat.S_ISDIR(facts.st_mode)
        return group_mode(stat.S_IMODE(facts.st_mode), folder=folder, read_only=self.read_only)


def _path_of(at: int) -> Path:
    return Path(f"/proc/self/fd/{at}")


def _shown(at: int) -> Path:
    """Return the path of an open file for a message; one that is longer than PATH_MAX has none."""
    try:
        return _path_of(at).readlink()
    except OSError:
        return Path("...")


class _StoppedError(Exception):
    """Raised in a walk whose caller does not wait for it any more."""


async def _keep_telling(pod: Pod, path: Path, walk: Walk, tell: Tell) -> None:
    before, uid, after = str(path).partition(pod.uid)
    shown = f"{uid}{after}" or before
    await asyncio.sleep(FIRST_WORD)
    log.info("Giving a volume to its pod's group takes long", pod=pod.full_name, path=path)
    tell(pod, "Warning", IN_PROGRESS, f"Setting volume ownership for {shown} {_ADVICE}")
    while True:
        await asyncio.sleep(NEXT_WORDS)
        message = f"Setting volume ownership for {shown}, processed {walk.files} files."
        tell(pod, "Warning", IN_PROGRESS, message)

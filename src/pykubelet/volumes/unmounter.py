"""Teardown of pods' volumes, and release of what several pods shared of a volume.

`PodUnmounter` ensures that a pod can always be deleted: first the sub-paths of its containers are unmounted,
then each plugin undoes its set-up, then mounts and files are removed. All of this is determined from the disk
and the mount table, so it may be interrupted anywhere and repeated by a kubelet process that has never seen
the pod. A mount that does not respond is detached after a timeout. A busy mount is reported, retried, and
detached after BUSY_SECONDS: it ends with its last user. The markers of complete emptyDirs are deleted first,
because a half-deleted directory must never count as a volume. Nothing is deleted while something is mounted
in it, so that no foreign files are deleted.

`VolumeGarbageCollector` releases staged mounts, iSCSI sessions and mounted disks, which outlive each pod and
thus belong to no pod worker. It runs soon after a pod is gone, and periodically, because a previous kubelet
process may have left something. A plugin that hangs does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

from pykubelet.linux.mounts import (
    is_mounted_inside,
    mount_points_in,
    plan_unmounts,
    read_mounts,
    remove_tree,
    unmount,
)
from pykubelet.linux.untrusted_files import TooManyEntries
from pykubelet.logs import get_logger
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.errors import VolumeError, format_os_error
from pykubelet.volumes.mounts.block import DEVICES, mapped_devices, unmap_device
from pykubelet.volumes.operations import FAILURES, OperationPending, PendingOperations, run_concurrently
from pykubelet.volumes.paths import PodVolumePaths, entries
from pykubelet.volumes.plugin import VolumePlugin
from pykubelet.volumes.volume_state import VolumeState

log = get_logger(__name__)
_MAX_STACKED_MOUNTS = 8
"""Maximum number of stacked mounts that are unmounted without reading the mount table."""


class PodVolumeTeardown:
    """One attempt to remove a pod's volumes of some plugins (by their directories); it blocks, and may hang.

    Volumes of other plugins are only unmounted: the plugin may no longer be installed, and the pod must be
    deletable; their directories are deleted with the pod's. With `detach`, busy mounts are detached from the
    pod's directory too: they end with their last user.
    """

    def __init__(
        self, root: Path, uid: str, plugin_dir_names: Collection[str], *, detach: bool = False
    ) -> None:
        """Initialize for a pod. Raises ValueError for a uid that is not a single path component."""
        self._root = root
        self._uid = uid
        self._paths = PodVolumePaths.for_pod(root, uid)
        self._plugin_dir_names = plugin_dir_names
        self._detach = detach
        self.unmounting: Path | None = None
        """Mount point that is being unmounted: where the attempt hangs, if it does."""

    @property
    def is_needed(self) -> bool:
        """Whether anything of the pod's volumes exists."""
        paths = self._paths
        if any(path.exists() for path in (paths.sub_paths, paths.markers, paths.pod / DEVICES)):
            return True
        return bool(entries(paths.volumes)) or any(mapped_devices(self._root, self._uid))

    def volumes(self) -> Iterator[tuple[str, str]]:
        """Yield the existing volumes as the plugin's directory and the volume's name; reads only names."""
        for directory in self._plugin_dirs(self._paths):
            yield from ((directory.name, path.name) for path in entries(directory))
        yield from mapped_devices(self._root, self._uid)

    def remove_sub_paths(self) -> None:
        """Unmount and delete the sub-paths of the containers. Raises OSError."""
        real = self._real()
        self._remove((real.sub_paths,), real)

    def remove_all(self) -> None:
        """Unmount and delete all that is left. Raises OSError."""
        real = self._real()
        remove_tree(real.markers)
        for plugin_dir, name in mapped_devices(self._root, self._uid):
            unmap_device(self._root, plugin_dir, self._uid, name)
        directories = (real.sub_paths, *self._plugin_dirs(real), real.pod / DEVICES)
        self._remove(
            directories,
            real,
            unmount_only=[path for path in entries(real.volumes) if path not in directories],
        )

    def _real(self) -> PodVolumePaths:
        """Return the pod's directories by their real paths, as in the mount table."""
        return PodVolumePaths(self._paths.pod.parent.resolve() / self._paths.pod.name)

    def _plugin_dirs(self, paths: PodVolumePaths) -> list[Path]:
        return [path for path in entries(paths.volumes) if path.name in self._plugin_dir_names]

    def _remove(
        self, directories: Sequence[Path], real: PodVolumePaths, unmount_only: Sequence[Path] = ()
    ) -> None:
        if self._unmount_volumes((*directories, *unmount_only)):
            for directory in directories:
                remove_tree(directory, ())
            return
        mounts = read_mounts(real.pod)
        if points := [
            point for directory in (*directories, *unmount_only) for point in plan_unmounts(mounts, directory)
        ]:
            for point in points:
                self.unmounting = point
                self._unmount(point)
            self.unmounting = None
        for directory in directories:
            # Checked again after an unmount, which may have uncovered another mount.
            remove_tree(directory, None if points else mounts)

    def _unmount_volumes(self, directories: Sequence[Path]) -> bool:
        """Unmount the volumes in some directories without the mount table, which has all pods' mounts.

        Return whether nothing is mounted there any more. False if more than volumes is mounted, if a volume
        is busy, or if the check would cost more than the mount table.
        """
        try:
            for _ in range(_MAX_STACKED_MOUNTS):
                points = [point for directory in directories for point in mount_points_in(directory)]
                if not points:
                    break
                for point in points:
                    self.unmounting = point
                    unmount(point)
            return not any(is_mounted_inside(directory) for directory in directories)
        except TooManyEntries:
            return False
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            return False
        finally:
            self.unmounting = None

    def _unmount(self, point: Path) -> None:
        try:
            unmount(point)
        except OSError as err:
            if err.errno != errno.EBUSY or not self._detach:
                raise
            log.warning("Detaching busy volume mount", path=point, podUID=self._uid)
            unmount(point, detach=True)


UNMOUNT_TIMEOUT_SECONDS = 20.0
"""Seconds that a pod worker waits for unmounting per attempt."""
TEAR_DOWN_TIMEOUT_SECONDS = 123.0
"""Seconds that a pod worker waits for a plugin's `tear_down`: drivers access servers."""
BUSY_SECONDS = 60.0
"""Seconds after which busy mounts are detached."""
MAX_CONCURRENT_TEARDOWNS = 4
"""Number of pods whose files are deleted concurrently: more threads only slow each other down."""
SLOT_TIMEOUT_SECONDS = 5.0
"""Seconds that a pod waits for other pods before its files are deleted regardless of the limit."""
RecordUnmount = Callable[[str, str, str, float, bool], None]
"""Records a volume: the pod's uid, the plugin's directory, the name, the seconds, whether it was removed."""
_TEAR_DOWN = "taking down"
_UNMOUNT = "unmounting"


class PodUnmounter:
    """Unmounter of pods' volumes below one root directory."""

    def __init__(
        self,
        root: Path,
        plugins: Mapping[str, VolumePlugin],
        operations: PendingOperations,
        record_unmount: RecordUnmount = lambda uid, plugin_dir, name, seconds, succeeded: None,
    ) -> None:
        self._root = root
        self._record_unmount = record_unmount
        self._plugins = {
            plugin.directory_name: plugin for plugin in plugins.values() if plugin.directory_name
        }
        self._operations = operations
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_TEARDOWNS)
        self._failing_since: dict[str, float] = {}
        """Event-loop time since which a pod's volumes cannot be unmounted, by uid."""
        self._active_teardowns: dict[str, PodVolumeTeardown] = {}
        """Teardown in progress in a thread, by uid."""

    async def unmount_pod(self, uid: str) -> bool:
        """Remove all of a pod's volumes; return whether any of them had a slow plugin.

        Raises VolumeError, after which it may be called again.
        """
        now = asyncio.get_running_loop().time()
        try:
            teardown = PodVolumeTeardown(
                self._root,
                uid,
                self._plugins.keys(),
                detach=now - self._failing_since.get(uid, now) >= BUSY_SECONDS,
            )
            is_needed = teardown.is_needed
            volumes = list(teardown.volumes()) if is_needed else []
            slow = [volume for volume in volumes if self._is_slow(volume[0])]
        except (OSError, ValueError) as err:
            raise _teardown_error(uid, err) from err
        if not is_needed:
            self._failing_since.pop(uid, None)
            return False
        succeeded = False
        try:
            if slow:
                await self._unmount(uid, teardown, teardown.remove_sub_paths)
                await self._tear_down_volumes(uid, slow)
            await self._unmount(uid, teardown, teardown.remove_all)
            succeeded = True
        finally:
            seconds = asyncio.get_running_loop().time() - now
            for plugin_dir, name in volumes:
                self._record_unmount(uid, plugin_dir, name, seconds, succeeded)
        self._failing_since.pop(uid, None)
        return bool(slow)

    def _is_slow(self, plugin_dir: str) -> bool:
        return plugin_dir in self._plugins and self._plugins[plugin_dir].slow

    async def _tear_down_volumes(self, uid: str, volumes: list[tuple[str, str]]) -> None:
        """Call the `tear_down` of each volume's plugin."""
        problems = await run_concurrently(
            [self._tear_down(uid, plugin_dir, name) for plugin_dir, name in volumes]
        )
        if found := [problem for problem in problems if problem]:
            raise VolumeError(*found)

    async def _tear_down(self, uid: str, plugin_dir: str, name: str) -> str:
        plugin = self._plugins[plugin_dir]
        try:
            await self._operations.run(
                f"{uid}/{name}",
                _TEAR_DOWN,
                lambda: plugin.tear_down(uid, name),
                timeout=TEAR_DOWN_TIMEOUT_SECONDS,
            )
        except FAILURES as err:
            reason = format_os_error(err) if isinstance(err, OSError) else err
            return f'UnmountVolume.TearDown failed for volume "{name}" : {reason}'
        return ""

    async def _unmount(self, uid: str, teardown: PodVolumeTeardown, step: Callable[[], None]) -> None:
        key = f"{uid}/"
        now = asyncio.get_running_loop().time()

        async def in_thread() -> None:
            async with self._slot():
                self._active_teardowns[uid] = teardown
                try:
                    await in_own_thread(step, name=f"unmount {uid}", cancel_timeout=0)
                finally:
                    del self._active_teardowns[uid]

        try:
            await self._operations.run(
                key, _UNMOUNT, in_thread, timeout=UNMOUNT_TIMEOUT_SECONDS, use_backoff=False
            )
        except OperationPending as err:
            self._failing_since.setdefault(uid, now)
            # The thread may belong to an earlier attempt.
            point = self._active_teardowns.get(uid, teardown).unmounting
            if point is None:
                # Deleting millions of files takes long; a second thread would only slow down others.
                raise _teardown_error(uid, "deleting its files takes long, and goes on") from err
            await self._detach(uid, point)
            await self._operations.cancel(key, _UNMOUNT, timeout=UNMOUNT_TIMEOUT_SECONDS)
            raise _teardown_error(uid, f"{point} does not answer, so it is detached") from err
        except OSError as err:
            self._failing_since.setdefault(uid, now)
            raise _teardown_error(uid, format_os_error(err)) from err

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Wait for a slot, at most SLOT_TIMEOUT_SECONDS: a teardown that hangs must not block other pods."""
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._slots.release()

    async def _detach(self, uid: str, point: Path) -> None:
        log.warning("Detaching unresponsive volume mount", path=point, podUID=uid)
        try:
            async with asyncio.timeout(UNMOUNT_TIMEOUT_SECONDS):
                await in_own_thread(
                    lambda: unmount(point, detach=True), name=f"detach {uid}", cancel_timeout=0
                )
        except TimeoutError:
            raise _teardown_error(uid, f"{point} does not answer, and cannot be detached") from None
        except OSError as err:
            raise _teardown_error(uid, format_os_error(err)) from err


def _teardown_error(uid: str, reason: object) -> VolumeError:
    return VolumeError(f"UnmountVolume.TearDown failed for pod {uid} : {reason}")


COLLECTION_PERIOD_SECONDS = 60.0
"""Seconds between runs when no pod is removed."""
UNSTAGE_TIMEOUT_SECONDS = 30.0
"""Seconds to wait for one plugin."""


class VolumeGarbageCollector:
    """Garbage collector of shared volume state: calls the `unmount_unused` of all plugins."""

    def __init__(
        self,
        plugins: Mapping[str, VolumePlugin],
        state: VolumeState,
        operations: PendingOperations,
        on_requested_run: Callable[[], None] = lambda: None,
    ) -> None:
        """Initialize; `on_requested_run` is called after each run of `run` that `request_run` requested."""
        self._plugins = plugins
        self._state = state
        self._operations = operations
        self._on_requested_run = on_requested_run
        self._requested = asyncio.Event()

    def request_run(self) -> None:
        """Request a run soon, because a pod is gone."""
        self._requested.set()

    async def run(self) -> NoReturn:
        """Run until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COLLECTION_PERIOD_SECONDS):
                    await self._requested.wait()
            requested = self._requested.is_set()
            self._requested.clear()
            await self.run_once()
            if requested:
                self._on_requested_run()

    async def run_once(self) -> None:
        """Call `unmount_unused` of all plugins now; failures are only logged."""
        await run_concurrently([self._run_plugin(name, plugin) for name, plugin in self._plugins.items()])

    async def _run_plugin(self, name: str, plugin: VolumePlugin) -> None:
        def work() -> Coroutine[Any, Any, None]:
            return plugin.unmount_unused(self._state.names_in_use)

        try:
            await self._operations.run(
                f"all/{name}", "sweeping", work, timeout=UNSTAGE_TIMEOUT_SECONDS, use_backoff=False
            )
        except Exception as err:  # third-party plugins may raise anything
            log.error(err, "Failed to release volumes that no pod uses", kind=name)

"""Registration of plugins: watches a directory for sockets and registers the plugin behind each.

Each socket has its own task, so a hung plugin delays no other. Failures are retried with exponential back-off
while the socket exists; a replaced socket is a new plugin, which is registered after the previous one has
been deregistered. The handlers implement the plugin types: `{"CSIPlugin": ..., "DevicePlugin": ...,
"DRAPlugin": ...}`. When the kubelet stops, plugins are not deregistered: the next kubelet process finds them.

inotify events only trigger a rescan: each scan returns all sockets, so that a missed event loses nothing
and a replaced socket is recognized. Sockets may be in subdirectories; names with a leading dot are ignored.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from pykubelet.linux.inotify import Inotify, Mask
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError, call_plugin
from pykubelet.util.backoff import ExponentialDelay
from pykubelet.util.tasks import TaskScope, finish_in_thread

log = get_logger(__name__)
QUIET_SECONDS = 0.02
"""Seconds during which further events are collected after the first one, because they come in bursts."""
RESCAN_SECONDS = 60.0
"""Seconds between scans without an event, in case inotify missed one."""
POLL_SECONDS = 5.0
"""Seconds between scans if inotify is not available."""
_MASK = (
    Mask.CREATE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE_SELF | Mask.MOVE_SELF
) | Mask.ONLYDIR


@dataclass(frozen=True, slots=True)
class SocketIdentity:
    """Identity of a socket, to recognize that it was replaced."""

    device: int
    inode: int
    mtime_ns: int
    """Modification time in nanoseconds, which is the creation time of a socket; inodes are reused."""


Sockets = Mapping[Path, SocketIdentity]


async def watch_sockets(directory: Path) -> AsyncGenerator[Sockets, None]:
    """Yield the sockets below a directory, immediately and then after each change.

    The directory is created if it does not exist, also later. Close the generator (`aclosing`) after use.
    """
    before: Sockets | None = None
    with _DirectoryWatcher() as watcher:
        while True:
            # In a thread: a plugin may have filled the directory with any number of files.
            found = await finish_in_thread(lambda: scan_sockets(directory, watcher))
            if found != before:
                yield found
                before = found
            await watcher.wait_change()


def scan_sockets(directory: Path, watcher: _DirectoryWatcher | None = None) -> dict[Path, SocketIdentity]:
    """Return the sockets below a directory, and watch the directories on the way. Blocks."""
    found: dict[Path, SocketIdentity] = {}
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as err:
        log.error(err, "Failed to create plugin registration directory", path=directory)
        return found
    pending = [directory]
    while pending:
        current = pending.pop()
        # Watch before scanning, otherwise changes in between are missed.
        if watcher is not None:
            watcher.watch(current)
        try:
            with os.scandir(current) as entries:
                names = [entry.name for entry in entries if not entry.name.startswith(".")]
        except OSError as err:
            log.v(4).info("Failed to scan plugin directory", path=current, err=err)
            continue
        for name in names:
            path = current / name
            try:
                state = path.stat()
            except OSError:
                continue
            if stat.S_ISSOCK(state.st_mode):
                # Not st_ctime: plugins change the mode of their sockets.
                found[path] = SocketIdentity(state.st_dev, state.st_ino, state.st_mtime_ns)
            elif stat.S_ISDIR(state.st_mode) and not path.is_symlink():
                pending.append(path)
    return found


class _DirectoryWatcher:
    """Watcher of directories; polls if inotify is not available."""

    def __init__(self) -> None:
        self._inotify: Inotify | None = None

    def __enter__(self) -> _DirectoryWatcher:
        try:
            self._inotify = Inotify()
        except OSError as err:
            log.error(err, "Failed to initialize inotify, polling for plugins")
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def watch(self, directory: Path) -> None:
        if self._inotify is None:
            return
        try:
            self._inotify.watch(directory, _MASK)
        except OSError as err:
            log.v(4).info("Failed to watch plugin directory", path=directory, err=err)

    async def wait_change(self) -> None:
        """Return shortly after a possible change."""
        if self._inotify is None:
            await asyncio.sleep(POLL_SECONDS)
            return
        try:
            async with asyncio.timeout(RESCAN_SECONDS):
                await anext(self._inotify)
            async with asyncio.timeout(QUIET_SECONDS):
                while True:
                    await anext(self._inotify)
                    # A flood of events must not starve the event loop, nor the timeout.
                    await asyncio.sleep(0)
        except TimeoutError:
            pass


CONNECT_SECONDS = 10.0
INFO_SECONDS = 1.0
NOTIFY_SECONDS = 5.0
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 122.0
_SERVICE = "/pluginregistration.Registration/"


@dataclass(frozen=True, slots=True)
class Plugin:
    """GetInfo response of a plugin; `endpoint` is the socket that it serves on."""

    type: str
    name: str
    endpoint: str
    versions: tuple[str, ...]


class RegistrationRefused(Exception):
    """The plugin is rejected; the text is for the plugin's author."""


class PluginHandler(Protocol):
    """Handler of one plugin type."""

    def validate(self, plugin: Plugin) -> None:
        """Validate a plugin. Raises RegistrationRefused if it can never be registered as it is."""

    async def register(self, plugin: Plugin) -> None:
        """Register a plugin. Raises RegistrationRefused. May be cancelled at any point."""

    async def deregister(self, plugin: Plugin) -> None:
        """Deregister a plugin; also called after a `register` that failed or was cancelled."""


class PluginRegistration:
    """Registration of the plugins of one directory; handlers may be added until `run`."""

    def __init__(self, directory: Path, handlers: Mapping[str, PluginHandler]) -> None:
        self._directory = directory
        self._handlers = handlers
        self._workers: dict[Path, _PluginWorker] = {}

    def sockets(self) -> dict[str, bool]:
        """Return the existing sockets, and whether the plugin of each is registered."""
        return {str(path): worker.is_registered for path, worker in self._workers.items()}

    async def run(self) -> NoReturn:
        """Register and deregister plugins until cancelled."""
        workers = self._workers
        async with TaskScope() as scope, aclosing(watch_sockets(self._directory)) as scans:
            before: Sockets = {}
            async for sockets in scans:
                for path in before.keys() - sockets.keys():
                    workers.pop(path).stop()
                for path in sockets:
                    if path in before and before[path] == sockets[path]:
                        continue
                    last = workers.get(path)
                    if last is not None:
                        last.stop()
                    workers[path] = _PluginWorker(str(path), self._handlers)
                    workers[path].start(scope, last)
                before = sockets
        raise AssertionError("the folder is watched for ever")


class _PluginWorker:
    """Worker of one socket: registers its plugin, and deregisters it when the socket is removed."""

    def __init__(self, socket: str, handlers: Mapping[str, PluginHandler]) -> None:
        self._socket = socket
        self._handlers = handlers
        self._to_deregister: tuple[PluginHandler, Plugin] | None = None
        self._stopped = False
        self._timeout: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_error = ""
        self.is_registered = False

    def start(self, scope: TaskScope, last: _PluginWorker | None) -> None:
        """Start after the previous worker of a replaced socket has finished."""
        after = last._task if last is not None else None
        self._task = scope.start(self._run(after), name=f"plugin {self._socket}")

    def stop(self) -> None:
        """Record that the socket was removed."""
        self._stopped = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def _run(self, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        if self._stopped:
            return
        try:
            async with asyncio.timeout(None) as self._timeout:
                await self._register()
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            if not self._stopped:
                raise
        finally:
            self._timeout = None
        await self._deregister()

    async def _register(self) -> None:
        """Register the plugin, with exponential back-off between attempts."""
        delay = ExponentialDelay(FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS)
        while True:
            try:
                await self._try_register()
            except (PluginError, RegistrationRefused) as err:
                await self._deregister()
                self._log_error(err)
            else:
                return
            await asyncio.sleep(delay.next())

    async def _try_register(self) -> None:
        plugin = await self._get_info()
        handler = self._handlers.get(plugin.type)
        try:
            if handler is None:
                raise RegistrationRefused(
                    f"no handler registered for plugin type: {plugin.type} at socket {self._socket}"
                )
            try:
                handler.validate(plugin)
            except RegistrationRefused as err:
                raise RegistrationRefused(f"plugin validation failed with err: {err}") from err
            # From here on it must be deregistered, even if the handler fails.
            self._to_deregister = (handler, plugin)
            try:
                await handler.register(plugin)
            except RegistrationRefused as err:
                raise RegistrationRefused(f"plugin registration failed with err: {err}") from err
        except RegistrationRefused as err:
            await self._notify(f"RegisterPlugin error -- {err}")
            raise
        await self._notify("")
        self._last_error = ""
        self.is_registered = True
        log.info("Registered plugin", type=plugin.type, name=plugin.name, endpoint=plugin.endpoint)

    async def _deregister(self) -> None:
        if self._to_deregister is not None:
            handler, plugin = self._to_deregister
            self.is_registered = False
            await handler.deregister(plugin)
            self._to_deregister = None
            log.info("Deregistered plugin", type=plugin.type, name=plugin.name)

    async def _get_info(self) -> Plugin:
        # Imported lazily: most nodes start without plugins, and the message classes take memory.
        from pykubelet.pluginmanager import registration_pb2 as pb

        info = await call_plugin(
            self._socket,
            f"{_SERVICE}GetInfo",
            pb.InfoRequest(),
            pb.PluginInfo,
            timeout=INFO_SECONDS,
            connect_timeout=CONNECT_SECONDS,
        )
        return Plugin(info.type, info.name, info.endpoint or self._socket, tuple(info.supported_versions))

    async def _notify(self, problem: str) -> None:
        """Notify the plugin of the result. Raises PluginError if the call fails."""
        from pykubelet.pluginmanager import registration_pb2 as pb

        await call_plugin(
            self._socket,
            f"{_SERVICE}NotifyRegistrationStatus",
            pb.RegistrationStatus(plugin_registered=not problem, error=problem),
            pb.RegistrationStatusResponse,
            timeout=NOTIFY_SECONDS,
        )

    def _log_error(self, err: Exception) -> None:
        """Log each new failure once: registration is retried without limit."""
        if str(err) != self._last_error:
            self._last_error = str(err)
            log.error(err, "Failed to register plugin, will retry", socket=self._socket)

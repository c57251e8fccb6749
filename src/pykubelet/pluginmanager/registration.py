"""Registration of plugins: whoever puts a socket into the folder is asked who it is, and gets an answer.

Each socket is attended by a task of its own, so a plugin that hangs holds up nobody else. What fails is
tried again after growing pauses for as long as the socket is there; a socket that is replaced is a new
plugin, which registers when the one before has been seen off. What a type of plugin means is its
handler's business: `{"CSIPlugin": ..., "DevicePlugin": ..., "DRAPlugin": ...}`.

When the agent ends, plugins stay registered wherever they were told of: the next agent finds them.

The sockets in the folder where plugins make themselves known, as they come and go.

The kernel's events only mean "look again": each look gives all sockets there are, so that nothing depends
on an event that was missed, and a socket that was replaced is told from the one before. Sockets may lie
in folders of their own; names with a dot in front are nobody's business.
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
from pykubelet.util.tasks import TaskScope, finish_in_thread

log = get_logger(__name__)
QUIET_SECONDS = 0.02
"""How long to wait after an event, because they come in bursts."""
LOOK_SECONDS = 60.0
"""How often to look without an event: for what the kernel did not tell."""
LOOK_OFTEN_SECONDS = 5.0
"""The same where the kernel gives no events at all."""
_MASK = (
    Mask.CREATE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE_SELF | Mask.MOVE_SELF
) | Mask.ONLYDIR


@dataclass(frozen=True, slots=True)
class SocketIdentity:
    """Tells a socket from another one that took its place."""

    device: int
    inode: int
    made: int
    """When it was made, in nanoseconds; inodes are used again."""


Sockets = Mapping[Path, SocketIdentity]


async def watch_sockets(folder: Path) -> AsyncGenerator[Sockets, None]:
    """Give the sockets below a folder, at once and then after each change.

    The folder is made when it is not there, also later. Close the generator (`aclosing`) when leaving.
    """
    before: Sockets | None = None
    with _DirectoryWatcher() as ear:
        while True:
            # In a thread: a plugin may have filled the directory with any number of files.
            found = await finish_in_thread(lambda: look(folder, ear))
            if found != before:
                yield found
                before = found
            await ear.hear()


def look(folder: Path, ear: _DirectoryWatcher | None = None) -> dict[Path, SocketIdentity]:
    """Return the sockets below a directory, and watch the directories on the way. Blocks."""
    found: dict[Path, SocketIdentity] = {}
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as err:
        log.error(err, "Cannot make the folder where plugins register", path=folder)
        return found
    pending = [folder]
    while pending:
        inside = pending.pop()
        # First listen and then look, or what comes in between is missed.
        if ear is not None:
            ear.listen(inside)
        try:
            with os.scandir(inside) as entries:
                names = [entry.name for entry in entries if not entry.name.startswith(".")]
        except OSError as err:
            log.v(4).info("A folder of plugins is gone", path=inside, err=err)
            continue
        for name in names:
            path = inside / name
            try:
                state = path.stat()
            except OSError:
                continue
            if stat.S_ISSOCK(state.st_mode):
                # Not the time of the last change: plugins give their sockets other modes.
                found[path] = SocketIdentity(state.st_dev, state.st_ino, state.st_mtime_ns)
            elif stat.S_ISDIR(state.st_mode) and not path.is_symlink():
                pending.append(path)
    return found


class _DirectoryWatcher:
    """Hears of changes in folders; where the kernel has no events to give, time passes instead."""

    def __init__(self) -> None:
        self._inotify: Inotify | None = None

    def __enter__(self) -> _DirectoryWatcher:
        try:
            self._inotify = Inotify()
        except OSError as err:
            log.error(err, "Plugins are only noticed by looking again and again")
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def listen(self, folder: Path) -> None:
        if self._inotify is None:
            return
        try:
            self._inotify.watch(folder, _MASK)
        except OSError as err:
            log.v(4).info("Cannot listen to a folder of plugins", path=folder, err=err)

    async def hear(self) -> None:
        """Return soon after something may have changed."""
        if self._inotify is None:
            await asyncio.sleep(LOOK_OFTEN_SECONDS)
            return
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await anext(self._inotify)
            async with asyncio.timeout(QUIET_SECONDS):
                while True:
                    await anext(self._inotify)
                    # A flood of events must not starve the loop, nor the timeout.
                    await asyncio.sleep(0)
        except TimeoutError:
            pass


CONNECT_SECONDS = 10.0
INFO_SECONDS = 1.0
NOTIFY_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 122.0
_SERVICE = "/pluginregistration.Registration/"


@dataclass(frozen=True, slots=True)
class Plugin:
    """What a plugin says about itself; `endpoint` is the socket that it serves on."""

    type: str
    name: str
    endpoint: str
    versions: tuple[str, ...]


class RegistrationRefused(Exception):
    """A plugin cannot be taken; the text is for the plugin's author."""


class PluginHandler(Protocol):
    """What is done with plugins of one type."""

    def validate(self, plugin: Plugin) -> None:
        """Raise RegistrationRefused if a plugin can never be taken as it is."""

    async def register(self, plugin: Plugin) -> None:
        """Take a plugin into service; raises RegistrationRefused. May be cancelled at any point."""

    async def deregister(self, plugin: Plugin) -> None:
        """Do without a plugin from now on; also after a `register` that failed or was cancelled."""


class PluginRegistration:
    """Attends to the plugins of one folder; handlers may be added until `run`."""

    def __init__(self, folder: Path, handlers: Mapping[str, PluginHandler]) -> None:
        self._folder = folder
        self._handlers = handlers
        self._attended: dict[Path, _PluginWorker] = {}

    def sockets(self) -> dict[str, bool]:
        """Give the sockets that there are, and whether the plugin of each is registered."""
        return {str(path): one.is_registered for path, one in self._attended.items()}

    async def run(self) -> NoReturn:
        """Attend to plugins until cancelled."""
        attended = self._attended
        async with TaskScope() as scope, aclosing(watch_sockets(self._folder)) as looks:
            before: Sockets = {}
            async for sockets in looks:
                for path in before.keys() - sockets.keys():
                    attended.pop(path).leave()
                for path in sockets:
                    if path in before and before[path] == sockets[path]:
                        continue
                    last = attended.get(path)
                    if last is not None:
                        last.leave()
                    attended[path] = _PluginWorker(str(path), self._handlers)
                    attended[path].start(scope, last)
                before = sockets
        raise AssertionError("the folder is watched for ever")


class _PluginWorker:
    """Registers the plugin of one socket and, when the socket has gone, sees it off."""

    def __init__(self, socket: str, handlers: Mapping[str, PluginHandler]) -> None:
        self._socket = socket
        self._handlers = handlers
        self._taken: tuple[PluginHandler, Plugin] | None = None
        self._gone = False
        self._until: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""
        self.is_registered = False

    def start(self, scope: TaskScope, last: _PluginWorker | None) -> None:
        """Begin, as soon as the attendant before, of a socket that was replaced, has ended."""
        after = last._task if last is not None else None
        self._task = scope.start(self._run(after), name=f"plugin {self._socket}")

    def leave(self) -> None:
        """Take note that the socket has gone."""
        self._gone = True
        if self._until is not None:
            self._until.reschedule(asyncio.get_running_loop().time())

    async def _run(self, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        if self._gone:
            return
        try:
            async with asyncio.timeout(None) as self._until:
                await self._register()
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            if not self._gone:
                raise
        finally:
            self._until = None
        await self._see_off()

    async def _register(self) -> None:
        """Register with ever longer pauses between attempts."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._try()
            except (PluginError, RegistrationRefused) as err:
                await self._see_off()
                self._complain(err)
            else:
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _try(self) -> None:
        plugin = await self._ask()
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
            # From here on it must be seen off, however far the handler gets.
            self._taken = (handler, plugin)
            try:
                await handler.register(plugin)
            except RegistrationRefused as err:
                raise RegistrationRefused(f"plugin registration failed with err: {err}") from err
        except RegistrationRefused as err:
            await self._notify(f"RegisterPlugin error -- {err}")
            raise
        await self._notify("")
        self._complaint = ""
        self.is_registered = True
        log.info("Plugin is registered", type=plugin.type, name=plugin.name, endpoint=plugin.endpoint)

    async def _see_off(self) -> None:
        if self._taken is not None:
            handler, plugin = self._taken
            self.is_registered = False
            await handler.deregister(plugin)
            self._taken = None
            log.info("Plugin is not registered any more", type=plugin.type, name=plugin.name)

    async def _ask(self) -> Plugin:
        # Most nodes start without plugins, and the messages' classes take memory.
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
        """Tell the plugin what came of it; raises PluginError when it does not want to know."""
        from pykubelet.pluginmanager import registration_pb2 as pb

        await call_plugin(
            self._socket,
            f"{_SERVICE}NotifyRegistrationStatus",
            pb.RegistrationStatus(plugin_registered=not problem, error=problem),
            pb.RegistrationStatusResponse,
            timeout=NOTIFY_SECONDS,
        )

    def _complain(self, err: Exception) -> None:
        """Say each new reason once; a plugin that cannot be taken is tried for ever."""
        if str(err) != self._complaint:
            self._complaint = str(err)
            log.error(err, "Failed to register a plugin, will try again", socket=self._socket)

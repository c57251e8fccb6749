"""Registration of plugins: whoever puts a socket into the folder is asked who it is, and gets an answer.

Each socket is attended by a task of its own, so a plugin that hangs holds up nobody else. What fails is
tried again after growing pauses for as long as the socket is there; a socket that is replaced is a new
plugin, which registers when the one before has been seen off. What a type of plugin means is its
handler's business: `{"CSIPlugin": ..., "DevicePlugin": ..., "DRAPlugin": ...}`.

When the agent ends, plugins stay registered wherever they were told of: the next agent finds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from pykubelet.host.plugin_calls import PluginError, call_plugin
from pykubelet.host.plugin_watch import Sockets, watch_sockets
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

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
        self._attended: dict[Path, _Attendant] = {}

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
                    attended[path] = _Attendant(str(path), self._handlers)
                    attended[path].start(scope, last)
                before = sockets
        raise AssertionError("the folder is watched for ever")


class _Attendant:
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

    def start(self, scope: TaskScope, last: _Attendant | None) -> None:
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
        from pykubelet.host import registration_pb2 as pb

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
        from pykubelet.host import registration_pb2 as pb

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

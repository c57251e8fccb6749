"""CSI drivers registered on this node, the CSIDriver informer, and pods that wait for a driver or volume.

`Drivers` is the registration handler of CSI drivers. A driver may be replaced by one of the same name with a
higher version, never by one with an equal or lower version: two drivers that claim the same name must not
alternate. A pod that needs an unregistered driver waits and is woken when it registers. Registrations are in
memory only; after a restart, plugin registration repeats them.

CSIDriver objects are watched from the first time that one is needed, because most nodes have no CSI volumes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from pykubelet.api.storage import CsiDriver
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.reflector import Reflector, StoreDelta
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError
from pykubelet.pluginmanager.registration import Plugin, RegistrationRefused
from pykubelet.volumes.csi.names import CSI_DRIVERS, KIND
from pykubelet.volumes.csi.types import NodeFacts
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from pykubelet.volumes.metrics import VolumeMetrics

if TYPE_CHECKING:
    from pykubelet.volumes.csi.node_client import NodeClient

log = get_logger(__name__)
SYNC_TIMEOUT_SECONDS = 30.0


class CsiDriverInformer:
    """Informer of CSIDriver objects, active while `run` runs; empty without an API server."""

    def __init__(self, api: ApiClient | None, sync_timeout: float = SYNC_TIMEOUT_SECONDS) -> None:
        self._reflector = Reflector(api, CSI_DRIVERS, self._updated) if api is not None else None
        self._sync_timeout = sync_timeout
        self._requested = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def standalone(self) -> bool:
        """Whether there is no API server, and therefore no CSIDriver object of any driver."""
        return self._reflector is None

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a callback for changes of CSIDriver objects."""
        self._listeners.append(listener)

    def start_watch(self) -> None:
        """Start the watch, if it has not started yet."""
        self._requested.set()

    def cached(self, name: str) -> CsiDriver | None:
        """Return the cached CSIDriver object of a driver, or None."""
        return self._reflector.objects.get(("", name)) if self._reflector is not None else None

    async def get(self, name: str) -> CsiDriver | None:
        """Return the CSIDriver object of a driver, or None if it does not exist.

        Raises VolumePluginError if the informer does not sync in time.
        """
        if self._reflector is None:
            return None
        self.start_watch()
        if not self._reflector.has_synced:
            try:
                async with asyncio.timeout(self._sync_timeout):
                    await self._reflector.synced()
            except TimeoutError:
                raise VolumePluginError(
                    "the cluster's CSIDriver objects are not known: the API server has not answered yet"
                ) from None
        return self._reflector.objects.get(("", name))

    async def run(self) -> NoReturn:
        """Watch CSIDriver objects, from the first `start_watch` on, until cancelled."""
        await self._requested.wait()
        if self._reflector is None:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody ends this future")
        await self._reflector.run()

    async def _updated(self, update: StoreDelta[CsiDriver]) -> None:
        for listener in self._listeners:
            listener()


class PodWaiters:
    """Pods that wait for something by name; a caller registers a pod before it checks, to miss no update."""

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._wake = wake
        self._pods: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._pods)

    def add(self, name: str, uid: str) -> None:
        """Register a pod as waiting."""
        self._pods.setdefault(name, set()).add(uid)

    def remove(self, name: str, uid: str) -> None:
        """Unregister a pod that waits for this name."""
        pods = self._pods.get(name, set())
        pods.discard(uid)
        if not pods:
            self._pods.pop(name, None)

    def forget(self, uid: str) -> None:
        """Unregister a pod for all names."""
        for name in list(self._pods):
            self.remove(name, uid)

    def retain(self, is_known: Callable[[str], bool]) -> None:
        """Unregister all pods that are no longer known."""
        for uid in set().union(*self._pods.values()):
            if not is_known(uid):
                self.forget(uid)

    def wake_all(self, names: Iterable[str]) -> None:
        """Wake and unregister all pods that wait for one of these names."""
        for name in names:
            for uid in sorted(self._pods.pop(name, ())):
                self._wake(uid)


PLUGIN_TYPE = "CSIPlugin"
Version = tuple[int, ...]
_VERSION = re.compile(r"v?((?:0|[1-9][0-9]*)(?:\.[0-9]+)+)", re.ASCII)


class CsiNodePublisher:
    """Publisher of this node's drivers to the API server; this base class does nothing (standalone mode)."""

    async def install(self, driver: str, facts: NodeFacts) -> None:
        """Publish a driver. Raises RegistrationRefused."""

    async def uninstall(self, driver: str, is_gone: Callable[[], bool]) -> None:
        """Withdraw a driver, as long as `is_gone` returns true. Never raises."""


@dataclass(frozen=True, slots=True)
class _Driver:
    plugin: Plugin
    """The exact registration, because one driver may register through several sockets."""
    version: Version
    client: NodeClient


class Drivers:
    """Registry of CSI drivers and their clients; a PluginHandler."""

    def __init__(
        self, node: CsiNodePublisher, wake: Callable[[str], None], metrics: VolumeMetrics | None = None
    ) -> None:
        self._node = node
        self._metrics = metrics or VolumeMetrics()
        self._drivers: dict[str, _Driver] = {}
        self._registering: set[str] = set()
        self._waiters = PodWaiters(wake)
        self._listeners: list[Callable[[], None]] = []

    @property
    def names(self) -> frozenset[str]:
        """Names of all registered drivers."""
        return frozenset(self._drivers)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a callback for registrations and deregistrations."""
        self._listeners.append(listener)

    def client(self, name: str) -> NodeClient | None:
        """Return the client of a driver, or None if it is not registered."""
        driver = self._drivers.get(name)
        return driver.client if driver is not None else None

    def client_for_pod(self, name: str, uid: str) -> NodeClient:
        """Return the client of a driver that a pod needs.

        Raises VolumeNotReady if it is not registered; then the pod is woken when it registers.
        """
        client = self.client(name)
        if client is None:
            self._waiters.add(name, uid)
            raise VolumeNotReady(f"driver name {name} not found in the list of registered CSI drivers")
        return client

    def forget(self, uid: str) -> None:
        """Unregister a pod that no longer needs any driver."""
        self._waiters.forget(uid)

    def retain(self, is_known: Callable[[str], bool]) -> None:
        """Unregister all waiting pods that are no longer known."""
        self._waiters.retain(is_known)

    # Methods of PluginHandler

    def validate(self, plugin: Plugin) -> None:
        """Check the versions and the name of a driver. Raises RegistrationRefused."""
        try:
            self._version(plugin)
        except RegistrationRefused as err:
            raise RegistrationRefused(
                f"validation failed for CSI Driver {plugin.name} at endpoint {plugin.endpoint}: {err}"
            ) from err

    async def register(self, plugin: Plugin) -> None:
        """Call NodeGetInfo, publish the driver and wake the pods that wait for it."""
        # Local, to load the protobuf classes with the first driver only; importing NodeFacts defeats that.
        from pykubelet.volumes.csi.node_client import NodeClient

        version = self._version(plugin)
        if plugin.name in self._registering:
            raise RegistrationRefused(
                f'{KIND}: CSI driver "{plugin.name}" failed. '
                "Another driver with the same name is being registered"
            )
        self._registering.add(plugin.name)
        try:
            client = NodeClient(plugin.endpoint, on_call=partial(self._metrics.record_csi_call, plugin.name))
            facts = await client.info()
            await self._node.install(plugin.name, facts)
        except PluginError as err:
            raise RegistrationRefused(str(err)) from err
        finally:
            self._registering.discard(plugin.name)
        self._drivers[plugin.name] = _Driver(plugin, version, client)
        log.info("CSI driver is ready", driver=plugin.name, endpoint=plugin.endpoint, nodeID=facts.node_id)
        self._changed()
        self._waiters.wake_all([plugin.name])

    async def deregister(self, plugin: Plugin) -> None:
        """Remove and withdraw a driver, unless another registration has, or is about to have, its name."""
        driver = self._drivers.get(plugin.name)
        if driver is not None and driver.plugin is not plugin:
            return
        self._drivers.pop(plugin.name, None)
        self._changed()
        # Another registration may start while this one is withdrawn.
        await self._node.uninstall(
            plugin.name, lambda: plugin.name not in self._registering and plugin.name not in self._drivers
        )

    def _version(self, plugin: Plugin) -> Version:
        what = f'CSI driver "{plugin.name}" failed.'
        version = best_version(plugin.versions)
        if version is None:
            raise RegistrationRefused(
                f"{KIND}: {what} None of the versions specified {list(plugin.versions)} are supported; "
                "CSI 1.x is"
            )
        known = self._drivers.get(plugin.name)
        if known is not None and known.version >= version:
            raise RegistrationRefused(
                f"{KIND}: {what} Another driver with the same name is already registered with a "
                f'higher supported version: "{".".join(map(str, known.version))}"'
            )
        return version

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()


def best_version(versions: Iterable[str]) -> Version | None:
    """Return the highest version 1.x that a driver supports, or None."""
    found = [
        tuple(map(int, match[1].split("."))) for text in versions if (match := _VERSION.match(text.strip()))
    ]
    return max((version for version in found if version[0] == 1), default=None)

"""The CSIDriver objects of the cluster: how drivers want to be used.

They are watched from the first time that somebody needs one, because most nodes have no CSI volumes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from pykubelet.api.storage import CsiDriver
from pykubelet.kube.client import ApiClient
from pykubelet.kube.object_copy import Update
from pykubelet.kube.reflector import Reflector
from pykubelet.volumes.csi.resources import CSI_DRIVERS
from pykubelet.volumes.errors import KindError

PATIENCE_SECONDS = 30.0


class DriverObjects:
    """Keeps a copy of the CSIDrivers while `run` runs; without an API server there are none."""

    def __init__(self, api: ApiClient | None, patience: float = PATIENCE_SECONDS) -> None:
        self._reflector = Reflector(api, CSI_DRIVERS, self._updated) if api is not None else None
        self._patience = patience
        self._wanted = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def standalone(self) -> bool:
        """Whether there is no API server, so that nobody can say how a driver wants to be used."""
        return self._reflector is None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this when some have changed."""
        self._listeners.append(listener)

    def want(self) -> None:
        """Begin to watch, if that has not begun yet."""
        self._wanted.set()

    def known(self, name: str) -> CsiDriver | None:
        """Give a driver's object as far as it is known now."""
        return self._reflector.objects.get(("", name)) if self._reflector is not None else None

    async def get(self, name: str) -> CsiDriver | None:
        """Give a driver's object; None when there is none. Raises KindError while nobody can say."""
        if self._reflector is None:
            return None
        self.want()
        if not self._reflector.has_synced:
            try:
                async with asyncio.timeout(self._patience):
                    await self._reflector.synced()
            except TimeoutError:
                raise KindError(
                    "the cluster's CSIDriver objects are not known: the API server has not answered yet"
                ) from None
        return self._reflector.objects.get(("", name))

    async def run(self) -> NoReturn:
        """Watch, once somebody has asked, until cancelled."""
        await self._wanted.wait()
        if self._reflector is None:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody ends this future")
        await self._reflector.run()

    async def _updated(self, update: Update[CsiDriver]) -> None:
        for listener in self._listeners:
            listener()

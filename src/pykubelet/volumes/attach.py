"""Waiting until the cluster's controllers say that a disk is this node's, before it is touched.

They attach a disk to one node at a time, unless it may be shared: two nodes that mount the same disk, one of
which only seems to be gone, would ruin it. Also where attaching is nothing that anybody does (iscsi, fc),
their word in the node's `status.volumesAttached` is the leave to use it. A pod that waits for that is woken
when the node's status changes. (CSI volumes have objects of their own for it: `csi/attachments.py`.)

Attached volumes are told to be in use before anybody touches them.

Whoever attaches and detaches volumes goes by the node's `status.volumesInUse`: a volume that is mounted
and not yet told could be detached under its mount. So a volume that a pod is about to use is reported
first, and used when the API server has been told. Pods without such volumes never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from pykubelet.apiserver.client import NODES, ApiClient
from pykubelet.apiserver.errors import KubeError
from pykubelet.logs import get_logger
from pykubelet.volumes.csi.drivers import PodWaiters
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from pykubelet.volumes.plugin import VolumeToMount

log = get_logger(__name__)
_ACTION = "MountVolume.WaitForAttach failed"


class NotAttached(VolumeNotReady):
    """The controllers have not attached a volume; the pod is woken when they have."""

    action = _ACTION


class NodeUnknown(VolumePluginError):
    """Nobody can say whether a volume is attached."""

    action = _ACTION


class AttachVerifier:
    """Waits for volumes to be attached to a node."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        use: Callable[[VolumeToMount, str], Awaitable[None]],
        wake: Callable[[str], None],
    ) -> None:
        """Take the API server and the node's name; `use` tells that a volume will be in use."""
        self._api = api
        self._node_name = node_name
        self._use = use
        self._waiting = PodWaiters(wake)

    async def device(self, wanted: VolumeToMount, name: str) -> str:
        """Give the device (it may be "") that a volume, by its name in the node's status, is attached as.

        Raises NotYet when it is not attached, and KindError.
        """
        await self._use(wanted, name)
        self._waiting.note(name, wanted.uid)
        try:
            # The server and not what was seen last: a volume that is being detached must not pass for one.
            node = await self._api.get(NODES, self._node_name)
        except KubeError as err:
            raise NodeUnknown(f"cannot see whether the volume is attached: {err}") from err
        for attached in node.status.volumes_attached:
            if attached.name == name:
                self._waiting.done(name, wanted.uid)
                return attached.device_path
        raise NotAttached(f"volume {name} is not attached according to the status of node {self._node_name}")

    def node_changed(self, status: bytes) -> None:
        """Take note of the node's own status, as the API server wrote it: wakes whose volumes it names."""
        if self._waiting:
            try:
                found = msgspec.json.decode(status, type=_Status).volumes_attached or ()
            except msgspec.MsgspecError as err:
                log.error(err, "Cannot read which volumes are attached to this node")
                return
            self._waiting.there(volume.name for volume in found)

    def forget(self, uid: str) -> None:
        """Take note that a pod waits no more."""
        self._waiting.forget(uid)


class _Name(msgspec.Struct):
    name: str = ""


class _Status(msgspec.Struct, rename="camel"):
    volumes_attached: list[_Name] | None = None


PATIENCE_SECONDS = 60.0


class NotReported(VolumePluginError):
    """The API server could not be told that a volume is in use."""

    action = "MountVolume.WaitForAttach failed"


class VolumesInUseReporter:
    """Has volumes reported; without a listener there is no cluster, and nobody to be told."""

    def __init__(self) -> None:
        self._changed: Callable[[], None] | None = None
        self._told: set[str] = set()
        self._news = asyncio.Event()
        self.last: frozenset[str] | None = None
        """What the API server was last known to have; None before it has been asked."""

    def listen(self, changed: Callable[[], None]) -> None:
        """Call this whenever there is something new to report."""
        self._changed = changed

    def changed(self) -> None:
        """Have the report renewed."""
        if self._changed is not None:
            self._changed()

    def reported(self, names: Iterable[str]) -> None:
        """Take note of what the API server was told just now."""
        self.last = frozenset(names)
        self._told = set(self.last)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait(self, name: str, *, new: bool) -> None:
        """Wait until a volume that counts as in use has been reported; raises NotReported.

        If it counts only from now on (`new`), earlier reports do not: the volume may have been left out
        of one that is on its way.
        """
        if self._changed is None:
            return
        if new:
            self._told.discard(name)
            self._changed()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while name not in self._told:
                    await self._news.wait()
        except TimeoutError:
            raise NotReported(
                "Volume has not been added to the list of VolumesInUse in the node's volume status"
            ) from None

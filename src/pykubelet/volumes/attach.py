"""Attachment of volumes to this node: waits for the attach/detach controller and reports volumes in use.

`AttachVerifier` waits until the node's `status.volumesAttached` lists a volume, before a plugin accesses its
disk. The controller attaches a disk to one node at a time, unless it may be shared: two nodes that mount the
same disk, one of which only seems to be dead, would corrupt it. The check also applies to volume types
without an attach operation (iscsi, fc), where the entry is the permission to use the disk. A waiting pod is
woken when the node's status changes. CSI volumes have VolumeAttachment objects instead
(`csi/volume_attachments.py`).

`VolumesInUseReporter` delays the use of a volume until the API server has it in the node's
`status.volumesInUse`. The controller does not detach volumes listed there; a volume that is mounted and not
yet listed could be detached under its mount. Pods without attachable volumes never wait.
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
    """Raised while a volume is not attached to this node; the pod is woken when it is."""

    action = _ACTION


class NodeUnknown(VolumePluginError):
    """Raised when the Node object, which lists the attached volumes, cannot be read."""

    action = _ACTION


class AttachVerifier:
    """Verifier that volumes are attached to this node."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        use: Callable[[VolumeToMount, str], Awaitable[None]],
        wake: Callable[[str], None],
    ) -> None:
        """Initialize with the API client and the node's name; `use` reports a volume as in use, and waits."""
        self._api = api
        self._node_name = node_name
        self._use = use
        self._waiting = PodWaiters(wake)

    async def device(self, wanted: VolumeToMount, name: str) -> str:
        """Return the device path (may be "") of an attached volume; `name` is its name in the node's status.

        Raises NotAttached while it is not attached, and VolumePluginError.
        """
        await self._use(wanted, name)
        self._waiting.add(name, wanted.uid)
        try:
            # Uncached: a volume that is being detached must not count as attached.
            node = await self._api.get(NODES, self._node_name)
        except KubeError as err:
            raise NodeUnknown(f"cannot see whether the volume is attached: {err}") from err
        for attached in node.status.volumes_attached:
            if attached.name == name:
                self._waiting.remove(name, wanted.uid)
                return attached.device_path
        raise NotAttached(f"volume {name} is not attached according to the status of node {self._node_name}")

    def node_changed(self, status: bytes) -> None:
        """Wake the pods whose volumes the node's status, JSON from the API server, lists as attached."""
        if self._waiting:
            try:
                found = msgspec.json.decode(status, type=_Status).volumes_attached or ()
            except msgspec.MsgspecError as err:
                log.error(err, "Failed to decode volumesAttached of the node status")
                return
            self._waiting.wake_all(volume.name for volume in found)

    def forget(self, uid: str) -> None:
        """Remove a pod from the waiting pods."""
        self._waiting.forget(uid)


class _Name(msgspec.Struct):
    name: str = ""


class _Status(msgspec.Struct, rename="camel"):
    volumes_attached: list[_Name] | None = None


PATIENCE_SECONDS = 60.0


class NotReported(VolumePluginError):
    """Raised when the API server does not have a volume in `status.volumesInUse` in time."""

    action = "MountVolume.WaitForAttach failed"


class VolumesInUseReporter:
    """Reporter of `status.volumesInUse`; without a listener (standalone mode) nothing is reported."""

    def __init__(self) -> None:
        self._changed: Callable[[], None] | None = None
        self._told: set[str] = set()
        self._news = asyncio.Event()
        self.last: frozenset[str] | None = None
        """Names last known to be in the node's status; None before the first report."""

    def listen(self, changed: Callable[[], None]) -> None:
        """Set the callback that requests a new report."""
        self._changed = changed

    def changed(self) -> None:
        """Request a new report."""
        if self._changed is not None:
            self._changed()

    def reported(self, names: Iterable[str]) -> None:
        """Record the names that the API server has just accepted."""
        self.last = frozenset(names)
        self._told = set(self.last)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait(self, name: str, *, new: bool) -> None:
        """Wait until a volume in use has been reported. Raises NotReported after PATIENCE_SECONDS.

        `new`: the volume is in use only from now on. Earlier reports then do not count, because one in flight
        may omit it.
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

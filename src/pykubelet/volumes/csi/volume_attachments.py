"""Volume attachments: waiting until the cluster has attached a volume to this node.

The attach/detach controller creates a VolumeAttachment, the driver's external-attacher attaches the volume,
and then the controller adds it to the node's `status.volumesAttached`. A node is not allowed to watch
VolumeAttachments, but it watches its own Node: a pod whose volume is not attached waits until the node's
status lists it, and then the VolumeAttachment is read, which is authoritative and contains the publish
context. The waiting pods are in memory only; they are registered again with the next sync after a restart.
With `enableControllerAttachDetach: false` the kubelet creates the VolumeAttachments (`attacher.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from pykubelet.api.storage import VolumeAttachment
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import KubeError, NotFound
from pykubelet.logs import get_logger
from pykubelet.objects.fetch import err_text
from pykubelet.volumes.csi.drivers import PodWaiters
from pykubelet.volumes.csi.names import ATTACHMENTS, attachment_name, unique_name
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.errors import NotAttached, VolumePluginError

log = get_logger(__name__)
RESOURCE_EXHAUSTED = 8
"""gRPC code of a driver whose volume limit on the node is reached."""


class AttachFailed(VolumePluginError):
    """Raised when a volume could not be attached, or its VolumeAttachment could not be read."""

    action = NotAttached.action


class AttachLimitExceeded(AttachFailed):
    """Raised when the driver's volume limit on this node is reached."""


class Attachments:
    """Attachment state of volumes, and the pods to wake when their volumes are attached."""

    def __init__(
        self,
        api: ApiClient | None,
        node_name: str,
        wake: Callable[[str], None],
        attach: Callable[[CsiVolume], Awaitable[VolumeAttachment]] | None = None,
    ) -> None:
        """Initialize; `attach` attaches a volume, None if the attach/detach controller does."""
        self._api = api
        self._node = node_name
        self._waiters = PodWaiters(wake)
        self._attach = attach

    async def publish_context(self, volume_to_publish: CsiVolume) -> dict[str, str]:
        """Return the publish context of an attached volume.

        Raises VolumeNotReady while it is not attached, and VolumePluginError if it cannot be.
        """
        driver, handle = volume_to_publish.driver, volume_to_publish.handle
        uid = volume_to_publish.volume_to_mount.uid
        if self._attach is not None:
            return (await self._attach(volume_to_publish)).status.attachment_metadata
        if self._api is None:
            raise AttachFailed(
                f"volume {handle} of driver {driver} must be attached by a cluster, and this node has none"
            )
        name = attachment_name(handle, driver, self._node)
        volume = unique_name(driver, handle)
        self._waiters.add(volume, uid)
        try:
            found = await self._api.get(ATTACHMENTS, name)
        except NotFound:
            raise NotAttached(
                f"volume {handle} is not attached: there is no volume attachment {name}"
            ) from None
        except KubeError as err:
            raise AttachFailed(
                f"volume {handle} has GET error for volume attachment {name}: {err_text(err)}"
            ) from err
        if problem := attachment_error(found, handle):
            raise problem
        self._waiters.remove(volume, uid)
        return found.status.attachment_metadata

    def forget(self, uid: str) -> None:
        """Unregister a waiting pod."""
        self._waiters.forget(uid)

    def retain(self, is_known: Callable[[str], bool]) -> None:
        """Unregister all waiting pods that are no longer known."""
        self._waiters.retain(is_known)

    def node_changed(self, status: bytes) -> None:
        """Wake the pods whose volumes the node's own status (JSON from the API server) lists as attached."""
        if not self._waiters:
            return
        try:
            attached = msgspec.json.decode(status, type=_Attached).volumes_attached or ()
        except msgspec.MsgspecError as err:
            log.error(err, "Failed to parse volumesAttached of the node status")
            return
        self._waiters.wake_all(volume.name for volume in attached)


def attachment_error(found: VolumeAttachment, handle: str) -> VolumePluginError | None:
    """Return the error for a volume that is not attached, or None if it is."""
    if found.metadata.deletion_timestamp is not None:
        return NotAttached("volume attachment is being deleted")
    if found.status.attached:
        return None
    problem = found.status.attach_error
    if problem is not None:
        kind = AttachLimitExceeded if problem.error_code == RESOURCE_EXHAUSTED else AttachFailed
        return kind(problem.message)
    return NotAttached(f"volume {handle} is not attached for volume attachment {found.metadata.name}")


class _Name(msgspec.Struct):
    name: str = ""


class _Attached(msgspec.Struct, rename="camel"):
    volumes_attached: list[_Name] | None = None

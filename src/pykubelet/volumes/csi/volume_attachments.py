"""Waiting until the cluster has attached a volume to this node.

The attach controller makes a VolumeAttachment, the driver's own attacher fulfils it, and then the
controller adds the volume to the node's `status.volumesAttached`. A node may not watch VolumeAttachments,
but it does watch itself: so a pod whose volume is not attached waits until the node's status says so, and
then the VolumeAttachment is read, which has the last word and what the driver needs to know.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pykubelet.api.storage import VolumeAttachment
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import KubeError, NotFound
from pykubelet.logs import get_logger
from pykubelet.objects.base import err_text
from pykubelet.volumes.csi.drivers import PodWaiters
from pykubelet.volumes.csi.names import ATTACHMENTS, attachment_name, unique_name
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError

log = get_logger(__name__)
RESOURCE_EXHAUSTED = 8
"""gRPC's code by which a driver says that no more volumes fit on the node."""
_ACTION = "MountVolume.WaitForAttach failed"


class NotAttached(VolumeNotReady):
    """A volume is not attached; the pod is woken when it is."""

    action = _ACTION


class AttachFailed(VolumePluginError):
    """A volume cannot be attached, as far as anybody knows now."""

    action = _ACTION


class AttachLimitExceeded(AttachFailed):
    """The driver says that this node has no room for another volume."""


class Attachments:
    """Tells whether volumes are attached, and wakes pods when theirs are."""

    def __init__(self, api: ApiClient | None, node_name: str, wake: Callable[[str], None]) -> None:
        self._api = api
        self._node = node_name
        self._waiting = PodWaiters(wake)

    async def publish_context(self, driver: str, handle: str, uid: str) -> dict[str, str]:
        """Give what the controller said when it attached a volume.

        Raises NotYet when it is not attached, and KindError when it cannot be.
        """
        if self._api is None:
            raise AttachFailed(
                f"volume {handle} of driver {driver} must be attached by a cluster, and this node has none"
            )
        name = attachment_name(handle, driver, self._node)
        volume = unique_name(driver, handle)
        self._waiting.note(volume, uid)
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
        if problem := refusal(found, handle):
            raise problem
        self._waiting.done(volume, uid)
        return found.status.attachment_metadata

    def forget(self, uid: str) -> None:
        """Take note that a pod waits no more."""
        self._waiting.forget(uid)

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Take note that pods which are not known any more do not wait."""
        self._waiting.keep(is_known)

    def node_changed(self, status: bytes) -> None:
        """Take note of the node's own status, as the API server wrote it: wakes whose volumes it names."""
        if not self._waiting:
            return
        try:
            attached = msgspec.json.decode(status, type=_Attached).volumes_attached or ()
        except msgspec.MsgspecError as err:
            log.error(err, "Cannot read which volumes are attached to this node")
            return
        self._waiting.there(volume.name for volume in attached)


def refusal(found: VolumeAttachment, handle: str) -> VolumePluginError | None:
    """Say why a volume is not there to be used; None when it is."""
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

"""Attaching and detaching of CSI volumes by the kubelet (`enableControllerAttachDetach: false`).

The kubelet creates the VolumeAttachment before a volume is staged, waits for the driver's external-attacher,
and deletes the VolumeAttachment after the volume was unstaged. The upstream kubelet of this version rejects
such volumes; its CSI plugin does the same inside the attach/detach controller. The role `system:node` only
allows nodes to read VolumeAttachments, so an administrator has to grant `create` and `delete` on them.

A node may not list VolumeAttachments. So each one has a record on disk, written before the object is created
and removed after the API server has deleted it: a kubelet process that never saw the pod detaches the volume.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.storage import (
    VolumeAttachment,
    VolumeAttachmentSource,
    VolumeAttachmentSpec,
)
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import AlreadyExists, Forbidden, KubeError, NotFound
from pykubelet.logs import get_logger
from pykubelet.objects.fetch import err_text
from pykubelet.util.files import fsync_directory, write_atomically
from pykubelet.util.tasks import finish_in_thread
from pykubelet.volumes.csi.dependencies import UnstageOperations
from pykubelet.volumes.csi.names import ATTACHMENTS, KIND, attachment_name, unique_name
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.csi.volume_attachments import AttachFailed, attachment_error
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.metrics import VolumeMetrics
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.ownership import RecordEvent

log = get_logger(__name__)
DIRECTORY = Path("pykubelet", "csi-attachments")
TIMEOUT_SECONDS = 120.0
"""Seconds that an attach or detach operation waits for the external-attacher."""
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS, _POLL_FACTOR = 0.25, 7.0, 1.3
_REMEDY = (
    "grant create and delete on volumeattachments.storage.k8s.io to the node, "
    "or set enableControllerAttachDetach: true"
)


class AttachOperationError(AttachFailed):
    """Raised when the kubelet could not attach a volume."""

    action = "AttachVolume.Attach failed"


class AttachmentRecord(msgspec.Struct, frozen=True, rename="camel"):
    """A volume that this kubelet attaches, or has attached."""

    driver: str
    handle: str
    volume: str
    """Name of the volume on the node: the PersistentVolume's name."""

    @property
    def unique_name(self) -> str:
        """Name of the volume in the node's status."""
        return unique_name(self.driver, self.handle)


class AttachmentRecords:
    """Records of the volumes that the kubelet attached, on disk; all methods block briefly."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY

    def add(self, name: str, record: AttachmentRecord) -> None:
        """Store the record of a VolumeAttachment durably. Raises OSError."""
        if self.get(name) == record:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._file(name)
        write_atomically(file, msgspec.json.encode(record) + b"\n", temporary=file.with_suffix(".new"))
        for directory in (self._directory, self._directory.parent, self._directory.parent.parent):
            fsync_directory(directory)

    def get(self, name: str) -> AttachmentRecord | None:
        """Return the record of a VolumeAttachment; None if it does not exist or is unreadable."""
        try:
            return msgspec.json.decode(self._file(name).read_bytes(), type=AttachmentRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as err:
            log.error(err, "Failed to read record of attached volume", path=self._file(name))
            return None

    def remove(self, name: str) -> None:
        """Delete the record of a VolumeAttachment. Raises OSError."""
        self._file(name).unlink(missing_ok=True)
        for directory in (self._directory, self._directory.parent):
            with suppress(OSError):  # missing or not empty
                directory.rmdir()

    def all(self) -> dict[str, AttachmentRecord]:
        """Return all readable records by the name of their VolumeAttachment."""
        try:
            names = sorted(file.stem for file in self._directory.glob("*.json"))
        except OSError:
            return {}
        return {name: record for name in names if (record := self.get(name)) is not None}

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"


class KubeletAttacher:
    """Attacher of CSI volumes to this node."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        root: Path,
        record_event: RecordEvent,
        metrics: VolumeMetrics,
        is_on_node: Callable[[str], bool],
    ) -> None:
        """Initialize; `is_on_node` returns whether the disk has a volume, by its unique name, and blocks."""
        self._api = api
        self._node = node_name
        self._records = AttachmentRecords(root)
        self._record_event = record_event
        self._metrics = metrics
        self._is_on_node = is_on_node
        self._locks = Locks()
        """Locks by name of the VolumeAttachment: a volume is attached or detached, not both."""

    async def attach(self, volume: CsiVolume) -> VolumeAttachment:
        """Ensure that a volume is attached, and return its VolumeAttachment. Raises VolumePluginError."""
        name = attachment_name(volume.handle, volume.driver, self._node)
        record = AttachmentRecord(volume.driver, volume.handle, volume.volume_to_mount.name)
        async with self._locks(name):
            try:
                await finish_in_thread(lambda: self._records.add(name, record))
            except OSError as err:
                raise AttachOperationError(f"cannot record the attachment of the volume: {err}") from err
            found = await self._get(name)
            if found is not None and found.metadata.deletion_timestamp is None and found.status.attached:
                return found
            with self._measured(volume.driver, "volume_attach"):
                if found is None:
                    await self._create(name, volume)
                found = await self._wait_attached(name, volume)
        message = f'AttachVolume.Attach succeeded for volume "{volume.volume_to_mount.name}" '
        self._record_event(volume.volume_to_mount.pod, "Normal", "SuccessfulAttachVolume", message)
        return found

    async def detach_operations(self, in_use: Collection[str]) -> UnstageOperations:
        """Return the operations that detach the volumes that no pod uses, by unique readable names."""
        records = await finish_in_thread(self._records.all)
        return {
            f"{name} of {record.driver}": partial(self._detach_unused, name, record, in_use)
            for name, record in records.items()
            if record.volume not in in_use
        }

    async def _detach_unused(self, name: str, record: AttachmentRecord, in_use: Collection[str]) -> None:
        async with self._locks(name):
            if await finish_in_thread(lambda: self._is_on_node(record.unique_name)):
                return
            # Checked last: a pod that requires the volume from now on waits for the lock and attaches it.
            if record.volume in in_use:
                return
            with self._measured(record.driver, "volume_detach"):
                try:
                    await self._api.delete(ATTACHMENTS, name)
                except NotFound:
                    pass
                except KubeError as err:
                    raise _denied(f"cannot detach volume {record.handle}", err) from err
                else:
                    await self._wait_detached(name, record)
            await finish_in_thread(lambda: self._records.remove(name))
        log.info("Detached volume", driver=record.driver, volumeName=record.volume)

    async def _get(self, name: str) -> VolumeAttachment | None:
        try:
            return await self._api.get(ATTACHMENTS, name)
        except NotFound:
            return None
        except Forbidden as err:
            if err.lacks_relationship:
                # The node authorizer allows reads of the VolumeAttachments that it has observed.
                return None
            raise _denied("cannot get volume attachment", err) from err
        except KubeError as err:
            raise _denied("cannot get volume attachment", err) from err

    async def _create(self, name: str, volume: CsiVolume) -> None:
        persistent = volume.volume_to_mount.persistent
        assert persistent is not None
        if volume.volume_to_mount.claim is not None:
            source = VolumeAttachmentSource(persistent_volume_name=persistent.metadata.name)
        else:  # an in-tree volume in the pod's spec, translated to CSI
            source = VolumeAttachmentSource(inline_volume_spec=persistent.spec)
        spec = VolumeAttachmentSpec(attacher=volume.driver, node_name=self._node, source=source)
        try:
            await self._api.create(ATTACHMENTS, VolumeAttachment(metadata=ObjectMeta(name=name), spec=spec))
        except AlreadyExists:
            log.v(4).info("Volume attachment exists already", attachment=name)
        except KubeError as err:
            raise _denied("cannot create volume attachment", err) from err

    async def _wait_attached(self, name: str, volume: CsiVolume) -> VolumeAttachment:
        async for found in self._polls(name, "attach", volume.driver, volume.handle):
            if found is None:
                continue
            problem = attachment_error(found, volume.handle)
            if problem is None:
                return found
            if isinstance(problem, AttachFailed) or found.metadata.deletion_timestamp is not None:
                problem.action = AttachOperationError.action
                raise problem
        raise AssertionError("unreachable: polling ends with an exception")

    async def _wait_detached(self, name: str, record: AttachmentRecord) -> None:
        async for found in self._polls(name, "detach", record.driver, record.handle):
            if found is None or found.metadata.deletion_timestamp is None:
                return  # deleted, and perhaps created again by another client
            if found.status.detach_error is not None:
                raise VolumePluginError(found.status.detach_error.message)

    async def _polls(
        self, name: str, what: Literal["attach", "detach"], driver: str, handle: str
    ) -> AsyncIterator[VolumeAttachment | None]:
        """Yield the VolumeAttachment, None if it is missing, until the timeout: nodes may not watch it."""
        clock = asyncio.get_running_loop().time
        deadline, delay = clock() + TIMEOUT_SECONDS, _FIRST_POLL_SECONDS
        while True:
            yield await self._get(name)
            if clock() + delay > deadline:
                raise AttachOperationError(
                    f"timed out waiting for external-attacher of {driver} CSI driver "
                    f"to {what} volume {handle}"
                )
            await asyncio.sleep(delay)
            delay = min(delay * _POLL_FACTOR, _LONGEST_POLL_SECONDS)

    @contextmanager
    def _measured(self, driver: str, operation: str) -> Iterator[None]:
        clock = asyncio.get_running_loop().time
        started, succeeded = clock(), False
        try:
            yield
            succeeded = True
        finally:
            seconds = clock() - started
            self._metrics.record_operation(f"{KIND}:{driver}", operation, seconds, succeeded=succeeded)


def _denied(what: str, err: KubeError) -> AttachOperationError:
    remedy = f"; {_REMEDY}" if isinstance(err, Forbidden) else ""
    return AttachOperationError(f"{what}: {err_text(err)}{remedy}")

"""CSI file system volumes: staged once for the node, published for each pod, and the reverse.

The data needed to undo a call is on disk before the driver is called, so that any later kubelet process can
undo it. A driver that returns a final error has left nothing behind; after a timeout or another uncertain
result the call is retried, or undone when the pod is gone.

On a host with SELinux, a volume is mounted with the pod's label instead of relabelling each file, if the
driver supports it (`seLinuxMount`; rules in `volumes/mounts/selinux.py`). Two pods with different labels
cannot have the same volume on one node then.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pykubelet.api.storage import CsiDriverSpec
from pykubelet.linux.kernel import has_selinux
from pykubelet.linux.mounts import read_mounts
from pykubelet.logs import get_logger
from pykubelet.util.tasks import finish_in_thread
from pykubelet.volumes.csi.dependencies import (
    CsiDependencies,
    DriverCallError,
    UnstageOperations,
    driver_call,
)
from pykubelet.volumes.csi.names import KIND, MOUNT_GROUP, STAGE_UNSTAGE, unique_name
from pykubelet.volumes.csi.paths import (
    DATA_FILE,
    VolumeData,
    read_data,
    remove_abandoned,
    remove_mount_point,
    write_data,
)
from pykubelet.volumes.csi.types import Context, VolumeCapability
from pykubelet.volumes.csi.unpublish import unpublish_or_force, unpublish_pending_before
from pykubelet.volumes.csi.volume import CsiVolume, applies_fs_group, must_attach
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.mounts.selinux import label_conflict, mount_label, supports_context_mount
from pykubelet.volumes.ownership import apply_fs_group
from pykubelet.volumes.paths import make_directory
from pykubelet.volumes.plugin import MountedVolume

if TYPE_CHECKING:
    from pykubelet.volumes.csi.node_client import NodeClient

log = get_logger(__name__)


class CsiMounter:
    """Mounter of CSI file system volumes."""

    def __init__(self, deps: CsiDependencies) -> None:
        self._deps = deps

    async def set_up(
        self, volume: CsiVolume, spec: CsiDriverSpec | None, *, republish: bool = False
    ) -> MountedVolume:
        """Stage and publish a volume for a pod; with `republish`, it is published already."""
        deps, volume_to_mount = self._deps, volume.volume_to_mount
        client = deps.drivers.client_for_pod(volume.driver, volume_to_mount.uid)
        published: dict[str, str] = {}
        if must_attach(volume, spec):
            published = await deps.attachments.publish_context(volume)
        with driver_call(f"{KIND}: failed to ask driver {volume.driver} what it can do: "):
            capabilities = await client.capabilities()
        group = volume_to_mount.pod.spec.security_context.fs_group
        label = ""
        if context_mount := supports_context_mount(volume_to_mount, all_modes=deps.se_linux_mount):
            supported = spec is not None and spec.se_linux_mount is True
            label = mount_label(volume_to_mount, supported=supported)
        capability = volume.capability(group=group if MOUNT_GROUP in capabilities else None, label=label)
        context = await deps.request_context.for_publishing(
            volume, published, spec, standalone=deps.informer.standalone
        )
        path = deps.paths.published(volume_to_mount.uid, volume_to_mount.name)
        async with deps.locks(volume.unique_name):
            await unpublish_pending_before(deps, volume, client, path)
            if context_mount and spec is not None and spec.se_linux_mount:
                await finish_in_thread(partial(self._check_labels, volume, label))
            staged = ""
            if not volume.ephemeral and STAGE_UNSTAGE in capabilities:
                staged = await self._stage(volume, client, capability, published, label)
            await self._publish(volume, client, path, staged, capability, context, label, republish=republish)
        # Also when it is republished: the driver may have written new files.
        if MOUNT_GROUP not in capabilities and applies_fs_group(volume, spec, group):
            try:
                await apply_fs_group(volume_to_mount.pod, path, deps.record_event)
            except OSError as err:
                raise VolumePluginError(f"applyFSGroup failed for vol {volume.handle}: {err}") from err
        return MountedVolume(
            str(path),
            read_only=volume.read_only,
            relabel=not label and not volume.read_only and has_selinux() and _has_labels(path),
            attached=volume.unique_name if must_attach(volume, spec) else "",
        )

    async def tear_down(self, uid: str, name: str) -> None:
        """Unpublish a pod's volume, or unmount it without the driver after the driver's deadline.

        Raises VolumeNotReady while the driver is not registered and its deadline has not expired.
        """
        target_path, data_file = self._deps.paths.published(uid, name), self._deps.paths.data(uid, name)
        data = read_data(data_file)
        if data is None:
            return

        async def unpublish() -> None:
            client = self._deps.drivers.client_for_pod(data.driver_name, uid)
            with driver_call(f"{KIND}: Unmounter.TearDownAt failed: "):
                await client.unpublish(data.volume_handle, str(target_path))
            await finish_in_thread(lambda: remove_mount_point(target_path, data_file))

        pending_call = data.pending_unpublish(target_path, data_file, uid, name)
        await unpublish_or_force(
            self._deps, pending_call, unpublish, lambda: remove_mount_point(target_path, data_file)
        )

    async def unstage_operations(self, in_use: Collection[str]) -> UnstageOperations:
        """Return the operations that unstage the volumes that no pod uses."""
        staging_paths = await finish_in_thread(lambda: list(self._deps.paths.all_staged()))
        return {
            f"{staging_path.parent.parent.name}^{staging_path.parent.name}": partial(
                self._unstage_unused, staging_path, in_use
            )
            for staging_path in staging_paths
        }

    async def _unstage_unused(self, staging_path: Path, in_use: Collection[str]) -> None:
        data_file = staging_path.parent / DATA_FILE
        data = read_data(data_file)
        if data is None:
            await finish_in_thread(lambda: remove_abandoned(data_file, (staging_path, staging_path.parent)))
        elif data.spec_vol_id not in in_use:
            async with self._deps.locks(unique_name(data.driver_name, data.volume_handle)):
                if not await finish_in_thread(partial(self._is_used, data)):
                    await self._unstage(data, staging_path, data_file)

    async def _stage(
        self,
        volume: CsiVolume,
        client: NodeClient,
        capability: VolumeCapability,
        published: dict[str, str],
        label: str,
    ) -> str:
        staging_path = self._deps.paths.staged(volume.driver, volume.handle)
        data_file = staging_path.parent / DATA_FILE
        await self._unstage_other_label(staging_path, data_file, label)
        if volume.unique_name in self._deps.staged and data_file.exists():
            return str(staging_path)
        context = await self._deps.request_context.for_staging(volume, published)
        data = VolumeData(
            volume_handle=volume.handle,
            driver_name=volume.driver,
            spec_vol_id=volume.volume_to_mount.name,
            se_linux_mount_context=label,
        )

        def prepare() -> bool:
            existed = read_data(data_file) is not None
            write_data(data_file, data)
            make_directory(staging_path)
            return existed

        existed = await finish_in_thread(prepare)
        try:
            with driver_call(action="MountVolume.MountDevice failed"):
                await client.stage(volume.handle, str(staging_path), capability, context)
        except DriverCallError as err:
            if err.is_final and not existed:
                await self._remove_after_failure(staging_path, data_file)
            raise
        self._deps.staged.add(volume.unique_name)
        return str(staging_path)

    def _check_labels(self, volume: CsiVolume, label: str) -> None:
        """Raise VolumePluginError if another pod on this node has the volume with another label."""
        uid, name = volume.volume_to_mount.uid, volume.volume_to_mount.name
        own = self._deps.paths.data(uid, name)
        for data_file in self._deps.paths.all_data():
            data = read_data(data_file) if data_file != own else None
            if (
                data is not None
                and (data.driver_name, data.volume_handle) == (volume.driver, volume.handle)
                and data.se_linux_mount_context != label
            ):
                raise label_conflict(name, data.se_linux_mount_context, label)

    async def _unstage_other_label(self, staging_path: Path, data_file: Path, label: str) -> None:
        """Unstage a volume that was staged with another SELinux label for a pod that has terminated.

        The whole volume has the label that it was staged with.
        """
        data = read_data(data_file)
        if data is None or data.se_linux_mount_context == label:
            return
        if not await finish_in_thread(partial(self._is_used, data)):
            await self._unstage(data, staging_path, data_file)

    async def _publish(
        self,
        volume: CsiVolume,
        client: NodeClient,
        path: Path,
        staged: str,
        capability: VolumeCapability,
        context: Context,
        label: str,
        *,
        republish: bool,
    ) -> None:
        volume_to_mount = volume.volume_to_mount
        data_file = self._deps.paths.data(volume_to_mount.uid, volume_to_mount.name)
        data = self._deps.volume_data(volume, label)

        def prepare() -> bool:
            existed = read_data(data_file) is not None
            write_data(data_file, data)
            return existed

        existed = await finish_in_thread(prepare)
        try:
            with driver_call():
                await client.publish(
                    volume.handle, str(path), staged, capability, context, read_only=volume.read_only
                )
        except DriverCallError as err:
            # A mount that the pod may already use must not be removed.
            if err.is_final and not existed and not republish:
                await self._remove_after_failure(path, data_file)
            raise

    async def _unstage(self, data: VolumeData, staging_path: Path, data_file: Path) -> None:
        client = self._deps.drivers.client(data.driver_name)
        if client is None:
            log.v(2).info(
                "Volume stays staged until its CSI driver registers",
                driver=data.driver_name,
                path=staging_path,
            )
            return
        recording = self._deps.record_operation(data.driver_name, "unmount_device")
        with driver_call(f"{KIND}: attacher.UnmountDevice failed: "), recording:
            if STAGE_UNSTAGE in await client.capabilities():
                await client.unstage(data.volume_handle, str(staging_path))
        self._deps.staged.discard(unique_name(data.driver_name, data.volume_handle))
        await finish_in_thread(lambda: remove_mount_point(staging_path, data_file))
        log.v(2).info("Unstaged volume", driver=data.driver_name, path=staging_path)

    def _is_used(self, data: VolumeData) -> bool:
        """Return whether, according to the disk, a pod uses a volume or an unpublish call is pending."""
        if self._deps.pending_unpublishes.for_volume(unique_name(data.driver_name, data.volume_handle)):
            return True
        return any(
            (found.driver_name, found.volume_handle) == (data.driver_name, data.volume_handle)
            for data_file in self._deps.paths.all_data()
            if (found := read_data(data_file)) is not None
        )

    async def _remove_after_failure(self, path: Path, data_file: Path) -> None:
        try:
            await finish_in_thread(lambda: remove_mount_point(path, data_file))
        except (VolumePluginError, OSError) as err:
            log.error(err, "Failed to remove path of volume that could not be set up", path=path)


def _has_labels(path: Path) -> bool:
    """Return whether the file system mounted at this path supports SELinux labels."""
    return any("seclabel" in mount.options for mount in read_mounts(path) if mount.point == path)

"""CSI file system volumes: staged once for the node, published for each pod, and the reverse.

The data needed to undo a call is on disk before the driver is called, so that any later kubelet process can
undo it. A driver that returns a final error has left nothing behind; after a timeout or another uncertain
result the call is retried, or undone when the pod is gone.

On a host with SELinux, a volume is mounted with the pod's label instead of relabelling each file, if the
driver supports it (`seLinuxMount`), no other pod can use the volume (`ReadWriteOncePod`), all containers that
use it have the same label, and the pod does not require relabelling (`seLinuxChangePolicy: Recursive`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pykubelet.api.pod import Pod, SELinuxOptions
from pykubelet.api.storage import CsiDriverSpec
from pykubelet.linux.kernel import FS, has_selinux
from pykubelet.linux.mounts import read_mounts
from pykubelet.logs import get_logger
from pykubelet.util.tasks import finish_in_thread
from pykubelet.volumes.csi.dependencies import CsiDependencies, DriverCallError, Sweeps, asking
from pykubelet.volumes.csi.names import KIND, MOUNT_GROUP, STAGE_UNSTAGE, unique_name
from pykubelet.volumes.csi.paths import DATA_FILE, VolumeData, drop_place, drop_scraps, read_data, write_data
from pykubelet.volumes.csi.types import Context, VolumeCapability
from pykubelet.volumes.csi.unpublish import let_go, pay_before
from pykubelet.volumes.csi.volume import CsiVolume, agent_owns, must_attach
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.ownership import RecordEvent, apply_fs_group
from pykubelet.volumes.paths import make_directory
from pykubelet.volumes.plugin import MountedVolume

if TYPE_CHECKING:
    from pykubelet.volumes.csi.node_client import NodeClient

log = get_logger(__name__)
RECURSIVE = "Recursive"
_POLICIES = Path("/etc/selinux")


def mount_label(
    volume: CsiVolume, spec: CsiDriverSpec | None, fs: Path = FS, policies: Path = _POLICIES
) -> str:
    """Return the SELinux label to mount a volume with; empty to mount it without a label."""
    if spec is None or not spec.se_linux_mount or volume.access_modes != ("ReadWriteOncePod",):
        return ""
    if volume.wanted.pod.spec.security_context.se_linux_change_policy == RECURSIVE:
        return ""
    options = _options(volume.wanted.pod, volume.wanted.pod_volume.name)
    if options is None or not has_selinux(fs):
        return ""
    default = _file_label(policies)
    if default is None:
        return ""
    user, role, kind, level = default
    return ":".join((options.get("user") or user, role, kind, options.get("level") or level))


def _options(pod: Pod, volume: str) -> dict[str, str] | None:
    """Return the SELinux options of the containers that use a volume; None if unset or different.

    A container's own options replace those of the pod, as they do for its processes.
    """
    spec = pod.spec
    found = set()
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        if all(mount.name != volume for mount in container.volume_mounts):
            continue
        context = container.security_context
        own = context.se_linux_options if context is not None else None
        options = own if own is not None else spec.security_context.se_linux_options
        if options is not None:
            found.add(tuple(sorted(_fields(options).items())))
    return (dict(found.pop()) or None) if len(found) == 1 else None


def _fields(options: SELinuxOptions) -> dict[str, str]:
    found = {"user": options.user, "role": options.role, "type": options.type, "level": options.level}
    return {name: value for name, value in found.items() if value}


def _file_label(policies: Path) -> tuple[str, str, str, str] | None:
    """Return user, role, type and level of container files in the host's policy; None if not found."""
    try:
        for line in (policies / "config").read_text().splitlines():
            key, _, name = line.partition("=")
            if key.strip() == "SELINUXTYPE":
                contexts = policies / name.strip() / "contexts" / "lxc_contexts"
                return _read_contexts(contexts.read_text())
    except OSError:
        pass
    return None


def _read_contexts(text: str) -> tuple[str, str, str, str] | None:
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "file":
            parts = value.strip().strip('"').split(":", 3)
            if len(parts) == 4:
                return parts[0], parts[1], parts[2], parts[3]
    return None


class CsiMounter:
    """Mounter of CSI file system volumes."""

    def __init__(self, parts: CsiDependencies, tell: RecordEvent) -> None:
        self._parts = parts
        self._tell = tell

    async def set_up(
        self, volume: CsiVolume, spec: CsiDriverSpec | None, *, again: bool = False
    ) -> MountedVolume:
        """Stage and publish a volume for a pod; `again`: it is published, and is republished."""
        parts, wanted = self._parts, volume.wanted
        client = parts.drivers.needed(volume.driver, wanted.uid)
        published: dict[str, str] = {}
        if must_attach(volume, spec):
            published = await parts.attachments.publish_context(volume.driver, volume.handle, wanted.uid)
        with asking(f"{KIND}: failed to ask driver {volume.driver} what it can do: "):
            abilities = await client.abilities()
        group = wanted.pod.spec.security_context.fs_group
        label = mount_label(volume, spec)
        use = volume.use(group=group if MOUNT_GROUP in abilities else None, label=label)
        context = await parts.teller.for_publishing(
            volume, published, spec, standalone=parts.objects.standalone
        )
        path = parts.places.published(wanted.uid, wanted.name)
        async with parts.locks(volume.unique_name):
            await pay_before(parts, volume, client, path)
            staged = ""
            if not volume.ephemeral and STAGE_UNSTAGE in abilities:
                staged = await self._stage(volume, client, use, published, label)
            await self._publish(volume, client, path, staged, use, context, label, again=again)
        # Also when it is republished: the driver may have written new files.
        if MOUNT_GROUP not in abilities and agent_owns(volume, spec, group):
            try:
                await apply_fs_group(wanted.pod, path, self._tell)
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
        place, file = self._parts.places.published(uid, name), self._parts.places.data(uid, name)
        data = read_data(file)
        if data is None:
            return

        async def ordinary() -> None:
            client = self._parts.drivers.needed(data.driver_name, uid)
            with asking(f"{KIND}: Unmounter.TearDownAt failed: "):
                await client.unpublish(data.volume_handle, str(place))
            await finish_in_thread(lambda: drop_place(place, file))

        debt = data.owed(place, file, uid, name)
        await let_go(self._parts, debt, ordinary, lambda: drop_place(place, file))

    async def sweeps(self, in_use: Collection[str]) -> Sweeps:
        """Return the operations that unstage the volumes that no pod uses."""
        places = await finish_in_thread(lambda: list(self._parts.places.all_staged()))
        return {
            f"{place.parent.parent.name}^{place.parent.name}": partial(self._sweep_one, place, in_use)
            for place in places
        }

    async def _sweep_one(self, place: Path, in_use: Collection[str]) -> None:
        file = place.parent / DATA_FILE
        data = read_data(file)
        if data is None:
            await finish_in_thread(lambda: drop_scraps(file, (place, place.parent)))
        elif data.spec_vol_id not in in_use:
            async with self._parts.locks(unique_name(data.driver_name, data.volume_handle)):
                if not await finish_in_thread(partial(self._is_used, data)):
                    await self._unstage(data, place, file)

    async def _stage(
        self,
        volume: CsiVolume,
        client: NodeClient,
        use: VolumeCapability,
        published: dict[str, str],
        label: str,
    ) -> str:
        place = self._parts.places.staged(volume.driver, volume.handle)
        file = place.parent / DATA_FILE
        await self._unstage_other_label(place, file, label)
        if volume.unique_name in self._parts.staged and file.exists():
            return str(place)
        context = await self._parts.teller.for_staging(volume, published)
        data = VolumeData(
            volume_handle=volume.handle,
            driver_name=volume.driver,
            spec_vol_id=volume.wanted.name,
            se_linux_mount_context=label,
        )

        def prepare() -> bool:
            known = read_data(file) is not None
            write_data(file, data)
            make_directory(place)
            return known

        known = await finish_in_thread(prepare)
        try:
            with asking(action="MountVolume.MountDevice failed"):
                await client.stage(volume.handle, str(place), use, context)
        except DriverCallError as err:
            if err.is_final and not known:
                await self._clean(place, file)
            raise
        self._parts.staged.add(volume.unique_name)
        return str(place)

    async def _unstage_other_label(self, place: Path, file: Path, label: str) -> None:
        """Unstage a volume that was staged with another SELinux label for a pod that has terminated.

        The whole volume has the label that it was staged with.
        """
        data = read_data(file)
        if data is None or data.se_linux_mount_context == label:
            return
        if not await finish_in_thread(partial(self._is_used, data)):
            await self._unstage(data, place, file)

    async def _publish(
        self,
        volume: CsiVolume,
        client: NodeClient,
        path: Path,
        staged: str,
        use: VolumeCapability,
        context: Context,
        label: str,
        *,
        again: bool,
    ) -> None:
        wanted = volume.wanted
        file = self._parts.places.data(wanted.uid, wanted.name)
        data = self._parts.data_of(volume, label)

        def prepare() -> bool:
            known = read_data(file) is not None
            write_data(file, data)
            return known

        known = await finish_in_thread(prepare)
        try:
            with asking():
                await client.publish(
                    volume.handle, str(path), staged, use, context, read_only=volume.read_only
                )
        except DriverCallError as err:
            # A mount that the pod may already use must not be removed.
            if err.is_final and not known and not again:
                await self._clean(path, file)
            raise

    async def _unstage(self, data: VolumeData, place: Path, file: Path) -> None:
        client = self._parts.drivers.client(data.driver_name)
        if client is None:
            log.v(2).info(
                "Volume stays staged until its CSI driver registers", driver=data.driver_name, path=place
            )
            return
        count = self._parts.counted(data.driver_name, "unmount_device")
        with asking(f"{KIND}: attacher.UnmountDevice failed: "), count:
            if STAGE_UNSTAGE in await client.abilities():
                await client.unstage(data.volume_handle, str(place))
        self._parts.staged.discard(unique_name(data.driver_name, data.volume_handle))
        await finish_in_thread(lambda: drop_place(place, file))
        log.v(2).info("Unstaged volume", driver=data.driver_name, path=place)

    def _is_used(self, data: VolumeData) -> bool:
        """Return whether, according to the disk, a pod uses a volume or an unpublish call is pending."""
        if self._parts.debts.of(unique_name(data.driver_name, data.volume_handle)):
            return True
        return any(
            (found.driver_name, found.volume_handle) == (data.driver_name, data.volume_handle)
            for file in self._parts.places.all_data()
            if (found := read_data(file)) is not None
        )

    async def _clean(self, place: Path, file: Path) -> None:
        try:
            await finish_in_thread(lambda: drop_place(place, file))
        except (VolumePluginError, OSError) as err:
            log.error(err, "Failed to remove path of volume that could not be set up", path=place)


def _has_labels(path: Path) -> bool:
    """Return whether the file system mounted at this path supports SELinux labels."""
    return any("seclabel" in mount.options for mount in read_mounts(path) if mount.point == path)

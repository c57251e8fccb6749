"""CSI volumes as files: staged once for the node, published for each pod, and the reverse.

What must be known to undo it is on disk before a driver is asked for anything. A driver that says that
it failed has left nothing behind; one that says nothing, or that it does not know, is asked again, or
asked to undo it when the pod is gone.

Mounting volumes with a pod's SELinux label instead of relabelling each file, where the machine has it.

That needs a driver that can (`seLinuxMount`), a volume that no other pod has at the same time
(`ReadWriteOncePod`), and a pod of which all containers that use it have the same label, and that does not
want each file to be relabelled (`seLinuxChangePolicy: Recursive`).
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
from pykubelet.volumes.csi.node_client import Context, VolumeCapability
from pykubelet.volumes.csi.paths import DATA_FILE, VolumeData, drop_place, drop_scraps, read_data, write_data
from pykubelet.volumes.csi.unpublish import let_go, pay_before
from pykubelet.volumes.csi.volume import CsiVolume, agent_owns, must_attach
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.ownership import Tell, own
from pykubelet.volumes.paths import make_folder
from pykubelet.volumes.plugin import MountedVolume

if TYPE_CHECKING:
    from pykubelet.volumes.csi.node_client import NodeClient

log = get_logger(__name__)
RECURSIVE = "Recursive"
_POLICIES = Path("/etc/selinux")


def mount_label(
    volume: CsiVolume, spec: CsiDriverSpec | None, fs: Path = FS, policies: Path = _POLICIES
) -> str:
    """Give the label to mount a volume with; empty when it is not to be mounted with one."""
    if spec is None or not spec.se_linux_mount or volume.access_modes != ("ReadWriteOncePod",):
        return ""
    if volume.wanted.pod.spec.security_context.se_linux_change_policy == RECURSIVE:
        return ""
    options = _options(volume.wanted.pod, volume.wanted.volume.name)
    if options is None or not has_selinux(fs):
        return ""
    default = _file_label(policies)
    if default is None:
        return ""
    user, role, kind, level = default
    return ":".join((options.get("user") or user, role, kind, options.get("level") or level))


def _options(pod: Pod, volume: str) -> dict[str, str] | None:
    """Give the options of the containers that use a volume; None when they have none, or different ones.

    A container's own take the place of the pod's, as they do for its processes.
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
    """Read the label that the machine's policy gives to containers' files."""
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
    """Gives CSI volumes as files."""

    def __init__(self, parts: CsiDependencies, tell: Tell) -> None:
        self._parts = parts
        self._tell = tell

    async def set_up(
        self, volume: CsiVolume, spec: CsiDriverSpec | None, *, again: bool = False
    ) -> MountedVolume:
        """Have a volume published for a pod; `again`: it is, and the driver wants to be asked once more."""
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
        # Also when it is published again: a driver may have written files anew.
        if MOUNT_GROUP not in abilities and agent_owns(volume, spec, group):
            try:
                await own(wanted.pod, path, self._tell)
            except OSError as err:
                raise VolumePluginError(f"applyFSGroup failed for vol {volume.handle}: {err}") from err
        return MountedVolume(
            str(path),
            read_only=volume.read_only,
            relabel=not label and not volume.read_only and has_selinux() and _has_labels(path),
            attached=volume.unique_name if must_attach(volume, spec) else "",
        )

    async def take_down(self, uid: str, name: str) -> None:
        """Have the driver undo what it published for a pod, or do without it when it had its time.

        Raises NotYet while the driver is away and waited for.
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
        """Give what has volumes unstaged that no pod has."""
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
            make_folder(place)
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
        """Undo what was staged for a pod with another SELinux label, which has left just now.

        All of a volume has the label that it was staged with.
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
            # What a pod already sees must not be taken from under it.
            if err.is_final and not known and not again:
                await self._clean(path, file)
            raise

    async def _unstage(self, data: VolumeData, place: Path, file: Path) -> None:
        client = self._parts.drivers.client(data.driver_name)
        if client is None:
            log.v(2).info(
                "A volume stays staged until its driver is back", driver=data.driver_name, path=place
            )
            return
        count = self._parts.counted(data.driver_name, "unmount_device")
        with asking(f"{KIND}: attacher.UnmountDevice failed: "), count:
            if STAGE_UNSTAGE in await client.abilities():
                await client.unstage(data.volume_handle, str(place))
        self._parts.staged.discard(unique_name(data.driver_name, data.volume_handle))
        await finish_in_thread(lambda: drop_place(place, file))
        log.v(2).info("A volume is not staged any more", driver=data.driver_name, path=place)

    def _is_used(self, data: VolumeData) -> bool:
        """Whether a pod has a volume, or its driver was never asked to take it back, by what is on disk."""
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
            log.error(err, "Failed to remove the place of a volume that could not be had", path=place)


def _has_labels(path: Path) -> bool:
    """Whether the file system that is mounted here has SELinux labels."""
    return any("seclabel" in mount.options for mount in read_mounts(path) if mount.point == path)

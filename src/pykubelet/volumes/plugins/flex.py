"""flexVolume: volumes of FlexVolume drivers, executables that the node's administrator has installed.

The paths are upstream's, because drivers depend on them:

    pods/<uid>/volumes/<vendor~driver>/<volume>                          mount point in the pod's directory
    plugins/kubernetes.io/flexvolume/<vendor>/<driver>/mounts/<volume>   a device, mounted once for all pods

The symlink `volumes/kubernetes.io~flexvolume/<volume>` in the pod's directory points to the mount point and
thereby names the driver, so that a kubelet process that never saw the pod can take the volume down.

A driver is executed once per call, with a command and its arguments, and prints a JSON object. For a command
that it does not implement it returns `Not supported`: then the kubelet applies the default, and does not call
the command again.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pykubelet.api.volume import Flex
from pykubelet.logs import get_logger
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.disks import format_and_mount
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mount_helper import (
    HelperError,
    MissingHelper,
    is_mounted,
    run_helper,
    unmount_with_helper,
)
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.ownership import Walk, own
from pykubelet.volumes.paths import VolumeFolders, bind_folder, make_folder, plain
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount
from pykubelet.volumes.plugins.secret import named_secret

log = get_logger(__name__)
SUCCESS = "Success"
NOT_SUPPORTED = "Not supported"


class DriverError(VolumePluginError):
    """Raised when a call to a driver failed; the text contains the driver's message."""


class NotSupportedError(DriverError):
    """Raised when the driver leaves a command to the kubelet."""


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities of a driver, with the defaults for those that it omits."""

    attach: bool = True
    selinuxrelabel: bool = True
    fsgroup: bool = True


class Answer(msgspec.Struct, frozen=True):
    """Response of a driver."""

    status: str = ""
    message: str = ""
    device: str = ""
    capabilities: Capabilities | None = None


def escaped(driver: str) -> str:
    """Return the directory name of a driver: `vendor~driver` for `vendor/driver`. Raises BadSource."""
    name = driver.replace("/", "~")
    try:
        if name.startswith(".") or name.endswith("~"):
            raise ValueError("there is no program of this name")
        return plain(name)
    except ValueError:
        raise BadSource(f"{driver!r} cannot be the name of a FlexVolume driver") from None


def read_answer(command: str, said: str) -> Answer:
    """Parse the response of a driver. Raises DriverError, or its subclass NotSupportedError.

    Keys are case-insensitive, because drivers write them in upper and lower case.
    """
    try:
        answer = msgspec.convert(_lower(msgspec.json.decode(said)), Answer)
    except msgspec.MsgspecError as err:
        words = " ".join(said.split())[:200]
        raise DriverError(
            f"{command} command failed, the driver's answer is unreadable: {err}: {words}"
        ) from err
    if answer.status == NOT_SUPPORTED:
        raise NotSupportedError(f"{command} command failed, status: {NOT_SUPPORTED}")
    if answer.status != SUCCESS:
        reason = " ".join(answer.message.split())
        raise DriverError(f"{command} command failed, status: {answer.status}, reason: {reason}")
    return answer


class FlexDriver:
    """One driver; its capabilities are cached until its executable changes."""

    def __init__(self, folder: Path, name: str) -> None:
        """Initialize with the directory of all drivers and the name, `vendor/driver`. Raises BadSource."""
        self.name = name
        self.program = folder / escaped(name) / name.rpartition("/")[2]
        self._seen: tuple[int, ...] = ()
        self._capabilities = Capabilities()
        self._unsupported: set[str] = set()

    async def capabilities(self) -> Capabilities:
        """Return the driver's capabilities, calling `init` if it is new. Raises VolumePluginError."""
        try:
            facts = self.program.stat()
        except OSError:
            raise BadSource(
                f"no volume plugin matched: the FlexVolume driver {self.name} is not installed "
                f"at {self.program}"
            ) from None
        seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if seen != self._seen:
            self._unsupported.clear()
            self._capabilities = (await self.call("init")).capabilities or Capabilities()
            self._seen = seen
        return self._capabilities

    async def call(self, command: str, *arguments: str) -> Answer:
        """Call a command of the driver. Raises NotSupportedError, DriverError and HelperError.

        Options, which are JSON and may contain secrets, are hidden in logs and errors.
        """
        if command in self._unsupported:
            raise NotSupportedError(NOT_SUPPORTED)
        failure: HelperError | None = None
        try:
            hidden = [argument for argument in arguments if argument.startswith("{")]
            said = await run_helper(str(self.program), command, *arguments, hidden=hidden)
        except HelperError as err:
            if err.status is None or not err.output.lstrip().startswith("{"):
                raise
            failure, said = err, err.output
        try:
            answer = read_answer(command, said)
        except NotSupportedError:
            self._unsupported.add(command)
            raise
        if failure is not None:
            raise failure
        return answer


def _lower(value: Any) -> Any:
    return {key.lower(): _lower(inner) for key, inner in value.items()} if isinstance(value, dict) else value


PATIENCE = 120.0
"""Seconds after which a volume is unmounted without its failing driver: a pod can always be deleted."""
_PREFIX = "kubernetes.io/"


class FlexKind(BaseVolumePlugin):
    """Plugin for flexVolume volumes."""

    folder = "kubernetes.io~flexvolume"

    def __init__(self, given: VolumeHost) -> None:
        self._given = given
        self._drivers: dict[str, FlexDriver] = {}
        self._locks = Locks()
        self._failing: dict[Path, float] = {}
        """Event loop time of the first failed unmount, by path."""

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Mount the volume through its driver. Raises VolumePluginError, ObjectError and OSError."""
        source = _source(wanted)
        driver = self._driver(source.driver)
        can = await driver.capabilities()
        folders = VolumeFolders.of(self._given.root, wanted.uid)
        place = folders.volume(escaped(source.driver), wanted.name)
        read_only = _read_only(wanted)
        _note(folders.volume(self.folder, wanted.name), place)
        async with self._locks(f"{source.driver}/{wanted.name}"):
            new = not is_mounted(place)
            if new:
                if can.attach:
                    await self._mount_device(wanted, driver)
                await self._mount(wanted, driver, place)
            if can.fsgroup and not read_only:
                await self._own(wanted, place, new=new)
        attached = _attached_name(wanted) if can.attach and self._given.api is not None else ""
        relabel = can.selinuxrelabel and not read_only
        return MountedVolume(str(place), read_only=read_only, relabel=relabel, attached=attached)

    async def take_down(self, uid: str, name: str) -> None:
        """Unmount the volume through its driver, and its device if no other pod uses it.

        Raises as `set_up` does.
        """
        note = VolumeFolders.of(self._given.root, uid).volume(self.folder, name)
        if not note.is_symlink():
            return
        place = note.parent.parent / plain(note.readlink().parts[-2]) / name
        driver = self._driver(place.parent.name.replace("~", "/"))
        async with self._locks(f"{driver.name}/{name}"):
            if is_mounted(place) or place.is_dir():
                await self._undo(driver, "unmount", place)
            if not self._others(uid, name, place.parent.name):
                await self._unmount_device(driver, name)
        with suppress(OSError):
            place.parent.rmdir()  # unless the pod has another volume of the driver

    async def _mount_device(self, wanted: VolumeToMount, driver: FlexDriver) -> None:
        options = _options(wanted, {})
        device = await self._attached(wanted, driver, options)
        with suppress(NotSupportedError):
            device = (await driver.call("waitforattach", device, options)).device
        place = self._device_place(driver.name, wanted.name)
        if is_mounted(place):
            return
        make_folder(place)
        try:
            await driver.call("mountdevice", str(place), device, options)
        except NotSupportedError:
            if device:
                read_only = _read_only(wanted)
                how = "ro" if read_only else "rw"
                await format_and_mount(
                    Path(device), place, _source(wanted).fs_type, [how], read_only=read_only
                )

    async def _attached(self, wanted: VolumeToMount, driver: FlexDriver, options: str) -> str:
        """Return the device that the cluster's controllers, or else the driver's `attach`, attached."""
        if not self._given.attaches:
            return await self._given.attached(wanted, _attached_name(wanted))
        try:
            return (await driver.call("attach", options, self._given.node_name)).device
        except NotSupportedError:
            return ""

    async def _mount(self, wanted: VolumeToMount, driver: FlexDriver, place: Path) -> None:
        make_folder(place)
        try:
            options = _options(wanted, _about(wanted) | await self._secrets(wanted, driver))
            await driver.call("mount", str(place), options)
        except NotSupportedError:
            device = self._device_place(driver.name, wanted.name)
            await in_own_thread(lambda: bind_folder(device, place, 0), name="flex volume")
        except BaseException:
            if not is_mounted(place) and not any(place.iterdir()):
                place.rmdir()
            raise

    async def _own(self, wanted: VolumeToMount, place: Path, *, new: bool) -> None:
        group = wanted.pod.spec.security_context.fs_group
        if group is None:
            return
        # A walk that was interrupted by a kubelet restart is repeated, a complete one is not.
        if new or await in_own_thread(lambda: Walk(group).differs(place), name="flex volume"):
            await own(wanted.pod, place, self._given.tell)

    async def _secrets(self, wanted: VolumeToMount, driver: FlexDriver) -> dict[str, str]:
        reference = _source(wanted).secret_ref
        if reference is None or not reference.name:
            return {}
        secret = await named_secret(self._given, wanted, reference)
        if secret.type != driver.name:
            raise VolumePluginError(
                f"couldn't get secret {reference.name} err: cannot get secret of type {driver.name}"
            )
        return {
            f"{_PREFIX}secret/{key}": base64.b64encode(value).decode() for key, value in secret.data.items()
        }

    async def _unmount_device(self, driver: FlexDriver, name: str) -> None:
        place = self._device_place(driver.name, name)
        if not is_mounted(place) and not place.is_dir():
            return
        await self._undo(driver, "unmountdevice", place)
        if self._given.attaches:
            with suppress(NotSupportedError, MissingHelper):
                await driver.call("detach", name, self._given.node_name)

    async def _undo(self, driver: FlexDriver, command: str, place: Path) -> None:
        """Unmount a path through the driver, and then what it left, hence also without a driver."""
        try:
            await driver.capabilities()
            await driver.call(command, str(place))
        except (NotSupportedError, BadSource):
            pass  # the driver is not installed any more, or leaves it to the kubelet
        except VolumePluginError as err:
            now = asyncio.get_running_loop().time()
            if now - self._failing.setdefault(place, now) < PATIENCE:
                raise
            log.error(
                err,
                "Failed to unmount volume through FlexVolume driver, unmounting without it",
                path=place,
            )
        self._failing.pop(place, None)
        while is_mounted(place):
            await unmount_with_helper(place)
        with suppress(OSError):
            place.rmdir()  # remaining content is deleted with the pod's directory

    def _driver(self, name: str) -> FlexDriver:
        if name not in self._drivers:
            self._drivers[name] = FlexDriver(self._given.flex_drivers, name)
        return self._drivers[name]

    def _device_place(self, driver: str, name: str) -> Path:
        return self._given.root / "plugins/kubernetes.io/flexvolume" / driver / "mounts" / plain(name)

    def _others(self, uid: str, name: str, driver: str) -> bool:
        """Return whether another pod has a volume with this name of the same driver."""
        # Only names are read: a stat of a mount point would block on an unreachable server.
        pods = [pod / "volumes" for pod in (self._given.root / "pods").iterdir() if pod.name != uid]
        return any((pod / self.folder / name).is_symlink() and name in _names(pod / driver) for pod in pods)


def _source(wanted: VolumeToMount) -> Flex:
    assert isinstance(wanted.source, Flex)
    return wanted.source


def _attached_name(wanted: VolumeToMount) -> str:
    """Return the name by which the cluster's controllers attach a volume."""
    return f"{_source(wanted).driver}/{wanted.name}"


def _read_only(wanted: VolumeToMount) -> bool:
    return wanted.read_only or (wanted.persistent is None and _source(wanted).read_only)


def _about(wanted: VolumeToMount) -> dict[str, str]:
    pod = wanted.pod
    about = {
        "pod.name": pod.metadata.name,
        "pod.namespace": pod.metadata.namespace,
        "pod.uid": pod.uid,
        "serviceAccount.name": pod.spec.service_account_name,
    }
    group = pod.spec.security_context.fs_group
    if group is not None:
        about["mounterArgs.FsGroup"] = str(group)
    return {f"{_PREFIX}{key}": value for key, value in about.items()}


def _options(wanted: VolumeToMount, more: Mapping[str, str]) -> str:
    """Return the options for the driver, in JSON; those of the volume's source take precedence."""
    source = _source(wanted)
    options = {
        f"{_PREFIX}fsType": source.fs_type,
        f"{_PREFIX}readwrite": "ro" if _read_only(wanted) else "rw",
        f"{_PREFIX}pvOrVolumeName": wanted.name,
        **more,
        **source.options,
    }
    return msgspec.json.encode(dict(sorted(options.items()))).decode()


def _note(note: Path, place: Path) -> None:
    """Ensure that the symlink from the plugin's directory to the volume's mount point exists."""
    target = Path("..", place.parent.name, place.name)
    if note.is_symlink() and note.readlink() == target:
        return
    make_folder(note.parent)
    note.unlink(missing_ok=True)
    note.symlink_to(target)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []

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
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mounts.disks import format_and_mount
from pykubelet.volumes.mounts.mount_helper import (
    HelperError,
    MissingHelper,
    is_mounted,
    run_helper,
    unmount_with_helper,
)
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.ownership import OwnershipWalk, apply_fs_group
from pykubelet.volumes.paths import PodVolumePaths, bind_directory, make_directory, path_component
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


class DriverResponse(msgspec.Struct, frozen=True):
    """Response of a driver."""

    status: str = ""
    message: str = ""
    device: str = ""
    capabilities: Capabilities | None = None


def driver_directory_name(driver: str) -> str:
    """Return the directory name of a driver: `vendor~driver` for `vendor/driver`. Raises BadSource."""
    name = driver.replace("/", "~")
    try:
        if name.startswith(".") or name.endswith("~"):
            raise ValueError("there is no program of this name")
        return path_component(name)
    except ValueError:
        raise BadSource(f"{driver!r} cannot be the name of a FlexVolume driver") from None


def parse_response(command: str, output: str) -> DriverResponse:
    """Parse the response of a driver. Raises DriverError, or its subclass NotSupportedError.

    Keys are case-insensitive, because drivers write them in upper and lower case.
    """
    try:
        response = msgspec.convert(_lower(msgspec.json.decode(output)), DriverResponse)
    except msgspec.MsgspecError as err:
        excerpt = " ".join(output.split())[:200]
        raise DriverError(
            f"{command} command failed, the driver's answer is unreadable: {err}: {excerpt}"
        ) from err
    if response.status == NOT_SUPPORTED:
        raise NotSupportedError(f"{command} command failed, status: {NOT_SUPPORTED}")
    if response.status != SUCCESS:
        reason = " ".join(response.message.split())
        raise DriverError(f"{command} command failed, status: {response.status}, reason: {reason}")
    return response


class FlexDriver:
    """One driver; its capabilities are cached until its executable changes."""

    def __init__(self, directory: Path, name: str) -> None:
        """Initialize with the directory of all drivers and the name, `vendor/driver`. Raises BadSource."""
        self.name = name
        self.executable = directory / driver_directory_name(name) / name.rpartition("/")[2]
        self._fingerprint: tuple[int, ...] = ()
        self._capabilities = Capabilities()
        self._unsupported: set[str] = set()

    async def capabilities(self) -> Capabilities:
        """Return the driver's capabilities, calling `init` if it is new. Raises VolumePluginError."""
        try:
            status = self.executable.stat()
        except OSError:
            raise BadSource(
                f"no volume plugin matched: the FlexVolume driver {self.name} is not installed "
                f"at {self.executable}"
            ) from None
        fingerprint = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if fingerprint != self._fingerprint:
            self._unsupported.clear()
            self._capabilities = (await self.call("init")).capabilities or Capabilities()
            self._fingerprint = fingerprint
        return self._capabilities

    async def call(self, command: str, *arguments: str) -> DriverResponse:
        """Call a command of the driver. Raises NotSupportedError, DriverError and HelperError.

        Options, which are JSON and may contain secrets, are hidden in logs and errors.
        """
        if command in self._unsupported:
            raise NotSupportedError(NOT_SUPPORTED)
        failure: HelperError | None = None
        try:
            hidden = [argument for argument in arguments if argument.startswith("{")]
            output = await run_helper(str(self.executable), command, *arguments, hidden=hidden)
        except HelperError as err:
            if err.status is None or not err.output.lstrip().startswith("{"):
                raise
            failure, output = err, err.output
        try:
            response = parse_response(command, output)
        except NotSupportedError:
            self._unsupported.add(command)
            raise
        if failure is not None:
            raise failure
        return response


def _lower(value: Any) -> Any:
    return {key.lower(): _lower(inner) for key, inner in value.items()} if isinstance(value, dict) else value


DRIVER_TIMEOUT_SECONDS = 120.0
"""Seconds after which a volume is unmounted without its failing driver: a pod can always be deleted."""
_PREFIX = "kubernetes.io/"


class FlexVolumePlugin(BaseVolumePlugin):
    """Plugin for flexVolume volumes."""

    directory_name = "kubernetes.io~flexvolume"

    def __init__(self, host: VolumeHost) -> None:
        self._host = host
        self._drivers: dict[str, FlexDriver] = {}
        self._locks = Locks()
        self._failing_since: dict[Path, float] = {}
        """Event loop time of the first failed unmount, by path."""

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Mount the volume through its driver. Raises VolumePluginError, ObjectError and OSError."""
        source = _source(volume)
        driver = self._driver(source.driver)
        capabilities = await driver.capabilities()
        paths = PodVolumePaths.for_pod(self._host.root, volume.uid)
        mount_point = paths.volume(driver_directory_name(source.driver), volume.name)
        read_only = _read_only(volume)
        _link_mount_point(paths.volume(self.directory_name, volume.name), mount_point)
        async with self._locks(f"{source.driver}/{volume.name}"):
            new = not is_mounted(mount_point)
            if new:
                if capabilities.attach:
                    await self._mount_device(volume, driver)
                await self._mount(volume, driver, mount_point)
            if capabilities.fsgroup and not read_only:
                await self._apply_fs_group(volume, mount_point, new=new)
        attached = _attached_name(volume) if capabilities.attach and self._host.api is not None else ""
        relabel = capabilities.selinuxrelabel and not read_only
        return MountedVolume(str(mount_point), read_only=read_only, relabel=relabel, attached=attached)

    async def tear_down(self, uid: str, name: str) -> None:
        """Unmount the volume through its driver, and its device if no other pod uses it.

        Raises as `set_up` does.
        """
        link = PodVolumePaths.for_pod(self._host.root, uid).volume(self.directory_name, name)
        if not link.is_symlink():
            return
        mount_point = link.parent.parent / path_component(link.readlink().parts[-2]) / name
        driver = self._driver(mount_point.parent.name.replace("~", "/"))
        async with self._locks(f"{driver.name}/{name}"):
            if is_mounted(mount_point) or mount_point.is_dir():
                await self._unmount_with_driver(driver, "unmount", mount_point)
            if not self._is_used_by_other_pod(uid, name, mount_point.parent.name):
                await self._unmount_device(driver, name)
        with suppress(OSError):
            mount_point.parent.rmdir()  # unless the pod has another volume of the driver

    async def _mount_device(self, volume: VolumeToMount, driver: FlexDriver) -> None:
        options = _options(volume, {})
        device = await self._attach(volume, driver, options)
        with suppress(NotSupportedError):
            device = (await driver.call("waitforattach", device, options)).device
        mount_point = self._device_mount_point(driver.name, volume.name)
        if is_mounted(mount_point):
            return
        make_directory(mount_point)
        try:
            await driver.call("mountdevice", str(mount_point), device, options)
        except NotSupportedError:
            if device:
                read_only = _read_only(volume)
                mode = "ro" if read_only else "rw"
                await format_and_mount(
                    Path(device), mount_point, _source(volume).fs_type, [mode], read_only=read_only
                )

    async def _attach(self, volume: VolumeToMount, driver: FlexDriver, options: str) -> str:
        """Return the device that the cluster's controllers, or else the driver's `attach`, attached."""
        if not self._host.attaches_volumes:
            return await self._host.attached_device(volume, _attached_name(volume))
        try:
            return (await driver.call("attach", options, self._host.options.node_name)).device
        except NotSupportedError:
            return ""

    async def _mount(self, volume: VolumeToMount, driver: FlexDriver, mount_point: Path) -> None:
        make_directory(mount_point)
        try:
            options = _options(volume, _pod_options(volume) | await self._secrets(volume, driver))
            await driver.call("mount", str(mount_point), options)
        except NotSupportedError:
            device = self._device_mount_point(driver.name, volume.name)
            await in_own_thread(lambda: bind_directory(device, mount_point, 0), name="flex volume")
        except BaseException:
            if not is_mounted(mount_point) and not any(mount_point.iterdir()):
                mount_point.rmdir()
            raise

    async def _apply_fs_group(self, volume: VolumeToMount, mount_point: Path, *, new: bool) -> None:
        group = volume.pod.spec.security_context.fs_group
        if group is None:
            return
        # A walk that was interrupted by a kubelet restart is repeated, a complete one is not.
        if new or await in_own_thread(lambda: OwnershipWalk(group).differs(mount_point), name="flex volume"):
            await apply_fs_group(volume.pod, mount_point, self._host.record_event)

    async def _secrets(self, volume: VolumeToMount, driver: FlexDriver) -> dict[str, str]:
        reference = _source(volume).secret_ref
        if reference is None or not reference.name:
            return {}
        secret = await named_secret(self._host, volume, reference)
        if secret.type != driver.name:
            raise VolumePluginError(
                f"couldn't get secret {reference.name} err: cannot get secret of type {driver.name}"
            )
        return {
            f"{_PREFIX}secret/{key}": base64.b64encode(value).decode() for key, value in secret.data.items()
        }

    async def _unmount_device(self, driver: FlexDriver, name: str) -> None:
        mount_point = self._device_mount_point(driver.name, name)
        if not is_mounted(mount_point) and not mount_point.is_dir():
            return
        await self._unmount_with_driver(driver, "unmountdevice", mount_point)
        if self._host.attaches_volumes:
            with suppress(NotSupportedError, MissingHelper):
                await driver.call("detach", name, self._host.options.node_name)

    async def _unmount_with_driver(self, driver: FlexDriver, command: str, mount_point: Path) -> None:
        """Unmount a path through the driver, and then what it left, hence also without a driver."""
        try:
            await driver.capabilities()
            await driver.call(command, str(mount_point))
        except (NotSupportedError, BadSource):
            pass  # the driver is not installed any more, or leaves it to the kubelet
        except VolumePluginError as err:
            now = asyncio.get_running_loop().time()
            if now - self._failing_since.setdefault(mount_point, now) < DRIVER_TIMEOUT_SECONDS:
                raise
            log.error(
                err,
                "Failed to unmount volume through FlexVolume driver, unmounting without it",
                path=mount_point,
            )
        self._failing_since.pop(mount_point, None)
        while is_mounted(mount_point):
            await unmount_with_helper(mount_point)
        with suppress(OSError):
            mount_point.rmdir()  # remaining content is deleted with the pod's directory

    def _driver(self, name: str) -> FlexDriver:
        if name not in self._drivers:
            self._drivers[name] = FlexDriver(self._host.options.flex_drivers, name)
        return self._drivers[name]

    def _device_mount_point(self, driver: str, name: str) -> Path:
        return self._host.root / "plugins/kubernetes.io/flexvolume" / driver / "mounts" / path_component(name)

    def _is_used_by_other_pod(self, uid: str, name: str, driver: str) -> bool:
        """Return whether another pod has a volume with this name of the same driver."""
        # Only names are read: a stat of a mount point would block on an unreachable server.
        pods = [pod / "volumes" for pod in (self._host.root / "pods").iterdir() if pod.name != uid]
        return any(
            (pod / self.directory_name / name).is_symlink() and name in _entry_names(pod / driver)
            for pod in pods
        )


def _source(volume: VolumeToMount) -> Flex:
    assert isinstance(volume.source, Flex)
    return volume.source


def _attached_name(volume: VolumeToMount) -> str:
    """Return the name by which the cluster's controllers attach a volume."""
    return f"{_source(volume).driver}/{volume.name}"


def _read_only(volume: VolumeToMount) -> bool:
    return volume.read_only or (volume.persistent is None and _source(volume).read_only)


def _pod_options(volume: VolumeToMount) -> dict[str, str]:
    pod = volume.pod
    options = {
        "pod.name": pod.metadata.name,
        "pod.namespace": pod.metadata.namespace,
        "pod.uid": pod.uid,
        "serviceAccount.name": pod.spec.service_account_name,
    }
    group = pod.spec.security_context.fs_group
    if group is not None:
        options["mounterArgs.FsGroup"] = str(group)
    return {f"{_PREFIX}{key}": value for key, value in options.items()}


def _options(volume: VolumeToMount, extra: Mapping[str, str]) -> str:
    """Return the options for the driver, in JSON; those of the volume's source take precedence."""
    source = _source(volume)
    options = {
        f"{_PREFIX}fsType": source.fs_type,
        f"{_PREFIX}readwrite": "ro" if _read_only(volume) else "rw",
        f"{_PREFIX}pvOrVolumeName": volume.name,
        **extra,
        **source.options,
    }
    return msgspec.json.encode(dict(sorted(options.items()))).decode()


def _link_mount_point(link: Path, mount_point: Path) -> None:
    """Ensure that the symlink from the plugin's directory to the volume's mount point exists."""
    target = Path("..", mount_point.parent.name, mount_point.name)
    if link.is_symlink() and link.readlink() == target:
        return
    make_directory(link.parent)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _entry_names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []

"""secret: the values of a Secret as files, in memory only.

`named_secret` fetches the Secrets that sources of other volumes reference, for servers and drivers: in the
pod's namespace, for PersistentVolumes in any namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pykubelet.api.core import Secret
from pykubelet.api.pod import Pod
from pykubelet.api.volume import DEFAULT_MODE, KeyToPath, SecretReference, SecretVolume
from pykubelet.apiserver.client import SECRETS
from pykubelet.apiserver.errors import KubeError
from pykubelet.objects.base import ObjectError, PodObjects
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.file_projection import File, FileVolumeWriter, object_files
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount


class SecretPlugin(BaseVolumePlugin):
    """Plugin for secret volumes."""

    directory_name = "kubernetes.io~secret"
    live = True
    slow = False

    def __init__(self, host: VolumeHost) -> None:
        self._objects = host.objects
        self._writer = FileVolumeWriter(host, self.directory_name, in_memory=True)

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Write the files of the current Secret."""
        pod, source = volume.pod, volume.source
        assert isinstance(source, SecretVolume)
        mode = DEFAULT_MODE if source.default_mode is None else source.default_mode
        files = await secret_files(
            self._objects, pod, source.secret_name, source.items, mode, optional=source.optional is True
        )
        return await self._writer.write(pod, volume.name, files)


async def secret_files(
    objects: PodObjects, pod: Pod, name: str, items: Sequence[KeyToPath], mode: int, *, optional: bool
) -> dict[str, File]:
    """Return the files of a Secret. Raises ObjectError, and VolumePluginError for a missing key."""

    async def read() -> Mapping[str, bytes]:
        return (await objects.secret(pod, name)).data

    missing = "references non-existent secret key"
    return await object_files(read(), items, mode, optional=optional, missing=missing)


async def named_secret(host: VolumeHost, volume: VolumeToMount, reference: SecretReference) -> Secret:
    """Return the Secret that a volume's source references. Raises VolumePluginError."""
    own = volume.pod.metadata.namespace
    namespace = (volume.persistent is not None and reference.namespace) or own
    try:
        if namespace == own:
            return await host.objects.secret(volume.pod, reference.name)
        if host.api is None:
            raise ObjectError("this node belongs to no cluster")
        return await host.api.get(SECRETS, reference.name, namespace)
    except (ObjectError, KubeError) as err:
        raise VolumePluginError(f"couldn't get secret {namespace}/{reference.name} err: {err}") from err

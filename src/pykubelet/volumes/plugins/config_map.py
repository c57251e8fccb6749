"""configMap: the values of a ConfigMap as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pykubelet.api.pod import Pod
from pykubelet.api.volume import DEFAULT_MODE, ConfigMapVolume, KeyToPath
from pykubelet.objects.base import PodObjects
from pykubelet.volumes.file_projection import File, FileVolumeWriter, object_files
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount


class ConfigMapPlugin(BaseVolumePlugin):
    """Plugin for configMap volumes."""

    directory_name = "kubernetes.io~configmap"
    live = True
    slow = False

    def __init__(self, host: VolumeHost) -> None:
        self._objects = host.objects
        self._writer = FileVolumeWriter(host, self.directory_name, in_memory=False)

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Write the files of the current ConfigMap."""
        pod, source = volume.pod, volume.source
        assert isinstance(source, ConfigMapVolume)
        mode = DEFAULT_MODE if source.default_mode is None else source.default_mode
        files = await config_map_files(
            self._objects, pod, source.name, source.items, mode, optional=source.optional is True
        )
        return await self._writer.write(pod, volume.name, files)


async def config_map_files(
    objects: PodObjects, pod: Pod, name: str, items: Sequence[KeyToPath], mode: int, *, optional: bool
) -> dict[str, File]:
    """Return the files of a ConfigMap. Raises ObjectError, and VolumePluginError for a missing key."""

    async def read() -> Mapping[str, bytes]:
        found = await objects.config_map(pod, name)
        return found.binary_data | {key: value.encode() for key, value in found.data.items()}

    missing = "configmap references non-existent config key"
    return await object_files(read(), items, mode, optional=optional, missing=missing)

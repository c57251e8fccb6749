"""configMap: the values of a ConfigMap as files."""

from __future__ import annotations

from collections.abc import Sequence

from pykubelet.api.pod import Pod
from pykubelet.api.volume import DEFAULT_MODE, ConfigMapVolume, KeyToPath
from pykubelet.objects.base import ObjectNotFound, PodObjects
from pykubelet.volumes.file_projection import File, Writer, of_keys
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount


class ConfigMapKind(BaseVolumePlugin):
    """Plugin for configMap volumes."""

    folder = "kubernetes.io~configmap"
    live = True
    slow = False

    def __init__(self, given: VolumeHost) -> None:
        self._objects = given.objects
        self._writer = Writer(given, self.folder, in_memory=False)

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Write the files of the current ConfigMap."""
        pod, source = wanted.pod, wanted.source
        assert isinstance(source, ConfigMapVolume)
        mode = DEFAULT_MODE if source.default_mode is None else source.default_mode
        files = await config_map_files(
            self._objects, pod, source.name, source.items, mode, optional=source.optional is True
        )
        return await self._writer.write(pod, wanted.name, files)


async def config_map_files(
    objects: PodObjects, pod: Pod, name: str, items: Sequence[KeyToPath], mode: int, *, optional: bool
) -> dict[str, File]:
    """Return the files of a ConfigMap. Raises ObjectError, and VolumePluginError for a missing key."""
    data: dict[str, bytes] = {}
    try:
        found = await objects.config_map(pod, name)
    except ObjectNotFound:
        if not optional:
            raise
    else:
        data = found.binary_data | {key: value.encode() for key, value in found.data.items()}
    missing = "configmap references non-existent config key"
    return of_keys(data, items, mode, optional=optional, missing=missing)

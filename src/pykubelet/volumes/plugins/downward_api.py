"""downwardAPI: fields and resources of the pod as files."""

from __future__ import annotations

from collections.abc import Sequence

from pykubelet.api.downward_api import field_value, resource_value
from pykubelet.api.pod import Pod
from pykubelet.api.volume import DEFAULT_MODE, DownwardFile, DownwardVolume
from pykubelet.volumes.errors import VolumePluginError, join_reasons
from pykubelet.volumes.file_projection import File, FileVolumeWriter
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount

# Known only after the volumes of the pod are set up.
_TOO_LATE = ("status.podIP", "status.podIPs")


class DownwardApiPlugin(BaseVolumePlugin):
    """Plugin for downwardAPI volumes."""

    directory_name = "kubernetes.io~downward-api"
    live = True
    slow = False

    def __init__(self, host: VolumeHost) -> None:
        self._host = host
        self._writer = FileVolumeWriter(host, self.directory_name, in_memory=True)

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Write the files of the current pod."""
        pod, source = volume.pod, volume.source
        assert isinstance(source, DownwardVolume)
        mode = DEFAULT_MODE if source.default_mode is None else source.default_mode
        files = downward_files(self._host, pod, source.items, mode)
        return await self._writer.write(pod, volume.name, files)


def downward_files(host: VolumeHost, pod: Pod, items: Sequence[DownwardFile], mode: int) -> dict[str, File]:
    """Return the files about a pod. Raises VolumePluginError with the reasons of all missing values."""
    files, problems = {}, []
    for item in items:
        try:
            value = _value(host, pod, item)
        except ValueError as err:
            problems.append(str(err))
        else:
            files[item.path] = File(value.encode(), mode if item.mode is None else item.mode)
    if problems:
        raise VolumePluginError(join_reasons(problems))
    return files


def _value(host: VolumeHost, pod: Pod, item: DownwardFile) -> str:
    if item.field_ref is not None:
        if item.field_ref.field_path in _TOO_LATE:
            raise ValueError(f"unsupported fieldPath: {item.field_ref.field_path}")
        return field_value(item.field_ref, pod, host_ips=host.node.host_ips)
    if item.resource_field_ref is not None:
        return resource_value(
            item.resource_field_ref, pod, None, host.node.allocatable, pod_level=host.node.pod_level
        )
    return ""

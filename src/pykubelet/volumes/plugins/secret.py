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
from pykubelet.objects.base import ObjectError, ObjectNotFound, PodObjects
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.file_projection import File, Writer, of_keys
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount


class SecretKind(BaseVolumePlugin):
    """Plugin for secret volumes."""

    folder = "kubernetes.io~secret"
    live = True
    slow = False

    def __init__(self, given: VolumeHost) -> None:
        self._objects = given.objects
        self._writer = Writer(given, self.folder, in_memory=True)

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Write the files of the current Secret."""
        pod, source = wanted.pod, wanted.source
        assert isinstance(source, SecretVolume)
        mode = DEFAULT_MODE if source.default_mode is None else source.default_mode
        files = await secret_files(
            self._objects, pod, source.secret_name, source.items, mode, optional=source.optional is True
        )
        return await self._writer.write(pod, wanted.name, files)


async def secret_files(
    objects: PodObjects, pod: Pod, name: str, items: Sequence[KeyToPath], mode: int, *, optional: bool
) -> dict[str, File]:
    """Return the files of a Secret. Raises ObjectError, and VolumePluginError for a missing key."""
    data: Mapping[str, bytes] = {}
    try:
        data = (await objects.secret(pod, name)).data
    except ObjectNotFound:
        if not optional:
            raise
    return of_keys(data, items, mode, optional=optional, missing="references non-existent secret key")


async def named_secret(given: VolumeHost, wanted: VolumeToMount, reference: SecretReference) -> Secret:
    """Return the Secret that a volume's source references. Raises VolumePluginError."""
    own = wanted.pod.metadata.namespace
    namespace = (wanted.persistent is not None and reference.namespace) or own
    try:
        if namespace == own:
            return await given.objects.secret(wanted.pod, reference.name)
        if given.api is None:
            raise ObjectError("this node belongs to no cluster")
        return await given.api.get(SECRETS, reference.name, namespace)
    except (ObjectError, KubeError) as err:
        raise VolumePluginError(f"couldn't get secret {namespace}/{reference.name} err: {err}") from err

"""secret: the values of a secret as files, in memory only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pykubelet.api.pod import Pod
from pykubelet.api.volume_files import DEFAULT_MODE, KeyToPath, SecretVolume
from pykubelet.pods.objects import ObjectMissing, PodObjects
from pykubelet.volumes.files import File, of_keys
from pykubelet.volumes.kind import PlainKind, Surroundings, Wanted
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.written import Writer


class SecretKind(PlainKind):
    """Gives volumes of kind secret."""

    folder = "kubernetes.io~secret"
    live = True
    slow = False

    def __init__(self, given: Surroundings) -> None:
        self._objects = given.objects
        self._writer = Writer(given, self.folder, in_memory=True)

    async def set_up(self, wanted: Wanted) -> MountedVolume:
        """Have the files as the secret is now."""
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
    """Give the files of a secret; raises ObjectError, and KindError for a key that is not there."""
    data: Mapping[str, bytes] = {}
    try:
        data = (await objects.secret(pod, name)).data
    except ObjectMissing:
        if not optional:
            raise
    return of_keys(data, items, mode, optional=optional, missing="references non-existent secret key")

"""A pod's volumes: there before its containers start, up to date while they run, gone after they end.

Everything may be repeated, after any interruption and by an agent that never saw the pod: mounting
looks at the disk, unmounting at the disk and the mount table. A pod's volumes are set up side by side,
and each that cannot be had is told. How a kind of volume comes about is the kind's own business
(`kinds.py`).

File systems may block (a dead server behind a hostPath, gigabytes to delete), so work that can is done
in a thread; a caller that is cancelled waits for it, or the next step would race with it. One caller at
a time acts for a pod: its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pykubelet.api.pod import Container, Pod
from pykubelet.api.volume import Volume
from pykubelet.pods.objects import ObjectError, PodObjects
from pykubelet.tasks import finish_in_thread
from pykubelet.volumes.errors import KindError, VolumeError, set_up_failed, told
from pykubelet.volumes.folders import VolumeFolders
from pykubelet.volumes.kind import NodeView, Surroundings
from pykubelet.volumes.kinds import make_kinds
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.sub_path import bind_sub_paths
from pykubelet.volumes.take_down import needs_take_down, take_down
from pykubelet.volumes.together import side_by_side


class PodVolumes:
    """Mounts, refreshes and unmounts pods' volumes below the agent's root."""

    def __init__(
        self,
        root: Path,
        *,
        objects: PodObjects,
        node: NodeView,
        memory_limit: Callable[[Pod], int | None],
        allocatable_memory: int,
        pod_level: bool = True,
    ) -> None:
        """Take the agent's root, and what volumes show or are bounded by.

        `memory_limit` and `allocatable_memory`: what bounds a pod's memory and all pods' (bytes);
        `pod_level`: whether resources of the whole pod count (`PodLevelResources`).
        """
        self._root = root
        self._kinds = make_kinds(
            Surroundings(root, objects, node, memory_limit, allocatable_memory, pod_level)
        )
        self._folders = frozenset(kind.folder for kind in self._kinds.values() if kind.folder)

    async def mount(self, pod: Pod) -> dict[str, MountedVolume]:
        """Have all of the pod's volumes ready, by name.

        Raises VolumeError, which tells of each that is not.
        """
        return await self._set_up(pod, pod.spec.volumes)

    async def refresh(self, pod: Pod) -> None:
        """Bring the content of the pod's live volumes up to date; nothing is written when nothing changed.

        Raises VolumeError, which tells of each volume that could not be; it keeps what it had.
        """
        live = [volume for volume in pod.spec.volumes if self._is_live(volume)]
        if live:
            await self._set_up(pod, live)

    async def sub_paths(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        """Have parts of volumes ready for a container; gives their paths on the host.

        `paths` has the path inside of the volume for each mount of the container, by its index, that
        shows only a part; raises VolumeError in words that tell nothing of the host.
        """
        if not any(paths.values()):
            return {}
        root = self._root.resolve()
        return await finish_in_thread(lambda: bind_sub_paths(root, pod, container, mounted, paths))

    async def unmount(self, uid: str) -> None:
        """Take down whatever a pod has mounted, and delete what lived with it; raises VolumeError."""
        try:
            folders = VolumeFolders.of(self._root, uid)
        except ValueError as err:
            raise VolumeError(str(err)) from err
        if needs_take_down(folders, self._folders):
            await finish_in_thread(lambda: take_down(folders, self._folders))

    def _is_live(self, volume: Volume) -> bool:
        return any(kind in self._kinds and self._kinds[kind].live for kind in volume.kinds)

    async def _set_up(self, pod: Pod, volumes: Sequence[Volume]) -> dict[str, MountedVolume]:
        outcomes = await side_by_side([self._one(pod, volume) for volume in volumes])
        if problems := [outcome for outcome in outcomes if isinstance(outcome, str)]:
            raise VolumeError(*problems)
        return {
            volume.name: outcome
            for volume, outcome in zip(volumes, outcomes, strict=True)
            if isinstance(outcome, MountedVolume)
        }

    async def _one(self, pod: Pod, volume: Volume) -> MountedVolume | str:
        """Have one volume; gives the problem instead of raising it, so that the others get their try."""
        kinds = volume.kinds
        try:
            if len(kinds) != 1 or kinds[0] not in self._kinds:
                what = " and ".join(kinds) or "none that is known"
                raise KindError(f"its kind is {what}; supported are {', '.join(self._kinds)}")
            return await self._kinds[kinds[0]].set_up(pod, volume)
        except (KindError, ObjectError, ValueError) as err:
            return set_up_failed(volume.name, err)
        except OSError as err:
            return set_up_failed(volume.name, told(err))

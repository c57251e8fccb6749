"""Volumes whose files the agent writes: what configMap, secret, downwardAPI and projected share.

Underneath is an emptyDir, made once per volume and marked when it is complete; what may be secret is
in memory only. The files are replaced all at once (`atomic_write.py`), so setting up again is
bringing up to date. Sub-paths of such a volume keep showing the version they were bound to.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger
from pykubelet.tasks import finish_in_thread
from pykubelet.volumes.atomic_write import publish
from pykubelet.volumes.empty_dir import MEMORY, make_empty_dir, memory_options
from pykubelet.volumes.files import Files
from pykubelet.volumes.folders import VolumeFolders
from pykubelet.volumes.kind import Surroundings
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.nested import make_mount_points, nested_mount_points

log = get_logger(__name__)

IN_PLACE = 64 << 10
"""Bytes in memory that are mounted, compared and written without a thread: using one would take longer."""


class Writer:
    """Writes the files of volumes of one kind, below that kind's folder."""

    def __init__(
        self,
        given: Surroundings,
        folder: str,
        *,
        in_memory: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._given = given
        self._folder = folder
        self._in_memory = in_memory
        self._clock = clock

    async def write(self, pod: Pod, volume: str, files: Files) -> MountedVolume:
        """Have a volume with exactly these files; raises KindError, ValueError and OSError."""
        folders = VolumeFolders.of(self._given.root, pod.uid)
        path, marker = folders.volume(self._folder, volume), folders.marker(volume, wrapped=True)
        points = nested_mount_points(pod, volume)
        options = memory_options(self._given, pod) if self._in_memory else ""
        medium = MEMORY if self._in_memory else ""
        group = pod.spec.security_context.fs_group

        def work() -> None:
            make_empty_dir(path, marker, medium, options, group)
            make_mount_points(path, points)
            if publish(path, files, group, moment=self._clock()):
                log.v(4).info(
                    "Wrote the files of a volume", pod=pod.full_name, volume=volume, files=len(files)
                )

        small = sum(len(file.data) for file in files.values()) <= IN_PLACE
        if self._in_memory and small:
            work()
        else:
            await finish_in_thread(work)
        return MountedVolume(str(path), read_only=True, relabel=True)


def fs_user(pod: Pod) -> int | None:
    """Return the user that all containers of a pod run as; None when they differ or leave it to the image.

    Ephemeral containers do not count: one that is added to a running pod must not change who may read the
    pod's tokens, which without a common user are readable by every process of the pod.
    """
    spec = pod.spec
    users = set()
    for container in (*spec.init_containers, *spec.containers):
        own = container.security_context.run_as_user if container.security_context is not None else None
        users.add(own if own is not None else spec.security_context.run_as_user)
    return users.pop() if len(users) == 1 else None

"""Logs that outlived their containers and pods.

Folders below /var/log/pods are named after their pod, so those of pods that are gone can be told
from the others; links in /var/log/containers are followed to see whether their log still exists.
Only what has such a name, and leads to such a folder, is touched: both places are shared with other
programs, and perhaps with another agent.
"""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError, NotFound
from pykubelet.host.mounts import remove_tree
from pykubelet.logs import get_logger
from pykubelet.runtime.names import container_id_of_link, pod_uid_of_log_dir

log = get_logger(__name__)


def plan_log_folders(names: Iterable[str], is_deleted: Callable[[str], bool]) -> list[str]:
    """Decide which folders go, by their names: those of deleted pods, and none that is no pod's."""
    return sorted(
        name
        for name in names
        if name.count("_") == 2 and all(name.split("_")) and is_deleted(pod_uid_of_log_dir(name))
    )


class LogCollector:
    """Deletes logs of what is gone."""

    def __init__(self, cri: Cri, pod_logs: Path, legacy_logs: Path | None) -> None:
        self._cri = cri
        self._pod_logs = pod_logs
        self._legacy_logs = legacy_logs

    def drop_container_logs(self, log_path: str) -> None:
        """Delete a container's log and what was rotated away from it. Raises OSError. Blocks."""
        path = Path(os.path.normpath(log_path))
        if not log_path or self._pod_logs not in path.parents:
            return
        for file in path.parent.glob(f"{glob.escape(path.name)}*"):
            try:
                file.unlink(missing_ok=True)
            except IsADirectoryError:
                remove_tree(file)

    async def drop_folders(self, is_deleted: Callable[[str], bool]) -> None:
        """Delete the folders of deleted pods; what fails is logged and left for the next time."""
        try:
            entries = [
                entry.name for entry in os.scandir(self._pod_logs) if entry.is_dir(follow_symlinks=False)
            ]
        except FileNotFoundError:
            return
        for name in plan_log_folders(entries, is_deleted):
            log.v(4).info("Removing pod logs", podUID=pod_uid_of_log_dir(name))
            try:
                await asyncio.to_thread(remove_tree, self._pod_logs / name)
            except OSError as err:
                log.error(err, "Failed to remove pod logs directory", path=name)

    async def drop_dangling_links(self) -> None:
        """Delete links whose log is gone, if their container is gone or has ended.

        While a log is rotated it does not exist for a moment.
        """
        if self._legacy_logs is None:
            return
        for link in self._legacy_logs.glob("*.log"):
            if not link.is_symlink() or link.exists() or self._pod_logs not in link.readlink().parents:
                continue
            container_id = container_id_of_link(link.name)
            if container_id is None or await self._has_ended(container_id):
                link.unlink(missing_ok=True)
                log.v(4).info("Removed symlink", path=str(link))

    async def _has_ended(self, container_id: str) -> bool:
        try:
            status = (await self._cri.runtime.container_status(container_id)).status
        except NotFound:
            return True
        except CriError as err:
            log.error(err, "Cannot tell whether a container has ended", containerID=container_id)
            return False
        return status.state == pb.CONTAINER_EXITED

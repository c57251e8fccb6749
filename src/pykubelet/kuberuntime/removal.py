"""Removal of exited containers, including those whose containerd task is orphaned.

The calls of a kubelet that is killed are cancelled. containerd then cleans up after a cancelled start for
about two seconds, during which the container cannot be removed. Sometimes the cleanup fails and leaves a task
that CRI does not show and that prevents the removal of the container.
"""

from __future__ import annotations

from pathlib import Path

from pykubelet.api.pod import Pod
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.containerd import delete_task
from pykubelet.kuberuntime.observed import ObservedContainer
from pykubelet.kuberuntime.paths import legacy_log_link
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, NotFound

log = get_logger(__name__)
_LOST_TASK = "cannot delete running task"
_STARTING = "starting state"


class ContainerRemover:
    """Removes exited containers of pods that continue to run, with the links to their logs."""

    def __init__(self, cri: RuntimeConnection, legacy_logs: Path | None) -> None:
        """Initialize with the directory of links to container logs, None without such links."""
        self._cri = cri
        self._legacy_logs = legacy_logs

    async def remove(self, pod: Pod, container: ObservedContainer) -> None:
        """Remove a container and the link to its log. Raises CriError.

        The log file stays until the pod is removed, because the files are counted as restarts. So the link
        would never dangle, and the garbage collection of logs would keep it.
        """
        if self._legacy_logs is not None:
            meta = pod.metadata
            # Before the container: a kubelet killed in between still finds the container and retries.
            name = legacy_log_link(meta.name, meta.namespace, container.name, container.id)
            try:
                (self._legacy_logs / name).unlink(missing_ok=True)
            except OSError as err:
                log.error(err, "Failed to remove legacy symbolic link", path=name, containerID=container.id)
        await remove_container(self._cri, container.id)


async def remove_container(cri: RuntimeConnection, container_id: str) -> None:
    """Remove a container that does not run, if it exists. Raises CriError."""
    try:
        await _remove(cri, container_id)
    except CriError as err:
        if _LOST_TASK not in err.message:
            raise
        log.warning("Deleting orphaned containerd task of container", containerID=container_id, err=err)
        await delete_task(cri.runtime_channel, container_id)
        await _remove(cri, container_id)


def is_starting(err: CriError) -> bool:
    """Return whether the removal failed because a start by a previous kubelet is still in progress."""
    return _STARTING in err.message


async def _remove(cri: RuntimeConnection, container_id: str) -> None:
    try:
        await cri.runtime.remove_container(container_id)
    except NotFound:
        return

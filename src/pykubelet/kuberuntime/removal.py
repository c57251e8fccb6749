"""Removing containers that have ended, also those that the runtime has lost its grip on.

An agent that is killed cuts its calls off. containerd then cleans up after a start for about two
seconds, in which the container can not be removed; and at times it fails to, and is left with a
process that CRI does not show and that keeps the container from ever being removed.
"""

from __future__ import annotations

from pathlib import Path

from pykubelet.api.pod import Pod
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.containerd import delete_task
from pykubelet.kuberuntime.observe import ObservedContainer
from pykubelet.kuberuntime.paths import legacy_log_link
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, NotFound

log = get_logger(__name__)
_LOST_TASK = "cannot delete running task"
_STARTING = "starting state"


class ContainerRemover:
    """Removes exited containers of pods that go on, with the links to their logs."""

    def __init__(self, cri: RuntimeConnection, legacy_logs: Path | None) -> None:
        """Take the runtime and the directory of links to container logs, None without such links."""
        self._cri = cri
        self._legacy_logs = legacy_logs

    async def remove(self, pod: Pod, container: ObservedContainer) -> None:
        """Remove a container and the link to its log. Raises CriError.

        The log file stays until the pod is removed, because the files are counted as restarts. So the link
        would never dangle, and the garbage collection of logs would keep it.
        """
        if self._legacy_logs is not None:
            meta = pod.metadata
            # Before the container: a kubelet that is killed in between finds the container, not the link.
            name = legacy_log_link(meta.name, meta.namespace, container.name, container.id)
            try:
                (self._legacy_logs / name).unlink(missing_ok=True)
            except OSError as err:
                log.error(err, "Failed to remove legacy symbolic link", path=name, containerID=container.id)
        await remove_container(self._cri, container.id)


async def remove_container(cri: RuntimeConnection, container_id: str) -> None:
    """Remove a container that does not run and may be gone already; raises CriError."""
    try:
        await _remove(cri, container_id)
    except CriError as err:
        if _LOST_TASK not in err.message:
            raise
        log.warning(
            "The runtime has lost a container's process: ending it", containerID=container_id, err=err
        )
        await delete_task(cri.runtime_channel, container_id)
        await _remove(cri, container_id)


def is_starting(err: CriError) -> bool:
    """Whether a container could not be removed because an earlier agent's start of it is not over."""
    return _STARTING in err.message


async def _remove(cri: RuntimeConnection, container_id: str) -> None:
    try:
        await cri.runtime.remove_container(container_id)
    except NotFound:
        return

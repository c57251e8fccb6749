"""Removing containers that have ended, also those that the runtime has lost its grip on.

An agent that is killed cuts its calls off. containerd then cleans up after a start for about two
seconds, in which the container can not be removed; and at times it fails to, and is left with a
process that CRI does not show and that keeps the container from ever being removed.
"""

from __future__ import annotations

from pykubelet.cri.connect import Cri
from pykubelet.cri.containerd import delete_task
from pykubelet.cri.errors import CriError, NotFound
from pykubelet.logs import get_logger

log = get_logger(__name__)

_LOST_TASK = "cannot delete running task"
_STARTING = "starting state"


async def remove_container(cri: Cri, container_id: str) -> None:
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


async def _remove(cri: Cri, container_id: str) -> None:
    try:
        await cri.runtime.remove_container(container_id)
    except NotFound:
        return

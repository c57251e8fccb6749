"""Readiness of static pods' containers, kept across kubelet restarts.

A pod of the API server has its last status, so a restarted kubelet knows which of its containers were
started and ready. A manifest has no status, and on a standalone node no API server stores it. So the
kubelet writes the `started` and `ready` of static pods that have startup or readiness probes to
`<root-dir>/pykubelet/static-pods-readiness`, at most `WRITE_SECONDS` after a change, and the next process
starts with them: a pod that was not ready is not reported Ready, and one that was does not flap. A missing
or damaged file is ignored; the prober then behaves as without a previous status.

Only the event loop's thread calls this; the file is written in another thread.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import ContainerStatus, PodStatus
from pykubelet.logs import get_logger
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.util.files import write_atomically
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
FILE = Path("pykubelet", "static-pods-readiness")
"""Path of the file below the kubelet's root directory."""
WRITE_SECONDS = 0.2
"""Seconds between a change and its write, which includes all later changes of that time."""
RETRY_SECONDS = 30.0
"""Seconds until a failed write is retried."""
_PRIVATE = 0o600
_MAX_BYTES = 8 * 1024 * 1024


class Readiness(msgspec.Struct, frozen=True):
    """Last reported readiness of one container."""

    id: str
    """Container ID as in a status: `containerd://…`."""
    started: bool
    ready: bool


_Entries = dict[str, dict[str, Readiness]]


class StaticReadiness:
    """Last reported readiness of static pods, by pod uid and container name."""

    def __init__(self, root_dir: Path) -> None:
        self._file = root_dir / FILE
        self._entries = _read(self._file)
        self._changed = asyncio.Event()

    def restore(self, pod: Pod) -> Pod:
        """Return a static pod with the last reported readiness of its containers, if it has no statuses."""
        known = self._entries.get(pod.uid)
        if known is None or pod.status.container_statuses:
            return pod
        initial = {container.name for container in pod.spec.init_containers}
        statuses = [
            ContainerStatus(
                name=name, container_id=readiness.id, started=readiness.started, ready=readiness.ready
            )
            for name, readiness in known.items()
        ]
        status = msgspec.structs.replace(
            pod.status,
            container_statuses=[status for status in statuses if status.name not in initial],
            init_container_statuses=[status for status in statuses if status.name in initial],
        )
        return msgspec.structs.replace(pod, status=status)

    def record(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        """Record the new status of a pod, if it is a static pod with probes."""
        if not is_static_pod(pod) or not _is_probed(pod):
            return
        found = {
            container.name: Readiness(container.container_id, container.started is True, container.ready)
            for container in (*status.container_statuses, *status.init_container_statuses)
            if container.container_id is not msgspec.UNSET and container.container_id
        }
        if self._entries.get(pod.uid, {}) != found:
            self._entries[pod.uid] = found
            self._changed.set()

    def forget(self, uid: str) -> None:
        """Remove a terminated pod."""
        if self._entries.pop(uid, None) is not None:
            self._changed.set()

    def retain(self, is_desired: Callable[[str], bool]) -> None:
        """Remove all pods except those whose uid is desired."""
        for uid in [uid for uid in self._entries if not is_desired(uid)]:
            self.forget(uid)

    async def run(self) -> None:
        """Write changes to the file until cancelled; pending changes are written on cancellation."""
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(WRITE_SECONDS)
                try:
                    await finish_in_thread(functools.partial(_write, self._file, self._content()))
                except OSError as err:
                    log.error(err, "Failed to write readiness of static pods", path=self._file)
                    self._changed.set()
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            if self._changed.is_set():
                try:
                    _write(self._file, self._content())
                except OSError as err:
                    log.error(err, "Failed to write readiness of static pods", path=self._file)

    def _content(self) -> bytes:
        self._changed.clear()
        return msgspec.json.encode(self._entries)


def _is_probed(pod: Pod) -> bool:
    return any(
        container.readiness_probe is not None or container.startup_probe is not None
        for container in (*pod.spec.containers, *pod.spec.init_containers)
    )


def _read(file: Path) -> _Entries:
    try:
        with file.open("rb") as opened:
            return msgspec.json.decode(opened.read(_MAX_BYTES), type=_Entries)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as err:
        log.error(err, "Failed to read readiness of static pods", path=file)
        return {}


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, content, _PRIVATE)

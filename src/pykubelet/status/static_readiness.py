"""Readiness of static pods' containers, kept over restarts of the kubelet.

A pod of the API server brings its last status along, so a kubelet that restarts knows which of its containers
were started and ready. A manifest has no status, and a standalone node has nobody else who kept it. So the
kubelet writes the `started` and `ready` of static pods that have startup or readiness probes to
`<root-dir>/pykubelet/static-pods-readiness`, `WRITE_SECONDS` after a change at the latest, and the next
process begins with them: a pod that was not ready is not reported Ready, one that was does not flap. A file
that is missing or damaged is ignored; then the prober presumes what it does without any memory.

Only the event loop's thread calls this; the file is written in another one.
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
from pykubelet.podconfig.static_pods import is_static_pod, write_atomically
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
FILE = Path("pykubelet", "static-pods-readiness")
"""Path of the file below the kubelet's root directory."""
WRITE_SECONDS = 0.2
"""Seconds between a change and its being written, with all others of that time."""
RETRY_SECONDS = 30.0
"""Seconds until a failed write is retried."""
_PRIVATE = 0o600
_MAX_BYTES = 8 * 1024 * 1024


class Readiness(msgspec.Struct, frozen=True):
    """What was reported of one container."""

    id: str
    """As in a status: `containerd://…`."""
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
        """Return a static pod with the readiness that was last reported of its containers, if any was."""
        known = self._entries.get(pod.uid)
        if known is None or pod.status.container_statuses:
            return pod
        initial = {container.name for container in pod.spec.init_containers}
        statuses = [
            ContainerStatus(name=name, container_id=one.id, started=one.started, ready=one.ready)
            for name, one in known.items()
        ]
        status = msgspec.structs.replace(
            pod.status,
            container_statuses=[one for one in statuses if one.name not in initial],
            init_container_statuses=[one for one in statuses if one.name in initial],
        )
        return msgspec.structs.replace(pod, status=status)

    def record(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        """Record a new status of a pod; of no interest unless it is a static pod with probes."""
        if not is_static_pod(pod) or not _is_probed(pod):
            return
        found = {
            one.name: Readiness(one.container_id, one.started is True, one.ready)
            for one in (*status.container_statuses, *status.init_container_statuses)
            if one.container_id is not msgspec.UNSET and one.container_id
        }
        if self._entries.get(pod.uid, {}) != found:
            self._entries[pod.uid] = found
            self._changed.set()

    def forget(self, uid: str) -> None:
        """Drop a pod that is gone."""
        if self._entries.pop(uid, None) is not None:
            self._changed.set()

    def retain(self, is_desired: Callable[[str], bool]) -> None:
        """Drop all pods but those whose uid is desired."""
        for uid in [uid for uid in self._entries if not is_desired(uid)]:
            self.forget(uid)

    async def run(self) -> None:
        """Keep the file up to date until cancelled; what is new is written at last."""
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

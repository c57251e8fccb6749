"""State of a node shutdown: the flag, its times, and the final statuses of pods.

- `NodeShutdownState` is in memory: whether the node is shutting down. Pod admission and the node status read
  it.
- `ShutdownTimes` are in `graceful_node_shutdown_state`, upstream's file, and in two metrics.
- `FinalStatuses` are in `graceful_node_shutdown_pods`: the statuses of pods that a shutdown terminates, until
  the API server has them. The kubelet may be killed and the host may lose power at any point. The next
  kubelet process does not start such a pod again, and reports its status (kubernetes #110755, #112443,
  #124448).

Both files are replaced atomically. A file that cannot be read is logged and counts as empty; a failed write
is logged and does not delay the shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from pykubelet.admission.handler import AdmitRejection, PodAdmitAttributes
from pykubelet.api.meta import ObjectStruct, from_json, to_json
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.logs import get_logger
from pykubelet.node.shutdown_groups import NODE_MESSAGE, REJECTED_MESSAGE, REJECTED_REASON
from pykubelet.util.files import write_atomically
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
STATE_FILE = "graceful_node_shutdown_state"
STATUSES_FILE = "graceful_node_shutdown_pods"
MAX_FILE_BYTES = 64 * 1024 * 1024
"""Largest file that is read; the statuses of 500 pods have about 2 MB."""
_ZERO_TIME = "0001-01-01T00:00:00Z"
"""Time that is not set, as upstream writes it."""


class NodeShutdownState:
    """Whether the node is shutting down; the shutdown manager sets it."""

    def __init__(self) -> None:
        self._active = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def active(self) -> bool:
        """Whether the node is shutting down."""
        return self._active

    def set(self, active: bool) -> None:
        """Set whether the node is shutting down."""
        if active != self._active:
            self._active = active
            for listener in self._listeners:
                listener()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change; it must not block."""
        self._listeners.append(listener)

    def problems(self) -> list[str]:
        """Return the reason why the node is not ready; empty if it is not shutting down."""
        return [NODE_MESSAGE] if self._active else []


class ShutdownAdmission:
    """Admission handler that rejects pods while the node is shutting down (`PodAdmitHandler`)."""

    for_running = False

    def __init__(self, state: NodeShutdownState) -> None:
        self._state = state

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Return the rejection of a pod, or None to admit it."""
        return AdmitRejection(REJECTED_REASON, REJECTED_MESSAGE) if self._state.active else None


class _Times(msgspec.Struct, rename="camel"):
    start_time: str = _ZERO_TIME
    end_time: str = _ZERO_TIME


class ShutdownTimes:
    """Start and end of the last node shutdown, in upstream's file and metrics."""

    def __init__(self, directory: Path, registry: CollectorRegistry | None = None) -> None:
        """Initialize with the times in the file of a directory."""
        self._path = directory / STATE_FILE
        self._started = Gauge(
            "kubelet_graceful_shutdown_start_time_seconds",
            "Last graceful shutdown start time since unix epoch in seconds",
            registry=registry,
        )
        self._ended = Gauge(
            "kubelet_graceful_shutdown_end_time_seconds",
            "Last graceful shutdown end time since unix epoch in seconds",
            registry=registry,
        )
        self._times = _Times()
        try:
            if (data := _read(self._path)) is not None:
                self._times = msgspec.json.decode(data, type=_Times)
                self._started.set(_seconds(self._times.start_time))
                self._ended.set(_seconds(self._times.end_time))
        except (OSError, ValueError) as err:
            log.error(err, "Failed to load graceful shutdown state", path=self._path)

    async def start(self, now: datetime) -> None:
        """Record the start of a shutdown."""
        self._started.set(int(now.timestamp()))
        self._ended.set(0)
        self._times = _Times(start_time=_text(now))
        await self._write()

    async def end(self, now: datetime) -> None:
        """Record the end of a shutdown."""
        self._ended.set(int(now.timestamp()))
        self._times = _Times(start_time=self._times.start_time, end_time=_text(now))
        await self._write()

    async def _write(self) -> None:
        await _store(self._path, msgspec.json.encode(self._times), 0o644)


class _Record(ObjectStruct):
    pods: dict[str, PodStatus] = {}


class FinalStatuses(Mapping[str, PodStatus]):
    """Statuses of pods that a node shutdown terminates, by uid, until the API server has them.

    `handle_status` is a listener of the status store. Changes are on disk after `flush`.
    """

    def __init__(self, directory: Path) -> None:
        """Initialize with the statuses in the file of a directory."""
        self._path = directory / STATUSES_FILE
        self._statuses: dict[str, PodStatus] = {}
        self._written: bytes | None = None
        self._lock = asyncio.Lock()
        self._added = asyncio.Event()
        try:
            self._written = _read(self._path)
            if self._written is not None:
                self._statuses = from_json(_Record, self._written).pods
        except (OSError, ValueError) as err:
            log.error(err, "Failed to load the final statuses of pods", path=self._path)

    def __getitem__(self, uid: str) -> PodStatus:
        return self._statuses[uid]

    def __iter__(self) -> Iterator[str]:
        return iter(self._statuses)

    def __len__(self) -> int:
        return len(self._statuses)

    def add(self, uid: str, status: PodStatus) -> None:
        """Record that a shutdown terminates a pod."""
        self._statuses[uid] = status
        self._added.set()

    async def wait_any(self) -> None:
        """Wait until there are statuses."""
        if not self._statuses:
            self._added.clear()
            await self._added.wait()

    def handle_status(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        """Handle a new status of a pod."""
        if pod.uid in self._statuses:
            self._statuses[pod.uid] = status

    def discard(self, uid: str) -> None:
        """Remove the status of a pod: the API server has it, or does not have the pod."""
        self._statuses.pop(uid, None)

    async def flush(self) -> None:
        """Write the statuses to disk if they have changed; a failure is logged."""
        async with self._lock:
            content = to_json(_Record(pods=self._statuses)) if self._statuses else None
            if content == self._written:
                return
            # A cancelled write completes in its thread: until it is awaited, the file may be either.
            self._written = b""
            if content is None:
                try:
                    await finish_in_thread(partial(self._path.unlink, missing_ok=True))
                except OSError as err:
                    log.error(err, "Failed to remove the final statuses of pods", path=self._path)
                    return
            elif not await _store(self._path, content, 0o600):
                return
            self._written = content


def _read(path: Path) -> bytes | None:
    """Return the contents of a file; None if it does not exist. Raises OSError and ValueError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    return data


async def _store(path: Path, content: bytes, mode: int) -> bool:
    """Replace a file durably; return whether that succeeded."""
    try:
        await finish_in_thread(partial(write_atomically, path, content, mode, sync_directory=True))
    except OSError as err:
        log.error(err, "Failed to store graceful shutdown state", path=path)
        return False
    return True


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _seconds(text: str) -> int:
    """Return the seconds since 1970 of a time in the file; 0 if it is not set. Raises ValueError."""
    if text == _ZERO_TIME:
        return 0
    # Upstream writes nanoseconds, of which Python reads six digits.
    seconds, dot, rest = text.partition(".")
    zone = rest.lstrip("0123456789") if dot else ""
    return int(datetime.fromisoformat(seconds + zone).timestamp())

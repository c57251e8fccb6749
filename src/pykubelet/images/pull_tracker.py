"""Pulls in progress and their measured progress.

`PullTracker` owns the list of the pulls that hold a pull slot. While there is one, it measures all of them
every second, if the runtime has a `ProgressSource`; the first measurement is a second after the start, so a
fast pull costs nothing. A measurement that fails or takes too long leaves the last values, and never delays
a pull.

The text for a container's waiting message changes at most every ten seconds, and is empty in the first ten:
each change is a status update for the API server. Listeners are called with the images whose text changed.

All state is in memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pykubelet.images.image_reference import ImageName, InvalidImageName, parse_image_name
from pykubelet.images.pull_progress import PullProgress
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, Unimplemented
from pykubelet.util.tasks import TaskScope
from pykubelet.util.text import format_size

log = get_logger(__name__)
POLL_SECONDS = 1.0
"""Seconds between two measurements."""
MEASURE_SECONDS = 5.0
"""Seconds after which a measurement is given up."""
MESSAGE_SECONDS = 10.0
"""Seconds without a waiting message at first, and between two changes of it."""


@dataclass(frozen=True, slots=True)
class RunningPull:
    """A pull that holds a slot."""

    id: int
    name: ImageName
    started: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """Measured progress of one pull."""

    done_bytes: int
    total_bytes: int
    done_layers: int
    total_layers: int


class ProgressSource(Protocol):
    """A runtime that reports the progress of pulls."""

    async def measure(self, pulls: Sequence[RunningPull]) -> Mapping[int, LayerProgress]:
        """Return the progress of the pulls for which it is certain, by their id. Raises CriError."""
        ...


@dataclass(slots=True)
class _Tracked:
    pull: RunningPull
    progress: PullProgress
    message: str = ""
    message_due: float = 0.0
    """Loop time from which the message may change."""


class PullTracker:
    """Pulls in progress of one node; without a `source` their progress is unknown."""

    def __init__(
        self,
        source: ProgressSource | None,
        tasks: TaskScope,
        *,
        clock: Callable[[], float] = time.time,
        interval: float = POLL_SECONDS,
    ) -> None:
        self._source = source
        self._tasks = tasks
        self._clock = clock
        self._interval = interval
        self._tracked: dict[int, _Tracked] = {}
        self._ids = itertools.count()
        self._poller: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def add_listener(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call `listener` with the images (names for the runtime) whose waiting message changed."""
        self._listeners.append(listener)

    def pulls(self) -> list[PullProgress]:
        """Return the pulls in progress, the oldest first."""
        return [tracked.progress for tracked in self._tracked.values()]

    def message(self, image: str) -> str:
        """Return the waiting message of containers that wait for an image, as the pod names it, or ""."""
        if not self._tracked or not (name := self.runtime_name(image)):
            return ""
        messages = (item.message for item in self._tracked.values() if item.pull.name.for_runtime == name)
        return next(filter(None, messages), "")

    @staticmethod
    def runtime_name(image: str) -> str:
        """Return the runtime's name of an image, as listeners get it; "" for an invalid one."""
        try:
            return parse_image_name(image).for_runtime
        except InvalidImageName:
            return ""

    @contextmanager
    def track(self, image: str) -> Iterator[None]:
        """List a pull, as the pod names the image, as in progress within the context."""
        try:
            name = parse_image_name(image)
        except InvalidImageName:
            yield
            return
        pull = RunningPull(next(self._ids), name, self._clock())
        due = asyncio.get_running_loop().time() + MESSAGE_SECONDS
        self._tracked[pull.id] = _Tracked(pull, PullProgress(image, pull.started), message_due=due)
        self._ensure_poller()
        try:
            yield
        finally:
            del self._tracked[pull.id]

    def _ensure_poller(self) -> None:
        if self._source is None or (self._poller is not None and not self._poller.done()):
            return
        work = self._poll(self._source)
        try:
            self._poller = self._tasks.start(work, name="pull-progress")
        except RuntimeError:
            # The kubelet is stopping.
            work.close()

    async def _poll(self, source: ProgressSource) -> None:
        """Measure until no pull is in progress."""
        while True:
            await asyncio.sleep(self._interval)
            if not self._tracked:
                return
            try:
                async with asyncio.timeout(MEASURE_SECONDS):
                    measured = await source.measure([item.pull for item in self._tracked.values()])
            except Unimplemented as err:
                log.info("Runtime does not report the progress of pulls", err=err)
                self._source = None
                return
            except (CriError, TimeoutError) as err:
                log.v(4).info("Failed to measure the progress of pulls", err=err)
                continue
            self._record(measured)

    def _record(self, measured: Mapping[int, LayerProgress]) -> None:
        now, changed = asyncio.get_running_loop().time(), set()
        for id, found in measured.items():
            # It may have ended during the measurement.
            if (tracked := self._tracked.get(id)) is None:
                continue
            tracked.progress = msgspec.structs.replace(
                tracked.progress,
                done_bytes=found.done_bytes,
                total_bytes=found.total_bytes,
                done_layers=found.done_layers,
                total_layers=found.total_layers,
            )
            text = waiting_message(tracked.progress)
            if now >= tracked.message_due and text != tracked.message:
                tracked.message, tracked.message_due = text, now + MESSAGE_SECONDS
                changed.add(tracked.pull.name.for_runtime)
        if changed:
            for listener in self._listeners:
                listener(frozenset(changed))


def waiting_message(progress: PullProgress) -> str:
    """Return the message of a container that waits for a pull of which the progress is known."""
    image = json.dumps(progress.image, ensure_ascii=False)
    return (
        f"Pulling image {image}: {format_size(progress.done_bytes or 0)} of "
        f"{format_size(progress.total_bytes or 0)}, {progress.done_layers} of {progress.total_layers} layers"
    )

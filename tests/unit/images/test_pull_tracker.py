"""Pulls in progress: measurements, waiting messages, and a source that hangs or fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import pytest

from pykubelet.images.pull_progress import PullProgress
from pykubelet.images.pull_tracker import (
    MEASURE_SECONDS,
    LayerProgress,
    PullTracker,
    RunningPull,
    waiting_message,
)
from pykubelet.transport.errors import CriError, Unavailable, Unimplemented
from pykubelet.util.tasks import TaskScope

pytestmark = pytest.mark.looptime

MIB = 1024 * 1024


class Source:
    """A source whose pulls receive a MiB per measurement."""

    def __init__(self) -> None:
        self.measured = 0
        self.error: CriError | None = None
        self.hangs = False

    async def measure(self, pulls: Sequence[RunningPull]) -> Mapping[int, LayerProgress]:
        self.measured += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        done = self.measured * MIB
        return {pull.id: LayerProgress(done, 100 * MIB, 2, 7) for pull in pulls}


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def tracker(source: Source, scope: TaskScope) -> PullTracker:
    return PullTracker(source, scope, clock=lambda: 1000.0)


async def test_track_fast_pull_is_never_measured(tracker: PullTracker, source: Source) -> None:
    with tracker.track("busybox"):
        assert tracker.pulls() == [PullProgress("busybox", 1000.0)]
        await asyncio.sleep(0.9)
    await asyncio.sleep(100)
    assert (source.measured, tracker.pulls()) == (0, [])


async def test_track_long_pull_message_changes_every_ten_seconds(
    tracker: PullTracker, source: Source
) -> None:
    changes: list[tuple[float, frozenset[str]]] = []
    start = asyncio.get_running_loop().time()
    tracker.add_listener(lambda images: changes.append((asyncio.get_running_loop().time() - start, images)))
    with tracker.track("busybox"):
        await asyncio.sleep(9.5)
        assert (tracker.message("busybox"), tracker.pulls()[0].done_bytes) == ("", 9 * MIB)
        await asyncio.sleep(32)
        assert tracker.message("busybox") == tracker.message("busybox:latest") != ""
        assert tracker.message("busybox:2") == tracker.message("BAD//") == ""
    assert tracker.message("busybox") == ""
    assert [images for _, images in changes] == [frozenset({"busybox:latest"})] * 4
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(changes)]
    assert changes[0][0] >= 10
    assert all(gap >= 10 for gap in gaps)


@pytest.mark.parametrize("error", [None, Unavailable("x", "Unavailable", "gone")])
async def test_track_source_hangs_or_fails_keeps_last_values(
    tracker: PullTracker, source: Source, error: CriError | None
) -> None:
    with tracker.track("busybox"):
        await asyncio.sleep(1.5)
        source.error, source.hangs = error, error is None
        await asyncio.sleep(3 * MEASURE_SECONDS)
        assert tracker.pulls()[0].done_bytes == MIB
        source.error, source.hangs = None, False
        await asyncio.sleep(2 * MEASURE_SECONDS)
        assert (tracker.pulls()[0].done_bytes or 0) > MIB


async def test_track_source_unimplemented_is_not_called_again(tracker: PullTracker, source: Source) -> None:
    source.error = Unimplemented("x", "Unimplemented", "no such service")
    for _ in range(2):
        with tracker.track("busybox"):
            await asyncio.sleep(10)
    assert source.measured == 1


def test_waiting_message_has_bytes_and_layers() -> None:
    progress = PullProgress("x", 0, int(12.3 * MIB), int(40.1 * MIB), 3, 7)
    assert waiting_message(progress) == 'Pulling image "x": 12.3 MiB of 40.1 MiB, 3 of 7 layers'

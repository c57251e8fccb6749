"""The work per pod does not grow with the number of pods.

Work is the number of source lines that the kubelet's own code executes, which depends neither on the
machine nor on its load. A loop over all pods that runs for each pod, or for each event of a pod, shows as
lines per pod that grow with the number of pods.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import pykubelet
from pykubelet.linux.cgroupfs import Cgroups
from tests.unit.cm.test_cgroup_v2 import v2
from tests.unit.podworkers.many_pods import engine_with_fakes

__all__ = ["v2"]

pytestmark = pytest.mark.looptime

FEW, MANY = 30, 120
MOST_GROWTH = 1.06
"""Lines per pod of many pods, as a multiple of those of few. What runs every few seconds for all pods
(housekeeping) grows a little, since many pods take longer than few."""

_SOURCE = str(Path(pykubelet.__file__).parent)


@pytest.fixture
def cgroups(v2: Cgroups, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    """A directory that behaves like a v2 hierarchy: a cgroup can be removed although it has files."""
    rmdir = os.rmdir

    def remove(path: Any, **options: Any) -> None:
        if Path(path).is_relative_to(v2.root / "pyk"):
            for file in Path(path).iterdir():
                if file.is_file():
                    file.unlink()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", remove)
    return v2


@contextmanager
def counted_lines() -> Iterator[Counter[CodeType]]:
    """Count the lines that the kubelet's functions execute, also each round of a comprehension."""
    counts: Counter[CodeType] = Counter()

    def on_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            counts[frame.f_code] += 1
        return on_line

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        return on_line if frame.f_code.co_filename.startswith(_SOURCE) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield counts
    finally:
        sys.settrace(before)


async def lines_per_pod(root: Path, cgroups: Cgroups, count: int) -> dict[str, float]:
    """Start and stop pods; return the lines that each function executed per pod."""
    async with engine_with_fakes(root, cgroups) as rig:
        with counted_lines() as counts:
            await rig.start_pods(count)
            await rig.stop_pods()
        # Each pod was told once that it runs, once that it has ended, and was then deleted.
        assert rig.api.writes == 3 * count
        assert rig.recorder.dropped == 0
    return {
        f"{Path(code.co_filename).relative_to(_SOURCE)}:{code.co_qualname}": lines / count
        for code, lines in counts.items()
    }


@pytest.mark.timeout(300)
async def test_engine_many_pods_executes_same_lines_per_pod_as_few(tmp_path: Path, cgroups: Cgroups) -> None:
    few = await lines_per_pod(tmp_path / "few", cgroups, FEW)
    many = await lines_per_pod(tmp_path / "many", cgroups, MANY)
    growth = {name: lines - few.get(name, 0.0) for name, lines in many.items()}
    worst = sorted(growth, key=lambda name: -growth[name])[:10]
    table = "".join(f"\n{few.get(name, 0.0):8.1f} -> {many[name]:8.1f}  {name}" for name in worst)
    ratio = sum(many.values()) / sum(few.values())
    assert ratio <= MOST_GROWTH, f"lines per pod grow {ratio:.2f} times from {FEW} to {MANY} pods:{table}"


HELD_SECONDS = 300
MOST_HELD_CALLS = 32
"""Calls in this time: two per relist and per garbage collection, none per pod."""


async def test_engine_pods_merely_run_runtime_calls_do_not_grow_with_pods(
    tmp_path: Path, cgroups: Cgroups
) -> None:
    async with engine_with_fakes(tmp_path, cgroups) as rig:
        await rig.start_pods(FEW)
        await asyncio.sleep(120)  # a relist has confirmed each pod
        before, syncs = rig.runtime.calls, rig.engine.syncer.observations
        await asyncio.sleep(HELD_SECONDS)
        assert rig.runtime.calls - before <= MOST_HELD_CALLS
        assert rig.engine.syncer.observations - syncs <= FEW // 10
        await rig.stop_pods()

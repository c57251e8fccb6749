"""The list of pod stages: order of preparation and release, and what a failed release leaves."""

from typing import Any, ClassVar

import pytest

from pykubelet.api.pod import Pod
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.stages.base import PodStart, Stage, StageList

START: Any = None


class Recording(Stage):
    """Stage that records its calls in a shared list; it may fail, and may report damage."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls
        self.failing = False
        self.intact = True
        self.retry: float | None = None

    async def prepare(self, start: PodStart) -> None:
        self._call("prepare")

    async def refresh(self, pod: Pod) -> float | None:
        return self.retry

    def is_intact(self, pod: Pod) -> bool:
        return self.intact

    async def release(self, uid: str, pod: Pod | None) -> None:
        self._call("release")

    def forget(self, uid: str) -> None:
        self._calls.append(f"forget {self.name}")

    def _call(self, what: str) -> None:
        self._calls.append(f"{what} {self.name}")
        if self.failing:
            raise SyncError(f"{self.name} failed")


class Early(Recording):
    """Stage that is released before the final status."""

    before_final_status: ClassVar[bool] = True


async def test_stage_list_prepared_in_order_released_in_reverse() -> None:
    calls: list[str] = []
    stages = StageList(Recording("cgroup", calls), Recording("volumes", calls), Early("claims", calls))
    await stages.prepare(START)
    await stages.release("u1", None, before_final_status=True)
    calls.append("final status")
    await stages.release("u1", None, before_final_status=False)
    stages.forget("u1")
    assert calls == [
        *("prepare cgroup", "prepare volumes", "prepare claims"),
        *("release claims", "final status", "release volumes", "release cgroup"),
        *("forget claims", "forget volumes", "forget cgroup"),
    ]


async def test_stage_list_prepare_fails_stops_at_failing_stage() -> None:
    calls: list[str] = []
    cgroup, volumes = Recording("cgroup", calls), Recording("volumes", calls)
    cgroup.failing = True
    with pytest.raises(SyncError, match="cgroup failed"):
        await StageList(cgroup, volumes).prepare(START)
    assert calls == ["prepare cgroup"]


async def test_stage_list_release_fails_keeps_earlier_stages_until_success() -> None:
    calls: list[str] = []
    cgroup, volumes = Recording("cgroup", calls), Recording("volumes", calls)
    stages, volumes.failing = StageList(cgroup, volumes), True
    with pytest.raises(SyncError, match="volumes failed"):
        await stages.release("u1", None, before_final_status=False)
    assert calls == ["release volumes"]
    volumes.failing = False
    await stages.release("u1", None, before_final_status=False)
    assert calls == ["release volumes", "release volumes", "release cgroup"]


async def test_stage_list_refresh_and_intact_combine_all_stages() -> None:
    pod: Any = None
    one, other = Recording("one", []), Recording("other", [])
    stages = StageList(one, other)
    assert await stages.refresh(pod) is None
    assert stages.is_intact(pod)
    one.retry, other.retry, other.intact = 10.0, 4.0, False
    assert await stages.refresh(pod) == 4.0
    assert not stages.is_intact(pod)

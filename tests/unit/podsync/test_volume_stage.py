"""Stage of the pod's volumes: which pods keep them mounted after their end."""

from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.stages.volumes import VolumeStage
from pykubelet.volumes.errors import VolumeError


def stage_with(kept: set[str], unmounted: list[str], failure: Exception | None = None) -> VolumeStage:
    async def unmount(uid: str) -> None:
        if failure is not None:
            raise failure
        unmounted.append(uid)

    volumes: Any = SimpleNamespace(unmount=unmount)
    return VolumeStage(volumes, PodHistory(), kept.__contains__)


async def test_volume_stage_release_kept_volumes_stay_until_pod_is_deleted() -> None:
    """Verify `--keep-terminated-pod-volumes`."""
    kept, unmounted = {"u-1"}, list[str]()
    stage = stage_with(kept, unmounted)
    await stage.release("u-1", None)
    await stage.release("u-2", None)
    assert unmounted == ["u-2"]
    kept.clear()
    await stage.release("u-1", None)
    assert unmounted == ["u-2", "u-1"]


async def test_volume_stage_release_failure_raises_sync_error() -> None:
    stage = stage_with(set(), [], VolumeError("busy"))
    with pytest.raises(SyncError, match="cleaning up: busy"):
        await stage.release("u-1", None)

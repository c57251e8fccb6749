"""How full other kinds of volumes are: asked of those who know, and nobody is waited for in vain."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.volumes import usage as usage_others
from pykubelet.volumes.plugin import MountedVolume, VolumeToMount
from pykubelet.volumes.usage import FileSystem, PluginStatsCollector, VolumeStats, file_system
from pykubelet.volumes.volume_state import VolumeRecord
from tests.support.volumes import pod_with

SHARE = {"nfs": {"server": "s", "path": "/"}}
SOME = VolumeStats(capacity=6, available=5, used=4, inodes=3, inodes_free=2, inodes_used=1, moment=0)


def holding(pod: Pod, name: str, kind: str, mounted: MountedVolume | None) -> VolumeRecord:
    volume = next(volume for volume in pod.spec.volumes if volume.name == name)
    return VolumeRecord(VolumeToMount(pod, volume, kind, None, f"pv-{name}"), mounted)


class Driver:
    """A kind that knows."""

    async def usage(self, pod: Pod) -> Mapping[str, VolumeStats]:
        return {"driven": SOME}


async def test_plugin_stats_collector_returns_file_system_device_and_plugin_stats(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"\0" * 12345)
    names = ("share", "block", "driven", "coming", "host", "gone", "none")
    pod = pod_with(*({"name": name, **SHARE} for name in names))
    held = [
        holding(pod, "share", "nfs", MountedVolume(str(tmp_path))),
        holding(pod, "block", "local", MountedVolume("", device=str(disk))),
        holding(pod, "driven", "csi", MountedVolume("/nowhere")),
        holding(pod, "coming", "nfs", None),
        holding(pod, "host", "hostPath", MountedVolume("/")),
        holding(pod, "gone", "nfs", MountedVolume(str(tmp_path / "gone"))),
        holding(pod, "none", "nfs", MountedVolume("")),
    ]
    kinds: dict[str, Any] = {"csi": Driver(), "nfs": object(), "local": object()}
    found = await PluginStatsCollector({pod.uid: held}.__getitem__, kinds, lambda: 7.0).for_pod(pod)
    assert found.keys() == {"share", "block", "driven"}
    around = file_system(tmp_path)
    assert (found["share"].capacity, found["share"].inodes, found["share"].moment) == (
        around.capacity,
        around.inodes,
        7.0,
    )
    assert found["share"].used > 0
    assert found["block"] == VolumeStats(
        capacity=12345, available=0, used=0, inodes=0, inodes_free=0, inodes_used=0, moment=7.0
    )
    assert found["driven"] == SOME


async def test_plugin_stats_collector_statvfs_hangs_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    asked: list[Path] = []

    def answer(path: Path) -> FileSystem:
        asked.append(path)
        if path.name == "dead":
            assert back.wait(60)
        return file_system(tmp_path)

    monkeypatch.setattr(usage_others, "file_system", answer)
    monkeypatch.setattr(usage_others, "STATVFS_TIMEOUT_SECONDS", 4.0)
    pod = pod_with({"name": "dead", **SHARE}, {"name": "good", **SHARE})
    held = [holding(pod, name, "nfs", MountedVolume(str(tmp_path / name))) for name in ("dead", "good")]
    others = PluginStatsCollector(lambda _: held, {})
    try:
        for _ in range(3):
            async with asyncio.timeout(30):
                assert (await others.for_pod(pod)).keys() == {"good"}
        assert [path.name for path in asked].count("dead") == 1
    finally:
        back.set()
    monkeypatch.setattr(usage_others, "STATVFS_TIMEOUT_SECONDS", 30)
    async with asyncio.timeout(30):
        while "dead" not in await others.for_pod(pod):
            await asyncio.sleep(0.01)


async def test_plugin_stats_collector_plugin_raises_other_volumes_returned(tmp_path: Path) -> None:
    class Broken(Driver):
        async def usage(self, pod: Pod) -> Mapping[str, VolumeStats]:
            raise RuntimeError("a bug")

    pod = pod_with({"name": "share", **SHARE}, {"name": "driven", **SHARE})
    held = [
        holding(pod, "share", "nfs", MountedVolume(str(tmp_path))),
        holding(pod, "driven", "theirs", MountedVolume("/nowhere")),
    ]
    others = PluginStatsCollector(lambda _: held, {"theirs": Broken()})
    assert (await others.for_pod(pod)).keys() == {"share"}


def test_volume_stats_from_file_system_computes_inodes_used() -> None:
    usage = VolumeStats.from_file_system(FileSystem(100, 40, 50, 10, 7), 1.0)
    assert usage == VolumeStats(
        capacity=100, available=40, used=50, inodes=10, inodes_free=7, inodes_used=3, moment=1.0
    )
    assert replace(usage, moment=2.0) != usage

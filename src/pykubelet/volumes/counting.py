"""Telling `metrics.py` what was done to pods' volumes, each under the name of the plugin that gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from pykubelet.api.pod import Pod
from pykubelet.api.volume import Volume
from pykubelet.volumes.holdings import Holdings
from pykubelet.volumes.kind import VolumeKind
from pykubelet.volumes.metrics import VolumeMetrics, plugin_name
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.problems import Problem


class Counting:
    """Counts for one node."""

    def __init__(self, metrics: VolumeMetrics, kinds: Mapping[str, VolumeKind], holdings: Holdings) -> None:
        self._metrics = metrics
        self._kinds = kinds
        self._holdings = holdings

    def met(self, pod: Pod, used: Collection[str]) -> None:
        """Count a pod that has its volumes since an earlier agent, if it was not counted yet."""
        if pod.uid not in self._metrics.count:
            for volume in pod.spec.volumes:
                if volume.name in used:
                    self._metrics.count.note(pod.uid, volume.name, self._plugin(pod, volume), there=True)

    def tried(
        self,
        pod: Pod,
        volume: Volume,
        outcome: MountedVolume | Problem | None,
        began: float,
        *,
        refreshing: bool,
    ) -> None:
        """Count a try to have a volume, or to bring it up to date; `began` is in the loop's time."""
        plugin, held = self._plugin(pod, volume), self._holdings.get(pod.uid, volume.name)
        well = not isinstance(outcome, Problem)
        if refreshing:
            self._metrics.count.note(pod.uid, volume.name, plugin, there=well)
        elif not isinstance(outcome, Problem) or outcome.stage != "claim":
            now = asyncio.get_running_loop().time()
            self._metrics.tried(
                pod.uid,
                volume.name,
                plugin,
                now - began,
                now - (held.since if held is not None else began),
                block=held is not None and held.wanted.block,
                well=well,
            )

    def unmounted(self, uid: str, folder: str, name: str, seconds: float, well: bool) -> None:
        """Count a volume that was taken from a pod."""
        operation, plugin = "volume_unmount", plugin_name("", folder)
        for holding in self._holdings.of(uid):
            if holding.wanted.name == name:
                operation = "unmap_volume" if holding.wanted.block else operation
                plugin = plugin_name(holding.wanted.kind, folder, holding.wanted.source)
        self._metrics.operated(plugin, operation, seconds, well=well)

    def _plugin(self, pod: Pod, volume: Volume) -> str:
        held = self._holdings.get(pod.uid, volume.name)
        kind, source = "unknown", None
        if held is not None:
            kind, source = held.wanted.kind, held.wanted.source
        elif volume.sources:
            kind, source = volume.sources[0]
        return plugin_name(kind, self._kinds[kind].folder if kind in self._kinds else "", source)

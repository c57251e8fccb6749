"""Prometheus collector of numbers of volumes and of the usage of claimed volumes, with upstream's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pykubelet.api.pod import Pod
from pykubelet.util.metrics import GaugeSlices, SlicedCollector
from pykubelet.volumes.metrics import VolumeCount
from pykubelet.volumes.pvc import claim_name
from pykubelet.volumes.usage import VolumeStats

_STEP_PODS = 64
"""Pods whose volumes are looked up before other tasks may run."""


class VolumeNumbers(SlicedCollector):
    """Collector of the number of volumes and of the usage of claimed volumes, at each scrape."""

    def __init__(
        self,
        count: VolumeCount,
        pods: Callable[[], Iterable[Pod]],
        usage: Callable[[str], Mapping[str, VolumeStats]],
    ) -> None:
        """Initialize; `usage` returns the latest stats of a pod's volumes (by the pod's uid), by name."""
        self._count = count
        self._pods = pods
        self._usage = usage

    def slices(self) -> Iterator[GaugeSlices | None]:
        """Yield the current metrics."""
        yield GaugeSlices(
            "volume_manager_total_volumes",
            "Volumes that pods need (desired) and volumes that are mounted (actual).",
            ("plugin_name", "state"),
            lambda: sorted(self._count.totals().items()),
        )
        claimed: dict[tuple[str, str], VolumeStats] = {}
        for count, pod in enumerate(self._pods(), start=1):
            volumes_by_name = {volume.name: volume for volume in pod.spec.volumes}
            for name, usage in self._usage(pod.uid).items():
                volume = volumes_by_name.get(name)
                if volume is not None and (claim := claim_name(pod, volume)):
                    claimed[pod.metadata.namespace, claim] = usage
            if count % _STEP_PODS == 0:
                yield None
        for name, what, amount in _STATS:
            yield _gauge(name, what, claimed, amount)


def _gauge(
    name: str,
    what: str,
    claimed: Mapping[tuple[str, str], VolumeStats],
    amount: Callable[[VolumeStats], int | None],
) -> GaugeSlices:
    def series() -> Iterator[tuple[Sequence[str], float]]:
        for claim in sorted(claimed):
            if (value := amount(claimed[claim])) is not None:
                yield claim, value

    return GaugeSlices(f"kubelet_volume_stats_{name}", what, ("namespace", "persistentvolumeclaim"), series)


_STATS: tuple[tuple[str, str, Callable[[VolumeStats], int | None]], ...] = (
    ("capacity_bytes", "Size of a claimed volume, in bytes.", lambda usage: usage.capacity),
    ("available_bytes", "What is left of a claimed volume, in bytes.", lambda usage: usage.available),
    ("used_bytes", "What is used of a claimed volume, in bytes.", lambda usage: usage.used),
    ("inodes", "Inodes of a claimed volume.", lambda usage: usage.inodes),
    ("inodes_free", "Inodes that are left of a claimed volume.", lambda usage: usage.inodes_free),
    ("inodes_used", "Inodes that are used of a claimed volume.", lambda usage: usage.inodes_used),
    (
        "health_status_abnormal",
        "1 if the CSI driver of a claimed volume reports it as unhealthy, 0 if it reports it as healthy.",
        lambda usage: usage.abnormal,
    ),
)

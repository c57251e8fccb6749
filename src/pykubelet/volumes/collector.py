"""Prometheus collector of numbers of volumes and of the usage of claimed volumes, with upstream's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet.api.pod import Pod
from pykubelet.volumes.metrics import VolumeCount
from pykubelet.volumes.pvc import claim_name
from pykubelet.volumes.usage import VolumeStats


class VolumeNumbers(Collector):
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

    def describe(self) -> Iterable[Metric]:
        """Return no metrics in advance: their names are those of `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        volumes = GaugeMetricFamily(
            "volume_manager_total_volumes",
            "Volumes that pods need (desired) and volumes that are mounted (actual).",
            labels=["plugin_name", "state"],
        )
        for labels, number in sorted(self._count.totals().items()):
            volumes.add_metric(labels, number)
        yield volumes
        claimed: dict[tuple[str, str], VolumeStats] = {}
        for pod in self._pods():
            volumes_by_name = {volume.name: volume for volume in pod.spec.volumes}
            for name, usage in self._usage(pod.uid).items():
                volume = volumes_by_name.get(name)
                if volume is not None and (claim := claim_name(pod, volume)):
                    claimed[pod.metadata.namespace, claim] = usage
        for name, what, amount in _STATS:
            family = GaugeMetricFamily(
                f"kubelet_volume_stats_{name}", what, labels=["namespace", "persistentvolumeclaim"]
            )
            for (namespace, claim), usage in sorted(claimed.items(), key=lambda pair: pair[0]):
                family.add_metric([namespace, claim], amount(usage))
            yield family
        health = GaugeMetricFamily(
            "kubelet_volume_stats_health_status_abnormal",
            "1 if the CSI driver of a claimed volume reports it as unhealthy, 0 if it reports it as healthy.",
            labels=["namespace", "persistentvolumeclaim"],
        )
        for (namespace, claim), usage in sorted(claimed.items(), key=lambda pair: pair[0]):
            if usage.abnormal is not None:
                health.add_metric([namespace, claim], usage.abnormal)
        yield health


_STATS: tuple[tuple[str, str, Callable[[VolumeStats], int]], ...] = (
    ("capacity_bytes", "Size of a claimed volume, in bytes.", lambda usage: usage.capacity),
    ("available_bytes", "What is left of a claimed volume, in bytes.", lambda usage: usage.available),
    ("used_bytes", "What is used of a claimed volume, in bytes.", lambda usage: usage.used),
    ("inodes", "Inodes of a claimed volume.", lambda usage: usage.inodes),
    ("inodes_free", "Inodes that are left of a claimed volume.", lambda usage: usage.inodes_free),
    ("inodes_used", "Inodes that are used of a claimed volume.", lambda usage: usage.inodes_used),
)

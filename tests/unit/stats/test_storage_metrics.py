"""Metrics of the ephemeral storage of pods."""

from prometheus_client import CollectorRegistry

from pykubelet.server.metrics.registry_text import text_format
from pykubelet.stats.storage.metrics import PodStorageMetrics, PodStorageRow
from tests.support.prometheus_text import Series, parse


def test_pod_storage_metrics_rows_reported_by_pod_and_volume() -> None:
    rows = [
        PodStorageRow("default", "web", "", 5000, 12, 10_000),
        PodStorageRow("default", "web", "scratch", 4000, 7, None),
        PodStorageRow("default", "idle", "", 0),
        PodStorageRow("default", "web", "", 6000, 12, 10_000),
    ]
    registry = CollectorRegistry()
    registry.register(PodStorageMetrics(lambda: rows))
    web, idle = (("namespace", "default"), ("pod", "web")), (("namespace", "default"), ("pod", "idle"))
    volume = (*web, ("volume", "scratch"))
    assert parse(text_format(registry.collect()).decode()) == {
        Series("kubelet_pod_ephemeral_storage_used_bytes", web): 6000,
        Series("kubelet_pod_ephemeral_storage_used_bytes", idle): 0,
        Series("kubelet_pod_ephemeral_storage_inodes_used", web): 12,
        Series("kubelet_pod_ephemeral_storage_limit_bytes", web): 10_000,
        Series("kubelet_pod_emptydir_used_bytes", volume): 4000,
        Series("kubelet_pod_emptydir_inodes_used", volume): 7,
    }


def test_pod_storage_metrics_no_rows_metrics_omitted() -> None:
    registry = CollectorRegistry()
    registry.register(PodStorageMetrics(lambda: ()))
    assert text_format(registry.collect()) == b""

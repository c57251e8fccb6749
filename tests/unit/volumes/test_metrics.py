"""What volumes cost and how many there are, as a scraper reads it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.apiserver.client import ApiClient
from pykubelet.server.metrics.registry_text import text_format
from pykubelet.volumes.attach import ClusterNode
from pykubelet.volumes.collector import VolumeNumbers
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.metrics import VolumeMetrics, plugin_name
from pykubelet.volumes.plugin import MemoryLimits
from pykubelet.volumes.pvc import claim_name
from pykubelet.volumes.usage import VolumeStats
from tests.support.metrics_page import Page, rows
from tests.support.volumes import Node, Server, Shelf, pod_with

CLAIM = {"name": "claimed", "persistentVolumeClaim": {"claimName": "claim"}}
CONFIG = {"name": "config", "configMap": {"name": "c"}}
EMPTY = {"name": "empty", "emptyDir": {}}
USAGE = VolumeStats(capacity=10, available=6, used=4, inodes=9, inodes_free=7, inodes_used=2, moment=1.0)

WANTED, HAD = "desired_state_of_world", "actual_state_of_world"


class Scraper:
    """Volumes of a node, and the page of their numbers."""

    def __init__(self, root: Path, shelf: Shelf, server: Server) -> None:
        self.registry = CollectorRegistry()
        self.volumes = self.agent(root, shelf, server, VolumeMetrics(self.registry))
        self.pods = [pod_with(EMPTY, CONFIG, CLAIM)]
        self.usage: dict[str, VolumeStats] = {}
        count = self.volumes.metrics.count
        self.registry.register(VolumeNumbers(count, lambda: self.pods, lambda uid: self.usage))

    @staticmethod
    def agent(root: Path, shelf: Shelf, server: Server, metrics: VolumeMetrics) -> PodVolumes:
        return PodVolumes(
            root,
            objects=shelf,
            node=Node(),
            memory=MemoryLimits(lambda pod: None, 1 << 30),
            cluster=ClusterNode(cast(ApiClient, server)),
            metrics=metrics,
        )

    def page(self) -> Page:
        return Page(text_format(self.registry.collect()).decode())


@pytest.fixture
def server(tmp_path: Path) -> Server:
    made = Server()
    made.claim("claim", "pv-1")
    made.volume("pv-1", "claim", hostPath={"path": str(tmp_path)})
    return made


@pytest.fixture
def scraper(root: Path, shelf: Shelf, server: Server) -> Scraper:
    return Scraper(root, shelf, server)


async def test_volume_metrics_count_operations_and_total_volumes(scraper: Scraper, shelf: Shelf) -> None:
    volumes, (pod,) = scraper.volumes, scraper.pods
    with pytest.raises(VolumeError):
        await volumes.mount(pod)
    page = scraper.page()
    operations = "storage_operation_duration_seconds_count"
    config = {"volume_plugin": "kubernetes.io/configmap", "operation_name": "volume_mount"}
    assert page.value(operations, status="fail-unknown", **config) == 1
    totals = "volume_manager_total_volumes"
    assert page.value(totals, plugin_name="kubernetes.io/configmap", state=WANTED) == 1
    assert page.values(totals, plugin_name="kubernetes.io/configmap", state=HAD) == []
    assert page.value(totals, plugin_name="kubernetes.io/empty-dir", state=HAD) == 1
    shelf.config_maps["c"] = {"a": "1"}
    await volumes.mount(pod)
    await volumes.mount(pod)
    page = scraper.page()
    assert page.value(operations, status="success", migrated="false", **config) == 2
    first = {"plugin_name": "kubernetes.io/configmap", "operation_name": "overall_volume_mount"}
    assert page.value("volume_operation_total_seconds_count", **first) == 1
    assert page.value(totals, plugin_name="kubernetes.io/host-path", state=HAD) == 1, "behind the claim"
    await volumes.unmount(pod.uid)
    page = scraper.page()
    assert page.total(totals) == 0
    gone = {"volume_plugin": "kubernetes.io/configmap", "operation_name": "volume_unmount"}
    assert page.value(operations, status="success", **gone) == 1


async def test_volume_metrics_kubelet_restarted_counts_existing_volumes(
    scraper: Scraper, root: Path, shelf: Shelf, server: Server
) -> None:
    shelf.config_maps["c"] = {"a": "1"}
    await Scraper.agent(root, shelf, server, VolumeMetrics()).mount(scraper.pods[0])
    await scraper.volumes.refresh(scraper.pods[0])
    page = scraper.page()
    for state in (WANTED, HAD):
        assert page.total("volume_manager_total_volumes", state=state) == 3
    assert page.values("storage_operation_duration_seconds_count") == []


def test_volume_numbers_reports_stats_of_claimed_volumes_only(scraper: Scraper) -> None:
    assert not [name for name in scraper.page().types if name.startswith("kubelet_volume_stats")]
    scraper.usage = {"claimed": USAGE, "empty": USAGE}
    page = scraper.page()
    labels = {"namespace": "default", "persistentvolumeclaim": "claim"}
    for name, value in {
        "capacity_bytes": 10,
        "available_bytes": 6,
        "used_bytes": 4,
        "inodes_used": 2,
    }.items():
        assert page.value(f"kubelet_volume_stats_{name}") == value
        assert page.value(f"kubelet_volume_stats_{name}", **labels) == value


def test_volume_metrics_all_listed_in_metrics_table(scraper: Scraper) -> None:
    metrics = scraper.volumes.metrics
    metrics.record_csi_call("d", "/csi.v1.Node/NodeGetInfo", "OK", 0.1)
    metrics.record_mount("u-1", "v", "kubernetes.io/nfs", 0.1, 0.2, block=False, succeeded=True)
    metrics.record_measurement("du", 0.1)
    scraper.usage = {"claimed": replace(USAGE, abnormal=False)}
    page = scraper.page()
    table = {row.metric: row for row in rows() if row.endpoint == "/metrics"}
    assert len(page.types) == 12
    for name, kind in page.types.items():
        row = table[name]
        assert (row.state, row.type, row.labels) == ("event", kind, page.labels(name))


def test_claim_name_and_plugin_name_equal_upstream() -> None:
    ephemeral = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}
    pod = pod_with(CLAIM, ephemeral, EMPTY)
    assert [claim_name(pod, volume) for volume in pod.spec.volumes] == ["claim", "p-scratch", ""]
    assert plugin_name("hostPath", "") == "kubernetes.io/host-path"
    assert plugin_name("nfs", "kubernetes.io~nfs") == "kubernetes.io/nfs"
    inline = pod_with({"name": "x", "csi": {"driver": "d.example"}}).spec.volumes[0]
    assert plugin_name("csi", "kubernetes.io~csi", inline.csi) == "kubernetes.io/csi:d.example"


async def test_volume_metrics_without_registry_two_instances_do_not_collide(
    root: Path, shelf: Shelf, server: Server
) -> None:
    """Two agents in one process do not meet in their metrics."""
    await asyncio.gather(
        *(
            Scraper.agent(root / name, shelf, server, VolumeMetrics()).mount(pod_with(EMPTY))
            for name in ("a", "b")
        )
    )


def test_volume_numbers_driver_reports_condition_shown_per_claim(scraper: Scraper) -> None:
    name = "kubelet_volume_stats_health_status_abnormal"
    scraper.usage = {"claimed": USAGE}
    assert scraper.page().values(name) == []
    for abnormal in (True, False):
        scraper.usage = {"claimed": replace(USAGE, abnormal=abnormal)}
        assert scraper.page().value(name, namespace="default", persistentvolumeclaim="claim") == abnormal

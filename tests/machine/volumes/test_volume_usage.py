"""Volumes of real pods are measured all the time, and that is in nobody's way."""

import re
from collections.abc import Iterator

import pytest

from tests.support.manifests import container, pod
from tests.support.node import Node, kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

MIB = 1 << 20


@pytest.fixture
def busy_node(runtime: RunningRuntime) -> Iterator[Node]:
    """A node that measures as often as it can."""
    with running(kubelet_node(runtime, volumeStatsAggPeriod="10ms")) as started:
        yield started
        started.clear()


def test_volume_stats_measured_and_pod_removal_not_blocked(busy_node: Node) -> None:
    volumes = [
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {
            "name": "about",
            "downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]},
        },
    ]
    mounts = [{"name": volume["name"], "mountPath": f"/{volume['name']}"} for volume in volumes]
    write = "for p in disk memory; do dd if=/dev/zero of=/$p/file bs=1M count=3 conv=fsync 2>/dev/null; done"
    uids = []
    for name in ("first", "second", "third"):
        main = container(volumeMounts=mounts)
        started = busy_node.start_pod(pod(name, main, volumes=volumes))
        busy_node.shell(f"{name}-n1", write)
        uid = started["metadata"]["uid"]

        def measured(uid: str = uid) -> bool:
            told = re.findall(rf"Measured volumes of pod.*podUID=\"{uid}\".*", busy_node.log_text())
            numbers = dict(re.findall(r"(\w+)\D{1,6}(\d+)", told[-1].rpartition("used=")[2])) if told else {}
            sizes = [int(numbers.get(name, 0)) for name in ("disk", "memory")]
            return all(3 * MIB <= size < 4 * MIB for size in sizes) and "about" in numbers

        busy_node.wait("the volumes to be measured", measured)
        uids.append(uid)
        busy_node.remove(name)
    for name, uid in zip(("first", "second", "third"), uids, strict=True):
        busy_node.wait_gone(f"{name}-n1", uid)
    assert "TearDown failed" not in busy_node.log_text()

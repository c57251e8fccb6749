"""Huge pages, which the machine has for the time of the test: asked for, mounted, used, and run out of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import container, pod
from tests.support.node import Node, kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
ADDED = 4


@pytest.fixture(scope="module")
def node(runtime: RunningRuntime) -> Iterator[Node]:
    """A node that was started when the machine had huge pages."""
    setting = PAGES / "nr_hugepages"
    if not setting.exists():
        pytest.skip("this kernel has no huge pages of 2 MB")
    before = int(setting.read_text())
    setting.write_text(str(before + ADDED))
    try:
        if int(setting.read_text()) != before + ADDED:
            pytest.skip("this machine has no memory to set aside")
        with running(kubelet_node(runtime)) as started:
            yield started
            started.clear()
    finally:
        setting.write_text(str(before))


def wants(amount: str) -> dict[str, Any]:
    amounts = {"hugepages-2Mi": amount, "cpu": "10m", "memory": "32Mi"}
    return {"resources": {"requests": amounts, "limits": amounts}}


def test_huge_pages_pod_mounts_uses_and_frees_them(node: Node) -> None:
    volume = {"name": "huge", "emptyDir": {"medium": "HugePages"}}
    mount = {"name": "huge", "mountPath": "/huge"}
    found = node.start_pod(pod("huge", container(volumeMounts=[mount], **wants("4Mi")), volumes=[volume]))
    assert found["status"]["qosClass"] == "Guaranteed"
    (mounted,) = (
        line for line in node.shell("huge-n1", "cat /proc/mounts").splitlines() if " /huge " in line
    )
    assert mounted.split()[2] == "hugetlbfs"
    assert "pagesize=2M" in mounted
    reserved = PAGES / "free_hugepages"
    free = int(reserved.read_text())
    node.shell("huge-n1", "fallocate -l 4194304 /huge/data")
    assert int(reserved.read_text()) == free - 2
    # There are not enough for another; a static pod is critical, but nobody could make so much room.
    node.write(pod("more", container(**wants("1Gi"))))
    refused = node.wait_phase("more-n1", "Failed")["status"]
    assert refused["reason"] == "UnexpectedAdmissionError"
    assert "hugepages-2Mi" in refused["message"]
    node.remove("more", "huge")
    node.wait_gone("huge-n1", found["metadata"]["uid"])
    # The kernel lets go of the last mount a moment after the process that had it.
    node.wait("the pages to be free", lambda: int(reserved.read_text()) == free)

"""A pod gets what it was promised beside others that take what they can, and those get no more than they may.

All that want processors want the same one, so that their weights alone decide. How much of it others on this
machine take makes no difference to that: shares are compared among the pods.
"""

import time
from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.manifests import container, pod
from tests.support.node import Document, Node, all_statuses, status_of

pytestmark = pytest.mark.machine

SECONDS = 2.0
BUSY = "while :; do :; done"
SOON: Document = {"terminationGracePeriodSeconds": 1}
PINNED = ["taskset", "1", "sh", "-c", BUSY]


def resources(**amounts: dict[str, str]) -> Document:
    return {"resources": amounts}


def cgroup_of(node: Node, controller: str, found: Document) -> Path:
    tier = {"Guaranteed": "", "Burstable": "burstable/", "BestEffort": "besteffort/"}
    below = f"{tier[found['status']['qosClass']]}pod{found['metadata']['uid']}"
    return detect_cgroups().path(controller, f"{node.instance.cgroup_root}/kubepods/{below}")


def used(node: Node, found: Document) -> float:
    """Seconds of processors that a pod has used."""
    if detect_cgroups().unified:
        return _stat(cgroup_of(node, "cpu", found))["usage_usec"] / 1e6
    return int((cgroup_of(node, "cpuacct", found) / "cpuacct.usage").read_text()) / 1e9


def _stat(cgroup: Path) -> dict[str, int]:
    lines = (cgroup / "cpu.stat").read_text().splitlines()
    return {name: int(number) for name, number in map(str.split, lines)}


def test_guaranteed_pod_under_contention_gets_requested_cpu_and_memory(node: Node) -> None:
    promised = {"cpu": "1", "memory": "32Mi"}
    guaranteed = container(command=PINNED, **resources(requests=promised, limits=promised))
    burstable = container(command=PINNED, **resources(requests={"cpu": "100m"}))
    slowed = container(command=["sh", "-c", BUSY], **resources(limits={"cpu": "20m"}))
    names = [
        node.write(pod("promised", guaranteed, **SOON)),
        node.write(pod("hungry", burstable, **SOON)),
        node.write(pod("greedy", container(command=PINNED), **SOON)),
        node.write(pod("slowed", slowed, **SOON)),
    ]
    pods = {name.removesuffix("-n1"): node.wait_ready(name, 60) for name in names}
    weights = {name: cgroup_of(node, "cpu", found) / "cpu.shares" for name, found in pods.items()}
    if not detect_cgroups().unified:
        assert {name: path.read_text().strip() for name, path in weights.items()} == {
            "promised": "1024",
            "hungry": "102",
            "greedy": "2",
            "slowed": "20",
        }
    before, began = {name: used(node, found) for name, found in pods.items()}, time.monotonic()
    node.wait(
        "some use of processors", lambda: used(node, pods["promised"]) - before["promised"] > SECONDS, 90
    )
    took = {name: used(node, found) - before[name] for name, found in pods.items()}
    elapsed = time.monotonic() - began
    contended = took["promised"] + took["hungry"] + took["greedy"]
    # By their weights it would be nine tenths; the burstable tier weighs as much as both of its pods.
    assert took["promised"] / contended > 0.75, took
    assert took["greedy"] / contended < 0.1, took
    assert took["hungry"] > 0, took
    # Two hundredths of a processor are two thousandths of a second in each tenth.
    assert took["slowed"] <= elapsed * 0.02 + 0.1, (took, elapsed)
    slow = cgroup_of(node, "cpu", pods["slowed"])
    node.wait("the slowed pod to be throttled", lambda: _stat(slow)["nr_throttled"] > 0, 30)
    assert _stat(cgroup_of(node, "cpu", pods["hungry"]))["nr_throttled"] == 0
    _eat_memory(node, pods["promised"])
    node.clear()


def _eat_memory(node: Node, beside: Document) -> None:
    """Have pods eat more memory than they may, by their own limit or by their pod's, beside another."""
    eats: Document = {"command": ["tail", "/dev/zero"]}
    names = [
        node.write(
            pod("eater", container(**eats, **resources(limits={"memory": "24Mi"})), restartPolicy="Never")
        ),
        node.write(
            pod(
                "eaters",
                container("main", **eats),
                container("calm"),
                restartPolicy="Never",
                resources={"limits": {"memory": "32Mi"}},
            )
        ),
    ]
    for name in names:
        # The runtime may hear of the end before it hears of the reason; the agent looks again in a minute.
        found = node.wait_pod(
            name,
            "to be killed",
            lambda it: status_of(it, "main")["state"].get("terminated", {}).get("reason") == "OOMKilled",
            150,
        )
        assert status_of(found, "main")["state"]["terminated"]["exitCode"] == 137
    now = node.pod(beside["metadata"]["name"])
    assert now is not None
    assert [one["restartCount"] for one in all_statuses(now)] == [0]
    assert all_statuses(now)[0]["state"] == all_statuses(beside)[0]["state"]

"""Thirty pods of all classes: their cgroups are set as the reference sets them, and go with them.

`cgroups-v1-mix.tsv` was recorded of the reference kubelet with these pods and settings; with MIX_REFERENCE
in the environment this test runs the reference and writes it anew.
"""

import csv
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import read_capacity
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux import process_limits as capabilities
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.process_limits import oom_score
from pykubelet.standalone.daemon import find_daemons
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.golden import GOLDEN
from tests.support.plane import Document, Plane
from tests.support.runtime import RunningRuntime
from tests.support.runtime_view import CONTAINER_NAME, POD_UID

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(detect_cgroups().unified, reason="the recording is of cgroup v1"),
]

REFERENCE = "MIX_REFERENCE" in os.environ
TABLE = GOLDEN / "cgroups-v1-mix.tsv"
FILES = {
    "cpu": ("cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
    "cpuset": ("cpuset.cpus", "cpuset.mems"),
    "memory": ("memory.limit_in_bytes",),
    "pids": ("pids.max",),
}
RESERVED_MILLI_CPU, RESERVED_MEMORY, RESERVED_PIDS = 150, 384 << 20, 1500
SETTINGS = {
    "podPidsLimit": 1024,
    "cpuCFSQuotaPeriod": "50ms",
    "featureGates": {"CustomCPUCFSQuotaPeriod": True},
    "systemReserved": {"cpu": "100m", "memory": "256Mi", "pid": "1000"},
    "kubeReserved": {"cpu": "50m", "memory": "128Mi", "pid": "500"},
    "maxPods": 40,
}
HEAVY = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "heavy"},
    "handler": "runc",
    "overhead": {"podFixed": {"cpu": "10m", "memory": "24Mi"}},
}
Row = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def node(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    """A node that reserves something, with a limit on processes and a quota period of its own."""
    plane.create(HEAVY)
    with ExitStack() as stack:
        stack.callback(plane.delete, "runtimeclass", "heavy")
        if REFERENCE:
            stack.enter_context(undo_host_changes())
        program = plane.reference_kubelet if REFERENCE else None
        yield stack.enter_context(
            in_cluster(cluster_node(plane, runtime, program=program, settings=SETTINGS))
        )


def mix(node: ClusterNode, namespace: str) -> list[Document]:
    """The pods of the recording, for this node."""
    found = []
    for name, spec in yaml.safe_load((GOLDEN / "mix.yaml").read_text()).items():
        document = node.pod_document(name, namespace)
        usual = document["spec"]["containers"][0]
        for container in spec["containers"]:
            container.update({**usual, **container})
        for container in spec.get("initContainers", ()):
            ends = {} if "restartPolicy" in container else {"command": ["true"]}
            container.update({**usual, **container, **ends})
        document["spec"] |= spec
        found.append(document)
    return found


def cgroup_rows(node: ClusterNode, pods: list[Document]) -> set[Row]:
    """What all cgroups of the pods are set to, with names instead of ids."""
    names = {f"pod{pod['metadata']['uid']}": f"pod<{pod['metadata']['name']}>" for pod in pods}
    names |= {one.id: f"<{one.labels[CONTAINER_NAME]}>" for one in node.truth.running()}
    names |= {box.id: "<sandbox>" for box in node.truth.ready()}
    rows: set[Row] = set()
    for controller, files in FILES.items():
        top = detect_cgroups().path(controller, node.instance.cgroup_root)
        for path in (top / "kubepods", *(top / "kubepods").rglob("*/")):
            name = "/".join(names.get(part, part) for part in path.relative_to(top).parts)
            rows.update((controller, name, file, (path / file).read_text().strip()) for file in files)
    return rows


def recorded_rows() -> set[Row]:
    """What the reference has set, with this machine's own numbers."""
    machine = read_capacity()
    own = {
        ("kubepods", "cpu.shares"): str((machine["cpu"].milli - RESERVED_MILLI_CPU) * 1024 // 1000),
        ("kubepods", "memory.limit_in_bytes"): str(int(machine["memory"]) - RESERVED_MEMORY),
        ("kubepods", "pids.max"): str(int(machine["pid"]) - RESERVED_PIDS),
    }
    top = detect_cgroups().path("cpuset", "/")
    rows: set[Row] = set()
    with TABLE.open() as file:
        for controller, cgroup, name, value in list(csv.reader(file, delimiter="\t"))[1:]:
            value = own.get((cgroup, name), value)
            if controller == "cpuset":
                value = (top / name).read_text().strip()
            rows.add((controller, cgroup, name, value))
    return rows


def write_table(rows: set[Row]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(("controller", "cgroup", "file", "value"))
        writer.writerows(sorted(rows))


def expect_cgroups(node: ClusterNode, pods: list[Document]) -> None:
    """Wait until the cgroups are as recorded: what tiers weigh is set a moment after their pods run."""
    expected = recorded_rows()
    different: set[Row] = set()

    def look() -> bool:
        different.clear()
        different.update(cgroup_rows(node, pods) ^ expected)
        return not different

    try:
        node.wait("cgroups as recorded", look)
    except AssertionError as err:
        raise AssertionError(f"{sorted(different)[:20]}\n{err}") from None


def expect_oom_scores(node: ClusterNode, pods: list[Document]) -> None:
    """Each container's process is as dear to the kernel as its pod's class and its request make it."""
    known = {pod["metadata"]["uid"]: pod for pod in pods}
    checked = Counter[str]()
    # A runtime that may not lower scores gives containers its own.
    # What it has just begun to start looks like itself for a moment, and is the younger.
    daemon = min(find_daemons(node.instance), key=lambda one: one.start)
    lowest = -1000 if capabilities.has_capability("CAP_SYS_RESOURCE") else oom_score(daemon.pid)
    for one in node.truth.running():
        pod, name = known[one.labels[POD_UID]], one.labels[CONTAINER_NAME]
        path = Path(f"/proc/{node.truth.container_pid(one.id)}/oom_score_adj")
        qos = pod["status"]["qosClass"]
        if qos == "Burstable" and ("resources" in pod["spec"] or name in ("early", "late")):
            continue
        expected = {"Guaranteed": -997, "BestEffort": 1000}.get(qos) or burstable_score(pod, name)
        assert int(path.read_text()) == max(expected, lowest), (pod["metadata"]["name"], name)
        checked[qos] += 1
    assert min(checked[qos] for qos in ("Guaranteed", "Burstable", "BestEffort")) >= 7, checked


def burstable_score(pod: Document, name: str) -> int:
    """1000 less the thousandths of the machine's memory that the container asked for."""
    container = next(one for one in pod["spec"]["containers"] if one["name"] == name)
    text = container["resources"].get("requests", {}).get("memory", "0")
    return min(999, 1000 - 1000 * int(Quantity.parse(text)) // int(read_capacity()["memory"]))


def tier_weights(node: ClusterNode) -> dict[str, str]:
    rows = {row for row in cgroup_rows(node, []) if row[2] == "cpu.shares" and "/" in row[1]}
    return {cgroup: value for _, cgroup, _, value in rows}


def test_pod_cgroups_thirty_pods_match_upstream_recording(
    plane: Plane, namespace: str, node: ClusterNode
) -> None:
    created = [plane.create(document) for document in mix(node, namespace)]
    assert len(created) == 30
    pods = [node.wait_pod_ready(pod, 120) for pod in created]
    if REFERENCE:
        expect_oom_scores(node, pods)
        write_table(cgroup_rows(node, pods))
        return
    expect_cgroups(node, pods)
    expect_oom_scores(node, pods)
    running = {one.id for one in node.truth.running()}
    node.kill()
    node.start()
    node.wait_registered()
    # When the node has taken another pod in, it has looked at those that were there.
    node.delete_pod(node.wait_pod_ready(node.create_pod(namespace, "last"), 120))
    expect_cgroups(node, pods)
    assert {one.id for one in node.truth.running()} == running, "nothing was restarted"
    for pod in pods:
        plane.delete("pod", pod["metadata"]["name"], namespace)
    node.wait("nothing to be left", lambda: not node.pod_cgroups(), 120)
    tiers = {"kubepods/besteffort": "2", "kubepods/burstable": "2"}
    node.wait("tiers that weigh nothing", lambda: tier_weights(node) == tiers)

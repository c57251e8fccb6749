"""CPUs and memory that containers have for themselves, on this machine, as the kernel sees it.

CPU 0 is the system's, so CPU 1 is all that pods can have for themselves.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.manifests import Document, container, forever, pod
from tests.support.metrics_page import Page
from tests.support.node import Node, kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(os.cpu_count() != 2, reason="counts on a machine with two CPUs"),
]

TAKEN = (
    "Pod was rejected: Allocate failed due to not enough cpus available to satisfy request: "
    "requested=1, available=0, which is unexpected"
)
MISALIGNED = "Pod was rejected: Resources cannot be allocated with Topology locality"
STATIC: dict[str, Any] = {
    "cpuManagerPolicy": "static",
    "reservedSystemCPUs": "0",
    "memoryManagerPolicy": "Static",
    "topologyManagerPolicy": "single-numa-node",
    "kubeReserved": {"memory": "412Mi"},
    "evictionHard": {"memory.available": "100Mi"},
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "512Mi"}}],
}


MEMORY_STATE = "memory_manager_state"


@pytest.fixture
def node(runtime: RunningRuntime) -> Iterator[Node]:
    for name in ("cpu_manager_state", MEMORY_STATE):
        (runtime.instance.kubelet_root / name).unlink(missing_ok=True)
    with running(kubelet_node(runtime, **STATIC)) as started:
        yield started
        if started.process is None:
            start_again(started)
        started.clear()


def guaranteed(name: str, **fields: Any) -> Document:
    amounts = {"cpu": "1", "memory": "32Mi"}
    return pod(name, container(resources={"requests": amounts, "limits": amounts}, **fields))


def burstable(name: str) -> Document:
    return pod(name, container(resources={"requests": {"memory": "16Mi"}}))


def proc(node: Node, name: str) -> Path:
    (one,) = node.truth.running(name)
    return Path("/proc") / str(node.truth.container_pid(one.id))


def cpus(node: Node, name: str) -> str:
    return _allowed(proc(node, name), "Cpus")


def memory_nodes(node: Node, name: str) -> str:
    """What the container's cgroup says: with one NUMA node a process is allowed all there is either way."""
    lines = (proc(node, name) / "cgroup").read_text().splitlines()
    (path,) = (line.partition(":cpuset:")[2] for line in lines if ":cpuset:" in line)
    return (Path("/sys/fs/cgroup/cpuset") / path.strip("/") / "cpuset.mems").read_text().strip()


def _allowed(process: Path, what: str) -> str:
    (found,) = re.findall(rf"^{what}_allowed_list:\s*(\S+)$", (process / "status").read_text(), re.MULTILINE)
    return str(found)


def wait_cpus(node: Node, name: str, wanted: str) -> None:
    node.wait(f"{name} to run on CPUs {wanted}", lambda: cpus(node, name) == wanted)


def set_topology_policy(node: Node, policy: str) -> None:
    file = node.instance.data_dir / "kubelet.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "topologyManagerPolicy": policy}))


def cpu_state(node: Node) -> Any:
    return json.loads((node.root / "cpu_manager_state").read_text())


def start_again(node: Node) -> None:
    """Start a killed agent; if this host has got memory since, without the memory manager's state.

    A virtual machine may get memory minutes after its boot. As by upstream, the state file is void then.
    """
    machine = json.loads((node.root / MEMORY_STATE).read_text())["machineState"]
    was = machine["0"]["memoryMap"]["memory"]["total"]
    if was != numa_memory():
        (node.root / MEMORY_STATE).unlink()
    node.start()


def numa_memory() -> int:
    """Return the bytes of NUMA node 0."""
    text = Path("/sys/devices/system/node/node0/meminfo").read_text()
    (found,) = re.findall(r"MemTotal:\s*(\d+) kB", text)
    return 1024 * int(found)


def test_cpu_manager_guaranteed_pod_gets_exclusive_cpu(node: Node) -> None:
    node.start_pod(burstable("sharing"))
    wait_cpus(node, "sharing-n1", "0-1")
    mine = node.start_pod(guaranteed("mine"))
    name, uid = mine["metadata"]["name"], mine["metadata"]["uid"]
    assert cpus(node, name) == "1"
    assert memory_nodes(node, name) == "0"
    wait_cpus(node, "sharing-n1", "0")
    assert cpu_state(node)["entries"] == {uid: {"main": "1"}}
    node.start_pod(burstable("late"))
    assert cpus(node, "late-n1") == "0"

    # Nobody runs there who would have to be protected from it.
    folders = [path for path in node.pod_cgroups() if path.name.endswith(uid) and "cpuset" not in path.parts]
    quotas = [path for folder in folders for path in folder.rglob("cpu.cfs_quota_us")]
    assert len(quotas) == 3, "the pod's, its sandbox's and its container's"
    assert {path.read_text().strip() for path in quotas} == {"-1"}

    node.write(guaranteed("second"))
    refused = node.wait_phase("second-n1", "Failed")
    assert refused["status"]["reason"] == "TopologyAffinityError"
    assert refused["status"]["message"] == MISALIGNED

    page = Page(node.page("/metrics"))
    assert page.value("kubelet_cpu_manager_exclusive_cpu_allocation_count") == 1
    assert page.value("kubelet_cpu_manager_shared_pool_size_millicores") == 0
    assert page.value("kubelet_cpu_manager_pinning_requests_total") == 1
    assert page.value("kubelet_memory_manager_pinning_requests_total") == 1
    assert page.value("kubelet_topology_manager_admission_errors_total") == 1
    aligned = {"scope": "container", "boundary": "numa_node"}
    assert page.value("kubelet_container_aligned_compute_resources_count", **aligned) == 3
    assert page.value("kubelet_container_aligned_compute_resources_failure_count", **aligned) == 1

    before = node.truth.running(name)[0].id
    node.kill()
    set_topology_policy(node, "none")
    start_again(node)
    node.wait_ready(name)
    assert node.truth.running(name)[0].id == before
    assert cpus(node, name) == "1"
    assert cpus(node, "sharing-n1") == "0"
    again = node.wait_phase("second-n1", "Failed")
    assert again["status"]["reason"] == "UnexpectedAdmissionError"
    assert again["status"]["message"] == TAKEN

    # What comes anew within the pod gets the same, also by an agent that did not give it.
    node.truth.remove_container(before)
    node.wait("the container to run again", lambda: node.truth.running(name), 60)
    assert cpus(node, name) == "1"

    node.remove("mine")
    node.wait_gone(name, uid)
    wait_cpus(node, "sharing-n1", "0-1")
    wait_cpus(node, "late-n1", "0-1")
    node.wait("the state to have no entries", lambda: "entries" not in cpu_state(node))


def test_cpu_manager_edited_static_pod_waits_for_cpu_of_old_pod(node: Node) -> None:
    slow = forever("trap 'sleep 1; exit 0' TERM")
    first = node.start_pod(guaranteed("edited", command=slow))
    node.write(guaranteed("edited", env=[{"name": "NEW", "value": "yes"}]))
    second = node.wait_pod(
        "edited-n1",
        "to be the new one and ready",
        lambda pod: (
            pod["metadata"]["uid"] != first["metadata"]["uid"]
            and any(
                c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())
            )
        ),
        60,
    )
    assert cpus(node, "edited-n1") == "1"
    assert cpu_state(node)["entries"] == {second["metadata"]["uid"]: {"main": "1"}}


def test_cpu_manager_pod_deleted_while_kubelet_down_frees_cpu(node: Node) -> None:
    first = node.start_pod(guaranteed("before"))
    node.kill()
    node.remove("before")
    node.write(guaranteed("after"))
    start_again(node)
    node.wait_ready("after-n1", 60)
    assert cpus(node, "after-n1") == "1"
    node.wait_gone("before-n1", first["metadata"]["uid"])


def test_kubelet_mismatched_manager_state_refuses_to_start(node: Node) -> None:
    node.start_pod(burstable("stays"))
    node.kill()
    for name, content, why in (
        ("cpu_manager_state", '{"policyName":"sta', "is not a CPU manager's state"),
        (
            "cpu_manager_state",
            '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}',
            "of cpuManagerPolicy 'none'",
        ),
        # CPUs that were there when the agent ran last.
        ("cpu_manager_state", '{"policyName":"static","defaultCpuSet":"0-3","checksum":0}', "0-3"),
        ("memory_manager_state", '{"policyName":"None","machineState":{},"checksum":4236770233}', "None"),
    ):
        file = node.root / name
        good = file.read_bytes()
        file.write_text(content)
        told = refuses_to_start(node)
        assert str(file) in told
        assert why in told
        assert re.search(r"[Dd]rain (the|this) node", told)
        assert file.read_text() == content
        file.write_bytes(good)
    start_again(node)
    wait_cpus(node, "stays-n1", "0-1")


def refuses_to_start(node: Node) -> str:
    """Give the one line that an agent says that cannot start."""
    done = subprocess.run(node.command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]

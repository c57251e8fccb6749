"""Signals of node pressure as they are on this host, node conditions, and pods that use up a resource."""

import re
from pathlib import Path
from typing import Any

from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cluster_node import ClusterNode
from tests.support.plane import Document

MI = 1 << 20


def available_memory() -> int:
    """Return `memory.available` of this host in bytes, as the kubelet computes it."""
    memory = detect_cgroups().path("memory")
    inactive = re.search(r"total_inactive_file (\d+)", (memory / "memory.stat").read_text())
    assert inactive is not None
    return total_memory() - (int((memory / "memory.usage_in_bytes").read_text()) - int(inactive[1]))


def total_memory() -> int:
    """Return the memory of this host in bytes."""
    found = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


def max_pids() -> int:
    """Return the number of tasks that this host can have."""
    return min(int(Path("/proc/sys/kernel", name).read_text()) for name in ("pid_max", "threads-max"))


def available_pids() -> int:
    """Return `pid.available` of this host."""
    return max_pids() - int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def condition(node: ClusterNode, kind: str) -> Document:
    """Return a condition of the node."""
    found = node.node_object()
    assert found is not None
    return next(one for one in found["status"]["conditions"] if one["type"] == kind)


def wait_condition(node: ClusterNode, kind: str, status: str) -> Document:
    """Wait until a condition of the node has a status."""

    def look() -> Document | None:
        found = condition(node, kind)
        return found if found["status"] == status else None

    return node.wait(f"{kind} to be {status}", look, 60)


def memory_pod(
    node: ClusterNode, name: str, namespace: str, sizes_mi: list[int], script: str = "", **spec: Any
) -> Document:
    """Return a pod that fills one emptyDir volume in memory for each size; `script` runs before."""
    volumes = [{"name": f"m{number}", "emptyDir": {"medium": "Memory"}} for number in range(len(sizes_mi))]
    fill = "".join(f"head -c {size}m /dev/zero > /m{number}/used; " for number, size in enumerate(sizes_mi))
    document = node.pod_document(name, namespace, f"{script}{fill}sleep 3600", volumes=volumes, **spec)
    document["spec"]["containers"][0]["volumeMounts"] = [
        {"name": volume["name"], "mountPath": f"/{volume['name']}"} for volume in volumes
    ]
    return document


def process_script(count: int, on_term: str = "") -> str:
    """Return a script that starts many processes and goes on; `on_term` runs when it is told to end."""
    start = f"i=0; while [ $i -lt {count} ]; do sleep 3600 & i=$((i+1)); done; touch /tmp/started"
    return f"trap '{on_term}' TERM; {start}; while true; do wait; sleep 1; done"

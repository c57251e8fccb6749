"""Processes that the kernel kills in a real container, whose first process survives."""

import pytest

from tests.support.cli_node import pykubelet
from tests.support.manifests import container, forever, pod
from tests.support.node import Node, status_of

pytestmark = pytest.mark.machine
LIMITED = {"limits": {"memory": "24Mi"}}
HOG = "cp /bin/busybox /tmp/tail; (echo 1000 > /proc/self/oom_score_adj; exec /tmp/tail /dev/zero)"


async def test_oom_event_child_process_killed_names_victim_and_limit(node: Node) -> None:
    # Without a limit of the other container the pod has none, which could be reached before.
    limited = container(command=forever(f"{HOG}; :"), resources=LIMITED)
    started = node.start_pod(pod("parent", limited, container("calm")))
    message = node.wait_event("parent-n1", "ProcessOOMKilled")
    assert message.startswith('Memory limit 24Mi of container "main" reached: killed process '), message
    assert '(tail) of container "main", anon-rss ' in message
    size = float(message.rpartition(" ")[2].removesuffix("Mi"))
    assert 5 < size <= 24
    status = status_of(node.wait_ready("parent-n1"), "main")
    assert status["restartCount"] == 0, "its first process goes on"
    curves = node.wait(
        "the memory curve",
        lambda: [
            curve
            for curve in node.control("GET", f"/pods/{started['metadata']['uid']}/memory")["containers"]
            if any(curve.get("kills", ())) and "limit" in curve
        ],
    )
    assert [(curve["name"], curve["limit"]) for curve in curves] == [("main", 24 << 20)]
    shown = await pykubelet(node.instance, "describe", "parent")
    assert "Memory of the last minutes:" in shown.out, shown
    assert "limit 24Mi, 1 OOM kill (✗)" in shown.out


def test_oom_event_young_container_first_process_killed_is_named(node: Node) -> None:
    """Verify that a container that lives for less than the sampling tick is found, too."""
    greedy = container("greedy", ["sh", "-c", "exec tail /dev/zero"], resources=LIMITED)
    node.write(pod("brief", greedy, container("calm"), restartPolicy="Never"))
    message = node.wait_event("brief-n1", "ProcessOOMKilled")
    assert 'Memory limit 24Mi of container "greedy" reached: killed process ' in message


def test_oom_event_victims_in_a_loop_are_combined(node: Node) -> None:
    loop = f"i=0; while [ $i -lt 30 ]; do {HOG}; i=$((i+1)); done"
    node.start_pod(pod("loops", container(command=forever(loop), resources=LIMITED)))
    message = node.wait(
        "a combined event",
        lambda: next(
            (
                message
                for reason, message, _ in node.events("loops-n1")
                if reason == "ProcessOOMKilled" and " processes in " in message
            ),
            None,
        ),
        60,
    )
    count = int(message.partition(" killed ")[2].partition(" ")[0])
    assert count >= 2
    assert len([1 for reason, *_ in node.events("loops-n1") if reason == "ProcessOOMKilled"]) <= 3

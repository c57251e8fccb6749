"""CRI container events of a real runtime as the source of the PLEG."""

import os
import signal

import pytest

from pykubelet.standalone.daemon import find_daemons
from pykubelet.standalone.instance import Instance
from tests.support.manifests import container, pod
from tests.support.newer_runtime import needs_containerd
from tests.support.node import Node, status_of
from tests.support.runtime import RunningRuntime

pytestmark = [pytest.mark.machine, needs_containerd(1, 7)]
CRI_EVENTS = 'mode="cri-events"'


def kill_main(node: Node, name: str) -> None:
    """Kill the first process of a pod's container."""
    [main] = node.truth.running(name)
    os.kill(node.truth.container_pid(main.id), signal.SIGKILL)


def wait_restarts(node: Node, name: str, count: int) -> None:
    """Wait for the restarted container; the limit is below the interval of slow relists."""
    node.wait_pod(
        name,
        f"to have {count} restarts",
        lambda found: status_of(found, "main")["restartCount"] == count and "running" in _state(found),
        50,
    )


def _state(found: dict[str, object]) -> dict[str, object]:
    state: dict[str, object] = status_of(found, "main")["state"]
    return state


def kill_containerd(node: Node, instance: Instance) -> None:
    """Kill containerd, and wait until it has been restarted and responds."""
    [old] = find_daemons(instance)
    os.kill(old.pid, signal.SIGKILL)

    def is_new() -> bool:
        return [one.pid for one in find_daemons(instance)] not in ([], [old.pid])

    node.wait("containerd to be restarted", is_new)
    node.wait("containerd to respond", lambda: node.truth.network())


def test_pleg_container_exits_restarted_by_cri_event(node: Node) -> None:
    name = node.write(pod("dies"))
    node.wait_ready(name)
    assert CRI_EVENTS in node.log_text()
    kill_main(node, name)
    wait_restarts(node, name, 1)
    status = status_of(node.pod(name) or {}, "main")
    assert status["lastState"]["terminated"]["exitCode"] == 137


def test_pleg_sandbox_killed_pod_gets_new_sandbox(node: Node) -> None:
    name = node.write(pod("sandboxed"))
    node.wait_ready(name)
    [old] = node.truth.ready(name)
    os.kill(node.truth.sandbox_pid(old.id), signal.SIGKILL)
    node.wait("another sandbox", lambda: [box.id for box in node.truth.ready(name)] not in ([], [old.id]), 50)
    node.wait_ready(name)


def test_pleg_containerd_killed_event_stream_resumes(node: Node, runtime: RunningRuntime) -> None:
    name = node.write(pod("stays"))
    node.wait_ready(name)
    [before] = node.truth.running(name)
    kill_containerd(node, runtime.instance)
    assert [one.id for one in node.truth.running(name)] == [before.id]
    kill_main(node, name)
    wait_restarts(node, name, 1)


def test_pleg_many_containers_exit_at_once_all_finish(node: Node) -> None:
    """Verify that a burst of events is neither lost nor blocks the runtime, whose queues are bounded."""
    burst = [container(f"c{index}", ["true"]) for index in range(20)]
    names = [node.write(pod(f"burst{index}", *burst, restartPolicy="Never")) for index in range(3)]
    for name in names:
        node.wait_phase(name, "Succeeded", 120)

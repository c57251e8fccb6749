"""Node shutdowns with real pods and a real API server; logind is the test's own, on a private bus."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_node import ClusterNode
from tests.support.logind import LogindPeer, bus_daemon
from tests.support.manifests import container, pod
from tests.support.plane import Document

IGNORES_TERM = "trap '' TERM; while true; do sleep 1; done"
PERIODS = [
    {"priority": 0, "shutdownGracePeriodSeconds": 4},
    {"priority": 1000, "shutdownGracePeriodSeconds": 3},
    {"priority": 100000, "shutdownGracePeriodSeconds": 20},
]
REASON = "Terminated"


class LogindThread:
    """A logind in a thread of its own."""

    def __init__(self, peer: LogindPeer, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self._loop = loop

    def prepare_for_shutdown(self, active: bool) -> None:
        self._loop.call_soon_threadsafe(self.peer.prepare_for_shutdown, active)

    def wait_held(self, count: int, seconds: float = 60.0) -> None:
        waiting = self.peer.until(lambda: self.peer.held == count, seconds)
        asyncio.run_coroutine_threadsafe(waiting, self._loop).result(seconds + 5)


@contextlib.contextmanager
def logind_thread(directory: Path) -> Iterator[LogindThread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        with bus_daemon(directory) as bus:
            peer = LogindPeer(bus, directory, delay=120)
            run(peer.__aenter__())
            try:
                yield LogindThread(peer, loop)
            finally:
                run(peer.__aexit__())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def logind(tmp_path: Path) -> Iterator[LogindThread]:
    with logind_thread(tmp_path) as running:
        yield running


def start(make_node: Callable[..., ClusterNode], tmp_path: Path, *flags: str, **settings: Any) -> ClusterNode:
    node = make_node(
        settings={"shutdownGracePeriodByPodPriority": PERIODS, **settings},
        env={"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={tmp_path / 'bus'}"},
        flags=flags,
    )
    node.start()
    node.wait_registered()
    return node


def run_pods(node: ClusterNode, namespace: str) -> dict[str, Document]:
    """Run pods of three priorities, all of which ignore SIGTERM."""
    made = {}
    for name, priority in (("low", 0), ("middle", 1000), ("high", 100000)):
        cluster_class(node, f"{namespace}-{name}", priority)
        spec = {"priorityClassName": f"{namespace}-{name}"} if priority else {}
        made[name] = node.create_pod(namespace, name, IGNORES_TERM, **spec)
    for one in made.values():
        node.wait_api_pod(one, "to run", lambda found: found["status"]["phase"] == "Running")
    return made


def cluster_class(node: ClusterNode, name: str, value: int) -> None:
    if value:
        node.plane.create(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": name},
                "value": value,
            }
        )


def finished_at(found: Document) -> datetime:
    state = found["status"]["containerStatuses"][0]["state"]["terminated"]
    return datetime.fromisoformat(state["finishedAt"])


def check_terminated(found: Document) -> None:
    status = found["status"]
    assert (status["phase"], status["reason"]) == ("Failed", REASON)
    assert status["message"] == "Pod was terminated in response to imminent node shutdown."
    target = next(one for one in status["conditions"] if one["type"] == "DisruptionTarget")
    assert (target["status"], target["reason"]) == ("True", "TerminationByKubelet")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


def ready_message(node: ClusterNode) -> str:
    found = node.node_object()
    assert found is not None
    return next(str(one["message"]) for one in found["status"]["conditions"] if one["type"] == "Ready")


def test_shutdown_three_priorities_terminate_in_order_and_cancel_restores_node(
    make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path, logind: LogindThread
) -> None:
    node = start(make_node, tmp_path)
    logind.wait_held(1)
    static = node.write(pod("agent", container(), hostNetwork=True))
    made = run_pods(node, namespace)
    node.wait_ready(static)
    logind.prepare_for_shutdown(True)
    node.wait("the node to be NotReady", lambda: ready_message(node) == "node is shutting down")
    late = node.create_pod(namespace, "late")
    rejected = node.wait_api_pod(late, "to be rejected", lambda found: found["status"]["phase"] == "Failed")
    assert rejected["status"]["reason"] == "NodeShutdown"
    logind.wait_held(0)
    # The API server has everything when the inhibitor is released: nothing is waited for here.
    found = {name: node.api_pod(one) for name, one in made.items()}
    for one in found.values():
        assert one is not None
        check_terminated(one)
    low, middle, high = (finished_at(one) for one in found.values() if one is not None)
    assert (middle - low).total_seconds() >= 1
    assert (high - middle).total_seconds() >= 1
    assert not node.truth.running("agent")
    logind.prepare_for_shutdown(False)
    logind.wait_held(1)
    node.wait_registered()
    node.wait_ready(static)


def test_shutdown_without_api_server_statuses_are_reported_by_next_kubelet(
    make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path, logind: LogindThread
) -> None:
    node = start(make_node, tmp_path)
    logind.wait_held(1)
    made = node.create_pod(namespace, "web", IGNORES_TERM)
    node.wait_api_pod(made, "to run", lambda found: found["status"]["phase"] == "Running")
    with node.plane.without_server():
        logind.prepare_for_shutdown(True)
        logind.wait_held(0)
        node.kill()
    assert (node.root / "graceful_node_shutdown_pods").exists()
    logind.peer.preparing = False
    node.start()
    found = node.wait_api_pod(made, "to be Failed", lambda one: one["status"]["phase"] == "Failed")
    check_terminated(found)
    node.wait("the file to be removed", lambda: not (node.root / "graceful_node_shutdown_pods").exists())


def test_drain_on_stop_terminates_pods_before_kubelet_ends(
    make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path
) -> None:
    node = start(make_node, tmp_path, "--drain-on-stop")
    made = run_pods(node, namespace)
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(90) == 0
    node.process = None
    for one in made.values():
        found = node.api_pod(one)
        assert found is not None
        check_terminated(found)
    assert not node.truth.running("low")


def test_drain_on_stop_second_signal_ends_kubelet_and_next_one_completes(
    make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path
) -> None:
    periods = [{"priority": 0, "shutdownGracePeriodSeconds": 30}]
    node = start(make_node, tmp_path, "--drain-on-stop", shutdownGracePeriodByPodPriority=periods)
    made = node.create_pod(namespace, "web", IGNORES_TERM, terminationGracePeriodSeconds=30)
    node.wait_api_pod(made, "to run", lambda found: found["status"]["phase"] == "Running")
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    node.wait("the drain", lambda: (node.root / "graceful_node_shutdown_pods").exists())
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(30) == 1
    node.process = None
    node.start()
    found = node.wait_api_pod(made, "to be Failed", lambda one: one["status"]["phase"] == "Failed", 90)
    check_terminated(found)

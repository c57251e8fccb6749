"""`systemctl reboot` with pods of three priorities, a real logind and a real API server.

A reboot would end the guest and this test with it. The test holds a delay inhibitor of its own, and while
logind waits for it, it masks reboot.target: logind announces the shutdown, waits for the kubelet, fails to
start the target, and announces that the shutdown was cancelled. The boot is a kubelet that is killed and
started again.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pykubelet.devcluster.binaries import find_programs
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.linux.logind import DROP_IN_DIRECTORY, DROP_IN_NAME
from tests.cluster.conftest import fresh_namespace, running_plane
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.data_dir import short_dir
from tests.support.manifests import container, pod
from tests.support.plane import Document
from tests.support.runtime import runtime_process
from tests.vm.guest.node import SLOW
from tests.vm.guest.test_stats import upstream_kubelet

pytestmark = pytest.mark.timeout(2400)

PERIODS = {"low": (0, 60), "middle": (1000, 40), "high": (100000, 40)}
"""Priority and seconds of each group; the pods ignore SIGTERM and have shorter grace periods of their own."""
GRACE = {"low": 8, "middle": 6, "high": 4}
TOTAL = sum(seconds for _, seconds in PERIODS.values())
IGNORES_TERM = "trap '' TERM; while true; do sleep 1; done"


def systemctl(*arguments: str) -> str:
    command = ["systemctl", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SLOW).stdout


def max_delay() -> int:
    """Return logind's InhibitDelayMaxSec, in seconds."""
    target = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
    command = ["busctl", "get-property", *target, "InhibitDelayMaxUSec"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SLOW).stdout
    return int(output.split()[1]) // 1_000_000


def inhibitors() -> str:
    command = ["systemd-inhibit", "--list", "--no-legend", "--no-pager"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SLOW).stdout


@pytest.fixture
def logind() -> Iterator[None]:
    """A running logind; the drop-in file of the kubelet is removed at the end."""
    drop_in = DROP_IN_DIRECTORY / DROP_IN_NAME
    systemctl("start", "dbus.service", "systemd-logind.service")
    try:
        yield
    finally:
        systemctl("unmask", "--runtime", "reboot.target")
        drop_in.unlink(missing_ok=True)
        systemctl("kill", "--signal=HUP", "systemd-logind.service")


@contextlib.contextmanager
def own_inhibitor() -> Iterator[subprocess.Popen[bytes]]:
    """Delay a shutdown until the process is killed."""
    command = ["systemd-inhibit", "--what=shutdown", "--who=test", "--mode=delay", "sleep", "infinity"]
    with subprocess.Popen(command) as holding:
        try:
            yield holding
        finally:
            holding.kill()


def ready_condition(node: ClusterNode) -> Document:
    found = node.node_object()
    assert found is not None
    condition: Document = next(one for one in found["status"]["conditions"] if one["type"] == "Ready")
    return condition


def run_pods(node: ClusterNode, namespace: str) -> dict[str, Document]:
    made = {}
    for name, (priority, _) in PERIODS.items():
        spec: dict[str, Any] = {"terminationGracePeriodSeconds": GRACE[name], "hostNetwork": True}
        if priority:
            spec["priorityClassName"] = name
            node.plane.create(
                {
                    "apiVersion": "scheduling.k8s.io/v1",
                    "kind": "PriorityClass",
                    "metadata": {"name": name},
                    "value": priority,
                }
            )
        made[name] = node.create_pod(namespace, name, IGNORES_TERM, **spec)
    for one in made.values():
        node.wait_api_pod(one, "to run", lambda found: found["status"]["phase"] == "Running", SLOW)
    return made


def ended_at(found: Document) -> datetime:
    state = found["status"]["containerStatuses"][0]["state"]["terminated"]
    return datetime.fromisoformat(state["finishedAt"])


def wait_terminated(node: ClusterNode, one: Document) -> Document:
    found = node.wait_api_pod(one, "to be Failed", lambda now: now["status"]["phase"] == "Failed", SLOW)
    status = found["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "Terminated")
    assert status["message"] == "Pod was terminated in response to imminent node shutdown."
    assert any(one["type"] == "DisruptionTarget" and one["status"] == "True" for one in status["conditions"])
    return found


def test_reboot_three_priorities_have_their_periods_and_node_comes_back(logind: None) -> None:
    if upstream_kubelet() is None:
        pytest.skip("the host has not built the control plane: make test")
    try:
        programs = find_programs(print)
    except NotAvailable as err:
        pytest.skip(str(err))
    periods = [
        {"priority": priority, "shutdownGracePeriodSeconds": seconds}
        for priority, seconds in PERIODS.values()
    ]
    settings = {"shutdownGracePeriodByPodPriority": periods}
    with (
        short_dir() as path,
        runtime_process(path, "cgroupfs") as runtime,
        running_plane(programs, timeout=SLOW) as plane,
        fresh_namespace(plane, seconds=SLOW) as namespace,
        in_cluster(cluster_node(plane, runtime, settings=settings), start=False) as node,
    ):
        node.start(wait=False)
        node.wait_registered(SLOW)
        node.wait("the kubelet's inhibitor", lambda: "kubelet" in inhibitors(), SLOW)
        assert max_delay() >= TOTAL
        assert f"InhibitDelayMaxSec={TOTAL + 5}\n" in (DROP_IN_DIRECTORY / DROP_IN_NAME).read_text()
        static = node.write(pod("agent", container(), hostNetwork=True))
        made = run_pods(node, namespace)
        node.wait_ready(static, SLOW)
        with own_inhibitor() as holding:
            node.wait("the test's inhibitor", lambda: "test" in inhibitors(), SLOW)
            systemctl("reboot")
            node.wait(
                "the node to be NotReady",
                lambda: ready_condition(node)["message"] == "node is shutting down",
                SLOW,
            )
            systemctl("mask", "--runtime", "reboot.target")
            node.wait("the kubelet's inhibitor to be released", lambda: "kubelet" not in inhibitors(), TOTAL)
            # On a slow host the API server may get a status after the 5 s that the kubelet waits for it.
            found = {name: wait_terminated(node, one) for name, one in made.items()}
            holding.kill()
            holding.wait()
        ends = [ended_at(found[name]) for name in PERIODS]
        # Each group begins when the one before it has ended, and its pods have their own grace period.
        assert (ends[1] - ends[0]).total_seconds() >= GRACE["middle"] - 1
        assert (ends[2] - ends[1]).total_seconds() >= GRACE["high"] - 1
        # reboot.target is masked: logind announces that there is no shutdown.
        node.wait_registered(SLOW)
        node.wait("the kubelet's new inhibitor", lambda: "kubelet" in inhibitors(), SLOW)
        node.wait_ready(static, SLOW)
        node.kill()
        node.start(wait=False)
        node.wait_registered(SLOW)
        node.wait_ready(static, SLOW)
        # The new process could start the others again only after it has them from the API server.
        node.wait("the pods of the API server", lambda: all(map(node.pod, made)), SLOW)
        for one in made.values():
            wait_terminated(node, one)
        running = {one.labels["io.kubernetes.pod.name"] for one in node.truth.running()}
        assert running == {static}
        assert Path(node.root / "graceful_node_shutdown_state").exists()
        unreported = node.root / "graceful_node_shutdown_pods"
        node.wait("the final statuses to be reported", lambda: not unreported.exists(), SLOW)

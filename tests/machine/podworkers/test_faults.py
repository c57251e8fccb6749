"""What breaks around the agent: the runtime hangs, dies, or loses things."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pykubelet.standalone.daemon import find_daemons
from tests.support.manifests import container, pod
from tests.support.node import Node, is_ready, status_of
from tests.support.runtime_view import CONTAINER_NAME, POD_NAME

pytestmark = pytest.mark.machine

HANG_SECONDS = 15


@pytest.fixture(autouse=True)
def tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the test's manifests away; the module's end proves that their pods are gone."""
    yield
    if "node" in request.fixturenames:
        for path in request.getfixturevalue("node").manifests.iterdir():
            path.unlink()


def containerd(node: Node, but: int | None = None) -> int:
    """Wait for the runtime's process; for another one than `but`, which may still be ending."""

    def found() -> list[int]:
        pids = [daemon.pid for daemon in find_daemons(node.instance)]
        return pids if len(pids) == 1 and pids != [but] else []

    return node.wait("one containerd", found)[0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process hang for the time of a block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_runtime_hangs_kubelet_responds_and_pods_survive(node: Node) -> None:
    # Time for a busy machine; but three times that is less than what the runtime hangs for.
    alive = {"exec": {"command": ["true"]}, "periodSeconds": 1, "timeoutSeconds": 3}
    node.write(pod("steady", container(livenessProbe=alive, readinessProbe=alive)))
    node.write(pod("leaves"))
    node.wait_ready("steady-n1")
    leaving = node.wait_ready("leaves-n1")
    (before,) = node.truth.running("steady-n1")
    with stopped(containerd(node)):
        began = time.monotonic()
        node.write(pod("comes"))
        node.remove("leaves")
        slowest = 0.0
        while time.monotonic() - began < HANG_SECONDS:
            asked = time.monotonic()
            assert node.is_healthy(), "the agent itself does not hang"
            assert {it["metadata"]["name"] for it in node.pods()} >= {"steady-n1"}
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.5)
    assert slowest < 9, f"the agent took {slowest:.1f} s to answer while the runtime hung"
    node.wait_ready("comes-n1")
    node.wait_gone("leaves-n1", leaving["metadata"]["uid"])
    now = node.wait_ready("steady-n1")
    assert [one.id for one in node.truth.running("steady-n1")] == [before.id]
    assert status_of(now, "main")["restartCount"] == 0
    assert len(node.truth.running("comes-n1")) == 1


def test_runtime_killed_during_pod_starts_all_pods_run_once(node: Node) -> None:
    node.start_pod(pod("stays"))
    (before,) = node.truth.running("stays-n1")
    names = [f"dies{number}" for number in range(4)]
    for round, name in enumerate(names):
        node.write(pod(name, container("one"), container("two")))
        time.sleep(0.1 * (round + 1))
        killed = containerd(node)
        os.kill(killed, signal.SIGKILL)
        containerd(node, but=killed)
    for name in names:
        node.wait_ready(f"{name}-n1", 60)
    wanted = {"stays-n1", *(f"{name}-n1" for name in names)}
    # Pods of the test before may still be ending.
    node.wait(
        "only these pods to run", lambda: {one.labels[POD_NAME] for one in node.truth.running()} == wanted
    )
    copies = Counter((one.labels[POD_NAME], one.labels[CONTAINER_NAME]) for one in node.truth.running())
    assert all(count == 1 for count in copies.values()), copies
    assert {name for name, _ in copies} == wanted
    assert [one.id for one in node.truth.running("stays-n1")] == [before.id]
    # Its events are heard again, too.
    os.kill(node.truth.container_pid(before.id), signal.SIGKILL)
    node.wait_pod("stays-n1", "to be restarted", lambda it: status_of(it, "main")["restartCount"] == 1)


@pytest.mark.parametrize("how", ["its process is killed", "it is removed"])
def test_sandbox_lost_is_replaced_with_same_pod_uid(node: Node, how: str) -> None:
    name = "lost" if how == "it is removed" else "killed"
    before = node.start_pod(pod(name))
    (box,) = node.truth.sandboxes(f"{name}-n1")
    (old,) = node.truth.running(f"{name}-n1")
    if how == "it is removed":
        node.truth.remove_sandbox(box.id)
    else:
        os.kill(node.truth.sandbox_pid(box.id), signal.SIGKILL)

    def replaced() -> bool:
        return [it.id for it in node.truth.ready(f"{name}-n1")] not in ([], [box.id])

    def settled() -> bool:
        boxes = [it.id for it in node.truth.ready(f"{name}-n1")]
        inside = [one.pod_sandbox_id for one in node.truth.running(f"{name}-n1")]
        return len(boxes) == 1 and boxes != [box.id] and inside == boxes

    node.wait("another sandbox", replaced)
    # Its container may have been started once more in the dying sandbox, which counts as a crash.
    node.wait("its container alone, in the new sandbox", settled)
    after = node.wait_ready(f"{name}-n1")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert [one.id for one in node.truth.running(f"{name}-n1")] != [old.id]
    assert len(node.truth.running(f"{name}-n1")) == 1


def test_sandbox_lost_removes_stale_log_symlinks(node: Node) -> None:
    node.start_pod(pod("linked", initContainers=[container("side", restartPolicy="Always")]))
    (box,) = node.truth.sandboxes("linked-n1")
    links = node.instance.pod_logs.parent / "containers"
    (first,) = links.glob("linked-n1_default_side-*.log")
    os.kill(node.truth.sandbox_pid(box.id), signal.SIGKILL)
    # The new sandbox starts with its init containers, so those of the lost one are removed.
    node.wait_none(
        "the link of the removed sidecar to go", lambda: [str(first)] if first.is_symlink() else []
    )
    node.wait_ready("linked-n1")
    assert not node.stale_links("linked-n1")


def test_container_killed_externally_is_restarted(node: Node) -> None:
    node.start_pod(pod("shot"))
    (old,) = node.truth.running("shot-n1")
    os.kill(node.truth.container_pid(old.id), signal.SIGKILL)
    after = node.wait_pod(
        "shot-n1",
        "to be restarted",
        lambda it: is_ready(it) and status_of(it, "main")["restartCount"] == 1,
    )
    assert status_of(after, "main")["lastState"]["terminated"]["exitCode"] == 137
    assert len(node.truth.ready("shot-n1")) == 1


def test_pod_removed_during_start_leaves_nothing(node: Node) -> None:
    for number in range(10):
        node.write(pod(f"brief{number}", container("one"), container("two")))
        time.sleep(0.12 + 0.04 * number)
        node.remove(f"brief{number}")

    def left() -> list[str]:
        return [box.id for box in node.truth.sandboxes() if box.metadata.name.startswith("brief")]

    node.wait("all of them to be gone", lambda: not left() and not node.pods(), 60)
    node.wait_none("nothing of them to be left", node.left_of, 60)


def test_cni_plugin_missing_pod_starts_after_repair(node: Node) -> None:
    (config,) = node.instance.cni_conf.iterdir()
    text = config.read_text()
    config.write_text(text.replace('"bridge"', '"no-such-plugin"', 1))
    try:
        # Else the pod would still get the good one.
        node.wait("the runtime to have heard of it", lambda: "no-such-plugin" in node.truth.network())
        node.write(pod("netless"))
        node.wait(
            "the event that names the plugin",
            lambda: any(
                why == "FailedCreatePodSandBox" and "no-such-plugin" in told
                for why, told, _ in node.events("netless-n1")
            ),
        )
    finally:
        config.write_text(text)
    node.wait_ready("netless-n1")
    assert len(node.truth.ready("netless-n1")) == 1

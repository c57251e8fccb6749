"""A runtime that is upgraded or downgraded under running pods: they keep running, and new pods start.

containerd's shims and its metadata are of the version that wrote them; the other version must use both.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pykubelet.standalone.teardown import find_shims
from tests.support import newer_runtime
from tests.support.data_dir import short_dir
from tests.support.manifests import IMAGE, container, forever, pod
from tests.support.node import Document, Node, all_statuses, kubelet_node, running
from tests.support.runtime import RunningRuntime, runtime_process

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        not newer_runtime.is_chosen(), reason="needs a newer containerd beside the host's: RUNTIME=2"
    ),
]
PODS = ("one", "two", "three")
IMAGE_VOLUME = {"name": "tools", "image": {"reference": IMAGE, "pullPolicy": "IfNotPresent"}}


class Replaceable:
    """A private runtime whose containerd can be replaced by another version, on the same data directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()

    def run(self, *, newer: bool) -> RunningRuntime:
        """Stop the present version, if any, and run the other one."""
        self._stack.close()
        env = {} if newer else {"PATH": newer_runtime.host_path()}
        return self._stack.enter_context(runtime_process(self._directory, env=env))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def replaceable() -> Iterator[Replaceable]:
    with short_dir() as directory, contextlib.closing(Replaceable(directory)) as made:
        yield made


def facts(node: Node) -> dict[str, list[tuple[str, int]]]:
    """Return the containers of each pod with their numbers of restarts."""
    return {
        pod["metadata"]["name"]: [(one["containerID"], one["restartCount"]) for one in all_statuses(pod)]
        for pod in node.pods()
        if pod["metadata"]["name"].removesuffix("-n1") in PODS
    }


def start_pods(node: Node) -> dict[str, list[tuple[str, int]]]:
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1, "timeoutSeconds": 20}
    for name in PODS:
        node.write(
            pod(name, container("main", livenessProbe=probe), container("side", forever("echo started")))
        )
    for name in PODS:
        node.wait_ready(f"{name}-n1", 90)
    return facts(node)


def wait_replaced(node: Node) -> None:
    """Wait until the kubelet has noticed the other version."""
    node.wait("the runtime to respond", lambda: node.truth.network(), 60)
    node.wait(
        "the kubelet to notice the other version",
        lambda: "Container runtime was replaced" in node.log_text(),
        60,
    )


def check_pods_work(node: Node, before: dict[str, list[tuple[str, int]]]) -> None:
    """Verify that all pods run as before, and that commands run in them."""
    for name in PODS:
        node.wait_ready(f"{name}-n1")
        assert node.shell(f"{name}-n1", "echo works", "main") == "works\n"
    assert facts(node) == before


def with_image_volume(name: str) -> Document:
    mounts = [{"name": "tools", "mountPath": "/tools"}]
    return pod(name, container(volumeMounts=mounts), volumes=[IMAGE_VOLUME])


def kill_side(node: Node, name: str) -> None:
    """Kill the process of a pod's second container, and wait until only that is restarted."""
    [side] = [one for one in node.truth.running(name) if one.metadata.name == "side"]
    os.kill(node.truth.container_pid(side.id), signal.SIGKILL)
    node.wait_pod(
        name,
        "to have one restart",
        lambda found: sorted(one["restartCount"] for one in all_statuses(found)) == [0, 1],
        60,
    )


def test_runtime_upgraded_under_pods_they_keep_running(replaceable: Replaceable) -> None:
    with running(kubelet_node(replaceable.run(newer=False))) as node:
        before = start_pods(node)
        node.write(with_image_volume("later"))
        assert "cannot mount images" in node.wait_event("later-n1", "FailedMount", 60)
        replaceable.run(newer=True)
        wait_replaced(node)
        check_pods_work(node, before)
        # What the older version could not do starts without a restart of the kubelet.
        node.wait_ready("later-n1", 200)
        assert node.shell("later-n1", "test -x /tools/bin/busybox && echo yes") == "yes\n"
        node.wait_ready(node.write(pod("new", hostUsers=False)))
        # A container of the older version's shim exits; the newer version restarts it in its sandbox.
        kill_side(node, "one-n1")
        node.restart()
        node.wait_ready("two-n1")
        assert facts(node)["two-n1"] == before["two-n1"]
        node.clear(120)


def test_runtime_upgraded_and_downgraded_pods_of_older_shims_keep_running(replaceable: Replaceable) -> None:
    with running(kubelet_node(replaceable.run(newer=False))) as node:
        before = start_pods(node)
        replaceable.run(newer=True)
        wait_replaced(node)
        check_pods_work(node, before)
        replaceable.run(newer=False)
        node.wait("the runtime to respond", lambda: node.truth.network(), 60)
        check_pods_work(node, before)
        node.wait_ready(node.write(pod("new")), 120)
        kill_side(node, "one-n1")
        node.clear(120)


def test_runtime_downgraded_pods_of_newer_shims_restarted_once(replaceable: Replaceable) -> None:
    """Verify that containers whose shims the older version cannot use are replaced, and none is left."""
    with running(kubelet_node(replaceable.run(newer=True))) as node:
        before = start_pods(node)
        old_shims = {process.pid for process in find_shims(node.instance)}
        old = {one.id: node.truth.container_pid(one.id) for one in node.truth.running()}
        replaceable.run(newer=False)
        wait_replaced(node)

        def are_new() -> bool:
            ids = {id for containers in facts(node).values() for id, _ in containers}
            return len(ids) == 2 * len(PODS) and ids.isdisjoint(
                id for containers in before.values() for id, _ in containers
            )

        node.wait("all containers to be replaced", are_new, 120)
        for name in PODS:
            node.wait_ready(f"{name}-n1", 90)
            assert node.shell(f"{name}-n1", "echo works", "main") == "works\n"
            uid = (node.pod(f"{name}-n1") or {})["metadata"]["uid"]
            assert len([box for box in node.truth.ready() if box.metadata.uid == uid]) == 1
        assert old_shims.isdisjoint(process.pid for process in find_shims(node.instance))
        assert not [pid for pid in old.values() if Path(f"/proc/{pid}").exists()]
        node.clear(120)

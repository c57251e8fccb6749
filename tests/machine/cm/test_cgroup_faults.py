"""Cgroups that somebody removed, filled, or left behind: pods get theirs again, and strangers go."""

import errno
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups, members
from tests.support.manifests import container, pod
from tests.support.node import Document, Node, is_ready, kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(detect_cgroups().unified, reason="takes a pod out of one hierarchy of cgroup v1"),
]

LIMITS = {"cpu": "50m", "memory": "32Mi"}


@pytest.fixture(scope="module")
def node(runtime: RunningRuntime) -> Iterator[Node]:
    """A node that looks at each pod every second."""
    with running(kubelet_node(runtime, syncFrequency="1s")) as started:
        yield started
        started.clear()


def folders(node: Node, below: str) -> dict[str, Path]:
    """The folders of a cgroup of pods, by controller."""
    found = detect_cgroups()
    return {name: found.path(name, f"{node.instance.cgroup_root}/kubepods/{below}") for name in found.mounts}


@contextmanager
def stranger(node: Node, below: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that sits in a cgroup of pods, in every hierarchy."""
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            for folder in folders(node, below).values():
                (folder / "cgroup.procs").write_text(str(process.pid))
            yield process
        finally:
            process.kill()


@contextmanager
def frozen(node: Node) -> Iterator[None]:
    """Have the agent stand still for the time of a block."""
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.process.send_signal(signal.SIGCONT)


def guaranteed(name: str, **spec: Any) -> Document:
    return pod(name, container(resources={"requests": LIMITS, "limits": LIMITS}), **spec)


def take_away(node: Node, folder: Path) -> None:
    """Move all processes of a cgroup to the root of its hierarchy, and remove it."""
    root = detect_cgroups().mounts["pids"] / "cgroup.procs"

    def gone() -> bool:
        # Who is forked meanwhile is still inside, and the kernel lets go of those who end a moment later.
        for pid in members(folder):
            with suppress(ProcessLookupError):
                root.write_text(str(pid))
        try:
            for path in (*(path for path in folder.iterdir() if path.is_dir()), folder):
                path.rmdir()
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            return False
        return True

    node.wait(f"{folder} to be taken away", gone)


def test_pod_cgroup_removed_externally_is_recreated_container_restarted(node: Node) -> None:
    found = node.start_pod(guaranteed("robbed"))
    (old,) = node.truth.running("robbed-n1")
    place = folders(node, f"pod{found['metadata']['uid']}")
    (place["memory"] / "memory.limit_in_bytes").write_text(str(64 << 20))
    take_away(node, place["pids"])

    def again() -> bool:
        new = [one.id for one in node.truth.running("robbed-n1") if one.id != old.id]
        return len(new) == 1 and node.truth.container_pid(new[0]) in members(place["pids"])

    node.wait("another container within the pod's cgroup", again, 60)
    # The status follows what it tells of.
    after = node.wait_pod(
        "robbed-n1", "to be ready again", lambda it: is_ready(it) and status_of(it, "main")["restartCount"]
    )
    assert after["metadata"]["uid"] == found["metadata"]["uid"]
    assert status_of(after, "main")["restartCount"] == 1
    # All of it was made as for a new pod, not only what was gone.
    assert (place["memory"] / "memory.limit_in_bytes").read_text().strip() == str(32 << 20)
    assert (place["cpu"] / "cpu.cfs_quota_us").read_text().strip() == "5000"
    assert node.wait_event("robbed-n1", "SandboxChanged")


def test_pod_cgroup_removed_restart_policy_never_is_not_restarted(node: Node) -> None:
    found = node.start_pod(guaranteed("once", restartPolicy="Never"))
    take_away(node, folders(node, f"pod{found['metadata']['uid']}")["pids"])
    ended = node.wait_pod(
        "once-n1", "to end", lambda it: it["status"]["phase"] in ("Succeeded", "Failed"), 60
    )
    assert status_of(ended, "main")["restartCount"] == 0


def test_pod_cgroup_foreign_process_is_killed_on_pod_removal(node: Node) -> None:
    found = node.start_pod(guaranteed("crowded"))
    with stranger(node, f"pod{found['metadata']['uid']}") as process:
        node.remove("crowded")
        assert process.wait(60) == -signal.SIGKILL
        node.wait_gone("crowded-n1", found["metadata"]["uid"])


@pytest.mark.parametrize("tier", ["", "burstable/", "besteffort/"])
def test_pod_cgroup_of_unknown_pod_is_removed(node: Node, tier: str) -> None:
    below = f"{tier}pod{uuid.uuid4()}"
    with ExitStack() as stack:
        # An agent that looks before all is in place would take away what there is.
        with frozen(node):
            for folder in folders(node, below).values():
                folder.mkdir(exist_ok=True)
            cpuset = folders(node, below)["cpuset"]
            for name in ("cpuset.cpus", "cpuset.mems"):
                (cpuset / name).write_text((cpuset.parent / name).read_text())
            process = stack.enter_context(stranger(node, below))
        assert process.wait(60) == -signal.SIGKILL
    node.wait("it to be gone", lambda: not any(it.exists() for it in folders(node, below).values()))


def test_pod_cgroup_of_pod_ended_while_kubelet_down_is_removed(node: Node) -> None:
    stays = node.start_pod(guaranteed("stays"))
    found = node.start_pod(guaranteed("leaves"))
    (box,) = node.truth.sandboxes("leaves-n1")
    place = folders(node, f"pod{found['metadata']['uid']}")
    node.kill()
    node.remove("leaves")
    node.truth.remove_sandbox(box.id)
    # Logs of pods that nobody knows are collected at times; this is not about them.
    shutil.rmtree(node.instance.pod_logs / f"default_leaves-n1_{found['metadata']['uid']}")
    for link in (node.instance.pod_logs.parent / "containers").glob("leaves-n1_*"):
        link.unlink()
    assert all(folder.is_dir() for folder in place.values())
    node.start()
    node.wait_gone("leaves-n1", found["metadata"]["uid"])
    assert not any(folder.exists() for folder in place.values())
    now = node.wait_ready("stays-n1")
    assert status_of(now, "main") == status_of(stays, "main")
    assert folders(node, f"pod{stays['metadata']['uid']}")["pids"].is_dir()

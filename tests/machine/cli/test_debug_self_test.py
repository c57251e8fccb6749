"""`pykubelet self-test` and `pykubelet debug` on a real node."""

import asyncio
import json
import signal
from collections.abc import Iterator

import pytest

from pykubelet.cli.node.self_test import CHECKS
from tests.support.cli_node import Terminal, command, pykubelet
from tests.support.data_dir import short_dir
from tests.support.manifests import container, pod
from tests.support.node import Node, running, up_node

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with short_dir() as path, running(up_node(path)) as started:
        yield started
        started.clear()


async def test_self_test_real_node_passes_and_leaves_nothing(node: Node) -> None:
    ran = await pykubelet(node.instance, "self-test", timeout=180)
    assert (ran.code, ran.err) == (0, ""), ran
    assert [line.split()[:2] for line in ran.out.splitlines()[:-1]] == [["ok", name] for name in CHECKS]
    assert ran.out.splitlines()[-1].startswith("The node works: 7 checks in ")
    assert node.pods() == []
    assert list(node.manifests.iterdir()) == []


async def test_self_test_interrupted_pod_is_removed(node: Node) -> None:
    terminal = Terminal(command(node.instance, "self-test"))
    await terminal.until("start")
    terminal.signal(signal.SIGINT)
    assert await terminal.end() == 130
    assert list(node.manifests.iterdir()) == []
    await asyncio.to_thread(node.wait, "no pods", lambda: not node.pods())


async def test_self_test_missing_image_explains_and_removes(node: Node) -> None:
    ran = await pykubelet(
        node.instance, "self-test", "--image", "127.0.0.1:1/no:1", "-o", "json", timeout=180
    )
    found = json.loads(ran.out)
    assert (ran.code, found["passed"]) == (1, False)
    first, *_, last = found["checks"]
    assert (first["status"], last["status"]) == ("failed", "ok"), found
    assert "127.0.0.1:1/no:1" in first["message"]
    assert "--image" in first["remedy"]


async def test_debug_command_sees_target_and_exits_with_its_code(node: Node) -> None:
    name = node.write(pod("web", container(command=["sleep", "12345"])))
    await asyncio.to_thread(node.wait_ready, name)
    before = (node.pod(name) or {})["status"]["containerStatuses"]
    script = "grep -a 12345 /proc/1/cmdline && echo found && exit 4"
    ran = await pykubelet(node.instance, "debug", "web", "--target", "main", "--", "sh", "-c", script)
    assert ran.code == 4, ran
    assert "found" in ran.out
    ran = await pykubelet(node.instance, "debug", "-i", "web", "--", "cat", stdin=b"to the container\n")
    assert (ran.code, ran.out) == (0, "to the container\n"), ran
    terminal = Terminal(command(node.instance, "debug", "web", "-it", "--", "sh"))
    await terminal.until("#")
    terminal.type("echo tty-$((40 + 2)); exit 5\r")
    await terminal.until("tty-42")
    assert await terminal.end() == 5
    terminal = Terminal(command(node.instance, "debug", "web", "--", "sh", "-c", "echo begun; sleep 12345"))
    await terminal.until("begun")
    terminal.signal(signal.SIGINT)
    assert await terminal.end() == 130
    assert len(node.truth.running(name)) == 1
    after = node.pod(name) or {}
    assert after["status"]["containerStatuses"] == before
    assert len(after["spec"]["ephemeralContainers"]) == 4
    await asyncio.to_thread(node.clear)


async def test_debug_running_command_survives_a_kubelet_restart_and_ends_with_the_pod(node: Node) -> None:
    name = node.write(pod("web", container(command=["sh", "-c", "trap exit TERM; sleep 12345 & wait"])))
    await asyncio.to_thread(node.wait_ready, name)
    terminal = Terminal(command(node.instance, "debug", "web", "-it", "--", "sh"))
    await terminal.until("#")
    terminal.type("trap '' HUP; while sleep 1; do :; done\r")
    running_before = {one.id for one in node.truth.running(name)}
    assert len(running_before) == 2
    node.restart()  # not in a thread: its end would end the kubelet (`setpriv --pdeathsig`)
    await asyncio.to_thread(node.wait_ready, name)
    assert {one.id for one in node.truth.running(name)} == running_before
    ran = await pykubelet(node.instance, "debug", "web", "--", "true")
    assert ran.code == 0, ran
    await asyncio.to_thread(node.clear)
    assert node.truth.containers(name) == []
    terminal.signal(signal.SIGKILL)
    await terminal.end()

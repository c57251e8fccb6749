"""`pykubelet debug` on a scripted node; the real one is in tests/machine/cli."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import (
    ContainerState,
    ContainerStateTerminated,
    ContainerStateWaiting,
    ContainerStatus,
)
from pykubelet.cli.pods.debug import DebugOptions, debug_container
from pykubelet.cli.pods.logs import log_outlook
from pykubelet.podconfig.ephemeral_containers import MAX_EPHEMERAL_CONTAINERS
from pykubelet.server.node_info import NodeInfo
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.standalone.instance import Instance
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE
from tests.support.cli_node import answering, pykubelet
from tests.support.pod_view import ScriptedView, pod_of


@pytest.fixture
def instance(data_dir: Path) -> Instance:
    return Instance.at(data_dir)


@asynccontextmanager
async def node(instance: Instance, state: ContainerState, *, standalone: bool = True) -> AsyncIterator[Pod]:
    """Run a scripted node with the pod `web`, whose ephemeral containers get this state."""
    info = NodeInfo(
        node_name="node1",
        root_dir=str(instance.kubelet_root),
        cert_dir="",
        pod_logs_dir=str(instance.pod_logs),
        container_runtime_endpoint=instance.endpoint,
        standalone=standalone,
    )

    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=to_json(info))

    pod = pod_of("web", "uid-1")
    async with answering(instance, ScriptedView([pod], debugger_state=state), [web.get("/node", respond)]):
        yield pod


def ended(code: int) -> ContainerState:
    return ContainerState(terminated=ContainerStateTerminated(exit_code=code))


async def test_debug_ended_container_exit_code_is_ours(instance: Instance) -> None:
    async with node(instance, ended(3)) as pod:
        ran = await pykubelet(instance, "debug", "web", "--target", "main", "--", "sh", "-c", "exit 3")
    assert ran.code == 3
    [added] = pod.spec.ephemeral_containers
    assert ran.err == f"Container {added.name} of pod web-node1\n"
    assert (added.image, added.command, added.target_container_name) == (
        BUSYBOX_IMAGE,
        ["sh", "-c", "exit 3"],
        "main",
    )


async def test_debug_image_missing_or_pod_full_is_one_line(instance: Instance) -> None:
    waiting = ContainerState(waiting=ContainerStateWaiting(reason="ErrImageNeverPull", message="x\x1b[2J"))
    async with node(instance, waiting) as pod:
        ran = await pykubelet(instance, "debug", "web", "--", "true")
        assert ran.code == 1
        assert ran.err.endswith("does not start: ErrImageNeverPull: x\\x1b[2J; give --image\n")
        pod.spec.ephemeral_containers *= MAX_EPHEMERAL_CONTAINERS
        ran = await pykubelet(instance, "debug", "web", "--", "true")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "which is the maximum" in ran.err


async def test_debug_wrong_use_is_explained(instance: Instance) -> None:
    async with node(instance, ended(0), standalone=False) as pod:
        ran = await pykubelet(instance, "debug", "web", "--", "true")
        assert (ran.code, ran.err) == (
            1,
            "pykubelet debug: the node has an API server: use `kubectl debug`\n",
        )
        assert pod.spec.ephemeral_containers == []
    async with node(instance, ended(0)):
        ran = await pykubelet(instance, "debug", "web")
        assert (ran.code, "add -it for a shell" in ran.err) == (2, True)
        ran = await pykubelet(instance, "debug", "web", "--target", "none", "--", "true")
        assert (ran.code, "it has: main" in ran.err) == (1, True)


async def test_ephemeralcontainers_route_hostile_bodies_are_rejected(instance: Instance) -> None:
    async with node(instance, ended(0)) as pod:
        socket = str(instance.kubelet_root / SOCKET_NAME)
        async with aiohttp.ClientSession("http://n", connector=aiohttp.UnixConnector(socket)) as session:
            for uid, body, status in (
                ("uid-1", b"{", 400),
                ("uid-1", b"[]", 400),
                ("uid-1", b'{"name": "main", "image": "i"}', 422),
                ("uid-1", b"x" * (65 * 1024), 413),
                ("none", b"{}", 404),
            ):
                async with session.post(f"/pods/{uid}/ephemeralcontainers", data=body) as answer:
                    assert answer.status == status
        assert pod.spec.ephemeral_containers == []


def test_debug_container_input_ends_with_us_and_other_images_are_pulled() -> None:
    found = debug_container(DebugOptions("web", image="alpine", stdin=True))
    assert (found.stdin, found.stdin_once, found.image_pull_policy) == (True, True, "")


def test_log_outlook_ended_ephemeral_container_is_over_in_a_restarting_pod() -> None:
    pod = pod_of("p", "u", spec={"ephemeralContainers": [{"name": "d", "image": "i"}]})
    [container] = pod.spec.ephemeral_containers
    pod.status.ephemeral_container_statuses = [ContainerStatus(name="d", state=ended(0))]
    assert log_outlook(pod, "syncing", container, 0) == "over"

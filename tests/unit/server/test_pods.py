"""`/pods` on the read-only port, and the control socket, with pods that a script gives."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from pykubelet.api.meta import from_json
from pykubelet.api.pod import PodList
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.server.listeners import PortError, http_server, unix_server
from pykubelet.server.manifests import control_routes
from pykubelet.server.pods import NodePods, PodJournal, pod_list_json
from pykubelet.server.readonly import read_only_routes
from tests.support.pod_view import ScriptedView, pod_of


@pytest.fixture
def view() -> ScriptedView:
    web = pod_of(
        "web",
        "u1",
        spec={"containers": [{"name": "main", "image": "busybox", "ports": [{"containerPort": 80}]}]},
        status={
            "podIP": "10.1.0.2",
            "containerStatuses": [
                {
                    "name": "main",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": "2026-01-02T03:04:06Z"}},
                }
            ],
        },
    )
    return ScriptedView(
        listed=[web, pod_of("job", "u2")],
        events={"u1": [Event("Normal", "Started", "Started container main", "spec", 10.0, 12.5, 2)]},
        notes={"u1": [TimelineEntry(9.0, "decide", "start main")]},
        states={"u2": "terminating"},
    )


@asynccontextmanager
async def served(view: ScriptedView, path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        unix_server(path, control_routes(view)),
        aiohttp.ClientSession("http://node", connector=aiohttp.UnixConnector(str(path))) as session,
    ):
        yield session


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_pod_list_json_kind_on_list_not_on_items(view: ScriptedView) -> None:
    document = json.loads(pod_list_json(view.pods()))
    assert list(document) == ["kind", "apiVersion", "metadata", "items"]
    assert (document["kind"], document["apiVersion"], document["metadata"]) == ("PodList", "v1", {})
    first = document["items"][0]
    assert "kind" not in first
    assert "apiVersion" not in first
    assert first["metadata"]["name"] == "web-node1"
    assert first["status"]["startTime"] == "2026-01-02T03:04:05Z"
    assert first["status"]["containerStatuses"][0]["state"] == {
        "running": {"startedAt": "2026-01-02T03:04:06Z"}
    }


def test_pod_list_json_roundtrips(view: ScriptedView) -> None:
    assert from_json(PodList, pod_list_json(view.pods())).items == view.pods()


def test_pod_list_json_no_pods_returns_empty_items() -> None:
    assert json.loads(pod_list_json([]))["items"] == []


async def test_read_only_port_lists_pods_and_rejects_changes(
    view: ScriptedView, unused_tcp_port: int
) -> None:
    async with (
        http_server("read-only", "127.0.0.1", unused_tcp_port, read_only_routes(view)),
        aiohttp.ClientSession(f"http://127.0.0.1:{unused_tcp_port}") as session,
    ):
        async with session.get("/pods") as answer:
            assert answer.status == 200
            assert answer.content_type == "application/json"
            assert [item["metadata"]["uid"] for item in (await answer.json())["items"]] == ["u1", "u2"]
        async with session.post("/pods") as answer:
            assert answer.status == 405
        async with session.post("/pods/u1/restart") as answer:
            assert answer.status == 404


async def test_control_socket_returns_pods_states_and_journal(view: ScriptedView, tmp_path: Path) -> None:
    async with served(view, tmp_path / "s") as session:
        async with session.get("/pods") as answer:
            told = from_json(NodePods, await answer.read())
        assert told.pods == view.pods()
        assert told.states == {"u1": "syncing", "u2": "terminating"}
        async with session.get("/pods/u2") as answer:
            assert [pod.uid for pod in from_json(NodePods, await answer.read()).pods] == ["u2"]
        async with session.get("/pods/u1/journal") as answer:
            journal = from_json(PodJournal, await answer.read())
        assert (journal.events, journal.timeline) == (view.events["u1"], view.notes["u1"])


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/pods/nope"), ("GET", "/pods/nope/journal"), ("POST", "/pods/nope/restart")],
)
async def test_control_socket_unknown_pod_returns_404(
    view: ScriptedView, tmp_path: Path, method: str, path: str
) -> None:
    async with served(view, tmp_path / "s") as session, session.request(method, path) as answer:
        assert answer.status == 404
        assert await answer.json() == {"message": "there is no pod with uid nope"}


async def test_control_socket_restart_requests_one_or_all_containers(
    view: ScriptedView, tmp_path: Path
) -> None:
    async with served(view, tmp_path / "s") as session:
        async with session.post("/pods/u1/restart") as answer:
            assert await answer.json() == {"containers": ["main"]}
        async with session.post("/pods/u1/restart", params={"container": "main"}) as answer:
            assert answer.status == 200
        async with session.post("/pods/u1/restart", params={"container": "no"}) as answer:
            assert answer.status == 404
            assert await answer.json() == {"message": "pod has no running container 'no'"}
        async with session.get("/pods/u1/restart") as answer:
            assert answer.status == 405
    assert view.restarts == [("u1", None), ("u1", "main")]


async def test_unix_server_socket_mode_0600_and_removed_at_exit(view: ScriptedView, tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        async with served(view, path):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            assert names_in(tmp_path) == ["s"]
    finally:
        os.umask(before)
    assert names_in(tmp_path) == []


async def test_unix_server_stale_socket_replaced(view: ScriptedView, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    (tmp_path / ".s").write_text("an agent was killed while it made its socket")
    async with served(view, path) as session, session.get("/pods") as answer:
        assert answer.status == 200
    assert names_in(tmp_path) == []


async def test_unix_server_socket_in_use_raises(view: ScriptedView, tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with served(view, path) as session:
        with pytest.raises(PortError, match="another agent answers"):
            async with unix_server(path, []):
                pass
        async with session.get("/pods") as answer:
            assert answer.status == 200


async def test_unix_server_newer_socket_not_removed_at_exit(view: ScriptedView, tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with unix_server(path, control_routes(view)):
        path.unlink()
        later = socket.socket(socket.AF_UNIX)
        later.bind(str(path))
    later.close()
    assert path.exists()


def _put_a_file(folder: Path) -> Path:
    (folder / "s").write_text("mine")
    return folder / "s"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (_put_a_file, "something else is there, remove it"),
        (lambda folder: folder / "missing" / "s", "No such file or directory"),
        (lambda folder: folder / ("x" * 120), "too long"),
    ],
)
async def test_unix_server_unusable_path_raises(
    tmp_path: Path, place: Callable[[Path], Path], says: str
) -> None:
    with pytest.raises(PortError, match=says):
        async with unix_server(place(tmp_path), []):
            pass
    assert {name for name in names_in(tmp_path) if name.startswith(".")} == set()


def test_unix_server_on_uvloop_serves(view: ScriptedView, tmp_path: Path) -> None:
    async def ask() -> Any:
        async with served(view, tmp_path / "s") as session, session.get("/pods/u1") as answer:
            return await answer.json()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask())["states"] == {"u1": "syncing"}
    assert names_in(tmp_path) == []

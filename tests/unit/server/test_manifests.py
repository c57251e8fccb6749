"""Manifests over HTTP: what is taken, what is refused and how, and that nothing else is touched."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from pykubelet.podconfig.local_objects import LOCAL_KINDS
from pykubelet.podconfig.static_pods import static_pods
from pykubelet.server.auth.identity import ANONYMOUS_USER, USER, User
from pykubelet.server.manifests import ManifestDirectory

MOST = 2000
Client = TestClient[web.Request, web.Application]


def pod(name: str = "web", **spec: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "busybox"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": containers, **spec},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "manifests"
    path.mkdir()
    (tmp_path / "secret").write_text("not for everybody")
    return path


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    @web.middleware
    async def known(request: web.Request, handler: Any) -> web.StreamResponse:
        name = request.headers.get("Who", "admin")
        request[USER] = ANONYMOUS_USER if name == "nobody" else User(name)
        answer: web.StreamResponse = await handler(request)
        return answer

    app = web.Application(middlewares=[known])
    app.add_routes(ManifestDirectory(folder, "node1", clock=lambda: 0).routes(max_bytes=MOST))
    async with TestClient(TestServer(app)) as made:
        yield made


async def ask(client: Client, method: str, path: str, body: object = None, **more: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    async with client.request(method, f"/manifests/{path}", data=data, **more) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text


async def test_manifests_put_get_delete_lifecycle_succeeds(client: Client, folder: Path) -> None:
    status, taken = await ask(client, "PUT", "web.yaml", pod())
    assert status == 201
    content = (folder / "web.yaml").read_bytes()
    made = static_pods(content, source="file", origin=str(folder / "web.yaml"), node_name="node1", now=0)
    expected = {"namespace": "default", "name": "web-node1", "uid": made[0].uid}
    assert taken == {
        "path": str(folder / "web.yaml"),
        "pods": [expected],
        "objects": [],
        "warnings": [],
        "problems": [],
    }
    assert json.loads(content) == pod()
    assert await ask(client, "GET", "web.yaml") == (200, content.decode())
    status, changed = await ask(client, "PUT", "web.yaml", pod(hostNetwork=True))
    assert status == 200
    assert changed["pods"][0]["uid"] != expected["uid"]
    status, listed = await ask(client, "GET", "")
    assert (status, listed["items"]) == (200, [changed])
    status, removed = await ask(client, "DELETE", "web.yaml")
    assert (status, removed["pods"]) == (200, changed["pods"])
    assert list(folder.iterdir()) == []
    assert (await ask(client, "GET", "web.yaml"))[0] == 404
    assert (await ask(client, "DELETE", "web.yaml"))[0] == 404


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 422, "is empty"),
        (b"{", 422, ""),
        (b"\xff\xfe", 422, "UTF-8"),
        (b"kind: Service\napiVersion: v1\n", 422, "only Pod and PodList can be run"),
        (b"kind: PodList\napiVersion: v1\nitems: []\n", 422, "holds no pod"),
        (pod(containers=[]), 422, "containers"),
        (pod("Bad_Name"), 422, "name"),
        (b"#" * (MOST + 1), 413, "at most"),
    ],
)
async def test_manifests_put_invalid_body_returns_422_or_413(
    client: Client, folder: Path, body: object, status: int, says: str
) -> None:
    got, refusal = await ask(client, "PUT", "web.yaml", body)
    assert got == status
    assert says in refusal["message"]
    assert "Traceback" not in str(refusal)
    assert list(folder.iterdir()) == []


async def test_manifests_put_chunked_body_above_limit_returns_413(client: Client, folder: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"#" * 1000

    async with client.put("/manifests/web.yaml", data=endless()) as answer:
        assert answer.status == 413
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        ".hidden",
        "..",
        "%2e%2e",
        "%2e%2e%2fsecret",
        "..%2fsecret",
        "a%2fb",
        "a%00b",
        "a%0ab",
        "x" * 201,
        "%2e",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_manifests_invalid_name_rejected(client: Client, folder: Path, method: str, name: str) -> None:
    url = URL(f"{client.make_url('/manifests/')}{name}", encoded=True)
    async with client.session.request(method, url, data=json.dumps(pod()).encode()) as answer:
        assert answer.status in (400, 404, 405)
        assert "not for everybody" not in await answer.text()
    assert list(folder.iterdir()) == []
    assert {path.name for path in folder.parent.iterdir()} == {"secret", "manifests"}


@given(st.text(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
async def test_manifests_put_any_name_stays_in_directory(client: Client, folder: Path, name: str) -> None:

    url = URL(f"{client.make_url('/manifests/')}{quote(name, safe='', errors='replace')}", encoded=True)
    async with client.session.put(url, data=json.dumps(pod()).encode()) as answer:
        assert answer.status in (200, 201, 400, 404, 405, 409)
    for path in folder.iterdir():
        assert not path.name.startswith(".")
        path.unlink()
    assert {path.name for path in folder.parent.iterdir()} == {"secret", "manifests"}


async def test_manifests_put_pod_of_other_file_returns_409(client: Client, folder: Path) -> None:
    assert (await ask(client, "PUT", "a.yaml", pod("one")))[0] == 201
    status, refusal = await ask(client, "PUT", "a.yaml", pod("two"))
    assert status == 409
    assert "holds pod default/one" in refusal["message"]
    status, refusal = await ask(client, "PUT", "b.yaml", pod("one"))
    assert status == 409
    assert "already in" in refusal["message"]
    assert (await ask(client, "PUT", "b.yaml?replace=true", pod("one")))[0] == 201
    assert [path.name for path in folder.iterdir()] == ["b.yaml"]


async def test_manifests_symlink_not_followed(client: Client, folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "secret")
    status, refusal = await ask(client, "GET", "link")
    assert status == 403
    assert "is a link" in refusal["message"]
    assert (await ask(client, "PUT", "link?replace=true", pod()))[0] == 200
    assert not (folder / "link").is_symlink()
    assert (folder.parent / "secret").read_text() == "not for everybody"


async def test_manifests_list_invalid_file_reports_problems(client: Client, folder: Path) -> None:
    (folder / "bad").write_text("kind: [")
    (folder / "sub").mkdir()
    (folder / ".hidden").write_text("x")
    status, listed = await ask(client, "GET", "")
    assert status == 200
    (item,) = listed["items"]
    assert item["path"] == str(folder / "bad")
    assert item["problems"]
    assert (await ask(client, "DELETE", "sub"))[0] == 404
    assert (await ask(client, "DELETE", "bad"))[0] == 200


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "a"), ("PUT", "a"), ("DELETE", "a")])
async def test_manifests_anonymous_user_returns_403(
    client: Client, folder: Path, method: str, path: str
) -> None:
    (folder / "a").write_text(json.dumps(pod("old")))
    status, refusal = await ask(client, method, path, pod(), headers={"Who": "nobody"})
    assert status == 403
    assert "say who they are" in refusal["message"]
    assert json.loads((folder / "a").read_text()) == pod("old")


async def test_manifests_directory_missing_returns_500(client: Client, folder: Path) -> None:
    folder.rmdir()
    for method, path in (("GET", ""), ("PUT", "a")):
        status, refusal = await ask(client, method, path, pod())
        assert status == 500
        assert "cannot be used: No such file or directory" in refusal["message"]


CONFIG = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "page"},
    "data": {"index.html": "hello"},
}
HIDDEN = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "s"},
    "stringData": {"password": "hunter2"},
}
USER_POD = pod(volumes=[{"name": "v", "configMap": {"name": "page"}}])


def together(*documents: object) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(documents)}


@pytest.fixture
async def standalone(folder: Path) -> AsyncIterator[Client]:
    """A node whose manifests have to do for an API server."""
    app = web.Application()
    app.add_routes(ManifestDirectory(folder, "node1", served=LOCAL_KINDS, clock=lambda: 0).routes())
    async with TestClient(TestServer(app)) as made:
        yield made


async def test_manifests_standalone_config_map_accepted_alone_and_with_pods(
    standalone: Client, folder: Path
) -> None:
    status, taken = await ask(standalone, "PUT", "page.yaml", CONFIG)
    assert (status, taken["pods"], taken["objects"]) == (201, [], ["configMap default/page"])
    assert (folder / "page.yaml").stat().st_mode & 0o777 == 0o644
    assert json.loads((await ask(standalone, "GET", "page.yaml"))[1]) == CONFIG
    status, refusal = await ask(standalone, "PUT", "all.yaml", together(USER_POD, CONFIG))
    assert (status, "configMap default/page is already in" in refusal["message"]) == (409, True)
    status, taken = await ask(standalone, "PUT", "all.yaml?replace=true", together(USER_POD, CONFIG))
    assert (status, len(taken["pods"]), taken["objects"]) == (201, 1, ["configMap default/page"])
    assert [path.name for path in folder.iterdir()] == ["all.yaml"]
    status, refusal = await ask(standalone, "PUT", "all.yaml", pod("other"))
    assert status == 409
    assert "holds configMap default/page, pod default/web" in refusal["message"]


async def test_manifests_standalone_secret_stored_and_not_shown(standalone: Client, folder: Path) -> None:
    status, taken = await ask(standalone, "PUT", "s.yaml", HIDDEN)
    assert (status, taken["objects"]) == (201, ["secret default/s"])
    assert (folder / "s.yaml").stat().st_mode & 0o777 == 0o600
    broken = json.dumps(HIDDEN).encode()[:-1]
    (folder / "broken.yaml").write_bytes(broken)
    (folder / "broken.yaml").chmod(0o600)
    for name in ("s.yaml", "broken.yaml"):
        status, refusal = await ask(standalone, "GET", name)
        assert (status, "it is not shown" in refusal["message"]) == (403, True)
    status, listed = await ask(standalone, "GET", "")
    assert "hunter2" not in str(listed)
    bad = {**HIDDEN, "data": {"password": "hunter2"}}
    status, refusal = await ask(standalone, "PUT", "s.yaml", bad)
    assert (status, refusal["problems"]) == (
        422,
        ["Secret 's': data.password: is not base64: plain text belongs under stringData"],
    )
    assert (await ask(standalone, "DELETE", "s.yaml"))[1]["objects"] == ["secret default/s"]


async def test_manifests_cluster_node_serves_no_objects(client: Client, folder: Path) -> None:
    status, refusal = await ask(client, "PUT", "page.yaml", CONFIG)
    assert (status, "holds no pod" in refusal["message"]) == (422, True)
    status, refusal = await ask(client, "PUT", "page.yaml", together(USER_POD, CONFIG))
    assert (status, "refers to configmaps" in refusal["message"]) == (422, True)
    status, taken = await ask(client, "PUT", "web.yaml", together(pod(), HIDDEN))
    assert (status, taken["objects"]) == (201, [])
    assert (folder / "web.yaml").stat().st_mode & 0o777 == 0o600
    assert (await ask(client, "GET", "web.yaml"))[0] == 403

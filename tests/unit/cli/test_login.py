"""`login` and `logout`: the file, and the handshake with good, bad, silent and hostile registries."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pykubelet.cli.images.login import LoginError, load_config, registry_entry, remove_entry, store_entry
from pykubelet.cli.images.registry_check import (
    MAX_BODY_BYTES,
    Login,
    RegistryError,
    check_login,
    is_loopback,
    parse_challenge,
)
from pykubelet.images.credentials import Keyring, NodeCredentials

USER, PASSWORD = "user", "s3cret-pässword"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setattr(Path, "home", lambda: path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def lookup(root: Path, repository: str) -> list[tuple[str, str]]:
    found = Keyring(NodeCredentials(root, root / "none").read()).lookup(repository)
    return [(item.username, item.password) for item in found]


def test_store_entry_kubelet_reads_it_and_other_entries_stay(tmp_path: Path, file: Path) -> None:
    file.write_text(
        json.dumps({"credsStore": "x", "auths": {"https://ghcr.io/v2/": {"auth": "eDp5"}, "a.io": {}}})
    )
    file.chmod(0o644)
    store_entry(file, registry_entry("ghcr.io")[0], USER, PASSWORD)
    store_entry(file, registry_entry("docker.io")[0], USER, "hub")
    document = json.loads(file.read_bytes())
    assert document["credsStore"] == "x"
    assert list(document["auths"]) == ["a.io", "ghcr.io", "https://index.docker.io/v1/"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert lookup(tmp_path, "ghcr.io/team/app") == [(USER, PASSWORD)]
    assert lookup(tmp_path, "docker.io/library/busybox") == [(USER, "hub")]
    assert remove_entry(file, registry_entry("https://ghcr.io")[0])
    assert not remove_entry(file, "ghcr.io")
    assert lookup(tmp_path, "ghcr.io/team/app") == []
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [
        ".config.json.lock",
        "config.json",
    ]


def test_store_entry_first_file_has_the_entries_in_use(tmp_path: Path, file: Path, home: Path) -> None:
    (home / ".docker").mkdir()
    other = home / ".docker" / "config.json"
    other.write_text(json.dumps({"auths": {"old.io": {"auth": base64.b64encode(b"a:b").decode()}}}))
    assert store_entry(file, "new.io", USER, PASSWORD) == other
    assert lookup(tmp_path, "old.io/x") == [("a", "b")]
    other.unlink()
    assert remove_entry(file, "new.io")
    assert remove_entry(file, "old.io")
    assert not file.exists(), "an empty file would hide other files"
    assert store_entry(file, "new.io", USER, PASSWORD) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"auths": {"a": {"auth": "!"}}}', " " * 2_000_000])
def test_store_entry_invalid_file_is_not_replaced(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(LoginError, match=r"is invalid: .*; correct or remove it first"):
        store_entry(file, "a.io", USER, PASSWORD)
    assert file.read_text() == content


@pytest.mark.parametrize("text", ["", "http://a.io", "user:pw@a.io", "*.io", "a b", "https://"])
def test_registry_entry_invalid_is_rejected(text: str) -> None:
    with pytest.raises(LoginError) as caught:
        registry_entry(text)
    assert "pw" not in str(caught.value)


def test_load_config_missing_is_none(file: Path) -> None:
    assert load_config(file) is None


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def registry(v2: Handler, token: Handler | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v2/", v2)
    if token is not None:
        app.router.add_get("/token", token)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


async def outcome(v2: Handler, token: Handler | None = None, timeout: float = 15) -> str:
    """Return "" when the registry accepts the credentials, or the error."""
    async with registry(v2, token) as host:
        try:
            await asyncio.to_thread(check_login, Login(host, USER, PASSWORD), timeout=timeout)
        except RegistryError as err:
            text = str(err)
            assert PASSWORD not in text
            assert "\n" not in text
            assert len(text) < 400
            return text
        return ""


BASIC = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"


def protected(authorization: str, challenge: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") == authorization:
            return web.Response(text="{}")
        full = challenge.replace("HOST", request.host)
        return web.Response(status=401, headers={"WWW-Authenticate": full})

    return handle


def token_server(authorization: str, document: object) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.query["service"] == "x"
        right = request.headers.get("Authorization") == authorization
        return web.json_response(document) if right else web.Response(status=401)

    return handle


BEARER = 'Bearer realm="http://HOST/token",service="x"'


async def test_check_login_basic_and_token_registries_accept_and_reject() -> None:
    assert await outcome(protected(BASIC, 'Basic realm="x"')) == ""
    assert "rejected the credentials of user 'user'" in await outcome(protected("other", 'Basic realm="x"'))
    accepted = token_server(BASIC, {"token": "t"})
    assert await outcome(protected("Bearer t", BEARER), accepted) == ""
    assert "rejected" in await outcome(protected("Bearer t", BEARER), token_server("other", {}))
    documents: list[object] = [{}, [], {"token": "a\r\nb"}]
    for document in documents:
        assert "returned no token" in await outcome(
            protected("Bearer t", BEARER), token_server(BASIC, document)
        )


async def test_check_login_hostile_registry_is_bounded_and_gets_no_password_elsewhere() -> None:
    redirected: list[str] = []

    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3)
        return web.Response()

    async def redirecting(request: web.Request) -> web.StreamResponse:
        redirected.append(request.headers.get("Authorization", ""))
        raise web.HTTPFound("http://127.0.0.2:1/v2/")

    async def endless(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * (MAX_BODY_BYTES + 1))

    async def dripping(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(30):
            await response.write(b"x")
            await asyncio.sleep(0.1)
        return response

    for handler in (silent, dripping):
        assert "did not respond within 0.5 s" in await outcome(handler, timeout=0.5)
    assert "is not a registry: GET /v2/ returned status 302" in await outcome(redirecting)
    assert redirected == [""]
    assert "returned more than 256 KiB" in await outcome(endless)


async def test_check_login_nothing_listens_or_no_tls_is_one_line() -> None:
    with pytest.raises(RegistryError, match="cannot be reached"):
        await asyncio.to_thread(check_login, Login("127.0.0.1:1", USER, PASSWORD))
    with pytest.raises(RegistryError, match="the CA file /none cannot be used"):
        check_login(Login("a.io", USER, PASSWORD), Path("/none"))


async def test_check_login_token_server_without_tls_gets_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykubelet.cli.images import registry_check

    asked: list[bool] = []

    async def get(session: object, url: str, auth: str = "", **_: object) -> registry_check._Reply:
        asked.append(bool(auth))
        return registry_check._Reply(401, 'Bearer realm="http://evil.example/token"', b"")

    monkeypatch.setattr(registry_check, "_get", get)
    with pytest.raises(RegistryError, match="which has no TLS: the password was not sent"):
        await asyncio.to_thread(check_login, Login("a.io", USER, PASSWORD))
    assert asked == [False]


def test_login_repr_is_masked() -> None:
    assert PASSWORD not in repr(Login("a.io", USER, PASSWORD))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:5000", True),
        ("[::1]:5000", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("a.io", False),
    ],
)
def test_is_loopback_is_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_parse_challenge_has_scheme_and_parameters() -> None:
    assert parse_challenge('Bearer realm="https://a/t",service="s"') == (
        "bearer",
        {"realm": "https://a/t", "service": "s"},
    )

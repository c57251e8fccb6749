import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from pykubelet.api.pod import Container, ContainerPort, HTTPGetAction, HTTPHeader, Probe
from pykubelet.probes.network_probes import http_check, lifecycle_get, unverified_tls
from pykubelet.probes.types import BadTarget, ProbeResult, Target
from tests.support.probes import run_probe, target

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_path = ContextVar("path", default="transport")


@pytest.fixture(params=["transport", "exchange"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with `http_check` alone, and as the prober runs it."""
    before = _path.set(request.param)
    yield
    _path.reset(before)


@asynccontextmanager
async def site(
    handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        listener = web.TCPSite(runner, host, 0, ssl_context=tls)
        await listener.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw(answer: bytes, *, close: bool = True) -> AsyncIterator[int]:
    """A server that says the same to everyone."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(1000)
            writer.write(answer)
            if not close:
                await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def ask(
    port: int,
    path: str = "/",
    *,
    timeout: int = 20,
    scheme: str = "",
    headers: dict[str, str] | None = None,
) -> ProbeResult:
    sent = [HTTPHeader(name=name, value=value) for name, value in (headers or {}).items()]
    return await check(
        HTTPGetAction(port=port, path=path, scheme=scheme, http_headers=sent), target(), timeout
    )


async def check(action: HTTPGetAction, whom: Target, timeout: int) -> ProbeResult:
    if _path.get() == "transport":
        return await http_check(action, whom, timeout, unverified_tls())
    return await run_probe(Probe(http_get=action, timeout_seconds=timeout), whom)


def answering(status: int, body: str = "body") -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    return handler


@pytest.mark.parametrize(
    ("status", "result", "output"),
    [
        (200, "success", "body"),
        (204, "success", ""),
        (300, "warning", "Probe terminated redirects, Response body: body"),
        (304, "warning", "Probe terminated redirects, Response body: "),
        (399, "warning", "Probe terminated redirects, Response body: body"),
        (400, "failure", "HTTP probe failed with statuscode: 400"),
        (404, "failure", "HTTP probe failed with statuscode: 404"),
        (503, "failure", "HTTP probe failed with statuscode: 503"),
    ],
)
async def test_http_check_status_code_sets_result(status: int, result: str, output: str) -> None:
    async with site(answering(status)) as port:
        outcome = await ask(port)
    assert (outcome.result, outcome.output, outcome.errored) == (result, output, False)


async def test_http_check_sends_kube_probe_headers_without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    seen: list[tuple[str, list[tuple[str, str]]]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path_qs, list(request.headers.items())))
        return web.Response(headers={"Set-Cookie": "a=b"})

    async with site(handler) as port:
        assert (await ask(port, "healthz?deep=1")).passed
        assert (await ask(port, headers={"host": "example.com", "X-A": "1"})).passed
    (path, plain), (_, custom) = seen
    assert path == "/healthz?deep=1"
    assert dict(plain) == {
        "Host": f"127.0.0.1:{port}",
        "User-Agent": "kube-probe/1.36",
        "Accept": "*/*",
        "Connection": "close",
    }
    assert dict(custom)["Host"] == "example.com"
    assert dict(custom)["X-A"] == "1"


def redirecting(code: int, location: str, end: str = "/end") -> Handler:
    async def handler(request: web.Request) -> web.Response:
        if request.path == end:
            return web.Response(text="arrived " + request.headers.get("X-Kept", ""))
        return web.Response(status=code, headers={"Location": location}, text="moved")

    return handler


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["/end", "end", "//127.0.0.1:{port}/end", "http://127.0.0.1:{port}/end"])
async def test_http_check_redirect_to_same_host_is_followed(code: int, location: str) -> None:
    places: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        return await redirecting(code, places[0])(request)

    async with site(handler) as port:
        places.append(location.format(port=port))
        outcome = await ask(port, "/start", headers={"X-Kept": "yes"})
    assert (outcome.result, outcome.output) == ("success", "arrived yes")


@pytest.mark.parametrize("location", ["http://localhost:1/", "//other.example/x", "https://other.example/"])
async def test_http_check_redirect_to_other_host_is_warning(location: str) -> None:
    async with site(redirecting(302, location)) as port:
        outcome = await ask(port)
    assert (outcome.result, outcome.passed) == ("warning", True)
    assert outcome.output == "Probe terminated redirects, Response body: moved"


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("/again", "stopped after 10 redirects"),
        ("gopher://127.0.0.1/", 'unsupported protocol scheme "gopher"'),
        ("http://127.0.0.1:99999/", "Port out of range"),
    ],
)
async def test_http_check_redirect_loop_or_bad_location_is_failure(location: str, words: str) -> None:
    async with site(redirecting(302, location)) as port:
        outcome = await ask(port)
    assert outcome.result == "failure"
    assert words in outcome.output


async def test_http_check_redirect_without_location_is_warning() -> None:
    async with raw(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n") as port:
        assert (await ask(port)).result == "warning"


async def test_http_check_timeout_covers_redirects() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.Response(status=302, headers={"Location": "/"})

    async with site(slow) as port:
        outcome = await ask(port, timeout=1)
    assert outcome.result == "failure"
    assert "context deadline exceeded (Client.Timeout exceeded while awaiting headers)" in outcome.output


async def test_http_check_connection_refused_is_failure() -> None:
    async with site(answering(200)) as port:
        pass
    outcome = await ask(port)
    assert outcome == ProbeResult(
        "failure", f'Get "http://127.0.0.1:{port}/": dial tcp 127.0.0.1:{port}: connect: connection refused'
    )


@pytest.mark.parametrize(
    ("answer", "close", "output", "errored"),
    [
        (b"", True, "EOF", False),
        (b"220 mail.example\r\n", True, "malformed HTTP response", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", True, "unexpected EOF", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", False, "while reading body", True),
        (b"", False, "while awaiting headers", False),
    ],
)
async def test_http_check_broken_response_is_failure(
    answer: bytes, close: bool, output: str, errored: bool
) -> None:
    async with raw(answer, close=close) as port:
        outcome = await ask(port, timeout=20 if close else 1)
    assert (outcome.result, outcome.errored) == ("failure", errored)
    assert output in outcome.output


async def test_http_check_endless_body_is_truncated() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 4096)

    async with site(endless) as port:
        outcome = await ask(port)
    assert outcome.result == "success"
    assert len(outcome.output) == 10 * 1024


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    """Weak and self-signed, as pods have them."""
    key, chain = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:1024", "-nodes", "-days", "1", "-subj", "/CN=x"]
    subprocess.run([*command, "-keyout", key, "-out", chain], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(chain, key)
    return context


async def test_http_check_https_does_not_verify_certificate(certificate: ssl.SSLContext) -> None:
    async with site(answering(200), certificate) as port:
        outcome = await ask(port, scheme="HTTPS")
    assert outcome == ProbeResult("success", "body")


async def test_http_check_https_to_plain_http_server_is_failure(certificate: ssl.SSLContext) -> None:
    async with site(answering(200)) as port:
        outcome = await ask(port, scheme="HTTPS")
    assert outcome.result == "failure"
    assert "server gave HTTP response to HTTPS client" in outcome.output


def test_http_check_on_uvloop_same_results(certificate: ssl.SSLContext) -> None:
    async def all_of_it() -> None:
        async with site(answering(200)) as port:
            assert await ask(port) == ProbeResult("success", "body")
        assert "connection refused" in (await ask(port)).output
        async with site(answering(200), certificate) as port:
            assert await ask(port, scheme="HTTPS") == ProbeResult("success", "body")
        async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", close=False) as port:
            assert (await ask(port, timeout=1)).errored
        async with site(answering(200)) as port:
            assert "HTTP response to HTTPS" in (await ask(port, scheme="HTTPS")).output

    uvloop.run(all_of_it())


async def test_http_check_ipv6_and_named_port_succeed() -> None:
    async with site(answering(200), host="::1") as port:
        named = target(ContainerPort(name="web", container_port=port), ip="::1")
        outcome = await check(HTTPGetAction(port="web"), named, 20)
        assert outcome.result == "success"
        outcome = await check(HTTPGetAction(port=1, host="::1"), target(), 2)
        assert outcome.output.startswith('Get "http://[::1]:1/": dial tcp [::1]:1: ')


@pytest.mark.parametrize("port", ["nope", 0, -1, 65536, "0"])
async def test_http_check_invalid_port_raises_bad_target(port: int | str) -> None:
    with pytest.raises(BadTarget, match="port"):
        await http_check(HTTPGetAction(port=port), target(), 1, unverified_tls())


async def test_http_check_invalid_header_is_failure() -> None:
    outcome = await ask(1, headers={"X": "a\nb"})
    assert outcome.result == "failure"
    assert 'invalid header field value for "X"' in outcome.output


async def test_lifecycle_get_accepts_any_status_and_falls_back_to_http() -> None:
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(status=500)

    container = Container(name="app")
    headers = [HTTPHeader(name="Authorization", value="secret")]
    async with site(handler) as port:
        plain = HTTPGetAction(port=port, path="/stop", http_headers=headers)
        assert await lifecycle_get(plain, container, "127.0.0.1") is None
        secure = HTTPGetAction(port=port, path="/stop", scheme="HTTPS", http_headers=headers)
        fallbacks: list[None] = []
        assert await lifecycle_get(secure, container, "127.0.0.1", lambda: fallbacks.append(None)) is None
    assert len(fallbacks) == 1
    assert [request.headers.get("Authorization") for request in seen] == ["secret", None]
    assert {request.headers["User-Agent"] for request in seen} == {"kube-lifecycle/1.36"}
    problem = await lifecycle_get(plain, container, "127.0.0.1")
    assert problem is not None
    assert "connection refused" in problem
    assert await lifecycle_get(HTTPGetAction(port="nope"), container, "") == "port nope not found"

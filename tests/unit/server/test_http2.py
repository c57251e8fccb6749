"""HTTP/2: the same answers as over HTTP/1.1, to real clients and to odd ones."""

import asyncio
import gzip
import json
from pathlib import Path

import pytest
from h2.errors import ErrorCodes

from pykubelet.server.listeners import http_server, unix_server
from tests.support.api_node import ENDPOINTS, STAMP, Node, Start, write_log
from tests.support.certs import Authority
from tests.support.server_clients import client_context
from tests.unit.server import http2_site
from tests.unit.server.http2_client import PATIENCE_SECONDS
from tests.unit.server.http2_site import Site, talking, token_of, write_long_log

authority, pairs, start, site = http2_site.authority, http2_site.pairs, http2_site.start, http2_site.site


# Pages whose content is another one each time.
_CHANGING = ("/metrics", "/debug/", "/flagz", "/statusz", "/checkpoint/")


async def test_http2_every_endpoint_equals_http1(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(5)} stdout F hello")
    wrong = []
    for client in ("admin", "token", "no credentials", "bad certificate"):
        async with talking(node, client) as talk:
            for method, path, _, _ in ENDPOINTS:
                status, text, headers = await node.ask(path, client, method)
                answer = await talk.ask(path, method, headers=token_of(node, client))
                # The client of HTTP/1.1 accepts compressed pages, the other one does not.
                dropped = {"date", "transfer-encoding", "connection", "content-length", "content-encoding"}
                expected = {name.lower(): value for name, value in headers.items()}
                for name in dropped:
                    expected.pop(name, None)
                    answer.headers.pop(name, None)
                same_text = path.startswith(_CHANGING) or answer.text == text
                if (answer.status, answer.headers) != (status, expected) or not same_text or not answer.ended:
                    wrong.append((method, path, client, answer, status, headers, text[:100]))
    assert wrong == []


async def ask_http1(node: Node, path: str, method: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=client_context(node.authority, node.clients["admin"]["pair"])
    )
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()
    finally:
        writer.close()


async def test_http2_paths_handled_as_over_http1(start: Start) -> None:
    node = await start()
    paths = [
        *("//pods", "/pods//", "/./pods", "/pods/../healthz", "/%2e%2e/pods", "/pods/%2E%2E/healthz"),
        *("/pods%2f", "/pods%00", "/p%6fds", "/pods?x=/../y", "/pods?a=%zz&b=%", "/pods#there", "/pods%"),
        *("/\\pods", "/pods;x=1", "/logs/%2e%2e/etc/passwd", "/logs/..%2f..%2fetc/passwd", "/" + "x" * 5000),
        *("/healthz?", "/healthz?a b".replace(" ", "+"), "/%68ealthz", "/héalthz", "*"),
    ]
    async with talking(node) as talk:
        for path in paths:
            for method in ("GET", "HEAD", "OPTIONS", "DELETE"):
                answer = await talk.ask(path, method)
                status, text = await ask_http1(node, path, method)
                # aiohttp answers HEAD for what is no path with a body, which HTTP/2 cannot have.
                assert (answer.status, answer.text) == (status, text if method != "HEAD" else ""), path


async def test_http2_request_headers_reach_handler(site: Site) -> None:
    async with site.talking() as talk:
        headers = [
            ("cookie", "a=1"),
            ("cookie", "b=2"),
            ("x-twice", "1"),
            ("x-twice", "2"),
            ("host", "other"),
        ]
        seen = json.loads((await talk.ask("/echo/x?y=%2F", headers=headers)).body)
        assert (seen["method"], seen["path"], seen["size"]) == ("GET", "/echo/x?y=%2F", 0)
        by_name = {name.lower(): values for name, values in seen["headers"].items()}
        assert by_name["cookie"] == ["a=1; b=2"]
        assert by_name["x-twice"] == ["1", "2"]
        assert by_name["host"] == ["node"]
        pseudo = [(":method", "GET"), (":scheme", "https"), (":path", "/echo")]
        seen = json.loads((await talk.ask("", pseudo=pseudo, headers=[("host", "other")])).body)
        assert [values for name, values in seen["headers"].items() if name.lower() == "host"] == [["other"]]


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 300_000, 1024**2])
@pytest.mark.parametrize("told", [True, False])
async def test_http2_request_body_any_size_received(site: Site, size: int, told: bool) -> None:
    headers = [("content-length", str(size))] if told else []
    async with site.talking() as talk:
        answer = await talk.ask("/echo", "POST", b"x" * size, headers=headers)
        assert (answer.status, json.loads(answer.body)["size"]) == (200, size)


async def test_http2_body_above_limit_returns_413(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/echo", "POST", b"x" * (2 * 1024**2))
        assert (answer.status, answer.ended) == (413, True)
        # The client is told to stop sending; there is nothing wrong with the answer.
        assert answer.reset in (None, ErrorCodes.NO_ERROR)
        assert (await talk.ask("/echo")).status == 200


async def test_http2_content_length_mismatch_is_protocol_error(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/echo", "POST", headers=[("content-length", "5")])
        assert answer.reset == ErrorCodes.PROTOCOL_ERROR
        await talk.ask("/echo", "POST", b"four", headers=[("content-length", "5")])
        await talk.until(lambda: talk.closed)
        assert talk.goodbye == ErrorCodes.PROTOCOL_ERROR


async def test_http2_trailers_are_ignored(site: Site) -> None:
    async with site.talking() as talk:
        number = talk.begin("/echo", "POST", body=True)
        await talk.send(number, b"12345")
        talk.wire.send_headers(number, [("x-sum", "15")], end_stream=True)
        talk.flush()
        answer = await talk.whole(number)
        assert json.loads(answer.body)["size"] == 5
        assert "x-sum" not in answer.text.lower()


async def test_http2_expect_continue_returns_100(site: Site) -> None:
    async with site.talking() as talk:
        number = talk.begin("/echo", "POST", [("expect", "100-continue")], body=True)
        await talk.until(lambda: talk.answers[number].interim)
        await talk.send(number, b"12345", end=True)
        answer = await talk.whole(number)
        assert (answer.interim, answer.status, json.loads(answer.body)["size"]) == (["100"], 200, 5)


@pytest.mark.parametrize("status", [204, 304, 200])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_http2_response_without_body_ends_stream(site: Site, status: int, method: str) -> None:
    async with site.talking() as talk:
        answer = await talk.ask(f"/status/{status}", method)
        assert (answer.status, bytes(answer.body), answer.ended) == (status, b"", True)
        assert answer.headers["x-here"] == "yes"


async def test_http2_head_returns_content_length(start: Start) -> None:
    node = await start()
    async with talking(node) as talk:
        whole, head = await talk.ask("/pods"), await talk.ask("/pods", "HEAD")
        assert (head.status, bytes(head.body)) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.body))


@pytest.mark.parametrize("how", ["raise", "abort"])
async def test_http2_handler_fails_mid_response_resets_stream(site: Site, how: str) -> None:
    async with site.talking() as talk:
        answer = await talk.ask(f"/break/{how}")
        assert (answer.ended, answer.reset) == (False, ErrorCodes.INTERNAL_ERROR)
        # What was written is sent, unless the handler wanted an end at once.
        assert (answer.status, bytes(answer.body)) == ((200, b"so far") if how == "raise" else (0, b""))
        assert (await talk.ask("/echo")).status == 200


async def test_http2_header_injection_rejected(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/no-header")
        assert "x-evil" not in answer.headers
        assert answer.status != 200


async def test_http2_compressed_response_decodes(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/compressed", headers=[("accept-encoding", "gzip")])
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.body) == b"again " * 100_000


GOOD = [(":method", "GET"), (":scheme", "https"), (":authority", "node"), (":path", "/echo")]


@pytest.mark.parametrize(
    "fields",
    [
        GOOD[1:],
        GOOD[:1] + GOOD[2:],
        GOOD[:3],
        [*GOOD[:3], (":path", "")],
        [*GOOD[:3], (":path", "echo")],
        [*GOOD[:3], (":path", "/echo HTTP/1.1\r\nx-more: 1\r\n")],
        [*GOOD[:3], (":path", "/echo x")],
        [*GOOD, (":path", "/echo")],
        [*GOOD, (":status", "200")],
        [*GOOD, (":protocol", "websocket")],
        [*GOOD, ("x", "1"), (":method", "GET")],
        [*GOOD, ("x", "1\r\ny: 2")],
        [*GOOD, ("x", "1\0")],
        [*GOOD, ("x y", "1")],
        [*GOOD, ("x:", "1")],
        [*GOOD, ("X", "1")],
        [*GOOD, ("", "1")],
        [(":method", "GET /evil"), *GOOD[1:]],
        [*GOOD[:1], (":scheme", "ftp"), *GOOD[2:]],
        [(":method", "CONNECT"), *GOOD[1:]],
        [*GOOD, ("content-length", "0"), ("content-length", "0")],
        [*GOOD, ("content-length", "3")],
    ],
)
async def test_http2_malformed_request_resets_its_stream_only(
    site: Site, fields: list[tuple[str, str]]
) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("", pseudo=fields)
        assert (answer.reset, answer.status) == (ErrorCodes.PROTOCOL_ERROR, 0)
        assert (await talk.ask("/echo")).status == 200


@pytest.mark.parametrize(
    "header",
    [
        ("connection", "Upgrade"),
        ("upgrade", "SPDY/3.1"),
        ("transfer-encoding", "chunked"),
        ("keep-alive", "timeout=5"),
        ("te", "gzip"),
    ],
)
async def test_http2_connection_headers_return_400(start: Start, header: tuple[str, str]) -> None:
    """As the reference answers, whoever asks: exec and its like need HTTP/1.1."""
    node = await start()
    async with talking(node) as talk:
        answer = await talk.ask("/exec/default/web/main?output=1", "POST", headers=[header])
        assert (answer.status, answer.ended) == (400, True)
        assert header[0] in answer.text.lower()
        answer = await talk.ask("/healthz", "HEAD", headers=[header])
        assert (answer.status, answer.text, answer.ended) == (400, "", True)
        assert (await talk.ask("/healthz", headers=[("te", "trailers")])).status == 200
    assert node.runtime.asked == []


async def test_http2_alpn_selects_protocol(site: Site, authority: Authority) -> None:
    for offered, agreed in [
        (["h2", "http/1.1"], "h2"),
        (["http/1.1", "h2"], "h2"),
        (["http/1.1"], "http/1.1"),
        (["spdy/3"], None),
        ([], None),
    ]:
        context = client_context(authority)
        if offered:
            context.set_alpn_protocols(offered)
        reader, writer = await asyncio.open_connection("localhost", site.port, ssl=context)
        try:
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == agreed
            if agreed != "h2":
                writer.write(b"GET /status/204 HTTP/1.1\r\nHost: x\r\n\r\n")
                async with asyncio.timeout(PATIENCE_SECONDS):
                    assert b" 204 " in await reader.readline()
        finally:
            writer.close()


async def test_http2_invalid_preface_closes_connection(site: Site, authority: Authority) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nXX" + b"\0" * 50):
        context = client_context(authority)
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection("localhost", site.port, ssl=context)
        try:
            writer.write(said)
            async with asyncio.timeout(PATIENCE_SECONDS):
                # Its settings, and a goodbye.
                assert len(await reader.read()) < 200
        finally:
            writer.close()


async def plain(port: int, data: bytes, path: str = "") -> bytes:
    reader, writer = await (
        asyncio.open_unix_connection(path) if path else asyncio.open_connection("127.0.0.1", port)
    )
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await reader.read()
    finally:
        writer.close()


async def test_plain_servers_http1_only_without_server_header(
    start: Start, tmp_path: Path, unused_tcp_port: int
) -> None:
    get = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with http_server("read-only", "127.0.0.1", unused_tcp_port, []):
        answers = [
            await plain(unused_tcp_port, get),
            await plain(unused_tcp_port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"),
            await plain(unused_tcp_port, b"nonsense\r\n\r\n"),
        ]
    async with unix_server(tmp_path / "s", []):
        answers.append(await plain(0, get, str(tmp_path / "s")))
    node = await start()
    for answer in answers:
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.0 400")), answer
        assert b"server" not in answer.lower()
        assert b"aiohttp" not in answer.lower()
    for path in ("/pods", "/nonsense"):
        _, _, headers = await node.ask(path)
        assert "Server" not in headers


async def curl(node: Node, *arguments: str) -> str:
    pair = node.clients["admin"]["pair"]
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--http2", "--max-time", "60", "--cacert", str(node.authority.certificate)),
        *("--cert", str(pair.certificate), "--key", str(pair.key), *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_http2_curl_requests_succeed(start: Start, tmp_path: Path) -> None:
    node = await start()
    text = write_long_log(node)
    url = f"https://localhost:{node.port}"
    told = await curl(node, "-i", f"{url}/healthz")
    assert told.startswith("HTTP/2 200")
    assert told.endswith("\r\n\r\nok")
    assert (await curl(node, "-I", f"{url}/pods")).startswith("HTTP/2 200")
    assert await curl(node, f"{url}/containerLogs/default/web/main") == text
    assert await curl(node, "--limit-rate", "20M", f"{url}/containerLogs/default/web/main") == text
    (tmp_path / "body").write_bytes(b"x" * 400_000)
    assert "HTTP/2 422" in await curl(node, "-i", "-T", str(tmp_path / "body"), f"{url}/manifests/x")
    outputs = [tmp_path / str(number) for number in range(30)]
    many = [word for path in outputs for word in (f"{url}/configz", "-o", str(path))]
    await curl(node, "-Z", "--parallel-max", "30", *many)
    assert len({path.read_text() for path in outputs}) == 1


async def test_http2_connection_reused_each_request_authenticated(start: Start) -> None:
    node = await start()
    async with talking(node, "no credentials") as talk:
        token = [("authorization", f"Bearer {node.clients['admin token']['token']}")]
        statuses = [(await talk.ask("/pods", headers=headers)).status for headers in (token, [], token, [])]
        assert statuses == [200, 401, 200, 401]

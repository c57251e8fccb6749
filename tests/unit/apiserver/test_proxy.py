import asyncio
import base64
import dataclasses
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from pykubelet.apiserver.client import NODES, ApiClient
from pykubelet.apiserver.errors import KubeconfigError, TimedOut, TlsError, Unreachable
from pykubelet.apiserver.proxy import proxy_from_environment, proxy_problem
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.util.rate_limiter import TokenBucket
from tests.support.api_client import Opener
from tests.support.api_server import Server, answer, server_context, serving
from tests.support.certs import Authority, Pair

PROXY = {"HTTPS_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("server", "environ", "expected"),
    [
        ("https://10.0.0.1:6443", {}, ""),
        ("https://10.0.0.1:6443", PROXY, "http://proxy:3128"),
        ("https://10.0.0.1:6443", {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("https://10.0.0.1:6443", {"HTTP_PROXY": "http://proxy:3128"}, ""),
        ("http://10.0.0.1:8080", {"HTTP_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://localhost:6443", PROXY, ""),
        ("https://127.0.0.1:6443", PROXY, ""),
        ("https://[::1]:6443", PROXY, ""),
        ("https://10.0.0.1:6443", PROXY | {"NO_PROXY": "*"}, ""),
        ("https://10.0.0.1:6443", PROXY | {"NO_PROXY": "192.168.0.0/16, 10.0.0.0/8"}, ""),
        ("https://10.0.0.1:6443", PROXY | {"NO_PROXY": "192.168.0.0/16"}, "http://proxy:3128"),
        ("https://10.0.0.1:6443", PROXY | {"no_proxy": "10.0.0.1"}, ""),
        ("https://10.0.0.1:6443", PROXY | {"no_proxy": "10.0.0.1:6443"}, ""),
        ("https://10.0.0.1:6443", PROXY | {"no_proxy": "10.0.0.1:443"}, "http://proxy:3128"),
        ("https://[fd00::1]:6443", PROXY | {"no_proxy": "[fd00::1]:6443"}, ""),
        ("https://[fd00::1]:6443", PROXY | {"no_proxy": "fd00::/8"}, ""),
        ("https://api.example.com", PROXY | {"NO_PROXY": "example.com"}, ""),
        ("https://example.com", PROXY | {"NO_PROXY": "example.com:443"}, ""),
        ("https://api.example.com", PROXY | {"NO_PROXY": ".example.com"}, ""),
        ("https://example.com", PROXY | {"NO_PROXY": ".example.com"}, "http://proxy:3128"),
        ("https://API.example.com", PROXY | {"NO_PROXY": "*.Example.com"}, ""),
        ("https://badexample.com", PROXY | {"NO_PROXY": "example.com"}, "http://proxy:3128"),
        ("https://api.example.com", PROXY | {"NO_PROXY": "10.0.0.0/8,nonsense/99,,"}, "http://proxy:3128"),
    ],
)
def test_proxy_from_environment_applies_no_proxy_rules(
    server: str, environ: dict[str, str], expected: str
) -> None:
    assert proxy_from_environment(server, environ) == expected


def test_proxy_problem_message_hides_password() -> None:
    assert "s3cret" not in (proxy_problem("socks4://me:s3cret@x") or "")
    for scheme in ("http", "https", "socks5", "socks5h"):
        assert proxy_problem(f"{scheme}://me:s3cret@x:1") is None


async def test_transport_invalid_environment_proxy_raises_kubeconfig_error() -> None:
    with pytest.raises(KubeconfigError, match=r"in the environment is not the URL of a proxy"):
        Transport(RestConfig("https://10.0.0.1"), environ={"HTTPS_PROXY": "socks4://x:1"})


@dataclass
class Proxy:
    """A real CONNECT proxy."""

    url: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    code: str = "200 Connection established"


@asynccontextmanager
async def proxying(context: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    proxy = Proxy()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        proxy.asked.append((lines[0], headers))
        writer.write(f"HTTP/1.1 {proxy.code}\r\n\r\n".encode())
        if not proxy.code.startswith("200"):
            writer.close()
            return
        host, _, port = lines[0].split()[1].rpartition(":")
        await pass_on(reader, writer, host, int(port))

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        scheme = "https" if context else "http"
        proxy.url = f"{scheme}://me:p%40ss@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
    finally:
        server.close()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(copy(reader, upstream_writer))
        tasks.create_task(copy(upstream_reader, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_transport_connect_proxy_tunnels_requests(
    server: Server, authority: Authority, opened: Opener
) -> None:
    server.default = answer({"metadata": {"name": "one"}})
    async with proxying() as proxy:
        access = RestConfig(
            server.url, ca=authority.certificate, token="t", proxy=proxy.url, tls_server_name="api.test"
        )
        client = opened(access)
        await client.get(NODES, "one")
        await client.get(NODES, "one")
        ((line, headers),) = proxy.asked
        assert line == f"CONNECT 127.0.0.1:{server.port} HTTP/1.1"
        assert headers["Proxy-Authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
        assert "Authorization" not in headers
        assert server.seen[0].header("Proxy-Authorization") == ""
        proxy.code = "403 Forbidden"
        await client.transport.close_all()
        with pytest.raises(Unreachable, match="the proxy refused with 403 Forbidden"):
            await client.get(NODES, "one")
        url = proxy.url
    await client.transport.close_all()
    with pytest.raises(Unreachable, match="the proxy cannot be reached"):
        await opened(RestConfig(server.url, ca=authority.certificate, proxy=url)).get(NODES, "one")


def test_transport_https_proxy_tunnels_tls_in_tls(authority: Authority, server_pair: Pair) -> None:
    """TLS inside TLS, on both loops that matter."""

    async def scenario() -> None:
        async with serving(server_context(authority, server_pair)) as server:
            server.default = answer({"metadata": {"name": "one"}})
            async with proxying(server_context(authority, server_pair)) as proxy:
                access = RestConfig(server.url, ca=authority.certificate, token="t", proxy=proxy.url)
                async with Transport(access) as transport:
                    client = ApiClient(transport, TokenBucket(-1, 0))
                    await client.get(NODES, "one")
                    await client.get(NODES, "one")
                ((_, headers),) = proxy.asked
                assert headers["Proxy-Authorization"].startswith("Basic ")
                assert len(server.seen) == 2

    asyncio.run(scenario())
    uvloop.run(scenario())


@dataclass
class Socks:
    """A real SOCKS5 proxy."""

    port: int = 0
    login: tuple[bytes, bytes] | None = None
    refusal: int = 0
    greeting: bytes = b""
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.greeting:
            writer.write(self.greeting)
            return
        _, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        wanted = 2 if self.login else 0
        if wanted not in methods:
            writer.write(b"\x05\xff")
            return
        writer.write(bytes([5, wanted]))
        if self.login:
            user = await reader.readexactly((await reader.readexactly(2))[1])
            password = await reader.readexactly((await reader.readexactly(1))[0])
            good = (user, password) == self.login
            writer.write(b"\x01\x00" if good else b"\x01\x01")
            if not good:
                return
        kind = (await reader.readexactly(4))[3]
        if kind == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        else:
            host = socket.inet_ntop(
                socket.AF_INET if kind == 1 else socket.AF_INET6,
                await reader.readexactly(4 if kind == 1 else 16),
            )
        port = int.from_bytes(await reader.readexactly(2))
        self.asked.append((host, port))
        # Where it connects from, as a name for once.
        writer.write(bytes([5, self.refusal, 0, 3, 4]) + b"here" + b"\0\0")
        if not self.refusal:
            await pass_on(reader, writer, "127.0.0.1", port)


@asynccontextmanager
async def socks() -> AsyncIterator[Socks]:
    proxy = Socks()
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    try:
        proxy.port = server.sockets[0].getsockname()[1]
        yield proxy
    finally:
        server.close()


def test_transport_socks_proxy_resolves_name_and_verifies_server_certificate(
    authority: Authority, server_pair: Pair, node_pair: Pair
) -> None:
    async def scenario() -> None:
        async with serving(server_context(authority, server_pair)) as server, socks() as proxy:
            server.default = answer({"metadata": {"name": "one"}})
            access = RestConfig(
                # A name that only the proxy can resolve.
                f"https://api.test:{server.port}",
                ca=authority.certificate,
                certificate=node_pair.certificate,
                key=node_pair.key,
                proxy=f"socks5://me:p%40ss@localhost:{proxy.port}",
            )
            proxy.login = (b"me", b"p@ss")
            async with Transport(access) as transport:
                client = ApiClient(transport, TokenBucket(-1, 0))
                await client.get(NODES, "one")
                await client.get(NODES, "one")
                assert proxy.asked == [("api.test", server.port)]
                assert [seen.subject for seen in server.seen] == ["system:node:one"] * 2
                await transport.close_all()
                # A certificate for another name is not accepted because a proxy says so.
                proxy.login = None
                other = dataclasses.replace(access, server=f"https://other.test:{server.port}")
                async with Transport(other) as strange:
                    with pytest.raises(TlsError, match=r"for another name than other.test"):
                        await ApiClient(strange, TokenBucket(-1, 0)).get(NODES, "one")

    asyncio.run(scenario())
    uvloop.run(scenario())


async def test_transport_socks_proxy_plain_http_to_ip_addresses_succeeds(opened: Opener) -> None:
    async with serving(None) as server, socks() as proxy:
        server.default = answer({"metadata": {"name": "one"}})
        for host in ("127.0.0.1", "[::1]"):
            access = RestConfig(f"http://{host}:{server.port}", proxy=f"socks5h://127.0.0.1:{proxy.port}")
            await opened(access).get(NODES, "one")
        assert [host for host, _ in proxy.asked] == ["127.0.0.1", "::1"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"refusal": 5}, "the proxy refused: the connection was refused"),
        ({"refusal": 99}, "the proxy refused: code 99"),
        ({"login": (b"me", b"right")}, "the proxy refused: user or password are wrong"),
        ({"greeting": b"HTTP/1.1 400 Bad Request"}, "the proxy does not speak SOCKS5"),
        ({"greeting": b"\x05"}, "the proxy closed the connection without an answer"),
    ],
)
async def test_transport_socks_proxy_rejects_connection_raises_unreachable(
    server: Server, authority: Authority, opened: Opener, state: dict[str, Any], words: str
) -> None:
    async with socks() as proxy:
        for name, value in state.items():
            setattr(proxy, name, value)
        url = f"socks5://me:wrong@127.0.0.1:{proxy.port}"
        with pytest.raises(Unreachable, match=words):
            await opened(RestConfig(server.url, ca=authority.certificate, proxy=url)).get(NODES, "one")
        if "login" in state:
            url = f"socks5://127.0.0.1:{proxy.port}"
            with pytest.raises(Unreachable, match="give user and password"):
                await opened(RestConfig(server.url, ca=authority.certificate, proxy=url)).get(NODES, "one")
    with pytest.raises(Unreachable, match=r"the proxy cannot be reached: .*refused"):
        await opened(RestConfig(server.url, ca=authority.certificate, proxy=url)).get(NODES, "one")


async def test_transport_socks_proxy_not_responding_raises_timed_out(
    server: Server, authority: Authority, opened: Opener
) -> None:
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(30), "127.0.0.1", 0)
    try:
        url = f"socks5://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        client = opened(RestConfig(server.url, ca=authority.certificate, proxy=url), timeout=0.3)
        with pytest.raises(TimedOut):
            await client.get(NODES, "one")
    finally:
        silent.close()


@pytest.mark.parametrize(
    ("host", "login", "words"),
    [
        ("api.test", "me:p%C3%A9", "password has a character that is not ASCII"),
        ("api.test", f"me:{256 * 'x'}", "user name or password is longer than 255 bytes"),
        (".".join(52 * ["abcd"]), "me:p", "name is longer than 255 bytes"),
        (f"{64 * 'a'}.test", "me:p", "name cannot be sent to the proxy"),
    ],
)
async def test_transport_socks_text_too_long_or_not_ascii_raises_unreachable(
    opened: Opener, host: str, login: str, words: str
) -> None:
    async with socks() as proxy:
        access = RestConfig(f"http://{host}:1", proxy=f"socks5://{login}@127.0.0.1:{proxy.port}")
        with pytest.raises(Unreachable, match=words):
            await opened(access).get(NODES, "one")
    assert proxy.asked == []


def test_socks_library_not_loaded_without_socks_proxy() -> None:
    script = (
        "import sys\n"
        "import pykubelet.cli.kubelet, pykubelet.cli.pykubelet, pykubelet.apiserver.transport\n"
        "print([name for name in sys.modules if name.startswith('python_socks')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

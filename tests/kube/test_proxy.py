import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from pykubelet.kube.access import Access
from pykubelet.kube.errors import KubeconfigError, Unreachable
from pykubelet.kube.proxy import proxy_from_environment, proxy_problem
from pykubelet.kube.resources import NODES
from pykubelet.kube.transport import Transport
from tests.kube.certs import Authority
from tests.kube.conftest import Opener
from tests.kube.servers import Server, answer

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
def test_environment(server: str, environ: dict[str, str], expected: str) -> None:
    assert proxy_from_environment(server, environ) == expected


def test_problem_hides_the_password() -> None:
    assert "s3cret" not in (proxy_problem("socks5://me:s3cret@x") or "")
    assert proxy_problem("http://me:s3cret@x:1") is None


async def test_unusable_proxy_of_the_environment() -> None:
    with pytest.raises(KubeconfigError, match=r"in the environment is a socks5 proxy"):
        Transport(Access("https://10.0.0.1"), environ={"HTTPS_PROXY": "socks5://x:1"})


@dataclass
class Proxy:
    """A real CONNECT proxy."""

    url: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    code: str = "200 Connection established"


@asynccontextmanager
async def proxying() -> AsyncIterator[Proxy]:
    proxy = Proxy()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        proxy.asked.append((lines[0], headers))
        writer.write(f"HTTP/1.1 {proxy.code}\r\n\r\n".encode())
        if not proxy.code.startswith("200"):
            writer.close()
            return
        host, _, port = lines[0].split()[1].rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, upstream_writer))
            tasks.create_task(copy(upstream_reader, writer))

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        proxy.url = f"http://me:p%40ss@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
    finally:
        server.close()


async def test_through_a_proxy(server: Server, authority: Authority, opened: Opener) -> None:
    server.default = answer({"metadata": {"name": "one"}})
    async with proxying() as proxy:
        access = Access(
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
        await opened(Access(server.url, ca=authority.certificate, proxy=url)).get(NODES, "one")

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.util.rate_limiter import TokenBucket
from tests.support.api_server import Server, server_context, serving
from tests.support.certs import NAMES, Authority, Pair


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certs"), "cluster")


@pytest.fixture(scope="session")
def server_pair(authority: Authority) -> Pair:
    # For the whole run, however slow the machine is.
    return authority.sign("/CN=kube-apiserver", NAMES, ends=12 * 3600)


@pytest.fixture(scope="session")
def node_pair(authority: Authority) -> Pair:
    return authority.sign("/O=system:nodes/CN=system:node:one", ends=12 * 3600)


@pytest.fixture
async def server(authority: Authority, server_pair: Pair) -> AsyncIterator[Server]:
    async with serving(server_context(authority, server_pair)) as server:
        yield server


@pytest.fixture
def access(server: Server, authority: Authority) -> RestConfig:
    return RestConfig(server.url, ca=authority.certificate.read_bytes(), token="t0k3n")


Opener = Callable[..., ApiClient]


@pytest.fixture
async def opened() -> AsyncIterator[Opener]:
    """Make clients that are closed at the end."""
    async with AsyncExitStack() as stack:
        transports: list[Transport] = []

        def open_client(access: RestConfig, limit: TokenBucket | None = None, **options: Any) -> ApiClient:
            ours = {name: options.pop(name) for name in ("timeout", "retries") if name in options}
            transport = Transport(access, **options)
            transports.append(transport)
            return ApiClient(transport, limit or TokenBucket(-1, 0), metrics=options.get("metrics"), **ours)

        yield open_client
        for transport in transports:
            stack.push_async_exit(transport)


@pytest.fixture
def client(opened: Opener, access: RestConfig) -> ApiClient:
    return opened(access, timeout=30)


@pytest.fixture
def scripts(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write executable shell scripts."""

    def write(name: str, body: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write

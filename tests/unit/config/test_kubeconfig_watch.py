"""A kubeconfig that is replaced while the agent runs."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.apiserver import credentials as kubeconfig_watch
from pykubelet.apiserver.client import NODES, ApiClient
from pykubelet.apiserver.credentials import follow_kubeconfig
from pykubelet.apiserver.transport import Transport
from pykubelet.config.kubeconfig_file import load_kubeconfig
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.tasks import TaskScope
from tests.support.api_server import Server, answer
from tests.support.certs import Authority, Pair


class File:
    """A kubeconfig, written as a whole each time."""

    def __init__(self, path: Path, server: Server, authority: Authority) -> None:
        self.path = path
        self._server = server
        self._authority = authority

    def write(self, user: dict[str, Any], **cluster: Any) -> None:
        ca = base64.b64encode(self._authority.certificate.read_bytes()).decode()
        document = {
            "clusters": [
                {
                    "name": "c",
                    "cluster": {"server": self._server.url, "certificate-authority-data": ca, **cluster},
                }
            ],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        new = self.path.with_suffix(".new")
        new.write_text(yaml.safe_dump(document))
        new.replace(self.path)


def inline(pair: Pair) -> dict[str, str]:
    parts = {"client-certificate-data": pair.certificate, "client-key-data": pair.key}
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in parts.items()}


@pytest.fixture
def file(tmp_path: Path, server: Server, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> File:
    monkeypatch.setattr(kubeconfig_watch, "CHECK_SECONDS", 0.02)
    server.default = answer({"metadata": {"name": "one"}})
    return File(tmp_path / "kubeconfig", server, authority)


@asynccontextmanager
async def following(file: File) -> AsyncIterator[ApiClient]:
    access = load_kubeconfig(file.path)
    async with Transport(access) as transport, TaskScope() as scope:
        work = follow_kubeconfig(file.path, load_kubeconfig, access, transport.credentials)
        scope.start(work, name="kubeconfig")
        yield ApiClient(transport, TokenBucket(-1, 0))


async def asked_until(client: ApiClient, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await client.get(NODES, "one")
            await asyncio.sleep(0.01)


async def test_follow_kubeconfig_file_replaced_uses_new_credentials(
    file: File, server: Server, authority: Authority, node_pair: Pair
) -> None:
    file.write(inline(node_pair))
    async with following(file) as client:
        await client.get(NODES, "one")
        file.write(inline(authority.sign("/CN=system:node:renewed")))
        await asked_until(client, lambda: server.seen[-1].subject == "system:node:renewed")
        file.write({"token": "fresh"})
        await asked_until(client, lambda: server.seen[-1].header("Authorization") == "Bearer fresh")
        assert server.seen[-1].subject == ""
    assert server.seen[0].subject == "system:node:one"


async def test_follow_kubeconfig_unusable_file_keeps_previous_credentials(
    file: File, server: Server, node_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pykubelet")

    def told(words: str) -> bool:
        return any(words in record.getMessage() for record in caplog.records)

    file.write({"token": "first"})
    async with following(file) as client:
        file.path.write_text("{")
        await asked_until(client, lambda: told("keeping the previous one"))
        file.path.unlink()
        await client.get(NODES, "one")
        file.write({"token": "theirs"}, server="https://elsewhere.example")
        await asked_until(client, lambda: told("restart the kubelet"))
        await client.get(NODES, "one")
        file.write({"token": "second"})
        await asked_until(client, lambda: server.seen[-1].header("Authorization") == "Bearer second")
    assert {seen.header("Authorization") for seen in server.seen} == {"Bearer first", "Bearer second"}

"""Streaming lists of a real API server: complete, followed by changes, and refused where they are off."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pykubelet.apiserver.client import CONFIG_MAPS, ApiClient, Params, Resource
from pykubelet.apiserver.reflector import Reflector, StoreDelta
from pykubelet.apiserver.transport import Transport
from pykubelet.config.kubeconfig_file import load_kubeconfig
from pykubelet.devcluster.binaries import Binaries
from pykubelet.util.rate_limiter import TokenBucket
from tests.cluster.conftest import fresh_namespace, running_plane
from tests.support.plane import Plane

pytestmark = pytest.mark.machine


class Client(ApiClient):
    """Client that records its lists and watches."""

    def __init__(self, transport: Transport, *, streams_lists: bool) -> None:
        super().__init__(transport, TokenBucket(-1, 0), streams_lists=streams_lists)
        self.sent: list[str] = []

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> Any:
        self.sent.append("list")
        return await super().list_page(resource, namespace, params)

    def watch(self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float) -> Any:
        self.sent.append("stream" if dict(params).get("sendInitialEvents") else "watch")
        return super().watch(resource, namespace, params, seconds=seconds)


@asynccontextmanager
async def reflecting(
    plane: Plane, namespace: str, *, streams_lists: bool = True
) -> AsyncIterator[tuple[Client, asyncio.Queue[StoreDelta[Any]]]]:
    updates: asyncio.Queue[StoreDelta[Any]] = asyncio.Queue()
    async with Transport(load_kubeconfig(plane.admin)) as transport:
        client = Client(transport, streams_lists=streams_lists)
        reflector = Reflector(client, CONFIG_MAPS, updates.put, namespace=namespace)
        task = asyncio.ensure_future(reflector.run())
        try:
            yield client, updates
        finally:
            task.cancel()
            await asyncio.wait([task])


def config_map(name: str, namespace: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k": "v"}}


def can_stream(programs: Binaries) -> bool:
    """Whether this etcd has what streaming lists need: 3.4.31, or 3.5.13 and later."""
    shown = subprocess.run([programs.etcd, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(part) for part in shown.split()[2].split("."))
    return version >= (3, 5, 13) or (3, 4, 31) <= version < (3, 5)


async def test_reflector_real_server_streams_list_then_changes(
    plane: Plane, namespace: str, programs: Binaries
) -> None:
    for number in range(30):
        plane.create(config_map(f"m{number}", namespace))
    loop = asyncio.get_running_loop()
    for streams in (True, False):
        async with reflecting(plane, namespace, streams_lists=streams) as (client, updates):
            began = loop.time()
            first = await asyncio.wait_for(updates.get(), 30)
            print(f"streams={streams}: {len(first.changed)} objects after {loop.time() - began:.3f} s")
            assert first.listed
            assert {found.metadata.name for found in first.changed} >= {f"m{number}" for number in range(30)}
            plane.create(config_map(f"late-{streams}".lower(), namespace))
            change = await asyncio.wait_for(updates.get(), 30)
            assert [found.metadata.name for found in change.changed] == [f"late-{streams}".lower()]
            expected = ["stream"] if streams else ["list", "watch"]
            if streams and not can_stream(programs):
                expected += ["list", "watch"]
            assert client.sent == expected


async def test_reflector_real_server_without_watch_list_lists(programs: Binaries) -> None:
    gates = ("--feature-gates=WatchList=false",)
    with running_plane(programs, api_flags=gates) as plane, fresh_namespace(plane) as namespace:
        async with reflecting(plane, namespace) as (client, updates):
            await asyncio.wait_for(updates.get(), 30)
            plane.create(config_map("late", namespace))
            change = await asyncio.wait_for(updates.get(), 30)
            assert [found.metadata.name for found in change.changed] == ["late"]
            assert client.sent == ["stream", "list", "watch"]

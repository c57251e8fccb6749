"""Connections, limits and waiting of the clients, against a server that is slow, away or gone."""

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import ResolveResult
from prometheus_client import CollectorRegistry

from pykubelet.apiserver.client import EVENTS, LEASES, NODES, PODS, ApiClient, Limits, make_clients
from pykubelet.apiserver.connection_pool import SharedResolver
from pykubelet.apiserver.errors import TimedOut, TooManyRequests, Unauthorized, Unreachable
from pykubelet.apiserver.metrics import RestMetrics
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport, _new_socket
from pykubelet.util.rate_limiter import TokenBucket
from tests.support.api_client import Opener
from tests.support.api_server import Server, answer, hang, refuse, reset, serving, stream
from tests.support.waiting import until

POD = {"metadata": {"name": "web", "namespace": "default", "uid": "u1", "resourceVersion": "7"}}


async def test_api_client_no_response_raises_timed_out(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    server.default = hang()
    with pytest.raises(TimedOut, match=r"get .*/pods/web: there was no answer in time \(0.7 s\)"):
        await opened(access, timeout=0.7).get(PODS, "web", "default")
    with pytest.raises(TimedOut, match=r"no answer in time"):
        async with opened(access).watch(PODS, "", [], seconds=0.2):
            pass


async def test_api_client_connection_refused_or_unknown_name_raises_unreachable(opened: Opener) -> None:
    async with serving(None) as server:
        url = server.url
    with pytest.raises(Unreachable, match=r"cannot be reached: .*([Rr]efused|Connect call failed)"):
        await opened(RestConfig(url)).get(PODS, "web", "default")
    with pytest.raises(Unreachable, match=r"the name api.invalid cannot be resolved"):
        await opened(RestConfig("https://api.invalid:6443", insecure=True)).get(PODS, "web", "default")


async def test_api_client_sequential_requests_reuse_connection(server: Server, client: ApiClient) -> None:
    server.default = answer(POD)
    for _ in range(5):
        await client.get(PODS, "web", "default")
    assert len({seen.peer for seen in server.seen}) == 1


async def test_transport_close_all_ends_pending_requests(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        late = request.method == "PATCH"
        return await (hang() if late else stream(b'{"metadata"', end=False))(request)

    async def watch() -> None:
        async with client.watch(PODS, "", [], seconds=20) as chunks:
            async for _ in chunks:
                pass

    server.default = handle
    client = opened(access)
    waiting = asyncio.gather(
        client.patch(PODS, "web", {}, "default"),
        client.get(PODS, "web", "default"),
        watch(),
        return_exceptions=True,
    )
    await until(lambda: len(server.seen) >= 3)
    await asyncio.sleep(0.1)
    await client.transport.close_all()
    results = await asyncio.wait_for(waiting, 60)
    assert [isinstance(result, Unreachable) for result in results] == [True] * 3, results
    server.default = answer(POD)
    assert (await client.get(PODS, "web", "default")).uid == "u1"


async def test_api_client_request_cancelled_stays_usable(server: Server, client: ApiClient) -> None:
    server.default = hang()
    task = asyncio.ensure_future(client.get(PODS, "web", "default"))
    await until(lambda: server.seen)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.default = answer(POD)
    assert (await client.get(PODS, "web", "default")).uid == "u1"


async def test_api_client_rate_limit_delays_requests(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    server.default = answer(POD)
    client = opened(access, TokenBucket(20, 1))
    begin = time.monotonic()
    await asyncio.gather(*(client.get(PODS, "web", "default") for _ in range(5)))
    assert time.monotonic() - begin >= 0.2


async def test_api_client_records_rest_client_metrics(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    registry = CollectorRegistry()
    server.default = refuse(404, "NotFound")
    server.say(answer(POD), reset, reset)
    client = opened(access, metrics=RestMetrics(registry))
    await client.get(PODS, "web", "default")
    with pytest.raises(Unreachable):
        await client.patch(PODS, "web", {"x": 1}, "default")
    host = server.url.removeprefix("https://")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"host": host, **labels})

    assert value("rest_client_requests_total", code="200", method="GET") == 1
    assert value("rest_client_requests_total", code="<error>", method="PATCH") == 1
    assert value("rest_client_request_duration_seconds_count", verb="GET") == 1
    assert value("rest_client_rate_limiter_duration_seconds_count", verb="GET") == 1
    assert value("rest_client_request_size_bytes_sum", verb="PATCH") == len('{"x":1}')
    assert (value("rest_client_response_size_bytes_sum", verb="GET") or 0) > 50
    assert registry.get_sample_value("rest_client_exec_plugin_ttl_seconds") == float("inf")
    server.script.clear()
    server.say(*[refuse(429, "TooManyRequests", "later", {"Retry-After": "0"})] * 2, answer(POD))
    await client.get(PODS, "web", "default")
    assert value("rest_client_request_retries_total", code="429", verb="GET") == 2


async def test_make_clients_applies_timeouts_and_rate_limits_per_client(
    server: Server, access: RestConfig
) -> None:
    server.default = hang()
    async with Transport(access) as transport:
        clients = make_clients(
            transport, objects=Limits(50, 100), events=Limits(0, 0), lease_seconds=40, status_seconds=0.1
        )
        with pytest.raises(TimedOut, match=r"\(0.1 s\)"):
            await clients.heartbeats.get(LEASES, "one", "kube-node-lease")
        clients = make_clients(
            transport, objects=Limits(50, 100), events=Limits(0, 0), lease_seconds=60, status_seconds=60
        )
        server.default = refuse(429, "TooManyRequests", "", {"Retry-After": "1"})
        with pytest.raises(TooManyRequests):
            await clients.heartbeats.get(LEASES, "one", "kube-node-lease")
        server.default = answer({})
        begin = time.monotonic()
        # With the default limit these would take half a minute: 5 a second after the first ten.
        await asyncio.gather(*(clients.heartbeats.get(LEASES, "x", "y") for _ in range(160)))
        assert time.monotonic() - begin < 28
        begin = time.monotonic()
        # Zero is the default of all clients: 5 a second after a burst of 10.
        await asyncio.gather(*(clients.events.get(EVENTS, "x", "y") for _ in range(12)))
        assert time.monotonic() - begin >= 0.4


async def test_api_client_disable_compression_sends_identity_encoding(
    server: Server, authority: Any, opened: Opener
) -> None:
    server.default = answer(POD)
    ca = authority.certificate.read_bytes()
    await opened(RestConfig(server.url, ca=ca)).get(PODS, "web", "default")
    await opened(RestConfig(server.url, ca=ca, compression=False)).get(PODS, "web", "default")
    assert "gzip" in server.seen[0].header("Accept-Encoding")
    assert server.seen[1].header("Accept-Encoding") == "identity"


async def test_api_client_server_url_with_path_prefixes_requests(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    server.default = answer(POD)
    await opened(RestConfig(server.url + "/k8s/clusters/c-1", ca=access.ca)).get(NODES, "one")
    assert server.seen[0].path == "/k8s/clusters/c-1/api/v1/nodes/one"


async def test_transport_pause_server_back_ends_early(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    server.default = answer(POD)
    client = opened(access)
    begin = time.monotonic()
    await client.transport.pause(0.3, least=0.1)
    assert time.monotonic() - begin >= 0.3
    server.say(reset)
    with pytest.raises(Unreachable):
        await client.patch(PODS, "web", {}, "default")
    pause = asyncio.ensure_future(client.transport.pause(20, least=0.1))
    await asyncio.sleep(0.01)
    await client.get(PODS, "web", "default")
    begin = time.monotonic()
    await pause
    assert time.monotonic() - begin < 10


async def test_transport_pause_after_unauthorized_ends_on_next_success(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    client = opened(access)
    server.default = refuse(401, "Unauthorized")
    with pytest.raises(Unauthorized):
        await client.get(PODS, "web", "default")
    begin = time.monotonic()
    pause = asyncio.ensure_future(client.transport.pause(60, least=0.1))
    await asyncio.sleep(0)
    server.default = answer(POD)
    await client.get(PODS, "web", "default")
    await pause
    assert time.monotonic() - begin < 30


async def test_api_client_endless_body_raises_timed_out(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    server.default = stream(b'{"metadata": ', end=False)
    with pytest.raises(TimedOut):
        await opened(access, timeout=0.2).get(PODS, "web", "default")


async def test_transport_server_hangs_counts_as_unreachable(
    server: Server, access: RestConfig, opened: Opener
) -> None:
    registry = CollectorRegistry()
    server.default = hang()
    client = opened(access, timeout=0.2, metrics=RestMetrics(registry))
    with pytest.raises(TimedOut):
        await client.get(PODS, "web", "default")
    server.default = answer(POD)
    pause = asyncio.ensure_future(client.pause(60))
    await asyncio.sleep(0)
    patient = ApiClient(client.transport, TokenBucket(-1, 0))
    await patient.get(PODS, "web", "default")
    await asyncio.wait_for(pause, 30)
    labels = {"code": "<error>", "method": "GET", "host": server.url.removeprefix("https://")}
    assert registry.get_sample_value("rest_client_requests_total", labels) == 1


async def test_new_socket_keepalive_detects_dead_peer_within_minute() -> None:
    made = _new_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1)))
    with made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 60


async def test_shared_resolver_concurrent_lookups_share_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answering = threading.Event()

    def slow(*args: Any) -> Any:
        asked.append(args[0])
        assert answering.wait(30)
        if args[0] == "bad.test":
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", args[1]))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    resolver = SharedResolver()

    def look_up(name: str) -> asyncio.Future[list[ResolveResult]]:
        return asyncio.ensure_future(resolver.resolve(name, 6443, socket.AF_UNSPEC))

    impatient, *others = [look_up("api.test") for _ in range(20)]
    await asyncio.sleep(0.01)
    impatient.cancel()
    answering.set()
    found = await asyncio.gather(*others)
    assert asked == ["api.test"]
    assert {(r[0]["host"], r[0]["port"], r[0]["hostname"]) for r in found} == {
        ("192.0.2.1", 6443, "api.test")
    }
    await look_up("api.test")
    assert asked == ["api.test"] * 2
    with pytest.raises(OSError, match="Temporary failure"):
        await look_up("bad.test")
    answering.clear()
    forgotten = look_up("bad.test")
    await asyncio.sleep(0.01)
    forgotten.cancel()
    answering.set()
    await until(lambda: not resolver._pending)

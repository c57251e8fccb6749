"""Connections of probes on bare sockets, with real servers."""

import asyncio
import contextlib
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from pykubelet.api.pod import HTTPGetAction, Probe
from pykubelet.probes.exchanges import Exchange, Exchanges, Peer, numeric_peer
from pykubelet.probes.runner import Checker, ExecSlots, PreparedProbe
from pykubelet.probes.types import ProbeResult
from tests.support.probes import no_exec, target
from tests.support.waiting import until

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
REQUEST = b"GET / HTTP/1.1\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Peer]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Peer(socket.AF_INET, ("127.0.0.1", server.sockets[0].getsockname()[1]))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(RESPONSE)


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@asynccontextmanager
async def exchanges() -> AsyncIterator[Exchanges]:
    made = Exchanges()
    try:
        yield made
    finally:
        made.close()


async def exchange(made: Exchanges, peer: Peer, request: bytes = REQUEST, seconds: float = 30) -> Exchange:
    ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    made.start(peer, request, asyncio.get_running_loop().time() + seconds, ended.set_result)
    assert not ended.done()
    return await ended


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("10.0.0.1", socket.AF_INET),
        ("::1", socket.AF_INET6),
        ("localhost", None),
        ("fe80::1%lo", None),
        ("1.2.3", None),
        ("", None),
        ("a\0b", None),
    ],
)
def test_numeric_peer_accepts_only_addresses(host: str, family: socket.AddressFamily | None) -> None:
    peer = numeric_peer(host, 80)
    assert peer == (None if family is None else Peer(family, (host, 80)))


async def test_exchange_many_at_a_time_all_end_with_their_response() -> None:
    async with serving(answer) as peer, exchanges() as made:
        ended = await asyncio.gather(*(exchange(made, peer) for _ in range(200)))
        assert {(one.failure, one.reader and one.reader.status) for one in ended} == {(None, 200)}
        assert not made._by_descriptor


def test_exchange_on_uvloop_same_results() -> None:
    async def all_of_it() -> None:
        async with exchanges() as made:
            async with serving(answer) as peer:
                done = await exchange(made, peer)
                assert done.reader is not None
                assert (done.failure, bytes(done.reader.body)) == (None, b"ok")
            refused = await exchange(made, peer)
            assert isinstance(refused.failure, ConnectionRefusedError)
            async with serving(silence) as peer:
                assert isinstance((await exchange(made, peer, seconds=0.1)).failure, TimeoutError)

    uvloop.run(all_of_it())


async def test_exchange_response_in_single_bytes_is_read() -> None:
    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for byte in RESPONSE:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(slowly) as peer, exchanges() as made:
        done = await exchange(made, peer)
        assert done.reader is not None
        assert (done.failure, bytes(done.reader.body)) == (None, b"ok")


async def test_exchange_request_larger_than_socket_buffer_is_sent_completely() -> None:
    request = b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000_000 + b"\r\n\r\n"
    received = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        while received < len(request):
            received += len(await reader.read(1_000_000))
        writer.write(RESPONSE)

    async with serving(count) as peer, exchanges() as made:
        assert (await exchange(made, peer, request)).failure is None
    assert received == len(request)


async def test_exchange_connection_reset_reports_failure_after_connect() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with serving(reset) as peer, exchanges() as made:
        done = await exchange(made, peer)
        assert isinstance(done.failure, ConnectionResetError)
        assert done.connected


async def test_exchange_not_accepted_times_out_before_connect() -> None:
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        async with exchanges() as made:
            late = await exchange(made, Peer(socket.AF_INET, full.getsockname()), seconds=0.2)
            assert isinstance(late.failure, TimeoutError)
            assert not late.connected


async def test_exchange_without_free_descriptor_reports_failure() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(answer) as peer, exchanges() as made:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            done = await exchange(made, peer)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert isinstance(done.failure, OSError)
        assert not done.connected
        assert (await exchange(made, peer)).failure is None


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_exchange_cancelled_closes_connection_without_calling_listener(how: str) -> None:
    connected, closed, called = asyncio.Event(), asyncio.Event(), list[Exchange]()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        closed.set()

    async with serving(watch) as peer, exchanges() as made:
        deadline = asyncio.get_running_loop().time() + 30
        running = made.start(peer, REQUEST, deadline, called.append)
        refused = made.start(Peer(socket.AF_INET, ("127.0.0.1", 1)), REQUEST, deadline, called.append)
        refused.cancel()
        await connected.wait()
        if how == "cancel":
            running.cancel()
            running.cancel()
        else:
            made.close()
        await asyncio.wait_for(closed.wait(), 45)
        assert called == []
        async with serving(answer) as other:
            assert (await exchange(made, other)).failure is None


async def test_exchange_advanced_while_not_ready_continues() -> None:
    async with serving(answer) as peer, exchanges() as made:
        ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        running = made.start(peer, REQUEST, asyncio.get_running_loop().time() + 30, ended.set_result)
        running.advance()
        running.advance()
        assert (await ended).failure is None


async def test_probe_run_cancelled_during_redirect_ends_it() -> None:
    outcomes, redirected, closed = list[ProbeResult](), asyncio.Event(), asyncio.Event()

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"GET /hang"):
            redirected.set()
            await reader.read()
            closed.set()
        else:
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /hang\r\nContent-Length: 0\r\n\r\n")

    async with serving(redirect) as peer:
        checker = Checker(no_exec, ExecSlots(1))
        probe = Probe(http_get=HTTPGetAction(port=peer.address[1]), timeout_seconds=30)
        run = PreparedProbe(probe, target(), checker).start(asyncio.ensure_future, outcomes.append)
        await asyncio.wait_for(redirected.wait(), 45)
        run.cancel()
        await until(closed.is_set)
        checker.exchanges.close()
    assert outcomes == []


async def test_probe_run_broken_response_is_retried_three_times() -> None:
    requests = 0

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")

    async with serving(broken) as peer:
        checker = Checker(no_exec, ExecSlots(1))
        probe = Probe(http_get=HTTPGetAction(port=peer.address[1]), timeout_seconds=30)
        outcome: asyncio.Future[ProbeResult] = asyncio.get_running_loop().create_future()
        PreparedProbe(probe, target(), checker).start(asyncio.ensure_future, outcome.set_result)
        assert (await outcome).errored
        checker.exchanges.close()
    assert requests == 3

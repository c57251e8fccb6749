"""HTTP/2 connections and their streams: any number at once, in turns, to their ends."""

import asyncio
import gc
import socket
import time
from contextlib import AsyncExitStack

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from pykubelet.server import connections
from pykubelet.server.http2.connection import MOST_STREAMS, Http2Connection
from pykubelet.server.http2.stream import Stream
from pykubelet.util.tasks import TaskScope
from tests.support.api_node import STAMP, Start, write_log
from tests.support.certs import Authority, Pair
from tests.support.server_clients import client_context
from tests.support.waiting import until
from tests.unit.server import http2_site
from tests.unit.server.http2_client import Client
from tests.unit.server.http2_site import Site, alive, site_of, standing, talking, write_long_log

authority, pairs, start, site = http2_site.authority, http2_site.pairs, http2_site.start, http2_site.site


async def test_http2_log_follow_reset_or_disconnect_ends_handlers(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(5)} stdout F one")
    inflight = node.deps.metrics._inflight.labels("GET", "containerLogs", "readwrite", "false")
    async with talking(node) as talk:
        streams = [talk.begin("/containerLogs/default/web/main?follow=true") for _ in range(3)]
        first = [talk.answers[number] for number in streams]
        await talk.until(lambda: all(answer.text == "one\n" for answer in first))
        with node.runtime.log.open("a") as file:
            file.write(f"{STAMP.format(6)} stdout F two\n")
        await talk.until(lambda: all(answer.text == "one\ntwo\n" for answer in first))
        assert inflight._value.get() == 3
        talk.wire.reset_stream(streams[0], ErrorCodes.CANCEL)
        talk.flush()
        await until(lambda: inflight._value.get() == 2)
        # Requests go on beside it.
        assert (await talk.ask("/healthz")).status == 200
    # Whoever hangs up has no followers left.
    await until(lambda: inflight._value.get() == 0)
    await until(lambda: alive(Stream) == 0 and alive(Http2Connection) == 0)


async def test_http2_slow_reader_bounded_memory_and_complete(start: Start) -> None:
    node = await start()
    text = write_long_log(node)
    async with talking(node, window=20_000, takes=False) as talk:
        number = talk.begin("/containerLogs/default/web/main")
        answer = talk.answers[number]
        await talk.until(lambda: len(answer.body) == 20_000)
        # Others on the same connection need not wait for it.
        for _ in range(10):
            assert (await talk.ask("/healthz")).status == 200
        [stream] = [found for found in gc.get_objects() if isinstance(found, Stream) and not found.over]
        assert stream.size < 1024**2 < len(text) / 4
        assert len(answer.body) == 20_000
        talk.takes = True
        talk.wire.acknowledge_received_data(20_000, number)
        talk.flush()
        assert (await talk.whole(number)).text == text


async def test_http2_client_not_reading_pauses_reading(start: Start) -> None:
    """Neither answers nor acknowledgements pile up."""
    node = await start()
    write_long_log(node)
    context = client_context(node.authority, node.clients["admin"]["pair"])
    context.set_alpn_protocols(["h2"])
    little = socket.socket()
    # So that the log does not fit between the two.
    little.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    little.connect(("127.0.0.1", node.port))
    _, writer = await asyncio.open_connection(
        sock=little, ssl=context, server_hostname="localhost", limit=1024
    )
    try:
        client = Client(asyncio.StreamReader(), writer, window=2**31 - 1, takes=False)
        client.wire.increment_flow_control_window(2**30)
        client.begin("/containerLogs/default/web/main")
        await until(lambda: any(connection._paused for connection in standing()))
        [connection] = standing()
        transport = connection.transport
        assert transport is not None
        assert not transport.is_reading()
        before = transport.get_write_buffer_size()
        assert before < 1024**2
        for _ in range(2000):
            client.wire.ping(b"12345678")
            client.flush()
        await asyncio.sleep(0.1)
        assert transport.get_write_buffer_size() <= before, "the pings are not answered"
    finally:
        writer.transport.abort()


async def test_http2_concurrent_responses_all_complete(start: Start) -> None:
    node = await start()
    write_long_log(node)
    async with talking(node, window=2**20) as talk:
        talk.wire.increment_flow_control_window(2**24)
        streams = [talk.begin("/containerLogs/default/web/main") for _ in range(4)]
        answers = [await talk.whole(number) for number in streams]
        assert len({bytes(answer.body) for answer in answers}) == 1
        assert all(answer.ended for answer in answers)


async def test_http2_stream_reset_cancels_handler(site: Site) -> None:
    async with site.talking() as talk:
        numbers = [talk.begin("/slow") for _ in range(20)]
        await until(lambda: site.slow.at_work == 20)
        for number in numbers[:15]:
            talk.wire.reset_stream(number, ErrorCodes.CANCEL)
        talk.flush()
        await until(lambda: (site.slow.at_work, site.slow.cancelled) == (5, 15))
        site.slow.release.set()
        answers = [await talk.whole(number) for number in numbers[15:]]
        assert [answer.text for answer in answers] == ["done"] * 5
        assert (await talk.ask("/echo")).status == 200


async def test_http2_connection_lost_cancels_handlers(site: Site) -> None:
    async with site.talking() as talk:
        for _ in range(10):
            talk.begin("/slow")
        body = talk.begin("/echo", "POST", body=True)
        await talk.send(body, b"half of it")
        await until(lambda: site.slow.at_work == 10)
        talk._writer.transport.abort()
        await until(lambda: (site.slow.at_work, site.slow.cancelled) == (0, 10))
    await until(lambda: alive(Stream) == 0 and alive(Http2Connection) == 0)


async def test_http2_total_stream_limit_exceeded_refuses_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykubelet.server.http2.connection.MOST_STREAMS_OF_ALL", 5)
    async with site.talking() as talk, site.talking() as other:
        await talk.ask("/echo")
        assert talk.wire.remote_settings.max_concurrent_streams == MOST_STREAMS
        assert talk.wire.remote_settings.max_header_list_size == 64 * 1024
        numbers = [talk.begin("/slow") for _ in range(4)] + [other.begin("/slow")]
        await until(lambda: site.slow.at_work == 5)
        # Everybody's places are taken; the client may try again.
        assert (await other.ask("/echo")).reset == ErrorCodes.REFUSED_STREAM
        site.slow.release.set()
        for number in numbers[:4]:
            assert (await talk.whole(number)).text == "done"
        await until(lambda: site.slow.at_work == 0)
        assert (await other.ask("/echo")).status == 200


async def test_http2_connection_stream_limit_exceeded_refuses_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykubelet.server.http2.connection.MOST_STREAMS", 3)
    async with site.talking() as talk:
        numbers = [talk.begin("/slow") for _ in range(3)]
        # Sent before this side could know of the bound.
        late = talk.begin("/slow")
        assert (await talk.whole(late)).reset == ErrorCodes.REFUSED_STREAM
        site.slow.release.set()
        assert [(await talk.whole(number)).text for number in numbers] == ["done"] * 3


async def test_http2_unread_responses_evicted_for_new_streams(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykubelet.server.http2.connection.MOST_STREAMS_OF_ALL", 5)
    async with site.talking(window=0) as stuck, site.talking() as other:
        for _ in range(5):
            number = stuck.begin("/echo")
            await stuck.until(lambda number=number: stuck.answers[number].status)
        assert (await other.ask("/echo")).status == 200
        await stuck.until(lambda: stuck.closed)


async def test_http2_idle_connection_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a slow machine to open three of them.
    monkeypatch.setattr(connections, "IDLE_SECONDS", 5.0)
    async with site.talking() as silent, site.talking() as busy, site.talking(window=0) as stuck:
        number = busy.begin("/slow")
        stuck.begin("/echo")
        await until(lambda: site.slow.at_work == 1)
        for talk in (silent, stuck):
            await talk.until(lambda talk=talk: talk.closed)
            assert talk.goodbye == ErrorCodes.NO_ERROR
        assert not busy.closed
        site.slow.release.set()
        assert (await busy.whole(number)).text == "done"
        await busy.until(lambda: busy.closed)


async def test_http2_idle_connections_evicted_for_new_ones(
    authority: Authority, pairs: dict[str, Pair]
) -> None:
    async with site_of(authority, pairs, most=5) as site, AsyncExitStack() as stack:
        busy = await stack.enter_async_context(site.talking())
        number = busy.begin("/slow")
        await until(lambda: site.slow.at_work == 1)
        others = [await stack.enter_async_context(site.talking()) for _ in range(12)]
        assert (await others[-1].ask("/echo")).status == 200
        await until(lambda: sum(talk.closed for talk in others) >= 7)
        site.slow.release.set()
        assert (await busy.whole(number)).text == "done"


async def test_http2_shutdown_completes_running_responses(
    authority: Authority, pairs: dict[str, Pair]
) -> None:
    async with TaskScope() as scope, AsyncExitStack() as clients:
        serving = AsyncExitStack()
        site = await serving.enter_async_context(site_of(authority, pairs))
        try:
            talk = await clients.enter_async_context(site.talking())
            idle = await clients.enter_async_context(site.talking())
            assert (await idle.ask("/echo")).status == 200
            number = talk.begin("/slow")
            await until(lambda: site.slow.at_work == 1)
        finally:
            stopping = scope.start(serving.aclose(), name="stopping")
        await idle.until(lambda: idle.closed)
        await talk.until(lambda: talk.goodbye is not None)
        assert (talk.goodbye, idle.goodbye) == (ErrorCodes.NO_ERROR, ErrorCodes.NO_ERROR)
        site.slow.release.set()
        assert (await talk.whole(number)).text == "done"
        await talk.until(lambda: talk.closed)
        await stopping


async def test_http2_shutdown_timeout_cancels_handlers(authority: Authority, pairs: dict[str, Pair]) -> None:
    async with AsyncExitStack() as clients:
        async with site_of(authority, pairs) as site:
            for _ in range(2):
                talk = await clients.enter_async_context(site.talking())
                for _ in range(3):
                    talk.begin("/slow")
            await until(lambda: site.slow.at_work == 6)
            began = time.monotonic()
        assert time.monotonic() - began < 60
        assert (site.slow.at_work, site.slow.cancelled) == (0, 6)


async def test_http2_client_goaway_running_responses_complete(site: Site) -> None:
    async with site.talking() as talk:
        number = talk.begin("/slow")
        await until(lambda: site.slow.at_work == 1)
        talk.raw(GoAwayFrame(0, last_stream_id=0, error_code=0))
        site.slow.release.set()
        assert (await talk.whole(number)).text == "done"
        await talk.until(lambda: talk.closed)


async def test_http2_client_settings_applied_with_bounded_header_table(site: Site) -> None:
    async with site.talking(window=100) as talk:
        talk.wire.update_settings({SettingCodes.MAX_FRAME_SIZE: 2**20, SettingCodes.HEADER_TABLE_SIZE: 2**30})
        talk.flush()
        for _ in range(20):
            assert (await talk.ask("/echo", headers=[("x", "y" * 500)])).status == 200
        [connection] = standing()
        # However much the client would remember for us.
        assert connection._wire.encoder.header_table_size == 4096

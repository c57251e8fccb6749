"""Live updates: what is sent, and the bounds on clients."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pykubelet.server.page.events import QUEUED, Broadcaster, Client, Rendered, TooManyClients
from pykubelet.server.page.html import Html
from pykubelet.util.tasks import TaskScope


class Source:
    """A view whose sections a test changes."""

    def __init__(self) -> None:
        self.sections: dict[str, Html] | None = {"a": Html("<p>1</p>"), "b": Html("<p>b</p>")}
        self.renders = 0
        self.prepared = 0
        self.error: Exception | None = None

    async def render(self, view: str) -> Rendered | None:
        self.renders += 1
        if self.error is not None and view != "other":
            raise self.error
        return None if self.sections is None else Rendered(dict(self.sections), {"time": self.renders})

    async def prepare(self) -> None:
        self.prepared += 1


@contextlib.asynccontextmanager
async def broadcasting(source: Source, **options: Any) -> AsyncIterator[Broadcaster[str]]:
    async with TaskScope() as tasks:
        yield Broadcaster(source.render, source.prepare, tasks, interval=0.01, **options)


async def message(messages: AsyncIterator[bytes]) -> tuple[str, dict[str, Any]]:
    async with asyncio.timeout(10):
        head, data = (await anext(messages)).decode().rstrip("\n").split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_broadcaster_sends_all_sections_first_then_changes() -> None:
    source = Source()
    async with broadcasting(source) as broadcaster:
        with broadcaster.connect("node") as client:
            messages = client.messages()
            kind, first = await message(messages)
            assert kind == "update"
            assert first["sections"] == source.sections
            source.sections = {"a": Html("<p>2</p>"), "b": Html("<p>b</p>")}
            while not (update := await message(messages))[1]["sections"]:
                pass
            assert update[1]["sections"] == {"a": "<p>2</p>"}
            with broadcaster.connect("node") as second:
                kind, whole = await message(second.messages())
                assert whole["sections"] == source.sections
                assert whole["isWhole"] is True


async def test_broadcaster_sends_ids_of_sections_that_are_gone_once() -> None:
    source = Source()
    async with broadcasting(source) as broadcaster:
        with broadcaster.connect("node") as client:
            messages = client.messages()
            await message(messages)
            source.sections = {"b": Html("<p>b</p>")}
            while not (removed := (await message(messages))[1]["removed"]):
                pass
            assert removed == ["a"]
            assert (await message(messages))[1]["removed"] == []


async def test_broadcaster_without_clients_renders_nothing_and_starts_again() -> None:
    source = Source()
    async with broadcasting(source) as broadcaster:
        for _ in range(2):
            with broadcaster.connect("node") as client:
                await message(client.messages())
            assert broadcaster.clients == 0
            while broadcaster._running:
                await asyncio.sleep(0.01)
            rendered = source.renders
            await asyncio.sleep(0.05)
            assert source.renders == rendered


async def test_broadcaster_renders_view_once_for_many_clients_and_rejects_more() -> None:
    source = Source()
    async with broadcasting(source, max_clients=64) as broadcaster:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(broadcaster.connect("node")) for _ in range(64)]
            with pytest.raises(TooManyClients), broadcaster.connect("pods"):
                pass
            for client in clients:
                await message(client.messages())
            assert source.renders <= QUEUED + 1
        assert broadcaster.clients == 0


async def test_broadcaster_disconnects_client_that_does_not_read() -> None:
    source = Source()
    async with broadcasting(source) as broadcaster:
        with broadcaster.connect("node") as slow, broadcaster.connect("node") as reader:
            messages = reader.messages()
            while broadcaster.clients == 2:
                await message(messages)
            assert slow.queue.qsize() == 1
            async with asyncio.timeout(10):
                assert [sent async for sent in slow.messages()] == []
            await message(messages)


async def test_broadcaster_goes_on_after_failure_of_a_view() -> None:
    source = Source()
    source.error = RuntimeError("defect")
    async with broadcasting(source) as broadcaster:
        with broadcaster.connect("node") as client:
            while source.renders < 3:
                await asyncio.sleep(0.01)
            source.error = None
            assert (await message(client.messages()))[0] == "update"


async def test_broadcaster_failure_of_a_view_does_not_stop_the_others() -> None:
    source = Source()
    source.error = RuntimeError("defect")
    async with broadcasting(source) as broadcaster:
        with broadcaster.connect("node"), broadcaster.connect("other") as client:
            assert (await message(client.messages()))[0] == "update"


async def test_broadcaster_reports_view_that_is_gone() -> None:
    source = Source()
    source.sections = None
    async with broadcasting(source) as broadcaster:
        with broadcaster.connect("pod") as client:
            assert (await message(client.messages()))[0] == "gone"


async def test_broadcaster_close_ends_messages_and_accepts_no_client() -> None:
    source = Source()
    async with broadcasting(source) as broadcaster:
        with broadcaster.connect("node") as client:
            broadcaster.close()
            async with asyncio.timeout(10):
                assert [sent async for sent in client.messages()] == []
        with pytest.raises(TooManyClients), broadcaster.connect("node"):
            pass


def test_client_send_beyond_its_queue_ends_it() -> None:
    client = Client()
    assert [client.send(b"x") for _ in range(QUEUED + 1)] == [True] * QUEUED + [False]
    assert client.queue.qsize() == 1

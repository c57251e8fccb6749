"""The log of recent events, and the route that serves it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest_asyncio

from pykubelet.api.meta import from_json
from pykubelet.podconfig.event_log import MAX_EVENTS, MAX_MESSAGE_CHARACTERS, EventLog, EventPage
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.server import node_routes
from pykubelet.server.listeners import unix_server
from tests.support.pod_view import pod_of

POD = pod_of("web", "u1")


async def test_event_log_repeated_event_moves_to_end_with_its_count() -> None:
    history, log = PodHistory(iter(range(100)).__next__), EventLog()
    history.add_listener(log.pod_event)
    history.event(POD, "Normal", "Pulled", "image", "spec.containers{main}")
    history.event(POD, "Warning", "BackOff", "again", keep=False)
    history.event(POD, "Normal", "Pulled", "image", "spec.containers{main}")
    found = log.page().events
    assert [(event.reason, event.count, event.first, event.last) for event in found] == [
        ("BackOff", 1, 1, 1),
        ("Pulled", 2, 0, 2),
    ]
    assert (found[1].namespace, found[1].pod, found[1].uid) == ("default", "web-node1", "u1")


async def test_event_log_hostile_events_bounded() -> None:
    log = EventLog(lambda: 5.0)
    for number in range(MAX_EVENTS + 50):
        log.node_event("Warning", "Flood", f"{number} {'x' * 10_000}")
    page = log.page()
    assert len(page.events) == MAX_EVENTS
    assert page.events[0].message.startswith("50 ")
    assert max(len(event.message) for event in page.events) == MAX_MESSAGE_CHARACTERS


async def test_event_log_cursor_returns_only_newer_and_all_of_another_log() -> None:
    log = EventLog(lambda: 5.0)
    log.node_event("Normal", "Starting", "a")
    first = log.page()
    log.node_event("Normal", "Ready", "b")
    log.node_event("Normal", "Ready", "b")
    (new,) = log.page(first.log, first.cursor).events
    assert (new.reason, new.count) == ("Ready", 2)
    assert len(log.page("former process", 10**9).events) == 2


async def test_event_log_wait_ends_with_event_or_in_time() -> None:
    log = EventLog()
    page = log.page()
    waits = [asyncio.create_task(log.wait(page.log, page.cursor, 60)) for _ in range(3)]
    await asyncio.sleep(0)
    log.node_event("Normal", "Ready", "b")
    await asyncio.gather(*waits)
    assert await log.wait(page.log, page.cursor, 60)  # one is there already
    assert await log.wait("former process", 10**9, 60)
    assert not await log.wait(page.log, log.page().cursor, 0.01)


async def test_event_log_recording_passes_events_on() -> None:
    log, passed = EventLog(), list[tuple[str, str, str]]()
    log.recording(lambda *event: passed.append(event))("Warning", "Full", "disk")
    assert passed == [("Warning", "Full", "disk")]
    assert log.page().events[0].uid == ""


@pytest_asyncio.fixture
async def session(tmp_path: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, EventLog]]:
    log = EventLog()
    path = tmp_path / "s"
    async with (
        unix_server(path, node_routes.event_routes(log)),
        aiohttp.ClientSession("http://node", connector=aiohttp.UnixConnector(str(path))) as client,
    ):
        yield client, log


async def test_event_routes_wrong_cursor_returns_all(
    session: tuple[aiohttp.ClientSession, EventLog],
) -> None:
    client, log = session
    log.node_event("Normal", "Ready", "b")
    for after in ("", "x", "-1", "9" * 5000, "%D9%A1"):
        async with client.get(f"/events?log={log.page().log}&after={after}") as response:
            assert len(from_json(EventPage, await response.read()).events) == 1


async def test_event_routes_too_many_followers_rejected(
    session: tuple[aiohttp.ClientSession, EventLog],
) -> None:
    client, log = session
    query = f"/events?log={log.page().log}&after=0&wait=1"
    tasks = {asyncio.create_task(client.get(query)) for _ in range(node_routes.MAX_WAITERS + 1)}
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [(await task).status for task in done] == [503]
    log.node_event("Normal", "Ready", "b")
    assert {(await task).status for task in waiting} == {200}

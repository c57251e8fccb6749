"""Reflector with streaming lists: initial events up to a bookmark, and the fallback to an ordinary list."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pykubelet.apiserver.client import PODS
from pykubelet.apiserver.errors import (
    ApiError,
    Gone,
    InvalidResponse,
    Status,
    TimedOut,
    TooManyRequests,
    Unreachable,
    status_error,
)
from pykubelet.apiserver.reflector import (
    INITIAL_EVENTS_END,
    INITIAL_SECONDS,
    INITIAL_SILENCE_SECONDS,
    InitialEvents,
    Reflector,
    Store,
    WatchEvent,
)
from pykubelet.util.backoff import Backoff
from tests.support.watch_events import Heard, ScriptedSource, event, page, pod

FOREVER = [10**9]
AWAY = Unreachable("https://x", "refused")


def end(version: str = "100") -> Any:
    metadata = {"resourceVersion": version, "annotations": {INITIAL_EVENTS_END: "true"}}
    return event("BOOKMARK", {"kind": "Pod", "metadata": metadata})


def bookmark(version: str) -> Any:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": version}})


@asynccontextmanager
async def reflecting(source: ScriptedSource, heard: Heard) -> AsyncIterator[Reflector[Any]]:
    source.streams_lists = True
    reflector = Reflector(source, PODS, heard, rng=lambda: 0.0, backoff=Backoff(rng=lambda: 0.0))
    task = asyncio.ensure_future(reflector.run())
    try:
        yield reflector
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def played(source: ScriptedSource, seconds: float = 10_000) -> tuple[Reflector[Any], Heard]:
    heard = Heard()
    async with reflecting(source, heard) as reflector:
        await asyncio.sleep(seconds)
    return reflector, heard


def names(reflector: Reflector[Any]) -> list[str]:
    return sorted(name for _, name in reflector.objects)


def verbs(source: ScriptedSource) -> list[str]:
    return [verb for verb, _ in source.asked]


@pytest.mark.looptime
async def test_reflector_streaming_list_is_one_watch_with_initial_events() -> None:
    first = [event("ADDED", pod("a", "7")), event("ADDED", pod("b", "9")), end("12")]
    source = ScriptedSource([*first, event("ADDED", pod("c", "13")), *FOREVER])
    reflector, heard = await played(source)
    assert names(reflector) == ["a", "b", "c"]
    assert verbs(source) == ["watch"]
    params = source.asked[0][1]
    assert params["sendInitialEvents"] == "true"
    assert params["resourceVersionMatch"] == "NotOlderThan"
    assert params["allowWatchBookmarks"] == "true"
    assert "resourceVersion" not in params
    assert reflector.has_synced
    assert heard.updates[0].listed
    assert len(heard.updates[0].changed) == 2


@pytest.mark.looptime
async def test_reflector_streaming_list_incomplete_delivers_nothing() -> None:
    source = ScriptedSource([event("ADDED", pod("a", "7")), bookmark("8"), *FOREVER])
    heard = Heard()
    async with reflecting(source, heard) as reflector:
        await asyncio.sleep(INITIAL_SILENCE_SECONDS - 1)
        assert not reflector.has_synced
        assert not heard.updates


@pytest.mark.looptime
async def test_reflector_watch_after_streaming_list_continues_from_its_version() -> None:
    source = ScriptedSource([event("ADDED", pod("a", "7")), end("12"), 300], FOREVER)
    await played(source, 400)
    assert [params.get("resourceVersion") for _, params in source.asked] == [None, "12"]
    assert "sendInitialEvents" not in source.asked[1][1]


@pytest.mark.looptime
@pytest.mark.parametrize("code", [400, 403, 404, 422, 500])
async def test_reflector_streaming_list_refused_lists(code: int) -> None:
    refusal = status_error(Status(code=code, message="sendInitialEvents is forbidden"))
    source = ScriptedSource(refusal, page(pod("a", "7")), FOREVER)
    reflector, _ = await played(source)
    assert verbs(source) == ["watch", "list", "watch"]
    assert names(reflector) == ["a"]
    assert "sendInitialEvents" not in source.asked[2][1]
    assert not source.pauses
    # What may not be listed or does not exist says nothing about streaming.
    assert source.streams_lists == (code in (403, 404))


@pytest.mark.looptime
async def test_reflector_server_without_end_bookmark_lists_after_silence() -> None:
    source = ScriptedSource([event("ADDED", pod("a", "7")), *FOREVER], page(pod("a", "7")), FOREVER)
    reflector, _ = await played(source)
    assert verbs(source) == ["watch", "list", "watch"]
    assert names(reflector) == ["a"]
    assert source.times[1] - source.times[0] == pytest.approx(INITIAL_SILENCE_SECONDS, abs=1)
    # Otherwise each new reflector, and each relist, would wait again.
    assert not source.streams_lists


@pytest.mark.looptime
async def test_reflector_initial_events_that_drip_lists_after_limit() -> None:
    drips = [step for number in range(100) for step in (20, event("ADDED", pod(f"p{number}", "7")))]
    source = ScriptedSource(drips, page(pod("a", "7")), FOREVER)
    reflector, _ = await played(source)
    assert names(reflector) == ["a"]
    assert source.times[1] - source.times[0] == pytest.approx(INITIAL_SECONDS, abs=1)


@pytest.mark.looptime
async def test_reflector_streaming_list_cut_off_lists() -> None:
    source = ScriptedSource([event("ADDED", pod("a", "7"))], page(pod("b", "7")), FOREVER)
    reflector, _ = await played(source)
    assert names(reflector) == ["b"]


@pytest.mark.looptime
@pytest.mark.parametrize("err", [AWAY, TooManyRequests(429, "TooManyRequests", "later")])
async def test_reflector_streaming_list_server_away_retries_streaming(err: Exception) -> None:
    source = ScriptedSource(err, [event("ADDED", pod("a", "7")), end(), *FOREVER])
    reflector, _ = await played(source)
    assert verbs(source) == ["watch", "watch"]
    assert names(reflector) == ["a"]


@pytest.mark.looptime
async def test_reflector_streaming_list_connection_breaks_lists() -> None:
    source = ScriptedSource([event("ADDED", pod("a", "7")), AWAY], page(pod("b", "8")), FOREVER)
    reflector, _ = await played(source)
    assert verbs(source) == ["watch", "list", "watch"]
    assert names(reflector) == ["b"]
    assert source.streams_lists


@pytest.mark.looptime
async def test_reflector_streaming_list_without_response_in_time_lists() -> None:
    late = TimedOut("https://x", "there was no answer in time")
    source = ScriptedSource(late, page(pod("b", "8")), FOREVER)
    reflector, _ = await played(source)
    assert verbs(source) == ["watch", "list", "watch"]
    assert names(reflector) == ["b"]
    assert not source.streams_lists


@pytest.mark.looptime
async def test_reflector_expired_version_streams_list_again_with_differences() -> None:
    first = [
        event("ADDED", pod("a", "7")),
        event("ADDED", pod("b", "7")),
        end("12"),
        Gone(410, "Expired", "old"),
    ]
    source = ScriptedSource(
        first, [event("ADDED", pod("b", "7")), event("ADDED", pod("c", "20")), end("21"), *FOREVER]
    )
    reflector, heard = await played(source)
    assert names(reflector) == ["b", "c"]
    last = heard.updates[-1]
    assert [found.metadata.name for found in last.changed] == ["c"]
    assert [found.metadata.name for found in last.removed] == ["a"]


@pytest.mark.looptime
async def test_reflector_version_unknown_at_relist_lists_without_it() -> None:
    first = [event("ADDED", pod("a", "7")), end("12"), Gone(410, "Expired", "old")]
    source = ScriptedSource(first, Gone(410, "Expired", "old"), page(pod("b", "30"), version="31"), FOREVER)
    reflector, _ = await played(source)
    assert verbs(source) == ["watch", "watch", "list", "watch"]
    assert source.asked[1][1]["resourceVersion"] == "12"
    assert "resourceVersion" not in source.asked[2][1]
    assert names(reflector) == ["b"]


def raw(kind: str, document: Any) -> WatchEvent:
    return WatchEvent(kind, msgspec.Raw(json.dumps(document).encode()))


def test_initial_events_changes_before_the_end_are_applied() -> None:
    initial = InitialEvents(Store(PODS))
    assert initial.add([raw("ADDED", pod("a", "1")), raw("ADDED", pod("b", "2"))]) is None
    assert initial.add([raw("DELETED", pod("a", "3")), raw("MODIFIED", pod("b", "4"))]) is None
    after = raw("ADDED", pod("c", "6"))
    assert initial.add([raw(end("5")["type"], end("5")["object"]), after]) == [after]
    assert [found.metadata.resource_version for found in initial.take()] == ["4"]
    assert initial.version == "5"
    assert not list(initial.take())


def test_initial_events_endless_are_rejected() -> None:
    initial = InitialEvents(Store(PODS), max_bytes=100_000)
    with pytest.raises(InvalidResponse, match="larger than a list"):
        for _ in range(100_000):
            # The same object again and again: only the bytes tell.
            initial.add([raw("ADDED", pod("a", "1"))])


def test_initial_events_end_without_version_is_rejected() -> None:
    with pytest.raises(InvalidResponse, match="resourceVersion"):
        InitialEvents(Store(PODS)).add([raw("BOOKMARK", end("")["object"])])


def test_initial_events_error_event_is_raised() -> None:
    with pytest.raises(ApiError, match="too old"):
        InitialEvents(Store(PODS)).add(
            [raw("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})]
        )

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pykubelet.apiserver.client import PODS, ApiClient
from pykubelet.apiserver.errors import (
    Forbidden,
    Gone,
    InvalidResponse,
    ServerError,
    StatusCause,
    StatusDetails,
    Superseded,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from pykubelet.apiserver.reflector import ListerWatcher, Reflector
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.util.backoff import Backoff
from tests.support.api_client import Opener
from tests.support.api_server import (
    Server,
    cut,
    listing,
    refuse,
    reset,
    server_context,
    serving,
    stream,
    text,
)
from tests.support.certs import Authority, Pair
from tests.support.ports import held_port
from tests.support.waiting import until
from tests.support.watch_events import Heard, ScriptedSource, event, page, pod, status

AWAY = Unreachable("https://x", "refused")
FOREVER = [10**9]


def bookmark(version: str) -> Any:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": version}})


@asynccontextmanager
async def reflecting(source: ListerWatcher, heard: Heard, **options: Any) -> AsyncIterator[Reflector[Any]]:
    reflector = Reflector(source, PODS, heard, **options)
    task = asyncio.ensure_future(reflector.run())
    try:
        yield reflector
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def played(
    source: ScriptedSource, seconds: float = 10_000, **options: Any
) -> tuple[Reflector[Any], Heard]:
    """Let a reflector run for so long, in the loop's own time."""
    heard = Heard()
    async with reflecting(source, heard, rng=lambda: 0.0, **options) as reflector:
        await asyncio.sleep(seconds)
    return reflector, heard


def asked(source: ScriptedSource, *names: str) -> list[tuple[str, ...]]:
    return [(verb, *(params.get(name, "-") for name in names)) for verb, params in source.asked]


@pytest.mark.looptime
async def test_reflector_lists_then_watches_from_listed_version() -> None:
    source = ScriptedSource(
        page(pod("a", 5), version="7"),
        [event("ADDED", pod("b", 8)), 1, event("MODIFIED", pod("a", 9)), bookmark("12"), 300],
        [event("DELETED", pod("b", 13)), 300],
        FOREVER,
    )
    reflector, heard = await played(source, field_selector="spec.nodeName=one", label_selector="a=b")
    assert heard.versions == {"default/a": "9"}
    assert {name: obj.uid for (_, name), obj in reflector.objects.items()} == {"a": "uid-a"}
    assert [update.listed for update in heard.updates] == [True, False, False, False]
    first, second, third, fourth = (params for _, params in source.asked)
    selectors = {"fieldSelector": "spec.nodeName=one", "labelSelector": "a=b"}
    assert first == {**selectors, "resourceVersion": "0", "limit": "500"}
    watch = {**selectors, "allowWatchBookmarks": "true", "timeoutSeconds": "300"}
    assert (second, third, fourth) == (
        {**watch, "resourceVersion": "7"},
        {**watch, "resourceVersion": "12"},
        {**watch, "resourceVersion": "13"},
    )
    assert source.pauses == []


@pytest.mark.looptime
async def test_reflector_has_synced_only_after_complete_list() -> None:
    source = ScriptedSource(AWAY, page(version="3"), FOREVER)
    heard = Heard()
    async with reflecting(source, heard, rng=lambda: 0.0) as reflector:
        await asyncio.sleep(0.5)
        assert not reflector.has_synced
        assert heard.updates == []
        await reflector.synced()
        await asyncio.sleep(0)
        assert reflector.has_synced
        assert [update.listed for update in heard.updates] == [True]


@pytest.mark.looptime
async def test_reflector_paginated_list_is_one_update() -> None:
    source = ScriptedSource(
        page(pod("a"), version="7", continues="p2"),
        page(pod("b"), version="7", continues="p3"),
        page(pod("c"), version="7"),
        FOREVER,
    )
    _, heard = await played(source)
    assert set(heard.pods) == {"default/a", "default/b", "default/c"}
    assert len(heard.updates) == 1
    assert asked(source, "continue", "limit", "resourceVersion")[:4] == [
        ("list", "-", "500", "0"),
        ("list", "p2", "500", "-"),
        ("list", "p3", "500", "-"),
        ("watch", "-", "-", "7"),
    ]


@pytest.mark.looptime
async def test_reflector_continue_token_expired_lists_without_pages() -> None:
    source = ScriptedSource(
        page(pod("a"), version="7", continues="p2"),
        Gone(410, "Expired"),
        page(pod("b"), version="9"),
        FOREVER,
    )
    _, heard = await played(source)
    assert set(heard.pods) == {"default/b"}
    assert asked(source, "continue", "limit", "resourceVersion")[2] == ("list", "-", "-", "-")


@pytest.mark.looptime
@pytest.mark.parametrize(
    "lost", [[event("ERROR", status(410, "Expired"))], Gone(410, "Expired", "too old resource version")]
)
async def test_reflector_resource_version_too_old_relists(lost: Any) -> None:
    source = ScriptedSource(
        page(pod("a", 5), pod("b", 6), version="7"),
        lost,
        page(pod("a", 5), pod("c", 20), version="30"),
        FOREVER,
    )
    _, heard = await played(source)
    assert asked(source, "resourceVersion", "limit") == [
        ("list", "0", "500"),
        ("watch", "7", "-"),
        ("list", "7", "-"),
        ("watch", "30", "-"),
    ]
    update = heard.updates[-1]
    assert update.listed
    assert [p.full_name for p in update.changed] == ["default/c"]
    assert [p.full_name for p in update.removed] == ["default/b"]


@pytest.mark.looptime
@pytest.mark.parametrize(
    "unknown",
    [
        Gone(410, "Expired"),
        ServerError(504, "Timeout", details=StatusDetails(causes=[StatusCause("ResourceVersionTooLarge")])),
    ],
)
async def test_reflector_relist_version_unknown_lists_latest(unknown: Exception) -> None:
    source = ScriptedSource(
        page(version="7"), Gone(410, "Expired"), unknown, AWAY, page(version="30"), FOREVER
    )
    await played(source)
    assert asked(source, "resourceVersion")[2:] == [
        ("list", "7"),
        ("list", "-"),
        ("list", "-"),
        ("watch", "30"),
    ]


@pytest.mark.looptime
async def test_reflector_version_expired_after_outage_relists_without_long_backoff() -> None:
    back = [Gone(410, "Expired"), page(pod("a", 90), version="90"), FOREVER]
    source = ScriptedSource(page(version="7"), [5, AWAY], *[AWAY] * 9, *back)
    away = 5 + sum([0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 30, 30])
    _, heard = await played(source, away + 1)
    # One that was away for minutes is not waited for that long once it answers.
    assert heard.versions == {"default/a": "90"}


@pytest.mark.looptime
async def test_reflector_server_away_for_hour_keeps_objects_and_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = ScriptedSource(page(pod("a", 5), version="7"), [5, AWAY])
    source.default = lambda: AWAY
    heard = Heard()
    with caplog.at_level(logging.INFO, "pykubelet"):
        async with reflecting(source, heard, rng=lambda: 0.0) as reflector:
            await asyncio.sleep(3600)
            assert reflector.objects
            assert source.pauses[:8] == [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
            assert 110 < len(source.asked) < 130
            # Nothing was forgotten: it goes on from the version that was seen.
            assert {verb for verb, _ in source.asked[1:]} == {"watch"}
            assert [r.levelname for r in caplog.records] == ["ERROR"] * 6
            source.default = lambda: [event("MODIFIED", pod("a", 90)), *FOREVER]
            await asyncio.sleep(31)
            assert heard.versions == {"default/a": "90"}
    assert [r.getMessage() for r in caplog.records[6:]] == ["Works again"]


@pytest.mark.looptime
@pytest.mark.parametrize(("wanted", "waited"), [(20, 20), (86400, 60)])
async def test_reflector_too_many_requests_waits_retry_after_and_keeps_version(
    wanted: float, waited: float
) -> None:
    source = ScriptedSource(page(version="7"), TooManyRequests(429, retry_after=wanted), FOREVER)
    await played(source)
    assert asked(source, "resourceVersion")[1:] == [("watch", "7"), ("watch", "7")]
    assert source.times[2] - source.times[1] == pytest.approx(waited, abs=0.1)


@pytest.mark.looptime
@pytest.mark.parametrize(("bookmarks", "seconds"), [(1, 60 + 10_000), (3, 180 + 180)])
async def test_reflector_bookmarks_stop_restarts_watch(bookmarks: int, seconds: float) -> None:
    """Only a server that has sent several is known to send them."""
    minutes = [step for number in range(bookmarks) for step in (60, bookmark(str(number + 8)))]
    source = ScriptedSource(page(version="7"), [*minutes, 10_000, AWAY], FOREVER)
    await played(source, 20_000)
    assert asked(source, "resourceVersion")[1:] == [("watch", "7"), ("watch", str(bookmarks + 7))]
    assert source.times[2] - source.times[1] == pytest.approx(seconds, abs=1)


@pytest.mark.looptime
async def test_reflector_unauthorized_retries_with_first_backoff_delay() -> None:
    """Not longer than until others are let in again: the certificate may have been renewed."""
    source = ScriptedSource(Unauthorized(401, "Unauthorized"), page(version="7"), FOREVER)
    await played(source)
    assert source.pauses == [0.8]


@pytest.mark.looptime
@pytest.mark.parametrize(
    "failure",
    [
        Forbidden(403, "Forbidden"),
        ServerError(500, "InternalError"),
        InvalidResponse("nonsense"),
        [b'{"type": "ADDED", "object": {"met'],
        [event("MODIFIED", pod("a", 6)), 5, b'{"type": "ADDED", "object": {"met'],
        [b"nonsense\n"],
        [b"x" * (8 * 1024 * 1024 + 1)],
        [],
        [event("ADDED", {"kind": "Pod"})],
        [event("ERROR", status(500, "InternalError"))],
        [event("BOOKMARK", 3)],
    ],
)
async def test_reflector_watch_failed_relists(failure: Any) -> None:
    source = ScriptedSource(page(pod("a", 5), version="7"), failure, page(pod("a", 9), version="11"), FOREVER)
    _, heard = await played(source)
    assert [verb for verb, _ in source.asked] == ["list", "watch", "list", "watch"]
    assert heard.versions == {"default/a": "9"}


@pytest.mark.looptime
@pytest.mark.parametrize("failure", [AWAY, [event("MODIFIED", pod("a", 9)), 3, AWAY]])
async def test_reflector_connection_broken_resumes_watch_from_last_version(failure: Any) -> None:
    source = ScriptedSource(page(pod("a", 5), version="7"), failure, FOREVER)
    await played(source)
    assert asked(source, "resourceVersion")[1:] == [
        ("watch", "7"),
        ("watch", "7" if failure is AWAY else "9"),
    ]


@pytest.mark.looptime
async def test_reflector_credentials_superseded_rewatches_immediately_without_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = ScriptedSource(page(version="7"), [5, Superseded("https://x")], FOREVER)
    with caplog.at_level(logging.INFO, "pykubelet"):
        await played(source)
    assert asked(source, "resourceVersion")[1:] == [("watch", "7")] * 2
    assert source.times[2] - source.times[1] == 5
    assert caplog.records == []


@pytest.mark.looptime
async def test_reflector_list_without_version_is_discarded() -> None:
    source = ScriptedSource(page(pod("a"), version=""), page(pod("b"), version="3"), FOREVER)
    _, heard = await played(source)
    assert set(heard.pods) == {"default/b"}
    assert len(heard.updates) == 1


@pytest.mark.looptime
async def test_reflector_unreadable_object_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bad = pod("a", 6, containers="none")
    source = ScriptedSource(
        page(pod("a", 5), version="5"),
        [event("MODIFIED", bad), event("MODIFIED", pod("b", 7)), 1, event("MODIFIED", pod("b", 8)), 300],
        [Gone(410)],
        page(bad, version="9"),
        FOREVER,
    )
    with caplog.at_level(logging.INFO, "pykubelet"):
        reflector, heard = await played(source)
    assert heard.versions == {"default/a": "5"}
    assert set(reflector.unreadable) == {("default", "a")}
    assert [r.getMessage() for r in caplog.records] == ["Failed to read object"]


@pytest.mark.looptime
async def test_reflector_events_in_one_chunk_are_one_update() -> None:
    lines = [event("ADDED", pod(str(n), n)) for n in range(40)]
    chunk = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    source = ScriptedSource(page(version="1"), [chunk, 400], FOREVER)
    _, heard = await played(source, 100)
    assert len(heard.updates) == 2
    assert len(heard.pods) == 40


@pytest.mark.looptime
async def test_reflector_handler_raises_propagates_exception() -> None:
    async def broken(_: Any) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        await Reflector(ScriptedSource(page(version="1")), PODS, broken).run()


# Against a real server.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    original = Reflector.__init__

    def init(self: Reflector[Any], *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self._backoff = Backoff(first=0.02, limit=0.05)

    monkeypatch.setattr(Reflector, "__init__", init)


@pytest.mark.usefixtures("quick")
async def test_reflector_sequence_of_server_failures_converges(server: Server, client: ApiClient) -> None:
    heard = Heard()
    hold = stream(end=False)
    server.say(
        refuse(503, "ServiceUnavailable"),
        refuse(401, "Unauthorized"),
        reset,
        reset,
        text('{"metadata": {"resourceVersion": "5"}, "items": [{'),
        text("<html>login</html>"),
        text('{"items":' + "[" * 100_000),
        cut(b'{"metadata": {"resourceVersion": "5"},', 1000),
        listing([pod("a", 4)], "5"),
        stream(event("ADDED", pod("b", 6)), b'{"type": "ADDED", "obj', end=True),
        listing([pod("a", 4), pod("b", 6)], "7"),
        stream(event("ADDED", pod("c", 8)), 0.05, event("ERROR", status(410, "Expired"))),
        listing([pod("a", 4), pod("c", 8)], "9"),
        refuse(429, "TooManyRequests", "later", {"Retry-After": "0"}),
        cut(b'{"type": "DELETED", "object": {"meta', 1000),
        stream(b'{"type": "DELETED", "object":' + b"[" * 100_000 + b"\n"),
        listing([pod("a", 4), pod("c", 8)], "9"),
        stream(event("DELETED", pod("a", 10)), 0.05, end=False),
    )
    server.default = hold
    async with reflecting(client, heard):
        await until(lambda: heard.versions == {"default/c": "8"})
        await asyncio.sleep(0.1)
        assert heard.versions == {"default/c": "8"}
        assert not server.script


@pytest.mark.usefixtures("quick")
async def test_reflector_silent_watch_is_restarted_from_last_version(
    server: Server, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykubelet.apiserver.reflector.WATCH_SECONDS", (0, 0))
    # So long the bookmark may take to arrive; on a machine that is slower the watch is only repeated.
    monkeypatch.setattr("pykubelet.apiserver.reflector.GRACE_SECONDS", 2.0)
    heard = Heard()

    async def handle(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return await listing([pod("a", 4)], "5")(request)
        told = bookmark("8") if request.query["resourceVersion"] == "5" else event("MODIFIED", pod("a", 9))
        return await stream(told, end=False)(request)

    server.default = handle
    async with reflecting(client, heard):
        await until(lambda: heard.versions == {"default/a": "9"})
    asked = [(seen.query.get("watch"), seen.query["resourceVersion"]) for seen in server.seen]
    first = next(number for number, (_, version) in enumerate(asked) if version == "8")
    assert asked[first - 1 : first + 1] == [("1", "5"), ("1", "8")]


@pytest.mark.usefixtures("quick")
async def test_reflector_server_restarted_resumes_watch_from_last_version(
    authority: Authority, server_pair: Pair, access: RestConfig, opened: Opener
) -> None:
    heard = Heard()
    context = server_context(authority, server_pair)
    with held_port() as port:
        await _dies_and_comes_back(context, port, heard, access, opened)


async def _dies_and_comes_back(
    context: ssl.SSLContext, port: int, heard: Heard, access: RestConfig, opened: Opener
) -> None:
    async with serving(context, port) as first:
        first.say(listing([pod("a", 4)], "5"))
        first.default = stream(bookmark("6"), end=False)
        client = opened(RestConfig(first.url, ca=access.ca))
        stack = reflecting(client, heard)
        await stack.__aenter__()
        await until(lambda: len(first.seen) == 2)
        await asyncio.sleep(0.5)  # for the bookmark to arrive
    try:
        await asyncio.sleep(0.2)
        assert heard.versions == {"default/a": "4"}
        async with serving(context, port) as second:
            second.default = stream(event("MODIFIED", pod("a", 9)), end=False)
            await until(lambda: heard.versions == {"default/a": "9"})
            assert second.seen[0].query["resourceVersion"] == "6"
    finally:
        await stack.__aexit__(None, None, None)


@pytest.mark.usefixtures("quick")
async def test_reflector_close_all_connections_restarts_watch(server: Server, client: ApiClient) -> None:
    heard = Heard()
    server.say(
        listing([pod("a", 4)], "5"), stream(end=False), stream(event("MODIFIED", pod("a", 9)), end=False)
    )
    async with reflecting(client, heard):
        await until(lambda: len(server.seen) == 2)
        await asyncio.sleep(0.05)
        await client.transport.close_all()
        await until(lambda: heard.versions == {"default/a": "9"})


async def test_reflector_large_object_in_many_chunks_is_read(server: Server, client: ApiClient) -> None:
    heard = Heard()
    large = pod("a", 6)
    large["metadata"]["annotations"] = {"x": "ä" * 500_000}
    server.say(listing([], "5"), stream(event("ADDED", large), end=False))
    async with reflecting(client, heard):
        await until(lambda: heard.pods)
    assert len(heard.pods["default/a"].metadata.annotations["x"]) == 500_000

"""Node log queries: what may be asked, that nothing gets through, and the answers; ranges of files."""

import asyncio
import os
import re
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from multidict import MultiDict
from prometheus_client import CollectorRegistry
from yarl import URL

from pykubelet.server.auth.identity import HttpError
from pykubelet.server.logs import node_logs
from pykubelet.server.logs.node_logs import LogQuery, check_log_query, journal_arguments, read_log_query
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.pipeline import counting_middleware
from pykubelet.server.streams.streaming import StreamLimits
from tests.support.loop_stalls import watched_loop

Client = TestClient[web.Request, web.Application]
NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)


def read(text: str) -> LogQuery | None:
    return read_log_query(URL(f"/logs/?{text}").query)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("", None),
        ("other=1", None),
        ("query=kubelet", LogQuery(services=("kubelet",))),
        ("query=a&query=b", LogQuery(services=("a", "b"))),
        ("query=/kern.log", LogQuery(files=("/kern.log",))),
        ("query=a%5Cb", LogQuery(files=("a\\b",))),
        ("query=a&query=%20", LogQuery(services=("a",))),
        ("tailLines=5", LogQuery(tail=5)),
        ("query=a&boot=-1", LogQuery(services=("a",), boot=-1)),
        ("query=a&sinceTime=2026-01-02T13:00:00%2B01:00", LogQuery(services=("a",), since=NOON)),
        ("query=a&untilTime=2026-01-02T12:00:00.5Z", LogQuery(services=("a",), until=NOON)),
        ("query=a&pattern=x", LogQuery(services=("a",), pattern="x")),
    ],
)
def test_read_log_query_parameters_parsed(text: str, query: LogQuery | None) -> None:
    assert read(text) == query


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("query=", 400, "may not be empty"),
        ("query=%20%20", 400, "may not be empty"),
        ("query=a&sinceTime=yesterday", 400, "sinceTime: Invalid value: 'yesterday': invalid time format"),
        ("query=a&untilTime=2026-99-01T00:00:00Z", 400, "untilTime"),
        ("query=a&tailLines=x&boot=y", 400, "[tailLines: "),
        ("query=a&tailLines=99999999999999999999", 400, "tailLines"),
        ("query=a&tailLines=-1", 406, "between 0 and 100000"),
        ("query=a&tailLines=100001", 406, "between 0 and 100000"),
        ("tailLines=1", 406, "cannot be empty with options"),
        ("query=a&query=/b", 406, "cannot specify a file and service"),
        ("query=/a&query=/b", 406, "more than one file"),
        ("query=/a&tailLines=1", 406, "cannot specify file with options"),
        ("query=a&boot=1", 406, "must be less than 1"),
        ("query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z", 406, "must be after"),
        ("query=a&pattern=%28", 406, "pattern"),
        ("query=a&pattern=" + "x" * 5000, 406, "at most 4096"),
        ("query=a&pattern=a%00", 406, "NUL"),
        ("query=a&query=b&query=c&query=d&query=e", 406, "at most 4 items"),
        ("query=" + "a" * 257, 406, "length must be less than 256"),
        ("query=a;reboot", 406, "unsupported characters"),
        ("query=$(reboot)", 406, "unsupported characters"),
        ("query=a%60b%60", 406, "unsupported characters"),
        ("query=a%20--help", 406, "unsupported characters"),
        ("query=a%0Ab", 406, "unsupported characters"),
        ("query=a%00", 406, "unsupported characters"),
        ("query=%C3%A9", 406, "unsupported characters"),
    ],
)
def test_check_log_query_invalid_query_raises(text: str, status: int, says: str) -> None:
    with pytest.raises(HttpError) as refused:
        query = read(text)
        assert query is not None
        check_log_query(query)
    assert refused.value.status == status
    assert says in refused.value.text


@given(st.lists(st.text(), max_size=5), st.text(), st.integers(-2, 100_002), st.integers(-3, 2))
def test_journal_arguments_any_query_only_known_options(
    services: list[str], pattern: str, tail: int, boot: int
) -> None:
    asked = MultiDict([("query", name) for name in services])
    asked.extend({"pattern": pattern, "tailLines": str(tail), "boot": str(boot)})
    try:
        query = read_log_query(asked)
        assert query is not None
        check_log_query(query)
    except HttpError:
        return
    for argument in journal_arguments(query):
        assert re.fullmatch(
            r"--(utc|no-pager|output=short-precise|pager-end|lines=\d+|unit=[\w.:@-]+|boot=-?\d+|grep=.*)",
            argument,
            re.DOTALL,
        )
        assert "\0" not in argument


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("not for everybody")
    folder = tmp_path / "log"
    (folder / "app").mkdir(parents=True)
    (folder / "app" / "app.log").write_text("from app\n")
    (folder / "kern.log").write_text("0123456789")
    (folder / "plain").write_text("plain\n")
    (folder / "escape").symlink_to(tmp_path / "secret")
    (folder / "escape2.log").symlink_to("../secret")
    os.mkfifo(folder / "pipe")
    os.utime(folder / "kern.log", (NOON.timestamp(), NOON.timestamp()))
    return folder


@pytest.fixture
async def client(logs: Path) -> AsyncIterator[Client]:
    app = web.Application(middlewares=[counting_middleware(ServerMetrics(CollectorRegistry()), "readwrite")])
    app.add_routes(node_logs.node_log_routes(logs, StreamLimits(max_streams=1)))
    async with TestClient(TestServer(app)) as made:
        yield made


async def ask(client: Client, path: str, **headers: str) -> tuple[int, str]:
    async with client.get(URL(path, encoded=True), headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal that knows two units and tells what it is asked."""
    program = tmp_path / "journalctl"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --field ]; then echo kubelet.service; echo slow.service; exit; fi\n'
        'for word in "$@"; do echo "[$word]"; case "$word" in --unit=slow) exec sleep 1000;; esac; done\n'
    )
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(node_logs, "find_journalctl", lambda: str(program))
    return program


@pytest.fixture
def no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_logs, "find_journalctl", lambda: None)


@pytest.mark.usefixtures("no_journal")
@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/logs/?query=plain", 200, "plain\n"),
        ("/logs/?query=kern", 200, "0123456789"),
        ("/logs/?query=kern.log", 200, "0123456789"),
        ("/logs/?query=app", 200, "from app\n"),
        ("/logs/?query=plain&query=app", 200, "plain\nfrom app\n"),
        ("/logs/?query=none", 200, "\nlog not found for none\n"),
        ("/logs/?query=..", 200, "\nerror getting log for ..: not allowed\n"),
        ("/logs/?query=escape", 200, "\nerror getting log for escape: not allowed\n"),
        ("/logs/?query=escape2", 200, "\nerror getting log for escape2: not allowed\n"),
        ("/logs/?query=pipe", 200, "\nerror getting log for pipe: not a regular file\n"),
        ("/logs/?query=/kern.log", 200, "0123456789"),
        ("/logs/?query=app%5Capp.log", 200, "from app\n"),
        ("/logs/?query=/none", 406, "query: Invalid value: No such file or directory\n"),
        ("/logs/?query=/app", 406, "query: Invalid value: is a folder\n"),
        ("/logs/?query=/..", 406, "query: Invalid value: leads elsewhere\n"),
        ("/logs/?query=../secret", 406, "query: Invalid value: leads elsewhere\n"),
        ("/logs/?query=/escape", 406, "query: Invalid value: leads elsewhere\n"),
        ("/logs/?query=/a%00b", 406, "query: Invalid value: No such file or directory\n"),
        ("/logs/kern.log?query=plain", 406, "path not allowed in query mode\n"),
        ("/logs/kern.log", 200, "0123456789"),
    ],
)
async def test_node_log_query_files_return_content_or_error(
    client: Client, path: str, status: int, text: str
) -> None:
    assert await ask(client, path) == (status, text)


@pytest.mark.usefixtures("no_journal")
async def test_node_log_query_options_with_files_rejected(client: Client) -> None:
    status, text = await ask(client, "/logs/?query=plain&tailLines=1")
    assert status == 200
    assert text == (
        "\noptions present and query resolved to log files for [plain]\ntry without specifying options\n"
    )


@pytest.mark.usefixtures("journalctl")
async def test_node_log_query_services_read_from_journal(client: Client) -> None:
    status, text = await ask(client, "/logs/?query=kubelet&query=plain")
    assert status == 200
    assert text.splitlines() == [
        "[--utc]",
        "[--no-pager]",
        "[--output=short-precise]",
        "[--unit=kubelet]",
        "plain",
    ]
    _, text = await ask(client, "/logs/?query=kubelet&tailLines=3&pattern=--help&boot=-1")
    assert text.splitlines()[3:] == [
        "[--pager-end]",
        "[--lines=3]",
        "[--unit=kubelet]",
        "[--grep=--help]",
        "[--boot=-1]",
    ]
    async with client.get(
        "/logs/?query=plain", headers={"Accept-Encoding": "gzip"}, skip_auto_headers=["Accept-Encoding"]
    ) as answer:
        assert (answer.headers["Content-Encoding"], await answer.text()) == ("gzip", "plain\n")


@pytest.mark.usefixtures("journalctl")
async def test_node_log_query_client_disconnects_journalctl_stopped(client: Client) -> None:
    async with client.get("/logs/?query=slow") as answer:
        assert b"[--unit=slow]" in await answer.content.readuntil(b"slow]\n")
        # There is one place, and it is taken.
        assert (await ask(client, "/logs/?query=plain"))[0] == 429
        answer.close()
    async with asyncio.timeout(30):
        # The place is given back when the program is gone.
        while (await ask(client, "/logs/?query=plain"))[0] != 200:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("asked", "status", "text", "said"),
    [
        ("bytes=0-3", 206, "0123", "bytes 0-3/10"),
        ("bytes=4-", 206, "456789", "bytes 4-9/10"),
        ("bytes=-3", 206, "789", "bytes 7-9/10"),
        ("bytes=-30", 200, "0123456789", None),
        ("bytes=8-30", 206, "89", "bytes 8-9/10"),
        ("bytes=0-", 200, "0123456789", None),
        ("bytes=10-", 416, "invalid range\n", "bytes */10"),
        ("bytes=3-1", 416, "invalid range\n", "bytes */10"),
        ("bytes=x", 416, "invalid range\n", "bytes */10"),
        ("bytes=0-1,4-5", 200, "0123456789", None),
    ],
)
async def test_node_logs_range_header_returns_partial_content(
    client: Client, asked: str, status: int, text: str, said: str | None
) -> None:
    async with client.get("/logs/kern.log", headers={"Range": asked}) as answer:
        assert (answer.status, await answer.text()) == (status, text)
        assert answer.headers.get("Content-Range") == said


async def test_node_logs_unmodified_file_returns_304(client: Client) -> None:
    noon, later = "Fri, 02 Jan 2026 12:00:00 GMT", "Fri, 02 Jan 2026 11:59:59 GMT"
    assert await ask(client, "/logs/kern.log", **{"If-Modified-Since": noon}) == (304, "")
    assert (await ask(client, "/logs/kern.log", **{"If-Modified-Since": later}))[0] == 200
    part = {"Range": "bytes=1-2"}
    assert (await ask(client, "/logs/kern.log", **part, **{"If-Range": noon}))[0] == 206
    assert (await ask(client, "/logs/kern.log", **part, **{"If-Range": later}))[0] == 200
    async with client.head("/logs/kern.log") as answer:
        assert (answer.status, answer.headers["Content-Length"]) == (200, "10")


async def test_node_logs_large_directory_and_file_leave_loop_free(client: Client, logs: Path) -> None:
    for number in range(10_000):
        (logs / "app" / f"{number}.log").touch()
    (logs / "large").write_bytes(bytes(32 << 20))
    async with watched_loop() as stalls:
        status, listing = await ask(client, "/logs/app/")
    assert (status, listing.count("<a ")) == (200, 10_001)
    # 10,000 entries take about 50 ms to list and to sort.
    assert stalls.longest_cpu < 0.02
    async with client.get("/logs/large") as response:
        assert len(await response.read()) == 32 << 20

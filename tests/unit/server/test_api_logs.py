"""Logs over the API: those of containers with all that can be asked of them, and the machine's files."""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pykubelet.server.logs.node_logs import open_below
from tests.support import api_node
from tests.support.api_node import STAMP, Start, running, set_status, write_log
from tests.support.server_clients import client_context

authority, pairs, start = api_node.authority, api_node.pairs, api_node.start


# Containers' logs.


async def test_container_logs_query_options_applied(start: Start) -> None:
    node = await start()
    lines = [f"{STAMP.format(n)} {'stderr' if n % 2 else 'stdout'} F line {n}" for n in range(6)]
    write_log(node, *lines)
    stamped = [f"{STAMP.format(n)} line {n}\n" for n in range(6)]
    plain = [f"line {n}\n" for n in range(6)]
    url = "/containerLogs/default/web/main"
    for query, expected in [
        ("", plain),
        ("?timestamps=true", stamped),
        ("?timestamps=false", plain),
        ("?tailLines=2", plain[4:]),
        ("?tail=1", plain[5:]),
        ("?tail=all", plain),
        ("?tailLines=0", []),
        ("?tailLines=100", plain),
        ("?limitBytes=9", ["line 0\nli"]),
        ("?limitBytes=14", plain[:2]),
        ("?sinceTime=2026-01-02T03:04:04Z", plain[4:]),
        ("?sinceTime=2026-01-02T05:04:03.2%2B02:00", plain[4:]),
        ("?sinceSeconds=5", []),
        ("?sinceSeconds=999999999", plain),
        ("?tailLines=3&timestamps=1", stamped[3:]),
        ("?stream=All", plain),
    ]:
        assert await node.get(url + query) == (200, "".join(expected)), query
    decode, invalid = '{"message": "Unable to decode query."}', '{"message": "Invalid request."}'
    for query, refusal in [
        ("?tailLines=x", (400, decode)),
        ("?limitBytes=", (400, decode)),
        ("?sinceTime=yesterday", (400, decode)),
        ("?sinceTime=2026-99-02T03:04:04Z", (400, decode)),
        ("?tailLines=99999999999999999999", (400, decode)),
        ("?tailLines=-1", (422, invalid)),
        ("?limitBytes=0", (422, invalid)),
        ("?sinceSeconds=0", (422, invalid)),
        ("?sinceSeconds=1&sinceTime=2026-01-02T03:04:04Z", (422, invalid)),
        ("?stream=Both", (422, invalid)),
        ("?stream=Stdout&tailLines=1", (422, invalid)),
        (
            "?stream=Stdout",
            (
                400,
                'unable to return the given log stream: "Stdout". '
                "Please enable PodLogsQuerySplitStreams feature gate in kubelet",
            ),
        ),
    ]:
        assert await node.get(url + query) == refusal, query
    assert await node.get("/containerLogs/default/web/nope") == (
        404,
        'container "nope" not found in pod "web"',
    )


async def test_container_logs_split_streams_returns_selected_stream(start: Start) -> None:
    node = await start(gates={"PodLogsQuerySplitStreams": True})
    write_log(
        node,
        f"{STAMP.format(1)} stdout P be",
        f"{STAMP.format(1)} stderr F bad",
        f"{STAMP.format(2)} stdout F gin",
        "damaged",
        f"{STAMP.format(3)} stdout F end",
    )
    url = "/containerLogs/default/web/main"
    assert await node.get(f"{url}?stream=Stdout") == (200, "begin\nend\n")
    assert await node.get(f"{url}?stream=Stderr") == (200, "bad\n")
    assert await node.get(url) == (200, "bebad\ngin\nend\n")


@pytest.mark.parametrize(
    ("status", "query", "expected"),
    [
        (running(), "", (200, "now\n")),
        (
            {"name": "main", "state": {"terminated": {"exitCode": 0, "containerID": "containerd://c1"}}},
            "",
            (200, "now\n"),
        ),
        (
            running(lastState={"terminated": {"exitCode": 1, "containerID": "containerd://c0"}}),
            "?previous=1",
            (200, "before\n"),
        ),
        (
            {
                "name": "main",
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 1, "containerID": "containerd://c0"}},
            },
            "",
            (200, "before\n"),
        ),
        (running(), "?previous=1", (400, 'previous terminated container "main" in pod "web" not found')),
        ({"name": "other"}, "", (400, 'container "main" in pod "web" is not available')),
        (
            {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}},
            "",
            (400, 'container "main" in pod "web" is waiting to start: trying and failing to pull image'),
        ),
        (
            {"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}},
            "",
            (400, 'container "main" in pod "web" is waiting to start: ContainerCreating'),
        ),
        (
            {"name": "main", "state": {"terminated": {"exitCode": 0}}},
            "",
            (400, 'container "main" in pod "web" is terminated'),
        ),
        ({"name": "main"}, "", (400, 'container "main" in pod "web" is waiting to start - no logs yet')),
        (running("containerd://lost"), "", (400, "unable to retrieve container logs for containerd://lost")),
    ],
)
async def test_container_logs_container_state_selects_run(
    start: Start, status: dict[str, Any], query: str, expected: tuple[int, str]
) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(1)} stdout F now")
    node.runtime.log.with_name("0.log").write_text(f"{STAMP.format(1)} stdout F before\n")
    set_status(node, status)
    assert await node.get(f"/containerLogs/default/web/main{query}") == expected


async def test_container_logs_missing_file_returns_400(start: Start) -> None:
    node = await start()
    status, text = await node.get("/containerLogs/default/web/main")
    assert status == 400
    assert text.endswith("No such file or directory")


async def test_container_logs_follow_continues_over_rotation_until_exit(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(1)} stdout F one", f"{STAMP.format(1)} stdout F two")
    connector = aiohttp.TCPConnector(ssl=client_context(node.authority, node.clients["admin"]["pair"]))
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(60):
        url = f"https://localhost:{node.port}/containerLogs/default/web/main?follow=true&tailLines=1"
        async with session.get(url) as answer:
            assert await answer.content.readline() == b"two\n"
            with node.runtime.log.open("a") as log:
                log.write(f"{STAMP.format(2)} stdout P thr")
                log.flush()
                log.write(f"\n{STAMP.format(2)} stdout F ee\n")
            assert await answer.content.readline() == b"three\n"
            # Rotated: the old file gets its last line, then there is a new one.
            with node.runtime.log.open("a") as log:
                log.write(f"{STAMP.format(3)} stdout F four\n")
            node.runtime.log.rename(node.runtime.log.with_name("1.log.old"))
            write_log(node, f"{STAMP.format(4)} stdout F five")
            assert await answer.content.readline() == b"four\n"
            assert await answer.content.readline() == b"five\n"
            set_status(node, {"name": "main", "state": {"terminated": {"exitCode": 0}}})
            with node.runtime.log.open("a") as log:
                log.write(f"{STAMP.format(5)} stdout F unfinished")
            assert await answer.content.read() == b"unfinished\n"


async def test_container_logs_client_not_reading_bounded_memory(start: Start) -> None:
    node = await start()
    line = f"{STAMP.format(1)} stdout F {'x' * 200}\n".encode()
    with node.runtime.log.open("wb") as log:
        for _ in range(100):
            log.write(line * 3000)
    size = node.runtime.log.stat().st_size
    before = _resident()
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=client_context(node.authority, node.clients["admin"]["pair"]), limit=2**16
    )
    try:
        writer.write(b"GET /containerLogs/default/web/main?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert b" 200 OK" in head
        await asyncio.sleep(1)
        assert _resident() - before < size / 3
    finally:
        writer.transport.abort()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_container_logs_client_disconnects_follow_stops(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(1)} stdout F one")

    def watches() -> int:
        found = 0
        for path in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                found += str(path.readlink()) == "anon_inode:inotify"
        return found

    before = watches()
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=client_context(node.authority, node.clients["admin"]["pair"])
    )
    writer.write(b"GET /containerLogs/default/web/main?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"one\n"), 30)
    writer.transport.abort()
    deadline = time.monotonic() + 30
    while watches() > before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert watches() <= before, "of earlier tests some may have ended"


# The machine's logs.


async def test_node_logs_files_and_listing_stay_below_root(start: Start) -> None:
    node = await start()
    logs = node.deps.debug.node_logs
    (logs / "pods").mkdir()
    (logs / "pods" / "a b.log").write_text("inside")
    (logs / "link.log").symlink_to("pods/a b.log")
    (logs / "absolute.log").symlink_to(logs / "pods" / "a b.log")
    (logs / "<odd>.log").write_text("")
    secret = node.folder / "secret"
    secret.write_text("secret")
    (logs / "escape.log").symlink_to(secret)
    (logs / "up").symlink_to("..")
    (logs / "pods" / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(logs / "pipe")
    for path, expected in [
        ("/logs/pods/a%20b.log", (200, "inside")),
        ("/logs/link.log", (200, "inside")),
        ("/logs/absolute.log", (200, "inside")),
        ("/logs/escape.log", (403, "403 Forbidden\n")),
        ("/logs/up/secret", (403, "403 Forbidden\n")),
        ("/logs/pods/passwd", (403, "403 Forbidden\n")),
        ("/logs/pipe", (403, "403 Forbidden\n")),
        ("/logs/nope", (404, "404 page not found\n")),
        ("/logs/link.log/x", (404, "404 page not found\n")),
    ]:
        assert await node.get(path) == expected, path
    _, listing, headers = await node.ask("/logs/")
    assert '<a href="pods/">pods/</a>\n' in listing
    assert "&lt;odd&gt;.log" in listing
    assert headers["Content-Type"].startswith("text/html")
    status, _, headers = await node.ask("/logs/pods")
    assert (status, headers["Location"]) == (301, "pods/")


def test_open_below_symlink_swapped_during_open_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "logs", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    for folder in (root / "sub", outside):
        (folder / "file").write_text(str(folder))
    real = os.path.realpath

    def swap(path: Any, *, strict: bool = False) -> str:
        found = str(real(path, strict=strict))
        if found.endswith("sub/file"):
            (root / "sub").rename(root / "old")
            (root / "sub").symlink_to(outside)
        return found

    monkeypatch.setattr("pykubelet.server.logs.node_logs.os.path.realpath", swap)
    with pytest.raises(OSError):
        open_below(root, "sub/file")

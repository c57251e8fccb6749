"""One stream over all files of a container's log: since, tail, follow over many rotations, hostile files."""

import asyncio
import gzip
import os
import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest

from pykubelet.kuberuntime.log_rotation.readers import STALL_SECONDS, LogReaders
from pykubelet.server.logs import log_chain
from pykubelet.server.logs.container_logs import ContainerLogs, PodLogOptions
from pykubelet.server.logs.log_chain import GzipLog, open_newest_rotated
from pykubelet.server.logs.log_files import (
    LogFile,
    follow_blocks,
    parse_entries,
    present_blocks,
    seek_last_of,
)
from tests.support import api_node
from tests.support.api_node import Start

authority, pairs, start = api_node.authority, api_node.pairs, api_node.start
STEMS = [f"20260102-03040{number}" for number in range(1, 5)]


def line(number: int) -> str:
    return f"2026-01-02T03:{number // 60:02}:{number % 60:02}.5Z stdout F {number}\n"


def write_chain(path: Path, lines: int = 10) -> int:
    """Write a log of five files of so many lines, the older two compressed; return the number of lines."""
    for index, stem in enumerate(STEMS):
        text = "".join(line(index * lines + number) for number in range(lines)).encode()
        if index < 2:
            path.with_name(f"{path.name}.{stem}.gz").write_bytes(gzip.compress(text))
        else:
            path.with_name(f"{path.name}.{stem}").write_bytes(text)
    path.write_text("".join(line(4 * lines + number) for number in range(lines)))
    return 5 * lines


async def texts(logs: list[LogFile]) -> list[int]:
    found = []
    for log in logs:
        async for block in present_blocks(log):
            found += [int(entry.text) for entry in parse_entries(block)]
    return found


@pytest.mark.parametrize("count", [0, 1, 10, 11, 20, 21, 35, 40, 41, 49, 50, 51, 1000])
async def test_seek_last_of_any_count_returns_last_lines_of_all_files(tmp_path: Path, count: int) -> None:
    path = tmp_path / "0.log"
    total = write_chain(path)
    with closing(LogFile(path)) as log:
        files = [*log.older(), log]
        first = await seek_last_of(files, count)
        assert await texts(files[first:]) == list(range(max(total - count, 0), total))
        for file in files:
            file.close()


@pytest.mark.parametrize("count", [5, 15, 45, 100])
def test_skip_to_last_older_files_return_last_lines(tmp_path: Path, count: int) -> None:
    path = tmp_path / "0.log"
    total = write_chain(path)
    with closing(LogFile(path)) as log:
        older = log.older()
        found = [int(entry.text) for entry in log.skip_to_last(count, older)]
        for file in older:
            file.close()
    assert found == list(range(max(total - count, 0), total))


def test_older_since_skips_files_last_written_before(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    write_chain(path)
    for stem in STEMS[:2]:
        os.utime(tmp_path / f"0.log.{stem}.gz", (1000, 1000))
    with closing(LogFile(path)) as log:
        older = log.older(since=5000 * 10**9)
        assert [file.stem for file in older] == STEMS[2:]
        for file in older:
            file.close()


async def test_older_log_rotated_after_open_excludes_itself(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    total = write_chain(path)
    with closing(LogFile(path)) as log:
        path.rename(tmp_path / "0.log.20260102-030409")
        path.write_text(line(999))
        files = [*log.older(), log]
        assert await texts(files) == list(range(total))
        for file in files:
            file.close()


async def test_container_logs_since_and_tail_reach_back_others_do_not(start: Start) -> None:
    node = await start()
    path = node.runtime.log
    write_chain(path)
    url = "/containerLogs/default/web/main"

    def expected(first: int) -> tuple[int, str]:
        return 200, "".join(f"{number}\n" for number in range(first, 50))

    assert await node.get(url) == expected(40)
    assert await node.get(f"{url}?tailLines=5") == expected(45)
    assert await node.get(f"{url}?tailLines=33") == expected(17)
    assert await node.get(f"{url}?tailLines=500") == expected(0)
    assert await node.get(f"{url}?sinceTime=2026-01-02T03:00:12Z") == expected(12)
    assert await node.get(f"{url}?sinceTime=2026-01-02T03:00:45Z") == expected(45)
    assert await node.get(f"{url}?tailLines=20&sinceTime=2026-01-02T03:00:12Z") == expected(30)
    assert await node.get(f"{url}?sinceTime=2026-01-02T03:00:00Z&limitBytes=4") == (200, "0\n1\n")
    path.unlink()
    # A rotation whose log was never reopened: the newest rotated file.
    assert await node.get(url) == (200, "".join(f"{number}\n" for number in range(30, 40)))


async def _follow(path: Path, total: int, *, pause: float = 0.0) -> list[int]:
    """Follow a log until line `total - 1` was read; returns the numbers of all lines."""
    found: list[int] = []

    async def may_grow() -> bool:
        return not found or found[-1] < total - 1

    with closing(LogFile(path)) as log:
        async with aclosing(follow_blocks(log, may_grow)) as blocks:
            async for block in blocks:
                found += [int(entry.text) for entry in parse_entries(block)]
                await asyncio.sleep(pause)
    return found


@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_follow_many_rotations_each_line_once(tmp_path: Path, pause: float) -> None:
    """Verify that a follower, also one that misses several rotations, reads all files in order."""
    path, total, number = tmp_path / "0.log", 4000, 0
    file = path.open("ab", buffering=0)
    following = asyncio.create_task(_follow(path, total, pause=pause))
    await asyncio.sleep(0)  # it opens the log
    try:
        for rotation in range(40):
            for _ in range(50):
                file.write(line(number).encode())
                number += 1
            rotated = tmp_path / f"0.log.20260102-0304{rotation:02}"
            path.rename(rotated)
            # The runtime writes to the renamed file until it is told, and shortly after that.
            file.write(line(number).encode())
            number += 1
            successor = path.open("ab", buffering=0)
            for _ in range(49):
                file.write(line(number).encode())
                number += 1
            file.close()
            file = successor
            if rotation % 3 == 0:
                (tmp_path / f"{rotated.name}.gz").write_bytes(gzip.compress(rotated.read_bytes()))
                rotated.unlink()
            await asyncio.sleep(0.01)
        assert number == total
        async with asyncio.timeout(60):
            assert await following == list(range(total))
    finally:
        following.cancel()
        file.close()


async def test_follow_rotated_file_removed_while_read_continues_with_next(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    path.write_text(line(0))
    with closing(LogFile(path)) as log:
        path.rename(tmp_path / "0.log.20260102-030401")
        (tmp_path / "0.log.20260102-030401").unlink()
        (tmp_path / "0.log.20260102-030402").write_text(line(1))
        path.write_text(line(2))
        found = []
        for _ in range(3):
            found += [int(entry.text) for entry in log.entries()]
            log.advance()
    assert found == [0, 1, 2]


def test_gzip_log_bomb_read_up_to_limit_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(50_000_000)))
    with closing(GzipLog(os.open(path, os.O_RDONLY), limit=1_000_000)) as log:
        sizes = []
        while block := log.read(65536):
            sizes.append(len(block))
    assert sum(sizes) == 1_000_000
    assert max(sizes) <= 65536


@pytest.mark.parametrize(
    "damage", [b"", b"not compressed\n" * 10, gzip.compress(line(1).encode() * 999)[:-20]]
)
async def test_older_damaged_compressed_file_read_as_far_as_possible(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "0.log"
    (tmp_path / "0.log.20260102-030401.gz").write_bytes(damage)
    path.write_text(line(7))
    with closing(LogFile(path)) as log:
        files = [*log.older(), log]
        first = await seek_last_of(files, 5000)
        found = await texts(files[first:])
        for file in files:
            file.close()
    assert found[-1] == 7
    assert set(found[:-1]) <= {1}


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
async def test_older_hostile_rotated_file_skipped_without_blocking(tmp_path: Path, kind: str) -> None:
    path, hostile = tmp_path / "0.log", tmp_path / "0.log.20260102-030401"
    (tmp_path / "secret").write_text(line(99))
    path.write_text(line(7))
    if kind == "symlink":
        hostile.symlink_to(tmp_path / "secret")
    elif kind == "fifo":
        os.mkfifo(hostile)
    else:
        hostile.mkdir()
    with closing(LogFile(path)) as log:
        assert log.older() == []
    path.unlink()
    assert open_newest_rotated(path) is None


def test_older_many_files_newest_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_chain, "MAX_OLDER_FILES", 3)
    path = tmp_path / "0.log"
    write_chain(path)
    with closing(LogFile(path)) as log:
        older = log.older()
        assert [file.stem for file in older] == STEMS[1:]
        for file in older:
            file.close()


async def test_container_logs_since_large_compressed_files_keep_loop_running(start: Start) -> None:
    """Verify that decompression does not stop the event loop."""
    node = await start()
    path = node.runtime.log
    (path.with_name(f"{path.name}.20260102-030401.gz")).write_bytes(gzip.compress(bytes(200_000_000), 1))
    path.write_text(line(1))
    longest, is_over = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not is_over:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - before)

    watching = asyncio.create_task(watch())
    status, text = await node.get("/containerLogs/default/web/main?tailLines=100")
    is_over = True
    await watching
    assert (status, text[-2:]) == (200, "1\n")
    assert longest < 0.5


async def test_blocks_client_that_reads_older_files_has_not_stalled(tmp_path: Path) -> None:
    """Verify that a client has its time for each file, also for those before the one that it follows."""
    path, now = tmp_path / "0.log", 0.0
    write_chain(path)
    readers = LogReaders(clock=lambda: now)
    nothing: Any = None
    logs = ContainerLogs(nothing, nothing, readers, split_streams=False, idle_seconds=60)

    async def may_grow() -> bool:
        return False

    with closing(LogFile(path)) as log:
        blocks = logs._blocks(log, PodLogOptions(follow=True, since=0), may_grow)
        async with aclosing(blocks):
            await anext(blocks)
            readers.on_rotated(str(path), "20260102-030500")
            for _ in STEMS[1:]:
                now += STALL_SECONDS * 0.8
                while not await anext(blocks):
                    pass
                assert readers.unread_after(str(path)) == "20260102-030500"
            now += STALL_SECONDS
            assert readers.unread_after(str(path)) is None

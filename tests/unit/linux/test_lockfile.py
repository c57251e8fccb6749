import asyncio
import fcntl
import gc
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.linux.lock_file import LockFile, LockFileError

HOLDER = """
import asyncio, sys
from pykubelet.linux.lock_file import LockFile

async def main():
    async with LockFile(sys.argv[1], watched=len(sys.argv) > 2) as lock:
        print("held", flush=True)
        if len(sys.argv) > 2:
            print(await lock.wait_for_contention(), flush=True)
        else:
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@asynccontextmanager
async def another_process(path: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(path), *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            assert process.stdout is not None
            assert await process.stdout.readline() == b"held\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


async def test_lock_file_acquired_and_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with LockFile(path) as lock:
        assert lock.held
        assert is_locked(path)
        await lock.acquire()  # again is fine
    assert not lock.held
    assert not is_locked(path)
    assert path.stat().st_mode & 0o777 == 0o600
    lock.release()  # again is fine


async def test_lock_file_held_by_other_process_waits(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = LockFile(path)
    async with another_process(path) as other:
        waiting = asyncio.ensure_future(lock.acquire())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert other.stdin is not None
        other.stdin.write(b"enough\n")
        async with asyncio.timeout(45):
            await waiting
    assert is_locked(path)
    lock.release()


async def test_lock_file_holder_killed_is_acquired(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with another_process(path) as other:
        other.kill()
        async with asyncio.timeout(45), LockFile(path) as lock:
            assert lock.held


async def test_lock_file_watched_holder_exits_on_contention(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with another_process(path, "watched") as other, asyncio.timeout(45), LockFile(path):
        assert other.stdout is not None
        assert await other.stdout.readline() == b"opened\n"
        assert await other.wait() == 0


async def test_lock_file_opened_before_wait_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with LockFile(path, watched=True) as lock:
        path.open().close()
        async with asyncio.timeout(45):
            assert await lock.wait_for_contention() == "opened"


async def test_lock_file_deletion_is_reported_and_chmod_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with LockFile(path, watched=True) as lock:
        waiting = asyncio.ensure_future(lock.wait_for_contention())
        path.chmod(0o640)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        path.unlink()
        async with asyncio.timeout(45):
            assert await waiting == "deleted"


async def test_lock_file_release_ends_wait_for_contention(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "lock", watched=True)
    await lock.acquire()
    waiting = asyncio.ensure_future(lock.wait_for_contention())
    await asyncio.sleep(0.01)
    lock.release()
    async with asyncio.timeout(45):
        assert await waiting == "released"


async def test_lock_file_acquire_cancelled_leaks_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with LockFile(path):
        gc.collect()  # what earlier tests left open is closed now and not meanwhile
        before = len(list(Path("/proc/self/fd").iterdir()))
        second = LockFile(path)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await second.acquire()
        assert not second.held
        assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_lock_file_wait_for_contention_unwatched_raises(tmp_path: Path) -> None:
    async with LockFile(tmp_path / "lock") as lock:
        with pytest.raises(RuntimeError, match="watched=True"):
            await lock.wait_for_contention()


async def test_lock_file_unusable_path_raises_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, words in [
        (tmp_path / "none/lock", "does not exist: create it"),
        (tmp_path, "it is a folder"),
        (tmp_path / "file/lock", "is not a folder"),
        (Path("/sys/kernel/uevent_seqnum"), "no permission"),  # read-only even for root
    ]:
        with pytest.raises(LockFileError, match=words) as caught:
            await LockFile(path).acquire()
        assert str(caught.value).startswith(f"unable to acquire file lock on '{path}': ")
        assert "\n" not in str(caught.value)

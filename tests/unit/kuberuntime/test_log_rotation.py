"""Rotation of logs in real directories: limits, runtime failures, kills at each step, hostile files."""

import asyncio
import gzip
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from pykubelet.kuberuntime.log_rotation import directory as directory_module
from pykubelet.kuberuntime.log_rotation import manager as manager_module
from pykubelet.kuberuntime.log_rotation.directory import (
    FileChangedError,
    LogDirectory,
    is_written,
)
from pykubelet.kuberuntime.log_rotation.manager import ContainerLogManager, _Log
from pykubelet.kuberuntime.log_rotation.plan import RotationPolicy
from pykubelet.kuberuntime.log_rotation.readers import STALL_SECONDS, LogReaders
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod
from pykubelet.server.logs.log_files import LogFile
from pykubelet.transport.errors import from_status
from pykubelet.util.tasks import TaskScope

INTERVAL = 0.05
STAMP = "2026-01-02T03:04:05.123456789Z"


@pytest.fixture(autouse=True)
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "TICK_SECONDS", 0.02)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """The directory of a container below the pod log directory."""
    path = tmp_path / "pods" / "default_web_u1" / "main"
    path.mkdir(parents=True)
    return path


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


class Runtime:
    """Writes a container's log as a runtime does: to the file that it has opened last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.written = 0
        self.reopened = 0
        self.error: str = ""
        self.creates_before_error = False

    def write(self, lines: int = 1, width: int = 20) -> None:
        for _ in range(lines):
            self.file.write(f"{STAMP} stdout F {self.written} {'x' * width}\n".encode())
            self.written += 1

    async def reopen(self, container_id: str) -> None:
        assert container_id == "c1"
        if self.error and not self.creates_before_error:
            raise from_status("ReopenContainerLog", "UNKNOWN", self.error)
        file = self.path.open("ab", buffering=0)
        self.file.close()
        self.file = file
        self.reopened += 1
        if self.error:
            raise from_status("ReopenContainerLog", "DEADLINE_EXCEEDED", self.error)


class Host:
    """A manager with one container."""

    def __init__(self, logs: Path, policy: RotationPolicy, readers: LogReaders | None = None) -> None:
        self.logs = logs
        self.runtime = Runtime(logs / "0.log")
        self.readers = readers or LogReaders()
        self._pods: list[ObservedPod] = []
        self.set_phase("running")
        self.manager = ContainerLogManager(
            self.runtime.reopen,
            lambda: self._pods,
            logs.parents[1],
            policy,
            self.readers,
            workers=1,
            interval=INTERVAL,
        )

    def set_phase(self, phase: ContainerPhase) -> None:
        container = ObservedContainer(
            id="c1", name="main", phase=phase, log_path=str(self.logs / "0.log"), attempt=0
        )
        self._pods = [ObservedPod(uid="u1", containers=(container,))]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with TaskScope() as scope:
            scope.start(self.manager.run(), name="manager")
            yield

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    def names(self) -> list[str]:
        return names_in(self.logs)

    def rotated(self) -> list[str]:
        return [name for name in self.names() if name.startswith("0.log.")]


def numbers(path: Path) -> list[int]:
    """Return the numbers of all lines in all files of a log, in order."""
    with closing(LogFile(path)) as log:
        files = [*log.older(), log]
        found = [int(entry.text.split()[0]) for file in files for entry in (*file.entries(), *file.rest())]
        for file in files:
            file.close()
    return found


SMALL = RotationPolicy(max_size=1000, max_files=4)


async def test_manager_growing_log_rotated_compressed_and_bounded(logs: Path) -> None:
    host = Host(logs, SMALL)
    async with host.running():
        for _ in range(6):
            count = host.runtime.reopened
            host.runtime.write(30)
            await host.until(lambda count=count: host.runtime.reopened > count)  # type: ignore[misc]
        await host.until(lambda: sum(name.endswith(".gz") for name in host.rotated()) == 2)
    assert len(host.rotated()) == 3
    assert not host.rotated()[-1].endswith(".gz")
    found = numbers(logs / "0.log")
    assert found == list(range(found[0], 180))
    assert len(found) >= 90


async def test_manager_small_log_left_alone(logs: Path) -> None:
    host = Host(logs, SMALL)
    host.runtime.write(3)
    async with host.running():
        await asyncio.sleep(5 * INTERVAL)
    assert host.names() == ["0.log"]


@pytest.mark.parametrize("change", ["grow", "delete", "rename", "replace"])
async def test_manager_idle_log_watched_until_it_changes(
    logs: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Verify that a log is not checked while nothing is written, and soon after it has changed."""
    host = Host(logs, RotationPolicy(max_size=2**20, max_files=3))
    host.runtime.write(3)
    async with host.running():
        await host.until(lambda: bool(host.manager._watched))
        monkeypatch.setattr(host.manager, "_interval", 3600.0)
        (entry,) = host.manager._logs.values()
        checked_at = entry.checked_at
        await asyncio.sleep(0.2)
        assert entry.checked_at == checked_at
        if change == "grow":
            host.runtime.write(1200, width=1000)
        elif change == "delete":
            (logs / "0.log").unlink()
        elif change == "rename":
            (logs / "0.log").rename(logs / "0.log.20260102-030405")
        else:
            os.mkfifo(logs / "fifo")
            (logs / "fifo").rename(logs / "0.log")
        await host.until(lambda: host.runtime.reopened == 1)


def test_due_watched_logs_checked_together(logs: Path) -> None:
    """Verify that a check, which takes a thread, is not made for each of many idle logs on its own."""
    host = Host(logs, SMALL)
    manager = host.manager
    manager.set_policy(SMALL, workers=1, interval=10.0)
    for number in range(10):
        entry = _Log(f"c{number}", logs / f"{number}.log", str(logs / f"{number}.log"), is_running=True)
        entry.watch, entry.checked_at = number, 100.0 + number
        manager._logs[entry.container_id] = entry
    assert manager._due(109.9) == []
    assert [entry.container_id for entry in manager._due(110.0)] == ["c0", "c1", "c2", "c3", "c4", "c5"]
    manager._logs["c9"].watch = None
    assert [entry.container_id for entry in manager._due(101.0)] == ["c9"]


async def test_manager_negative_size_disabled(logs: Path) -> None:
    host = Host(logs, RotationPolicy(-1, 5))
    host.runtime.write(1000)
    async with host.running():
        await asyncio.sleep(10 * INTERVAL)
        assert host.names() == ["0.log"]


async def test_manager_fast_log_rotated_within_bound_and_not_compressed(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that a fast log is rotated before the monitoring interval ends, and costs no compression."""
    policy = RotationPolicy(max_size=2**20, max_files=4)
    host = Host(logs, policy)
    monkeypatch.setattr(host.manager, "_interval", 60.0)
    largest, deadline = 0, time.monotonic() + 60
    async with host.running():
        while host.runtime.reopened < 8 and time.monotonic() < deadline:
            host.runtime.write(100, width=1000)
            total = sum(path.stat().st_size for path in logs.iterdir() if path.exists())
            largest = max(largest, total)
            await asyncio.sleep(0.01)
    assert host.runtime.reopened >= 8
    assert not [name for name in host.names() if name.endswith((".gz", ".tmp"))]
    # Eight files of this size would be more.
    assert largest < policy.max_rotated_bytes + 4 * policy.max_size < 8 * policy.max_size
    found = numbers(logs / "0.log")
    assert found == list(range(found[0], host.runtime.written))


async def test_manager_reopen_fails_rename_undone_and_retried(logs: Path) -> None:
    host = Host(logs, SMALL)
    host.runtime.write(100)
    host.runtime.error = "no"
    inode = (logs / "0.log").stat().st_ino
    async with host.running():
        await asyncio.sleep(4 * INTERVAL)
        await host.until(lambda: host.names() == ["0.log"] and not host.runtime.reopened)
        assert (logs / "0.log").stat().st_ino == inode
        host.runtime.error = ""
        await host.until(lambda: len(host.names()) == 2)
    host.runtime.write()
    assert numbers(logs / "0.log") == list(range(101))


async def test_manager_reopen_response_lost_new_log_kept(logs: Path) -> None:
    """Verify that the rename is not undone over the file that the runtime writes already."""
    host = Host(logs, SMALL)
    host.runtime.write(100)
    host.runtime.error, host.runtime.creates_before_error = "late", True
    async with host.running():
        await host.until(lambda: host.runtime.reopened == 1)
        host.runtime.write(5)
        await asyncio.sleep(3 * INTERVAL)
    assert numbers(logs / "0.log") == list(range(105))


async def test_manager_cancelled_during_reopen_rename_undone(logs: Path) -> None:
    host = Host(logs, SMALL)
    host.runtime.write(100)
    started = asyncio.Event()

    async def hang(container_id: str) -> None:
        started.set()
        await asyncio.Event().wait()

    host.manager._reopen = hang
    async with host.running(), asyncio.timeout(10):
        await started.wait()
    assert host.names() == ["0.log"]


@pytest.mark.parametrize("action", ["delete", "rename"])
async def test_manager_missing_log_reopened(logs: Path, action: str) -> None:
    """Verify that a log exists again that was deleted, or renamed by a kubelet that was killed then."""
    host = Host(logs, SMALL)
    host.runtime.write(5)
    if action == "delete":
        (logs / "0.log").unlink()
    else:
        (logs / "0.log").rename(logs / "0.log.20260102-030405")
    async with host.running():
        await host.until(lambda: (logs / "0.log").exists())
    host.runtime.write(5)
    assert numbers(logs / "0.log") == list(range(5 if action == "delete" else 0, 10))


# Kills

STEPS = ("open", "unlink", "rename", "write", "fdatasync", "utime", "fstat")


def _killing(limit: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: all decorated functions together end the process at their call number `limit`."""
    calls = [0]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == limit:
                os._exit(9)
            return function(*args, **options)

        return call

    return decorate


def _rotate_in_child(host: Host, limit: int) -> bool:
    """Rotate and compress in a process that is killed at step `limit`; return whether it was."""
    child = os.fork()
    if child == 0:
        kill = _killing(limit)
        for name in STEPS:
            setattr(os, name, kill(getattr(os, name)))
        LogDirectory.rename = kill(LogDirectory.rename)  # type: ignore[method-assign]
        manager: Any = host.manager
        entry = manager_module._Log("c1", host.logs / "0.log", str(host.logs / "0.log"), True)
        names, _, _ = manager._clean(entry, ["0.log"], None, 0, is_over=False, is_read=False)
        for name in names:
            manager._compress(entry.path, name)
        manager._rename_log(entry, None, "", None, 0)
        (host.logs / "reopen").touch()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9


def _prepare(logs: Path) -> Host:
    """Return a host with two rotated files, the older one to be compressed, and a large log."""
    host = Host(logs, RotationPolicy(max_size=1000, max_files=10))
    for stem in ("20260102-030401", "20260102-030402"):
        host.runtime.write(50)
        (logs / "0.log").rename(logs / f"0.log.{stem}")
        os.utime(logs / f"0.log.{stem}", (1, 1))
        host.runtime.file.close()
        host.runtime.file = (logs / "0.log").open("ab", buffering=0)
    host.runtime.write(50)
    return host


async def test_manager_killed_at_every_step_no_line_lost_or_duplicated(tmp_path: Path) -> None:
    steps = 0
    for limit in range(1, 200):
        logs = tmp_path / str(limit) / "pods" / "default_web_u1" / "main"
        logs.mkdir(parents=True)
        host = _prepare(logs)
        killed = _rotate_in_child(host, limit)
        if (logs / "reopen").exists():
            (logs / "reopen").unlink()
            await host.runtime.reopen("c1")
        host.runtime.write(3)  # to the file that the runtime has open, whatever its name is now
        async with host.running():
            await host.until(
                lambda host=host: (
                    (host.logs / "0.log").exists()  # type: ignore[misc]
                    and not [name for name in host.names() if name.endswith(".tmp")]
                    and not [log for log in host.manager._logs.values() if log.is_rotating or log.is_tidying]
                    and bool(host.manager._logs)
                )
            )
        host.runtime.write(2)
        assert numbers(logs / "0.log") == list(range(155)), (limit, host.names())
        host.runtime.file.close()
        if not killed:
            break
        steps += 1
    else:
        raise AssertionError("the rotation has more steps than this test kills")
    assert steps > 15


# Exited containers and lost attempts


async def test_manager_exited_container_logs_compressed_and_trimmed(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RotationPolicy(max_size=-0, max_files=2)
    host = Host(logs, policy)
    (logs / "0.log.20260102-030405").write_bytes(b"older\n" * 10)
    host.runtime.write(2000, width=1000)
    host.runtime.file.close()
    host.set_phase("exited")
    async with host.running():
        await host.until(lambda: (logs / "0.log").stat().st_size <= policy.max_exited_bytes)
        await host.until(lambda: host.rotated() == ["0.log.20260102-030405.gz"])
    with closing(LogFile(logs / "0.log")) as log:
        lines = [int(entry.text.split()[0]) for entry in log.entries()]
    assert lines == list(range(lines[0], 2000))
    assert 1000 < len(lines) < 2000
    assert gzip.decompress((logs / "0.log.20260102-030405.gz").read_bytes()) == b"older\n" * 10


async def test_manager_exited_container_followed_log_not_replaced(logs: Path) -> None:
    host = Host(logs, RotationPolicy(max_size=0, max_files=2))
    host.runtime.write(2000, width=1000)
    host.runtime.file.close()
    host.set_phase("exited")
    inode = (logs / "0.log").stat().st_ino
    with host.readers.reading(str(logs / "0.log")):
        async with host.running():
            await asyncio.sleep(6 * INTERVAL)
            assert (logs / "0.log").stat().st_ino == inode


async def test_manager_attempts_lost_by_runtime_removed_except_newest(logs: Path) -> None:
    for name in ("1.log", "1.log.20260102-030405.gz", "2.log", "3.log", "foreign"):
        (logs / name).write_text("x")
    host = Host(logs, SMALL)
    async with host.running():
        await host.until(lambda: host.names() == ["0.log", "3.log", "foreign"])


# Clients


async def test_manager_unread_files_held_for_reader_then_removed(logs: Path) -> None:
    host = Host(logs, RotationPolicy(max_size=1000, max_files=2), LogReaders(limit=100_000))
    async with host.running():
        with host.readers.reading(str(logs / "0.log")):
            for _ in range(4):
                count = host.runtime.reopened
                host.runtime.write(30)
                await host.until(lambda count=count: host.runtime.reopened > count)  # type: ignore[misc]
            # The reader has the first one open; the three others are unread.
            stems = {name.removesuffix(".tmp").removesuffix(".gz") for name in host.rotated()}
            assert len(stems) == 3
        await host.until(lambda: len(host.rotated()) == 1)


@pytest.mark.parametrize("cause", ["stalled client", "disk pressure"])
async def test_manager_files_of_reader_that_no_longer_counts_removed(logs: Path, cause: str) -> None:
    now, may_hold = 0.0, True
    readers = LogReaders(limit=100_000, may_hold=lambda: may_hold, clock=lambda: now)
    host = Host(logs, RotationPolicy(max_size=1000, max_files=2), readers)
    async with host.running():
        with host.readers.reading(str(logs / "0.log")):
            for _ in range(4):
                count = host.runtime.reopened
                host.runtime.write(30)
                await host.until(lambda count=count: host.runtime.reopened > count)  # type: ignore[misc]
            assert len({name.partition(".gz")[0].removesuffix(".tmp") for name in host.rotated()}) == 3
            if cause == "disk pressure":
                may_hold = False
            else:
                now = STALL_SECONDS
            # Without another rotation.
            await host.until(lambda: len(host.rotated()) == 1)


# Hostile files


def hostile(kind: str, path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        (path / "deep" / "deeper").mkdir(parents=True)
        (path / "deep" / "file").write_text("x")
    elif kind == "device":
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    elif kind == "hardlink":
        path.hardlink_to(outside)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 2**40)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A file outside of the pod log directory that no operation may change."""
    path = tmp_path / "outside"
    path.write_text("secret")
    path.chmod(0o640)
    yield path
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("secret", 0o640)


def _skip_without_mknod(kind: str) -> None:
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("mknod needs root")


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "device"])
async def test_manager_log_replaced_by_other_type_reopened(logs: Path, outside: Path, kind: str) -> None:
    _skip_without_mknod(kind)
    host = Host(logs, SMALL)
    hostile(kind, logs / "0.log", outside)
    async with host.running():
        await host.until(lambda: host.names() == ["0.log"] and host.runtime.reopened > 0)
        assert stat.S_ISREG((logs / "0.log").lstat().st_mode)
    host.runtime.write(2)
    assert numbers(logs / "0.log") == [0, 1]


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "device", "hardlink", "sparse"])
@pytest.mark.parametrize("suffix", ["20260102-030401", "20260102-030401.gz", "20260102-030401.tmp"])
async def test_manager_hostile_rotated_file_removed_or_bounded(
    logs: Path, outside: Path, kind: str, suffix: str
) -> None:
    _skip_without_mknod(kind)
    host = Host(logs, SMALL)
    hostile(kind, logs / f"0.log.{suffix}", outside)
    async with host.running():
        for _ in range(4):
            count = host.runtime.reopened
            host.runtime.write(30)
            await host.until(lambda count=count: host.runtime.reopened > count)  # type: ignore[misc]
        await host.until(lambda: f"0.log.{suffix}" not in host.names())
    assert numbers(logs / "0.log")[-30:] == list(range(90, 120))


@pytest.mark.parametrize("depth", [0, 1])
async def test_manager_directory_replaced_by_symlink_not_followed(
    logs: Path, tmp_path: Path, depth: int
) -> None:
    host = Host(logs, SMALL)
    host.runtime.write(100)
    replaced = logs if depth == 0 else logs.parent
    replaced.rename(tmp_path / "elsewhere")
    replaced.symlink_to(tmp_path / "elsewhere")
    before = sorted(str(path) for path in (tmp_path / "elsewhere").rglob("*"))
    async with host.running():
        await asyncio.sleep(5 * INTERVAL)
    assert sorted(str(path) for path in (tmp_path / "elsewhere").rglob("*")) == before
    assert not host.runtime.reopened


async def test_manager_truncated_log_continues(logs: Path) -> None:
    host = Host(logs, SMALL)
    async with host.running():
        host.runtime.write(10)
        await asyncio.sleep(2 * INTERVAL)
        os.truncate(logs / "0.log", 0)
        host.runtime.write(60)
        await host.until(lambda: host.runtime.reopened > 0)
    assert numbers(logs / "0.log") == list(range(10, 70))


async def test_manager_many_foreign_files_listing_reused(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify that a directory with many files is not listed with each rotation."""
    for number in range(3000):
        (logs / f"foreign-{number}").touch()
    scans, real = [0], LogDirectory.scan

    def scan(directory: LogDirectory, name: str) -> Any:
        scans[0] += 1
        return real(directory, name)

    monkeypatch.setattr(LogDirectory, "scan", scan)
    host = Host(logs, SMALL)
    monkeypatch.setattr(host.manager, "_interval", 0.5)
    host.manager._policy = RotationPolicy(max_size=2**20, max_files=3)
    async with host.running():
        for _ in range(6):
            count = host.runtime.reopened
            host.runtime.write(1100, width=1000)
            await host.until(lambda count=count: host.runtime.reopened > count)  # type: ignore[misc]
    assert host.runtime.reopened >= 6
    assert scans[0] <= 4


# Operations


def test_compress_file_open_for_writing_left_alone(logs: Path) -> None:
    path = logs / "0.log.20260102-030401"
    path.write_text("x\n")
    with LogDirectory(logs.parents[1], logs) as directory, path.open("ab"):
        with path.open("rb") as read:
            assert is_written(read.fileno())
        with pytest.raises(FileChangedError):
            directory.compress(path.name)
    assert names_in(logs) == [path.name]


def test_compress_disk_full_file_unchanged(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = logs / "0.log.20260102-030401"
    path.write_text("x\n")

    def full(opened: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with LogDirectory(logs.parents[1], logs) as directory, pytest.raises(OSError, match="No space left"):
        directory.compress(path.name)
    assert names_in(logs) == [path.name]


def test_compress_mode_and_time_retained(logs: Path) -> None:
    path = logs / "0.log.20260102-030401"
    path.write_bytes(b"line\n" * 200_000)
    path.chmod(0o640)
    os.utime(path, (5, 7))
    with LogDirectory(logs.parents[1], logs) as directory:
        directory.compress(path.name)
    compressed = logs / f"{path.name}.gz"
    assert names_in(logs) == [compressed.name]
    assert gzip.decompress(compressed.read_bytes()) == b"line\n" * 200_000
    assert (stat.S_IMODE(compressed.stat().st_mode), compressed.stat().st_mtime) == (0o640, 7)


def test_rename_existing_target_raises(logs: Path) -> None:
    for name in ("a", "b"):
        (logs / name).write_text(name)
    with LogDirectory(logs.parents[1], logs) as directory, pytest.raises(FileExistsError):
        directory.rename("a", "b")
    assert (logs / "b").read_text() == "b"


def test_rename_without_renameat2_keeps_one_name(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "_LIBC", object())
    (logs / "a").write_text("a")
    with LogDirectory(logs.parents[1], logs) as directory:
        directory.rename("a", "b")
    assert names_in(logs) == ["b"]


def test_log_directory_outside_of_root_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not"):
        LogDirectory(tmp_path / "pods", tmp_path / "other")

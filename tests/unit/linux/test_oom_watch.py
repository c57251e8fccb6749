"""Kills for want of memory are heard of when they happen: from a log of our own, and from the kernel's."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubelet.agent.oom_kills import record_oom_kills
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.oom_watcher import OomKill, kills, open_log
from tests.support.cgroups import needs_v1, root

__all__ = ["root"]

KILLED = "Killed process {pid} ({name}) total-vm:1kB, anon-rss:1kB"
MACHINE = (
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/a"
)
CGROUP = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a"
)


class Log:
    """A log that gives one record for each read, as the kernel's does."""

    def __init__(self) -> None:
        self._written, self._read = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._read.setblocking(False)

    def open(self) -> int:
        return self._read.detach()

    def say(self, *texts: str) -> None:
        for text in texts:
            self._written.send(f"4,7,5,-;{text}\n".encode())

    def end(self) -> None:
        self._written.close()


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.end()
    made._read.close()


def reason(kind: str, pid: int) -> str:
    return f"{kind},task=app,pid={pid},uid=0"


async def test_record_oom_kills_system_oom_records_event(log: Log) -> None:
    told: list[tuple[str, str, str]] = []
    log.say("app invoked oom-killer: gfp_mask=0x0", reason(CGROUP, 3), KILLED.format(pid=3, name="app"))
    limits: list[str] = []
    watch = asyncio.create_task(
        record_oom_kills(
            lambda *event: told.append(event),
            lambda kill: limits.append(kill.limit or "/"),
            open_log=log.open,
        )
    )
    # It waits for more, and is not confused by what is no record at all.
    log._written.send(b"nonsense")
    log.say(
        "app invoked oom-killer: gfp_mask=0x0", reason(MACHINE, 4), KILLED.format(pid=4, name="big (one)")
    )
    log.say(*["something else"] * 250, reason(MACHINE, 5), KILLED.format(pid=5, name="app"))
    log.end()
    await asyncio.wait_for(watch, 30)
    assert told == [
        ("Warning", "SystemOOM", "System OOM encountered, victim process: big (one), pid: 4"),
        ("Warning", "SystemOOM", "System OOM encountered, victim process: app, pid: 5"),
    ]
    assert limits == ["/a", "/", "/"]


async def test_kills_many_records_registers_descriptor_once(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, registered = asyncio.get_running_loop(), list[int]()
    add = loop.add_reader

    def add_reader(fd: int, *call: Any) -> None:
        registered.append(fd)
        add(fd, *call)

    monkeypatch.setattr(loop, "add_reader", add_reader)
    fd = log.open()
    found: list[OomKill] = []

    async def collect() -> None:
        async for kill in kills(fd):
            found.append(kill)

    task = asyncio.ensure_future(collect())
    for number in range(5):
        await asyncio.sleep(0.01)
        log.say("port 3(veth) entered blocking state", KILLED.format(pid=number, name="victim"))
    async with asyncio.timeout(5):
        while len(found) < 5:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert registered == [fd]
    assert not loop.remove_reader(fd), "it is not registered any more"
    os.close(fd)


async def test_record_oom_kills_without_kmsg_returns(tmp_path: Path) -> None:
    def missing() -> int:
        return open_log(tmp_path / "kmsg")

    await record_oom_kills(lambda *event: pytest.fail(str(event)), open_log=missing)
    await record_oom_kills(
        lambda *event: pytest.fail(str(event)), open_log=lambda: open_log(Path("/dev/null"))
    )


async def test_record_oom_kills_cancelled_closes_descriptor(log: Log) -> None:
    fds: list[int] = []

    def opened() -> int:
        fds.append(log.open())
        return fds[0]

    watch = asyncio.create_task(record_oom_kills(lambda *event: None, open_log=opened))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


@pytest.mark.machine
@needs_v1
async def test_kills_real_cgroup_oom_is_reported(root: str) -> None:
    """A real kill, within the limit of a cgroup; none of those that were before."""
    memory = detect_cgroups().path("memory", root)
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text(str(16 << 20))
    script = "input(); data = bytearray(64 << 20)"
    fd = open_log()
    try:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdin=subprocess.PIPE)
        try:
            (memory / "cgroup.procs").write_text(str(process.pid))

            async def heard() -> OomKill:
                async for kill in kills(fd):
                    # Of many kills in a short time the kernel does not say where they were.
                    if kill.pid == process.pid or kill.limit.endswith(root):
                        return kill
                raise AssertionError("the log ended")

            _, kill = await asyncio.wait_for(asyncio.gather(process.communicate(b"\n"), heard()), 60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    finally:
        os.close(fd)
    assert (kill.cgroup, kill.system_oom) == (kill.limit, False)

"""Programs: run with their words kept, found by what they are, and ended without hitting a stranger."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pykubelet.linux.processes import (
    CommandError,
    bound_unix_sockets,
    end,
    find_process,
    list_processes,
    run,
    search_path,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


async def test_run_returns_stdout() -> None:
    assert await run("cat", input=b"hello") == "hello"
    assert await run("printf", "%s", "ünï") == "ünï"
    assert await run("cat") == "", "standard input is empty unless given"
    big = b"x" * 1_000_000
    assert len(await run("cat", input=big)) == len(big)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("sh", "-c", "echo one >&2; echo two >&2; exit 3"), "failed with status 3: one two"),
        (("sh", "-c", "exit 1"), "failed with status 1: it gave no reason"),
        (("/no/such/program",), "program could not be started: No such file"),
        (("/etc/passwd",), "passwd could not be started: Permission denied"),
    ],
)
async def test_run_command_fails_raises_one_line_error(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        await run(*argv)
    assert "\n" not in str(caught.value)


async def test_run_timeout_kills_process() -> None:
    started = time.monotonic()
    with pytest.raises(CommandError, match=r"sleep 1234\.5 did not end within 0\.1 s"):
        await run("sleep", "1234.5", timeout=0.1)
    assert time.monotonic() - started < 30
    assert not [process for process in list_processes() if process.argv == ("sleep", "1234.5")]


async def test_run_cancelled_kills_process() -> None:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run("sleep", "1234.6"))
        while not [process for process in list_processes() if process.argv == ("sleep", "1234.6")]:
            await asyncio.sleep(0.01)
        task.cancel()
    assert not [process for process in list_processes() if process.argv == ("sleep", "1234.6")]


def test_find_process_own_pid_is_found() -> None:
    me = find_process(os.getpid())
    assert me is not None
    assert me.start > 0
    assert me in list(list_processes())
    assert find_process(2**22 + 1) is None


def test_find_process_zombie_returns_none() -> None:
    process = subprocess.Popen(["true"])
    try:
        while find_process(process.pid) is not None:
            time.sleep(0.01)
    finally:
        process.wait()


def test_find_process_comm_with_parentheses_is_parsed() -> None:
    with subprocess.Popen(
        ["sh", "-c", "printf '(a) b)' >/proc/$$/comm; read x"], stdin=subprocess.PIPE
    ) as process:
        found = find_process(process.pid)
        assert found is not None
        assert found.pid == process.pid
        process.communicate(b"\n")


async def test_end_with_grace_sends_sigterm_first(sleeper: subprocess.Popen[bytes]) -> None:
    process = find_process(sleeper.pid)
    assert process is not None
    assert await end(process, grace=45)
    assert sleeper.wait() == -15


async def test_end_sigterm_ignored_sends_sigkill() -> None:
    command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sh:
        assert sh.stdout is not None
        sh.stdout.readline()
        process = find_process(sh.pid)
        assert process is not None
        assert await end(process, grace=0.1)
        assert sh.wait() == -9


async def test_end_zero_grace_sends_sigkill(sleeper: subprocess.Popen[bytes]) -> None:
    process = find_process(sleeper.pid)
    assert process is not None
    assert await end(process, grace=0)
    assert sleeper.wait() == -9
    assert await end(process, grace=0), "ending twice is fine"


async def test_end_reused_pid_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    process = find_process(sleeper.pid)
    assert process is not None
    assert await end(replace(process, start=process.start - 1), grace=0)
    assert sleeper.poll() is None


def test_bound_unix_sockets_returns_bound_path(tmp_path: Path) -> None:
    path = tmp_path / "a socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert str(path) in bound_unix_sockets()
    assert path.is_socket()
    assert str(path) not in bound_unix_sockets()


def test_search_path_adds_sbin_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/sbin")
    assert search_path() == "/usr/bin:/sbin:/usr/local/sbin:/usr/sbin"

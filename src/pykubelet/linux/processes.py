"""Running, finding and ending processes.

A process is identified by its pid and its start time, and signalled through a pidfd, so that a process that
has reused the pid is never hit.

`run` executes a command with a timeout. `run_bounded` executes a less trusted one (credential plugins, the
key generation worker) in a process group of its own, with bounds on its time and output; the whole group is
killed when a bound is exceeded or the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pykubelet.linux import HostError
from pykubelet.util.tasks import run_or_undo

_PROC = Path("/proc")


class CommandError(HostError):
    """Raised when a command cannot be started, fails or times out; one line that includes its stderr."""


@dataclass(frozen=True, slots=True)
class Process:
    """A running process; the start time distinguishes it from a later one with the same pid."""

    pid: int
    start: int
    """Clock ticks between boot and the start."""
    argv: tuple[str, ...]


def find_process(pid: int) -> Process | None:
    """Return the process with this pid; None if it does not exist or is a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
        cmdline = (_PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may itself contain spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    argv = cmdline.decode(errors="surrogateescape").rstrip("\0").split("\0")
    return Process(pid=pid, start=int(fields[19]), argv=tuple(argv) if cmdline else ())


def list_processes() -> Iterator[Process]:
    """Yield all running processes."""
    for entry in os.scandir(_PROC):
        if entry.name.isdigit() and (process := find_process(int(entry.name))) is not None:
            yield process


def bound_unix_sockets() -> set[str]:
    """Return the paths of all Unix sockets that a process has open; other socket files are stale."""
    lines = (_PROC / "net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    return {fields[7] for line in lines if len(fields := line.split(maxsplit=7)) == 8}


async def end(process: Process, *, grace: float) -> bool:
    """Send SIGTERM to a process, wait up to `grace` seconds, then send SIGKILL; return whether it is gone.

    With a grace of 0, SIGKILL is sent immediately. A process in an uninterruptible system call may survive
    even that, hence the return value.
    """
    with _pidfd(process) as fd:
        if fd is None:
            return True
        if grace > 0:
            if not _signal(fd, signal.SIGTERM):
                return True
            if await _ended(fd, grace):
                return True
        return not _signal(fd, signal.SIGKILL) or await _ended(fd, 5.0)


def search_path() -> str:
    """Return the PATH for commands: the caller's, with the system directories that `su` leaves out."""
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*directories, "/usr/local/sbin", "/usr/sbin", "/sbin"]))


def environment() -> dict[str, str]:
    """Return the environment of commands: this process's, with the complete PATH."""
    return {**os.environ, "PATH": search_path()}


async def run(*argv: str, input: bytes | None = None, timeout: float = 30.0) -> str:
    """Run a command to its end and return its standard output.

    Raises CommandError if it cannot be started, fails, or takes longer than `timeout` seconds. A cancellation
    kills the command.
    """
    program = Path(argv[0]).name
    try:
        process = await run_or_undo(
            asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE if input is not None else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment(),
            ),
            kill_and_wait,
        )
    except OSError as err:
        raise CommandError(f"{program} could not be started: {err.strerror or err}") from err
    try:
        async with asyncio.timeout(timeout):
            out, stderr = await process.communicate(input)
    except TimeoutError as err:
        raise CommandError(f"{_quoted_command(argv)} did not end within {timeout:g} s") from err
    finally:
        if process.returncode is None:
            await kill_and_wait(process)
    if process.returncode:
        reason = " ".join(stderr.decode(errors="replace").split()) or "it gave no reason"
        raise CommandError(f"{_quoted_command(argv)} failed with status {process.returncode}: {reason}")
    return out.decode(errors="surrogateescape")


async def kill_and_wait(process: asyncio.subprocess.Process) -> None:
    """Kill a child process, if it still runs, and wait for its end."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _quoted_command(argv: Sequence[str]) -> str:
    return " ".join([Path(argv[0]).name, *argv[1:]])


@contextmanager
def _pidfd(process: Process) -> Iterator[int | None]:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # The pidfd pins the pid; the start time verifies that it is still the same process.
        current = find_process(process.pid)
        yield fd if current is not None and current.start == process.start else None
    finally:
        os.close(fd)


def _signal(fd: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    return True


async def _ended(fd: int, timeout: float) -> bool:
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    loop.add_reader(fd, exited.set)
    try:
        async with asyncio.timeout(timeout):
            await exited.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


_CHUNK = 64 * 1024
_MAX_STDERR = 1024
_END_SECONDS = 5.0


class OutputTooLarge(Exception):
    """Raised when a command writes more than its limit."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Result of a command: its exit status, its stdout, and the beginning of its stderr."""

    status: int
    output: bytes
    stderr: str


async def run_bounded(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: float,
    max_bytes: int,
    data: bytes | None = None,
) -> ProcessResult:
    """Run a command to its end, with `data` on its standard input, or none.

    Raises OSError if it cannot be started, TimeoutError if it takes longer than `seconds`, and OutputTooLarge
    if it writes more than `max_bytes` to its stdout.
    """
    process = await run_or_undo(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if data is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        ),
        _end,
    )
    stdout, stderr = process.stdout, process.stderr
    assert stdout is not None
    assert stderr is not None
    complete = False
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            stderr_task = tasks.create_task(_drain(stderr), name="complaints of a program")
            if process.stdin is not None:
                tasks.create_task(_feed(process.stdin, data or b""), name="input of a program")
            output = await _read(stdout, max_bytes)
            if len(output) > max_bytes:
                await _end(process)
            status = await process.wait()
        complete = True
    finally:
        if not complete:
            await _end(process)
    if len(output) > max_bytes:
        raise OutputTooLarge
    return ProcessResult(status, output, " ".join(stderr_task.result().decode(errors="replace").split()))


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    # A command may end without reading its input; its exit status is reported instead.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read to the end, or until more than `max_bytes` were read."""
    output = bytearray()
    while len(output) <= max_bytes and (chunk := await stream.read(_CHUNK)):
        output += chunk
    return bytes(output)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # asyncio reports the exit only after the pipes are drained. A process that left the group may
    # keep a pipe open indefinitely, hence the timeout.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            assert process.stdout is not None
            await _drain(process.stdout)
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> bytes:
    output = b""
    while chunk := await stream.read(_CHUNK):
        output += chunk[: _MAX_STDERR - len(output)]
    return output

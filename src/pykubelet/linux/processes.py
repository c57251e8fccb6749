"""Other programs on this machine: running them, finding them, ending them.

A process is named by its pid *and* its start time, and signalled through a pidfd, so that a pid
which the kernel has given to someone else in the meantime is never hit.

Running someone else's program with bounds: on its time, on its output, and on what it leaves behind.

The program runs in a session of its own and is ended, with everything it started there, when it
takes too long, says too much, or nobody waits for it any more.
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
from pykubelet.util.tasks import begun

_PROC = Path("/proc")


class CommandError(HostError):
    """A program did not do what it was asked; the message is one line with its own words."""


@dataclass(frozen=True, slots=True)
class Process:
    """A running process, told apart from a later one with the same pid by its start time."""

    pid: int
    start: int
    """Clock ticks after boot."""
    argv: tuple[str, ...]


def find_process(pid: int) -> Process | None:
    """Give the process with this pid; None when there is none or it is a zombie."""
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
    """Give every process that runs now."""
    for entry in os.scandir(_PROC):
        if entry.name.isdigit() and (process := find_process(int(entry.name))) is not None:
            yield process


def bound_unix_sockets() -> set[str]:
    """Give the paths of all unix sockets that some process has open; a file that is not here is dead."""
    lines = (_PROC / "net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    return {fields[7] for line in lines if len(fields := line.split(maxsplit=7)) == 8}


async def end(process: Process, *, grace: float) -> bool:
    """Ask a process to end, wait up to `grace` seconds, then kill it; returns whether it is gone.

    With a grace of 0 it is killed at once. A process in an uninterruptible system call may
    outlive even that, hence the answer.
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
    """Give the PATH to look for programs in: the caller's and the system's, which `su` leaves out."""
    given = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*given, "/usr/local/sbin", "/usr/sbin", "/sbin"]))


def environment() -> dict[str, str]:
    """Give the environment that our programs get: ours, with the complete PATH."""
    return {**os.environ, "PATH": search_path()}


async def run(*argv: str, input: bytes | None = None, timeout: float = 30.0) -> str:
    """Run a program to its end and give what it wrote to standard output.

    Raises CommandError when it cannot be started, fails, or takes longer than `timeout` seconds;
    cancellation ends the program, too.
    """
    program = Path(argv[0]).name
    try:
        process = await begun(
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
            out, complaint = await process.communicate(input)
    except TimeoutError as err:
        raise CommandError(f"{_shown(argv)} did not end within {timeout:g} s") from err
    finally:
        if process.returncode is None:
            await kill_and_wait(process)
    if process.returncode:
        words = " ".join(complaint.decode(errors="replace").split())
        raise CommandError(
            f"{_shown(argv)} failed with status {process.returncode}: {words or 'it gave no reason'}"
        )
    return out.decode(errors="surrogateescape")


async def kill_and_wait(process: asyncio.subprocess.Process) -> None:
    """End a program of ours at once, whether or not it still runs."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _shown(argv: Sequence[str]) -> str:
    return " ".join([Path(argv[0]).name, *argv[1:]])


@contextmanager
def _pidfd(process: Process) -> Iterator[int | None]:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # Only now is the pid pinned; the start time says whether it is still the same process.
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
    gone = asyncio.Event()
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(timeout):
            await gone.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


_CHUNK = 64 * 1024
_MAX_COMPLAINT = 1024
_END_SECONDS = 5.0


class OutputTooLarge(Exception):
    """The program wrote more than it may."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """A program that ended: its status, its output, and the beginning of its complaints."""

    status: int
    output: bytes
    complaint: str


async def run_bounded(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: float,
    max_bytes: int,
    data: bytes | None = None,
) -> ProcessResult:
    """Run a program to its end, with `data` on its standard input, or nothing.

    Raises OSError when it cannot be started, TimeoutError when it takes longer than `seconds`, and
    TooMuch when it writes more than `max_bytes` to its output.
    """
    process = await begun(
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
            complaint = tasks.create_task(_drain(stderr), name="complaints of a program")
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
    return ProcessResult(status, output, " ".join(complaint.result().decode(errors="replace").split()))


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    # A program that ends without reading has its reasons, and its status tells them.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read to the end, or until it is too much."""
    output = bytearray()
    while len(output) <= max_bytes and (chunk := await stream.read(_CHUNK)):
        output += chunk
    return bytes(output)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Its end is not seen before all that it wrote was read. Who left the session may keep the pipe
    # open for good; that is not worth waiting for.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            assert process.stdout is not None
            await _drain(process.stdout)
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while chunk := await stream.read(_CHUNK):
        kept += chunk[: _MAX_COMPLAINT - len(kept)]
    return kept

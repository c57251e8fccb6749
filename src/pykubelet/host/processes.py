"""Other programs on this machine: running them, finding them, ending them.

A process is named by its pid *and* its start time, and signalled through a pidfd, so that a pid
which the kernel has given to someone else in the meantime is never hit.
"""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pykubelet.host import HostError
from pykubelet.tasks import begun

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

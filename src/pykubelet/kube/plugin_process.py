"""Running someone else's program with bounds: on its time, on its output, and on what it leaves behind.

The program runs in a session of its own and is ended, with everything it started there, when it
takes too long, says too much, or nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pykubelet.tasks import begun

_CHUNK = 64 * 1024
_MAX_COMPLAINT = 1024
_END_SECONDS = 5.0


class TooMuch(Exception):
    """The program wrote more than it may."""


@dataclass(frozen=True, slots=True)
class Finished:
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
) -> Finished:
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
        raise TooMuch
    return Finished(status, output, " ".join(complaint.result().decode(errors="replace").split()))


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

"""Answering a log query: journald's log of services, or their files below the folder of logs.

Which service logs where is found out: what journald knows is asked of journalctl, anything else is looked
for as a file. A query has half a minute; a client that goes away ends the program that works for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from pykubelet.host.processes import kill_and_wait, search_path
from pykubelet.server.log_query import LogQuery, journal_arguments, places_of
from pykubelet.tasks import begun

PATIENCE_SECONDS = 30.0
_BLOCK = 256 * 1024
_MOST_UNITS_BYTES = 4 * 1024 * 1024
_UNITS = ("--field", "_SYSTEMD_UNIT")

Open = Callable[[str], int]
"""Opens a file below the folder of logs, and nothing elsewhere; raises OSError."""
Write = Callable[[bytes], Awaitable[None]]
"""Sends a piece of the answer."""


async def answer_log_query(query: LogQuery, open_log: Open, program: str | None, write: Write) -> None:
    """Write the answer; what goes wrong is said in it, because its status was sent before."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            units = await _units(program) if program is not None else b""
            known = tuple(name for name in query.services if f"{name}.service".encode() in units)
            others = [name for name in query.services if name not in known]
            if known and program is not None:
                await _pass_on(program, journal_arguments(replace(query, services=known)), write)
            if others and query.has_options:
                text = f"options present and query resolved to log files for [{' '.join(others)}]"
                await write(f"\n{text}\ntry without specifying options\n".encode())
                return
            for name in others:
                await _write_file(name, open_log, write)
    except TimeoutError:
        await write(f"\nthe log was cut off after {PATIENCE_SECONDS:g} s\n".encode())


def find_journalctl() -> str | None:
    """Find the program that reads the journal; None on machines without one."""
    return shutil.which("journalctl", path=search_path())


async def _write_file(service: str, open_log: Open, write: Write) -> None:
    for place in places_of(service):
        try:
            file = open_log(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as err:
            await write(f"\nerror getting log for {service}: {err.strerror or 'not allowed'}\n".encode())
            return
        try:
            mode = os.fstat(file).st_mode
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                await write(f"\nerror getting log for {service}: not a regular file\n".encode())
                return
            # What is written while it is read is not followed.
            left = os.fstat(file).st_size
            while left > 0 and (data := os.read(file, min(_BLOCK, left))):
                left -= len(data)
                await write(data)
            return
        finally:
            os.close(file)
    await write(f"\nlog not found for {service}\n".encode())


async def _units(program: str) -> bytes:
    said = bytearray()

    async def keep(data: bytes) -> None:
        del said[_MOST_UNITS_BYTES:]
        said.extend(data)

    await _pass_on(program, _UNITS, keep)
    return bytes(said)


async def _pass_on(program: str, arguments: Sequence[str], write: Write) -> None:
    try:
        process = await begun(
            asyncio.create_subprocess_exec(
                program,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            ),
            kill_and_wait,
        )
    except OSError:
        await write(b"\nerror: journal output not available\n")
        return
    try:
        assert process.stdout is not None
        while data := await process.stdout.read(_BLOCK):
            await write(data)
    finally:
        await kill_and_wait(process)

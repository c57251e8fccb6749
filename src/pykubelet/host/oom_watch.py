"""Hearing of processes that the kernel kills for want of memory, the moment it says so.

Only what is killed from now on is told: what happened before was told by the agent that ran then, and
telling it again with each start would have people look for a fault that is long over. Where the kernel's log
cannot be read (in a container, often) nothing is told, and nothing else suffers.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

from pykubelet.host.kmsg import KmsgError, parse_record
from pykubelet.host.kmsg_oom import OomKill, OomState, follow

KMSG = Path("/dev/kmsg")

_LONGEST_RECORD = 16384
"""Bytes; the kernel refuses to give a record that does not fit."""
_AT_ONCE = 100
"""How many records to read before others get their turn: a packet filter can fill the log quickly."""


def open_log(path: Path = KMSG) -> int:
    """Open the kernel's log at its end; gives a descriptor for `kills`. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        raise
    return fd


async def kills(fd: int) -> AsyncIterator[OomKill]:
    """Give each kill that the log behind `fd` tells of; ends with the log, raises OSError."""
    state, taken = OomState(), 0
    while True:
        try:
            data = os.read(fd, _LONGEST_RECORD)
        except BlockingIOError:
            await _readable(fd)
            continue
        except BrokenPipeError:
            # The kernel has overwritten what was not read yet; it goes on with the oldest that it has.
            state = OomState()
            continue
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            continue  # longer than any record that matters, and passed over by the kernel
        if not data:
            return
        taken += 1
        if taken % _AT_ONCE == 0:
            await asyncio.sleep(0)
        try:
            state, kill = follow(state, parse_record(data))
        except KmsgError:
            continue
        if kill is not None:
            yield kill


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)

"""This program's own terminal while a command in a container has it, and its input otherwise.

In raw mode every key, Ctrl-C included, goes to the command. Whatever ends us, the terminal is given back
as it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

_BLOCK = 32 * 1024


@contextmanager
def raw_mode(fd: int) -> Iterator[None]:
    """Pass every key on at once and unchanged, while inside."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def sizes(fd: int) -> AsyncIterator[bytes]:
    """Give the terminal's size, now and whenever it changes, as the remote-command protocol writes it."""
    changed = asyncio.Event()
    changed.set()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while await changed.wait():
            changed.clear()
            size = os.get_terminal_size(fd)
            yield json.dumps({"Width": size.columns, "Height": size.lines}).encode()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def input_of(fd: int) -> AsyncIterator[bytes]:
    """Give what can be read from a terminal, pipe or file, until its end."""
    while True:
        await _readable(fd)
        try:
            data = os.read(fd, _BLOCK)
        except BlockingIOError:
            continue
        if not data:
            return
        yield data


async def _readable(fd: int) -> None:
    """Wait without making the descriptor non-blocking: it may be our shell's, too."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
    except PermissionError:
        return  # a plain file can always be read
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write everything; blocks as long as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

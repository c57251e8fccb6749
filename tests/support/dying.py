"""An agent that is killed at one chosen moment: right before the n-th thing that it changes on disk."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "open")
_CALLS = ("mount", "umount2")


def dies_at(moment: int, below: Path, life: Callable[[], Coroutine[Any, Any, object]]) -> bool:
    """Live in a child process that kills itself before the n-th change; says whether it came to that.

    Changes are what is made, written, moved or deleted below a directory, and each mount and unmount.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.addaudithook(_killer(moment, str(below)))
            asyncio.run(life())
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed before it could die"
    return os.WIFSIGNALED(status)


def _killer(moment: int, below: str) -> Callable[[str, tuple[Any, ...]], None]:
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _CHANGES:
            # The place of a link comes second.
            path = args[1] if event in ("os.link", "os.symlink") else args[0]
            about = str(path).startswith(below)
            if event == "open" and about:
                about = not isinstance(args[2], int) or bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        else:
            about = event == "ctypes.dlsym" and args[1] in _CALLS
        if about:
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook

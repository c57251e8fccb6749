"""Somebody in a volume who swaps files for links as fast as a process of its own can."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = """
import ctypes, itertools, os, sys
renameat2, exchange, here = ctypes.CDLL(None, use_errno=True).renameat2, 2, -100
names = [os.fsencode(name) for name in sys.argv[1:]]
pairs = list(zip(names[::2], names[1::2]))
print("ready", flush=True)
while True:
    for first, second in pairs:
        if renameat2(here, first, here, second, exchange):
            sys.exit(os.strerror(ctypes.get_errno()))
"""


@contextmanager
def swapping(*pairs: tuple[Path, Path], vanishing: bool = False) -> Iterator[None]:
    """Keep swapping the two of each pair, in turn, for as long as the block lasts.

    What is swapped must stay there, unless it is `vanishing`.
    """
    names = [str(name) for pair in pairs for name in pair]
    command = [sys.executable, "-S", "-c", _PROGRAM, *names]
    last_words = subprocess.DEVNULL if vanishing else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=last_words) as attacker:
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"ready\n"
            yield
            assert vanishing or attacker.poll() is None, "the attacker gave up, so nothing was shown"
        finally:
            attacker.kill()


def tries(count: int, *, seconds: float, enough: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Count up to so many tries, or as many as fit into the time on a slow machine.

    There are more, for a minute, while it is not `enough`: either side may get no processor for a while.
    """
    begin = time.monotonic()
    for number in itertools.count():
        yield number
        passed = time.monotonic() - begin
        if passed > seconds + 60 or (enough() and (number + 1 >= count or passed > seconds)):
            break

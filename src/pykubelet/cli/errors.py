"""How the commands for people end: what went wrong is a line, Ctrl-C and a closed pipe are no news.

How the programs say that something is wrong: a line each, on standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from pykubelet.cli.client import NodeError, SelectionError
from pykubelet.config.errors import ConfigError
from pykubelet.standalone.instance import EmbeddedError


def complain(program: str, err: BaseException | str) -> int:
    """Print what is wrong and give the exit code."""
    if isinstance(err, ConfigError) and len(err.problems) > 1:
        print(f"{program}: {len(err.problems)} problems:", file=sys.stderr)
        for problem in err.problems:
            print(f"  - {problem}", file=sys.stderr)
    else:
        print(f"{program}: {err}", file=sys.stderr)
    return 1


_USUAL: tuple[type[Exception], ...] = (NodeError, SelectionError, EmbeddedError, ConfigError)
_BY_SIGNAL = 128
"""Shells report the end by a signal as this plus the signal's number."""


def guarded(program: str, work: Callable[[], int], *expected: type[Exception]) -> int:
    """Do the work and give the exit code; failures that are `expected` or usual are told in a line."""
    try:
        code = work()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough; what Python still holds for it must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BY_SIGNAL + signal.SIGPIPE
    except _USUAL + expected as err:
        return complain(program, err)
    except KeyboardInterrupt:
        return _BY_SIGNAL + signal.SIGINT
    return code


def end_politely() -> None:
    """Unwind when we are told to end, so that a terminal gets its cursor back."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_BY_SIGNAL + number))

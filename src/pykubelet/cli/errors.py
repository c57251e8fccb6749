"""Error output and exit codes of the commands.

An error is one line on standard error. Ctrl-C and a closed output pipe end a command without a message,
with the exit code that a shell reports for the signal.
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
    """Print the error to standard error, each problem of a ConfigError on its own line, and return 1."""
    if isinstance(err, ConfigError) and len(err.problems) > 1:
        print(f"{program}: {len(err.problems)} problems:", file=sys.stderr)
        for problem in err.problems:
            print(f"  - {problem}", file=sys.stderr)
    else:
        print(f"{program}: {err}", file=sys.stderr)
    return 1


_USUAL: tuple[type[Exception], ...] = (NodeError, SelectionError, EmbeddedError, ConfigError)
_BY_SIGNAL = 128
"""Base of the exit code of a process ended by a signal; the signal's number is added."""


def guarded(program: str, work: Callable[[], int], *expected: type[Exception]) -> int:
    """Run `work` and return its exit code; usual and `expected` exceptions become one line and code 1."""
    try:
        code = work()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. Redirect stdout, so that flushing Python's buffer at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BY_SIGNAL + signal.SIGPIPE
    except _USUAL + expected as err:
        return complain(program, err)
    except KeyboardInterrupt:
        return _BY_SIGNAL + signal.SIGINT
    return code


def end_politely() -> None:
    """Exit with unwinding on SIGTERM, so that the terminal's cursor is restored."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_BY_SIGNAL + number))

"""A clock that can be set: put this directory on an agent's PYTHONPATH.

The agent's wall clock then differs from the machine's by the seconds in the file that
`PYKUBELET_TEST_CLOCK` names, read whenever someone asks for the time.
"""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

_FILE = Path(os.environ["PYKUBELET_TEST_CLOCK"])
_time, _time_ns = time.time, time.time_ns


def _ahead() -> int:
    try:
        return int(_FILE.read_text() or 0)
    except FileNotFoundError:
        return 0


def _shifted_now() -> datetime:
    return datetime.fromtimestamp(int(_time()) + _ahead(), UTC)


time.time = lambda: _time() + _ahead()
time.time_ns = lambda: _time_ns() + _ahead() * 1_000_000_000

# After the above, so that whatever is imported sees the same clock.
import pykubelet.api.meta  # noqa: E402

pykubelet.api.meta.now = _shifted_now

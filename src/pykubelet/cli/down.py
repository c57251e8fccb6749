"""`pykubelet down`: removes what `up` made, and says what it could not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pykubelet.cli.complain import complain
from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.teardown import down
from pykubelet.host.capabilities import is_root
from pykubelet.logs.setup import configure_early

PROGRAM = "pykubelet down"


def run_down(data_dir: Path) -> int:
    """Remove everything; returns the exit code."""
    if not is_root():
        return complain(PROGRAM, "root is needed to remove containers: run it with sudo")
    configure_early()
    try:
        left = asyncio.run(down(Instance.at(data_dir), print))
    except EmbeddedError as err:
        return complain(PROGRAM, err)
    except KeyboardInterrupt:
        return complain(PROGRAM, "interrupted: run it again to finish")
    for line in left:
        complain(PROGRAM, f"could not remove {line}")
    if left:
        return 1
    print("Nothing is left.")
    return 0

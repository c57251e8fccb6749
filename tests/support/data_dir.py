"""Data directories of nodes, removed with `pykubelet down`."""

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubelet.standalone.instance import Instance
from pykubelet.standalone.teardown import leftovers
from tests.support.node import BIN
from tests.support.runtime import why_no_machine


@contextmanager
def short_dir() -> Iterator[Path]:
    """A data directory with a short path; `pykubelet down` removes what was made of it, and all of it."""
    if reason := why_no_machine():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as parent:
        # Pods with user namespaces reach their files as another user.
        Path(parent).chmod(0o711)
        path = Path(parent) / "d"
        try:
            yield path
        finally:
            if (path / ".pykubelet").exists():
                take_down(path)


def take_down(path: Path) -> None:
    """Remove a node as a person would, and look whether that is true."""
    command = [str(BIN / "pykubelet"), "down", "--volumes", "--data-dir", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"down failed: {done.stdout}{done.stderr}"
    assert asyncio.run(leftovers(Instance.at(path))) == []
    assert not path.exists()

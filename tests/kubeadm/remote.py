"""Commands that one guest runs in the other, over files in the directory that they share with the host.

The guests have no other channel before the cluster exists. A request is a file with a number; the response
has the same number. Both are renamed into place, so that neither side reads a partial one.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5
_STOP = "stop"


@dataclass(frozen=True, slots=True)
class Result:
    """Exit code and output of a command, stdout and stderr together."""

    code: int
    output: str


class RemoteHost:
    """Client of the commands of another machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0

    def run(self, *command: str, timeout: float) -> Result:
        """Run a command in the other machine. Raises TimeoutError when it sends no result in `timeout` s."""
        self._number += 1
        _put(self._directory, f"request-{self._number}", {"command": command, "timeout": timeout})
        deadline = time.monotonic() + timeout
        response = self._directory / f"response-{self._number}"
        while not response.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{' '.join(command)}: no result of the other machine within {timeout:g} s"
                )
            time.sleep(POLL_SECONDS)
        return Result(**json.loads(response.read_text()))

    def stop(self) -> None:
        """End the other machine."""
        _put(self._directory, _STOP, {})


def serve(directory: Path, run: Callable[[Sequence[str], float], Result]) -> None:
    """Run the commands of the other machine one after the other, until it stops this one."""
    directory.mkdir(exist_ok=True)
    number = 1
    while not (directory / _STOP).exists():
        request = directory / f"request-{number}"
        if not request.exists():
            time.sleep(POLL_SECONDS)
            continue
        wanted = json.loads(request.read_text())
        result = run(wanted["command"], wanted["timeout"])
        _put(directory, f"response-{number}", {"code": result.code, "output": result.output})
        number += 1


def run_command(command: Sequence[str], timeout: float) -> Result:
    """Run a command here; one that takes too long is killed and has the exit code 124, as of timeout(1)."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        return Result(124, (err.stdout or b"").decode(errors="replace"))
    except OSError as err:
        return Result(127, f"{command[0]}: {err.strerror}")
    return Result(done.returncode, done.stdout)


def _put(directory: Path, name: str, document: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    partial = directory / f".{name}"
    partial.write_text(json.dumps(document))
    partial.rename(directory / name)

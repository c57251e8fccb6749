"""kubectl as people use it: with its exit code, its streams apart, running on, and in a terminal.

`Plane.kubectl` is the short way for what is only asked; these are for tests of the conversation itself.
"""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.plane import Plane

PATIENCE = 60.0
"""In seconds; machines of tests are slow and noisy."""


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it wrote."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


class Kubectl:
    """kubectl of one person, who speaks WebSocket or SPDY to the API server."""

    def __init__(self, plane: Plane, *, websocket: bool = True, kubeconfig: Path | None = None) -> None:
        self._command = [str(plane.cluster.programs.kubectl), f"--kubeconfig={kubeconfig or plane.admin}"]
        word = "true" if websocket else "false"
        self._env = os.environ | {
            "KUBECTL_REMOTE_COMMAND_WEBSOCKETS": word,
            "KUBECTL_PORT_FORWARD_WEBSOCKETS": word,
            "TERM": "dumb",
        }

    def run(self, *args: str, input: bytes = b"", timeout: float = PATIENCE) -> Said:
        """Run it to its end."""
        done = subprocess.run(
            [*self._command, *args],
            input=input,
            capture_output=True,
            env=self._env,
            timeout=timeout,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr.decode())

    def ok(self, *args: str, input: bytes = b"", timeout: float = PATIENCE) -> bytes:
        """Run it to its good end and give what it wrote."""
        said = self.run(*args, input=input, timeout=timeout)
        assert said.code == 0, f"kubectl {' '.join(args)}: {said.text}{said.err}"
        return said.out

    @contextlib.contextmanager
    def running(self, *args: str) -> Iterator["Running"]:
        """Have it run for the time of a block."""
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*self._command, *args], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=self._env
        ) as process:
            try:
                yield Running(process)
            finally:
                process.kill()

    @contextlib.contextmanager
    def terminal(self, *args: str, rows: int = 30, columns: int = 90) -> Iterator["Terminal"]:
        """Have it run in a terminal of this size for the time of a block."""
        ours, theirs = os.openpty()
        try:
            _resize(ours, rows, columns)
            with subprocess.Popen(
                # A session of its own, so that the terminal is its terminal and tells it of new sizes.
                ["setsid", "--ctty", "--wait", *self._command, *args],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=self._env,
            ) as process:
                try:
                    yield Terminal(process, ours)
                finally:
                    process.kill()
        finally:
            os.close(ours)
            os.close(theirs)


class Running:
    """A kubectl that runs on."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.said = b""

    def write(self, data: bytes, *, last: bool = False) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()
        if last:
            self.process.stdin.close()

    def wait_said(self, text: str) -> str:
        """Wait until it has written this; gives all that it wrote."""
        assert self.process.stdout is not None
        self.said = _read_until(self.process.stdout.fileno(), text.encode(), self.said)
        return self.said.decode()

    def wait_end(self) -> int:
        return self.process.wait(timeout=PATIENCE)


class Terminal:
    """A kubectl in a terminal, and the person before it."""

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int) -> None:
        self._process = process
        self._terminal = terminal
        self.seen = b""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_seen(self, text: str) -> str:
        """Wait until the screen has shown this since the last wait; gives all since then."""
        self.seen = _read_until(self._terminal, text.encode(), self.seen)
        seen, self.seen = self.seen, b""
        return seen.decode()

    def resize(self, rows: int, columns: int) -> None:
        _resize(self._terminal, rows, columns)

    def wait_end(self) -> int:
        """Wait until it ends and give its exit code; what it still writes is read, or it would wait."""
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"still running; it showed {self.seen!r}"
            if select.select([self._terminal], [], [], 0.05)[0]:
                self.seen += os.read(self._terminal, 65536)
        return self._process.returncode


def _resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _read_until(file: int, wanted: bytes, said: bytes) -> bytes:
    deadline = time.monotonic() + PATIENCE
    while wanted not in said:
        left = deadline - time.monotonic()
        ready = select.select([file], [], [], max(left, 0))[0]
        data = os.read(file, 65536) if ready else b""
        assert data, f"{wanted!r} did not come; it said {said!r}"
        said += data
    return said

"""A node for tests of commands: a data directory whose control socket says what a script says."""

import asyncio
import os
import pty
import struct
import sys
import termios
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

from aiohttp import web

from pykubelet.server.listeners import unix_server
from pykubelet.server.manifests import control_routes
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.standalone.instance import Instance
from tests.support.pod_view import ScriptedView

PYKUBELET = str(Path(sys.executable).with_name("pykubelet"))


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command went."""

    code: int
    out: str
    err: str


@asynccontextmanager
async def answering(
    instance: Instance, view: ScriptedView, routes: Sequence[web.RouteDef] = ()
) -> AsyncIterator[None]:
    """Let a script answer for the node of a data directory, also on further routes."""
    instance.kubelet_root.mkdir(parents=True, exist_ok=True)
    async with unix_server(instance.kubelet_root / SOCKET_NAME, [*control_routes(view), *routes]):
        yield


def command(instance: Instance, name: str, *arguments: str) -> list[str]:
    """Return the command line of a `pykubelet` command on a data directory."""
    return [PYKUBELET, name, "--data-dir", str(instance.data_dir), *arguments]


async def pykubelet(
    instance: Instance, name: str, *arguments: str, stdin: bytes = b"", timeout: float = 60
) -> Ran:
    """Run a command to its end."""
    process = await asyncio.create_subprocess_exec(
        *command(instance, name, *arguments), stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment()
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


def environment() -> dict[str, str]:
    """Nothing that would change how a command writes."""
    fixed = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "xterm", "COLUMNS": "200"}
    # The code under test need not be the installed one.
    return fixed | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


class Terminal:
    """A terminal with a program in it."""

    def __init__(self, argv: list[str], rows: int = 24, columns: int = 120) -> None:
        self.said = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execvpe(argv[0], argv, environment())

    async def until(self, text: str) -> None:
        """Read until a text was written."""
        async with asyncio.timeout(60):
            while text.encode() not in self.said:
                self.said += await asyncio.to_thread(os.read, self.fd, 1024)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.fd, text.encode())

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        os.kill(self.pid, number)

    def resize(self, rows: int, columns: int) -> None:
        """Pull at the window's corner."""
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def read_all(self) -> None:
        """Read until the program has closed the terminal."""
        async with asyncio.timeout(60):
            try:
                while data := await asyncio.to_thread(os.read, self.fd, 4096):
                    self.said += data
            except OSError:
                return  # EIO: no process has it open any more

    async def end(self) -> int:
        """Wait for the program's end and return its exit code."""
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)

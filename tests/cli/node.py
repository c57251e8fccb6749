"""A node for tests of commands: a data directory whose control socket says what a script says."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pykubelet.embedded.instance import Instance
from pykubelet.server.control import control_routes
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.server.unix import unix_server
from tests.server.view import ScriptedView

PYKUBELET = str(Path(sys.executable).with_name("pykubelet"))


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command went."""

    code: int
    out: str
    err: str


@asynccontextmanager
async def answering(instance: Instance, view: ScriptedView) -> AsyncIterator[None]:
    """Let a script answer for the node of a data directory."""
    instance.kubelet_root.mkdir(parents=True, exist_ok=True)
    async with unix_server(instance.kubelet_root / SOCKET_NAME, control_routes(view)):
        yield


def command(instance: Instance, name: str, *arguments: str) -> list[str]:
    """Give the command line of a `pykubelet` command on a data directory."""
    return [PYKUBELET, name, "--data-dir", str(instance.data_dir), *arguments]


async def pykubelet(
    instance: Instance, name: str, *arguments: str, stdin: bytes = b"", timeout: float = 30
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
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "xterm", "COLUMNS": "200"}

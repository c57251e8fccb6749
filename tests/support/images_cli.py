"""Runs `pykubelet images …` on a node, as a user would."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pykubelet.standalone.instance import Instance
from tests.support.cli_node import PYKUBELET, Ran, environment


def images_command(instance: Instance, name: str, *arguments: str) -> list[str]:
    """Return the command line of `pykubelet images NAME`."""
    return [PYKUBELET, "images", name, "--data-dir", str(instance.data_dir), *arguments]


async def images(instance: Instance, name: str, *arguments: str, stdin: bytes = b"") -> Ran:
    """Run `pykubelet images NAME` to its end."""
    async with started(instance, name, *arguments) as process:
        async with asyncio.timeout(120):
            out, err = await process.communicate(stdin)
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(errors="replace"), err.decode())


@asynccontextmanager
async def started(instance: Instance, name: str, *arguments: str) -> AsyncIterator[Process]:
    """Start `pykubelet images NAME`; it is killed at the end if it still runs."""
    command = images_command(instance, name, *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment()
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

"""One look at a container, by whichever of the four means its probe names.

A look that says nothing about the container (the runtime did not answer, a port has no such name)
is tried three times. Time and memory are bounded by the probe's timeout and 10 KiB of output.

The exec probe: a command in the container; exit code 0 is health.

A command costs a hundred times what a connection costs (the runtime makes a process), mostly in its
first moments. So at most a few begin at once, and a probe that just sits there gives its slot back
after half a second: a pod whose commands hang cannot keep all others from being asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from pykubelet.api.downward_api import ExpansionTooLongError, expand_all
from pykubelet.api.pod import EnvVar, ExecAction, Probe
from pykubelet.probes.grpc_probe import grpc_check
from pykubelet.probes.network_probes import http_check, tcp_check, unverified_tls, user_agent
from pykubelet.probes.types import OUTPUT_LIMIT, BadTarget, ProbeResult, Target, terms_of
from pykubelet.transport.errors import CommandTimedOut, CriError

ExecSync = Callable[[str, list[str], int], Awaitable[tuple[int, bytes]]]
"""Runs a command: container id, command, timeout in seconds; gives exit code and output.

Raises CommandTimedOut when it took too long, CriError when it could not be run.
"""
BUSY_SECONDS = 0.5
"""For how long a command that runs counts as beginning."""


def default_slots() -> int:
    """How many commands may begin at once on this machine."""
    return max(8, 4 * (os.cpu_count() or 1))


class ExecSlots:
    """Bounds how many commands begin at once; who waits is served in order."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it until the block ends or the command is no longer beginning."""
        await self._free.acquire()
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._free.release()

        timer = asyncio.get_running_loop().call_later(BUSY_SECONDS, release)
        try:
            yield
        finally:
            timer.cancel()
            release()


async def exec_check(
    action: ExecAction, target: Target, timeout: int, exec_sync: ExecSync, slots: ExecSlots
) -> ProbeResult:
    """Run the command; its own time starts when it has a slot. A time-out is a failure. Raises BadTarget."""
    command = expand(action.command, target.container.env)
    async with slots.slot():
        try:
            code, output = await exec_sync(target.container_id, command, timeout)
        except CommandTimedOut as err:
            return ProbeResult("failure", str(err))
        except CriError as err:
            return ProbeResult("unknown", err.rpc_text, errored=True)
    text = output[:OUTPUT_LIMIT].decode(errors="replace")
    return ProbeResult("success" if code == 0 else "failure", text)


def expand(command: Sequence[str], env: Sequence[EnvVar]) -> list[str]:
    """Replace `$(NAME)` by variables that the spec spells out; `$$` is a plain dollar.

    Names that are not known stay as they are. Values from elsewhere (`valueFrom`) are empty here.
    Raises BadTarget for a command that grows beyond reason.
    """
    try:
        return expand_all(command, {variable.name: variable.value for variable in env})
    except ExpansionTooLongError as err:
        raise BadTarget(str(err)) from None


ATTEMPTS = 3


class Checker:
    """Looks at containers; holds what all looks share."""

    def __init__(self, exec_sync: ExecSync, slots: ExecSlots) -> None:
        self._exec_sync = exec_sync
        self._slots = slots
        self._tls = unverified_tls()

    async def check(self, probe: Probe, target: Target) -> ProbeResult:
        """Look, again if the look itself goes wrong."""
        outcome = ProbeResult("unknown", errored=True)
        for _ in range(ATTEMPTS):
            try:
                outcome = await self._look(probe, target)
            except BadTarget as err:
                outcome = ProbeResult("unknown", str(err), errored=True)
            if not outcome.errored:
                break
        return outcome

    async def _look(self, probe: Probe, target: Target) -> ProbeResult:
        timeout = terms_of(probe).timeout
        if probe.exec is not None:
            return await exec_check(probe.exec, target, timeout, self._exec_sync, self._slots)
        if probe.http_get is not None:
            return await http_check(probe.http_get, target, timeout, self._tls)
        if probe.tcp_socket is not None:
            return await tcp_check(probe.tcp_socket, target, timeout)
        if probe.grpc is not None:
            return await grpc_check(probe.grpc, target, timeout, user_agent("probe"))
        raise BadTarget(f"missing probe handler for {target.container.name}")

"""Execution of one probe with the handler that it specifies, with retries; and exec probes.

A result that is no evidence about the container (the runtime does not respond, a port name is unknown) is
retried, up to three attempts. Time and memory are bounded by the probe's timeout and 10 KiB of output.

An exec probe costs a hundred times as much as a connection, because the runtime creates a process, mostly in
its first milliseconds. So the number of commands that start concurrently is limited, and a command that is
still running after half a second releases its slot: a pod with hanging commands cannot block the probes of
others.
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
from pykubelet.probes.types import OUTPUT_LIMIT, BadTarget, ProbeResult, Target, probe_parameters
from pykubelet.transport.errors import CommandTimedOut, CriError

ExecSync = Callable[[str, list[str], int], Awaitable[tuple[int, bytes]]]
"""Runs a command: container ID, command, timeout in seconds; returns exit code and output.

Raises CommandTimedOut when it took too long, CriError when it could not be run.
"""
BUSY_SECONDS = 0.5
"""Seconds for which a running command holds its slot."""


def default_slots() -> int:
    """Return the number of commands that may start concurrently on this host."""
    return max(8, 4 * (os.cpu_count() or 1))


class ExecSlots:
    """A FIFO limiter of the commands that start concurrently."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot until the context ends, at most for BUSY_SECONDS; wait for one first."""
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
    """Run an exec probe; the timeout starts with its slot and is a failure. Raises BadTarget."""
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
    """Expand `$(NAME)` with the literal variables of the spec; `$$` is an escaped dollar.

    Unknown names are left unchanged. Variables with `valueFrom` are empty here. Raises BadTarget for a
    command that grows too long.
    """
    try:
        return expand_all(command, {variable.name: variable.value for variable in env})
    except ExpansionTooLongError as err:
        raise BadTarget(str(err)) from None


ATTEMPTS = 3


class Checker:
    """Runs probes of every type; owns what they share."""

    def __init__(self, exec_sync: ExecSync, slots: ExecSlots) -> None:
        self._exec_sync = exec_sync
        self._slots = slots
        self._tls = unverified_tls()

    async def check(self, probe: Probe, target: Target) -> ProbeResult:
        """Run a probe, and retry it while it has an error instead of a result."""
        outcome = ProbeResult("unknown", errored=True)
        for _ in range(ATTEMPTS):
            try:
                outcome = await self._run_handler(probe, target)
            except BadTarget as err:
                outcome = ProbeResult("unknown", str(err), errored=True)
            if not outcome.errored:
                break
        return outcome

    async def _run_handler(self, probe: Probe, target: Target) -> ProbeResult:
        timeout = probe_parameters(probe).timeout
        if probe.exec is not None:
            return await exec_check(probe.exec, target, timeout, self._exec_sync, self._slots)
        if probe.http_get is not None:
            return await http_check(probe.http_get, target, timeout, self._tls)
        if probe.tcp_socket is not None:
            return await tcp_check(probe.tcp_socket, target, timeout)
        if probe.grpc is not None:
            return await grpc_check(probe.grpc, target, timeout, user_agent("probe"))
        raise BadTarget(f"missing probe handler for {target.container.name}")

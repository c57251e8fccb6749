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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from pykubelet.api.downward_api import ExpansionTooLongError, expand_all
from pykubelet.api.pod import (
    EnvVar,
    ExecAction,
    GRPCAction,
    HTTPGetAction,
    Probe,
    TCPSocketAction,
    probe_handler,
)
from pykubelet.logs import get_logger
from pykubelet.probes.custom import CustomProbes
from pykubelet.probes.exchanges import Exchange, Exchanges
from pykubelet.probes.grpc_probe import grpc_check
from pykubelet.probes.network_probes import (
    HttpGetError,
    HttpResponse,
    evaluate_response,
    http_check,
    is_redirect,
    plain_get,
    plain_response,
    redirected_check,
    tcp_check,
    tcp_peer,
    tcp_result,
    unverified_tls,
    user_agent,
)
from pykubelet.probes.types import OUTPUT_LIMIT, BadTarget, ProbeResult, Target, probe_parameters
from pykubelet.transport.errors import CommandTimedOut, CriError

log = get_logger(__name__)
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

    def __init__(self, exec_sync: ExecSync, slots: ExecSlots, custom: CustomProbes | None = None) -> None:
        self._exec_sync = exec_sync
        self._slots = slots
        self._custom = custom or CustomProbes({})
        self.tls = unverified_tls()
        self.exchanges = Exchanges()

    async def check(self, probe: Probe, target: Target, attempts: int = ATTEMPTS) -> ProbeResult:
        """Run a probe, and retry it while it has an error instead of a result."""
        outcome = ProbeResult("unknown", errored=True)
        for _ in range(attempts):
            try:
                outcome = await self._run_handler(probe, target)
            except BadTarget as err:
                outcome = ProbeResult("unknown", str(err), errored=True)
            if not outcome.errored:
                break
        return outcome

    async def _run_handler(self, probe: Probe, target: Target) -> ProbeResult:
        timeout = probe_parameters(probe).timeout
        _, action = probe_handler(probe) or ("", None)
        match action:
            case ExecAction() if target.custom is not None:
                command = expand(action.command, target.container.env)
                return await self._custom.check(target, command, timeout)
            case ExecAction():
                return await exec_check(action, target, timeout, self._exec_sync, self._slots)
            case HTTPGetAction():
                return await http_check(action, target, timeout, self.tls)
            case TCPSocketAction():
                return await tcp_check(action, target, timeout)
            case GRPCAction():
                return await grpc_check(action, target, timeout, user_agent("probe"))
            case None:
                raise BadTarget(f"missing probe handler for {target.container.name}")


Start = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task."""


class PreparedProbe:
    """A probe of one container at one address; what its runs have in common is prepared once."""

    def __init__(self, probe: Probe, target: Target, checker: Checker) -> None:
        self.probe = probe
        self.target = target
        self.timeout = probe_parameters(probe).timeout
        self._checker = checker
        self.get = plain_get(probe.http_get, target) if probe.http_get is not None else None
        self.peer = tcp_peer(probe.tcp_socket, target) if probe.tcp_socket is not None else None

    def is_for(self, container_id: str, ip: str) -> bool:
        """Return whether this is the probe of a container at an address."""
        return self.target.container_id == container_id and self.target.ip == ip

    def start(self, start_task: Start, listener: Callable[[ProbeResult], None]) -> ProbeRun:
        """Run the probe; `listener` is called with its result, after this method has returned."""
        return ProbeRun(self, self._checker, start_task, listener)


class ProbeRun:
    """A run of a probe in progress: an exchange if that suffices, otherwise a task."""

    __slots__ = ("_checker", "_deadline", "_listener", "_prepared", "_start_task", "_step")

    def __init__(
        self,
        prepared: PreparedProbe,
        checker: Checker,
        start_task: Start,
        listener: Callable[[ProbeResult], None],
    ) -> None:
        self._prepared = prepared
        self._checker = checker
        self._start_task = start_task
        self._listener = listener
        self._deadline = asyncio.get_running_loop().time() + prepared.timeout
        self._step: Exchange | asyncio.Task[None]
        if (get := prepared.get) is not None:
            self._step = checker.exchanges.start(get.peer, get.request, self._deadline, self._handle_response)
        elif prepared.peer is not None:
            self._step = checker.exchanges.start(prepared.peer, b"", self._deadline, self._handle_connected)
        else:
            self._step = start_task(self._finish(self._check))

    def cancel(self) -> None:
        """End the run; its listener is not called."""
        self._step.cancel()

    def _handle_response(self, exchange: Exchange) -> None:
        assert self._prepared.get is not None
        try:
            response = plain_response(self._prepared.get.url, exchange)
        except HttpGetError as err:
            self._listener(ProbeResult("failure", str(err)))
            return
        if is_redirect(response) or response.broken:
            self._step = self._start_task(self._finish(partial(self._continue, response)))
        else:
            self._listener(evaluate_response(response))

    def _handle_connected(self, exchange: Exchange) -> None:
        assert self._prepared.peer is not None
        self._listener(tcp_result(self._prepared.peer, exchange))

    async def _check(self) -> ProbeResult:
        return await self._checker.check(self._prepared.probe, self._prepared.target)

    async def _continue(self, response: HttpResponse) -> ProbeResult:
        """Follow a redirect; retry a probe whose response is broken."""
        prepared, checker = self._prepared, self._checker
        assert prepared.get is not None
        assert prepared.probe.http_get is not None
        outcome = await redirected_check(
            prepared.probe.http_get, prepared.get.url, response, checker.tls, self._deadline
        )
        if outcome.errored:
            outcome = await checker.check(prepared.probe, prepared.target, ATTEMPTS - 1)
        return outcome

    async def _finish(self, check: Callable[[], Coroutine[Any, Any, ProbeResult]]) -> None:
        # Not a coroutine: one would never be awaited if this task is cancelled before it starts.
        try:
            outcome = await check()
        except Exception as err:  # task boundary: a bug in one probe must not stop all others
            target = self._prepared.target
            log.exception(
                err,
                "Unexpected error in probe",
                containerID=target.container_id,
                containerName=target.container.name,
            )
            outcome = ProbeResult("unknown", f"{type(err).__name__}: {err}", errored=True)
        self._listener(outcome)

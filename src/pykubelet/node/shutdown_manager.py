"""Node shutdown manager: holds logind's delay inhibitor, and drains the node before a shutdown.

    no shutdown    the inhibitor is held; PrepareForShutdown(true) begins
    shutting down  the node is NotReady, new pods are rejected, the pods terminate (`PodDrain`); then the
                   inhibitor is released, and logind continues
    cancelled      PrepareForShutdown(false): the drain ends, the inhibitor is acquired again, static pods
                   start again; other pods that were terminated stay so

logind delays a shutdown by InhibitDelayMaxSec at most. A shorter value than the periods need is raised by a
drop-in file; if it stays shorter, all periods are shortened in proportion. logind may be absent, restart or
lose its state, and the bus may end: the inhibitor stays held, the connection is retried with back-off, and
logind's own state decides afterwards. A kubelet that starts during a shutdown, because the previous process
was killed, cannot inhibit it any more and drains what it can.

`drain_for_stop` does the same without logind, for a kubelet that is stopped (`--drain-on-stop`).
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pykubelet.linux.dbus import DBusError
from pykubelet.linux.logind import (
    DROP_IN_DIRECTORY,
    InhibitorLock,
    Logind,
    LogindRestarted,
    connect_logind,
    overriding_delay,
    read_delay_settings,
    write_delay_drop_in,
)
from pykubelet.logs import get_logger
from pykubelet.node.shutdown_drain import STATUS_SECONDS, PodDrain
from pykubelet.node.shutdown_groups import ShutdownPeriod, fit_periods, total_seconds
from pykubelet.node.shutdown_state import NodeShutdownState, ShutdownTimes
from pykubelet.node.status_loop import Record
from pykubelet.util.backoff import Backoff, ErrorLogLimiter
from pykubelet.util.tasks import TaskScope, finish_in_thread

log = get_logger(__name__)
RELOAD_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Waits in seconds until logind has read its files again."""
RETRY_LIMIT_SECONDS = 30.0
"""Longest delay between two connections to the bus."""
RELEASE_SECONDS = 0.5
"""Seconds before the end of logind's delay at which the inhibitor is released."""
WHO, WHY = "kubelet", "Kubelet needs time to handle node shutdown"


class NodeShutdownManager:
    """Drains the node before a shutdown; `run` watches logind."""

    def __init__(
        self,
        periods: Sequence[ShutdownPeriod],
        drain: PodDrain,
        state: NodeShutdownState,
        record: Record,
        scope: TaskScope,
        *,
        times: ShutdownTimes | None = None,
        on_cancelled: Callable[[], None] = lambda: None,
        connect: Callable[[], AbstractAsyncContextManager[Logind]] = connect_logind,
        drop_in_directory: Path = DROP_IN_DIRECTORY,
    ) -> None:
        """Initialize; `record` records an event about the node.

        `on_cancelled` is called after a cancelled shutdown, and must not block.
        """
        self._periods = tuple(periods)
        self._drain = drain
        self._state = state
        self._record = record
        self._scope = scope
        self._times = times
        self._on_cancelled = on_cancelled
        self._connect = connect
        self._drop_in_directory = drop_in_directory
        self._lock: InhibitorLock | None = None
        self._delay = math.inf
        """Seconds by which logind delays a shutdown."""
        self._draining: asyncio.Task[Any] | None = None
        self._stopping = False
        self._error_log = ErrorLogLimiter(log, "Failed to watch the node for shutdown events")

    @property
    def is_inhibiting(self) -> bool:
        """Whether the kubelet delays shutdowns."""
        return self._lock is not None and self._lock.is_held

    @property
    def stop_seconds(self) -> float:
        """Longest duration of `drain_for_stop`, in seconds."""
        return total_seconds(self._periods) + STATUS_SECONDS

    async def run(self) -> NoReturn:
        """Watch logind until cancelled."""
        clock, backoff = asyncio.get_running_loop().time, Backoff(limit=RETRY_LIMIT_SECONDS)
        try:
            while True:
                try:
                    async with self._connect() as logind:
                        await self._watch(logind)
                except OSError as err:
                    self._error_log.failed(err, clock())
                await asyncio.sleep(backoff.next(clock()))
                log.v(1).info("Restarting watch for node shutdown events")
        finally:
            self._release()

    async def drain_for_stop(self) -> None:
        """Terminate all pods, because the kubelet is stopped; wait for a drain in progress."""
        self._stopping = True
        if self._draining is None:
            self._start_drain(math.inf)
        assert self._draining is not None
        await asyncio.wait([self._draining])

    async def _watch(self, logind: Logind) -> NoReturn:
        async with logind.watch() as events:
            await self._take_over(logind)
            self._error_log.succeeded(asyncio.get_running_loop().time())
            while (event := await events.next()) is not None:
                if isinstance(event, LogindRestarted):
                    log.info("logind was restarted")
                    await self._take_over(logind)
                elif event.active:
                    self._begin()
                else:
                    await self._cancel()
                    await self._acquire(logind)
        raise DBusError(errno.ECONNRESET, "the connection to the system bus is lost")

    async def _take_over(self, logind: Logind) -> None:
        """Bring the manager into the state that logind is in."""
        self._delay = await self._ensure_delay(logind)
        if await logind.is_preparing():
            self._begin()
            return
        if self._state.active:
            await self._cancel()
        await self._acquire(logind)

    async def _ensure_delay(self, logind: Logind) -> float:
        """Raise the longest delay if it is too short; return the delay that applies, in seconds."""
        needed = total_seconds(self._periods)
        delay = await logind.max_delay()
        if delay >= needed:
            return delay
        try:
            value = math.ceil(needed + STATUS_SECONDS)
            await finish_in_thread(partial(write_delay_drop_in, value, self._drop_in_directory))
            await logind.reload()
            for seconds in RELOAD_SECONDS:
                await asyncio.sleep(seconds)
                delay = await logind.max_delay()
                if delay >= needed:
                    log.info("Raised the longest delay of logind", seconds=delay)
                    return delay
        except DBusError:
            raise
        except OSError as err:
            log.error(err, "Failed to raise the longest delay of logind", path=self._drop_in_directory)
        other = overriding_delay(await finish_in_thread(read_delay_settings))
        log.warning(
            "logind delays a shutdown for less time than the grace periods need, they are shortened: "
            "remove the drop-in file that overrides InhibitDelayMaxSec",
            seconds=delay,
            needed=needed,
            path=other.path if other is not None else None,
        )
        return delay

    async def _acquire(self, logind: Logind) -> None:
        """Acquire the inhibitor; the previous one is released after that."""
        lock = await logind.inhibit(WHO, WHY)
        self._release()
        self._lock = lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _begin(self) -> None:
        if self._draining is not None:
            return
        log.info("Shutdown manager detected new shutdown event", event="shutdown")
        self._record("Normal", "Shutdown", "Shutdown manager detected shutdown event")
        self._start_drain(self._delay)

    def _start_drain(self, available: float) -> None:
        self._state.set(True)
        self._draining = self._scope.start(self._run_drain(available), name="node-shutdown")

    async def _run_drain(self, available: float) -> None:
        """Drain the node and release the inhibitor, also after a failure."""
        periods = fit_periods(self._periods, available)
        try:
            if self._times is not None:
                await self._times.start(datetime.now(UTC))
            await self._drain.run(periods, available - RELEASE_SECONDS)
        except Exception as err:  # a bug must not block the shutdown
            log.exception(err, "Failed to drain the node before its shutdown")
        finally:
            try:
                if self._times is not None:
                    await self._times.end(datetime.now(UTC))
            finally:
                self._release()
                log.info("Shutdown manager completed processing shutdown event, node will shutdown shortly")

    async def _cancel(self) -> None:
        if not self._state.active or self._stopping:
            return
        log.info("Shutdown manager detected new shutdown event", event="cancelled")
        self._record("Normal", "Shutdown", "Shutdown manager detected shutdown cancellation")
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait([self._draining])
            self._draining = None
        self._state.set(False)
        self._on_cancelled()

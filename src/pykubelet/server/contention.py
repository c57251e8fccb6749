"""Contention profile of the event loop, for `/debug/pprof/block` (`enableContentionProfiling`).

Go's block profile sums up how long goroutines wait for locks and channels, by stack. Here the tasks are
sampled: the time since the last sample is added to the stack of each task that waits. As with Go, tasks that
sleep or wait for the network do not count, and workers that wait for work do. A further entry is the time for
which callbacks held the event loop while others were due. Nothing is measured unless `run` runs; the profile
is lost with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

SAMPLE_SECONDS = 0.25
"""Seconds between two samples, the resolution of the profile."""
MAX_STACKS = 2000
"""Stacks that are counted; what waits elsewhere is summed up in one entry."""
_MAX_DEPTH = 32
_NANOSECONDS = 1_000_000_000
_LOOP_LATENESS_SECONDS = 0.01
"""Lateness of the sampler that is contention for the event loop; less is the resolution of timers."""
_NOT_CONTENTION = (("asyncio/tasks.py", "sleep"), ("asyncio/streams.py", ""))
"""File and function (all if empty) of waits for time and for the network."""

Stack = tuple[tuple[CodeType, int], ...]
"""Code and line of each coroutine, the innermost first."""


@dataclass(slots=True)
class _Waits:
    seconds: float = 0.0
    count: int = 0


class ContentionProfile:
    """Time that tasks have waited, by stack."""

    def __init__(self) -> None:
        self._waits: dict[Stack, _Waits] = {}
        self._other = _Waits()
        self._loop = _Waits()
        self._last: dict[asyncio.Task[Any], Stack] = {}
        """Stacks of the tasks that were waiting at the last sample."""

    async def run(self) -> None:
        """Take samples until cancelled."""
        clock = asyncio.get_running_loop().time
        last = clock()
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            now = clock()
            if (late := now - last - SAMPLE_SECONDS) >= _LOOP_LATENESS_SECONDS:
                self._loop.seconds += late
                self._loop.count += 1
            self.sample(now - last)
            last = now

    def sample(self, seconds: float) -> None:
        """Add the time since the last sample to the stacks of the tasks that wait."""
        waiting: dict[asyncio.Task[Any], Stack] = {}
        for task in asyncio.all_tasks():
            stack = tuple(_frames(task.get_coro()))
            # A task without further frames has not begun, or is running.
            if not stack or _is_idle(stack[0][0]):
                continue
            waiting[task] = stack
            waits = self._entry(stack)
            waits.seconds += seconds
            if self._last.get(task) != stack:
                waits.count += 1
        self._last = waiting

    def text(self) -> str:
        """Return the profile in the format of Go's `debug=1`, the longest waits first."""
        lines = ["--- contention:", f"cycles/second={_NANOSECONDS}"]
        if self._loop.count:
            lines += [*_entry_lines(self._loop), "#\tevent loop, held by callbacks"]
        longest = sorted(self._waits.items(), key=lambda item: item[1].seconds, reverse=True)
        for stack, waits in longest:
            lines += _entry_lines(waits)
            lines += [f"#\t{code.co_qualname}\t{code.co_filename}:{line}" for code, line in stack]
        if self._other.count:
            lines += [*_entry_lines(self._other), "#\tfurther stacks"]
        return "\n".join([*lines, ""])

    def _entry(self, stack: Stack) -> _Waits:
        waits = self._waits.get(stack)
        if waits is None:
            if len(self._waits) >= MAX_STACKS:
                return self._other
            waits = self._waits[stack] = _Waits()
        return waits


def _entry_lines(waits: _Waits) -> list[str]:
    return [f"{round(waits.seconds * _NANOSECONDS)} {waits.count} @"]


def _is_idle(code: CodeType) -> bool:
    return any(
        code.co_filename.endswith(file) and function in ("", code.co_name)
        for file, function in _NOT_CONTENTION
    )


def _frames(coroutine: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield code and line of the coroutines that a suspended one awaits, from the innermost one outwards."""
    frames: list[FrameType] = []
    while coroutine is not None and len(frames) < _MAX_DEPTH:
        if getattr(coroutine, "cr_running", False):
            return  # it is the running task
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    for frame in reversed(frames):
        yield frame.f_code, frame.f_lineno

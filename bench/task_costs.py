"""A kubelet that counts what its tasks and callbacks cost: `python -m bench.task_costs OUTPUT FLAGS…`.

It is the kubelet with a slower event loop, for finding what wakes it up. On SIGUSR2 it appends to OUTPUT a
table since the last signal: processor time of the main thread per second, calls per second, mean and longest
call, by name of the task (uids replaced) or of the callback. Work of the loop itself, of protocols that read
sockets, and of threads is the rest of the first line.
"""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVarTuple

import uvloop

from pykubelet.cli.kubelet import main

_UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]+")
_ROWS = 60
Args = TypeVarTuple("Args")


@dataclass(slots=True)
class Cost:
    """Calls of one kind; times are nanoseconds of the main thread."""

    calls: int = 0
    total: int = 0
    longest: int = 0

    def add(self, spent: int) -> None:
        """Add a call."""
        self.calls += 1
        self.total += spent
        self.longest = max(self.longest, spent)


class Costs:
    """Costs of all callbacks since the last table."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._gc_started = 0
        self._reset()

    def _reset(self) -> None:
        self._by_name: defaultdict[str, Cost] = defaultdict(Cost)
        self._since = time.monotonic(), time.process_time(), time.thread_time()

    def counted(self, callback: Callable[..., object]) -> Callable[..., object]:
        """Return a callback whose cost is counted."""

        def run(*args: object) -> object:
            name, started = name_of(callback), time.thread_time_ns()
            try:
                return callback(*args)
            finally:
                self._by_name[name].add(time.thread_time_ns() - started)

        return run

    def on_gc(self, phase: str, info: dict[str, int]) -> None:
        """Count a garbage collection (`gc.callbacks`)."""
        if phase == "start":
            self._gc_started = time.thread_time_ns()
        else:
            self._by_name[f"gc generation {info['generation']}"].add(time.thread_time_ns() - self._gc_started)

    def write(self) -> None:
        """Append the table, and start the next one."""
        began, process, thread = self._since
        seconds = time.monotonic() - began
        rows = sorted(self._by_name.items(), key=lambda row: -row[1].total)
        lines = [
            f"{seconds:.1f} s: process {100 * (time.process_time() - process) / seconds:.3f} % of a core, "
            f"main thread {100 * (time.thread_time() - thread) / seconds:.3f} %, counted below "
            f"{sum(cost.total for _, cost in rows) / 1e7 / seconds:.3f} %"
        ]
        lines += [
            f"{cost.total / 1e6 / seconds:8.3f} ms/s {cost.calls / seconds:8.2f}/s  mean "
            f"{cost.total / 1e3 / cost.calls:6.0f} us  longest {cost.longest / 1e3:7.0f} us  {name}"
            for name, cost in rows[:_ROWS]
        ]
        with self._output.open("a") as file:
            file.write("\n".join(lines) + "\n\n")
        self._reset()


def name_of(callback: Any) -> str:
    """Return the name of a task that a callback steps, or of the callback."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        work = getattr(owner.get_coro(), "__qualname__", "")
        name = owner.get_name()
        return f"task {'' if name.startswith('Task-') else _UID.sub('UID', name)} {work}"
    while hasattr(callback, "func"):
        callback = callback.func
    return f"callback {getattr(callback, '__qualname__', callback)}"


class CountingLoop(uvloop.Loop):
    """An event loop that counts what its callbacks cost."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self._costs = costs
        self.add_signal_handler(signal.SIGUSR2, costs.write)

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        """Count the callback."""
        return super().call_soon(self._costs.counted(callback), *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Count the callback; `call_at` ends here, too."""
        return super().call_later(delay, self._costs.counted(callback), *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        """Count the callback."""
        return super().call_soon_threadsafe(self._costs.counted(callback), *args, context=context)

    def add_reader(self, fd: Any, callback: Callable[[*Args], Any], *args: *Args) -> None:
        """Count the callback."""
        super().add_reader(fd, self._costs.counted(callback), *args)


if __name__ == "__main__":
    costs = Costs(Path(sys.argv[1]))
    gc.callbacks.append(costs.on_gc)
    uvloop.new_event_loop = lambda: CountingLoop(costs)
    main(sys.argv[2:])

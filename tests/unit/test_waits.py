"""Computed waits: each loop that sleeps until a due time gets past it, also by loop time.

The clock of loop time moves by microseconds only, and a timer ends up to a nanosecond early: a loop that
sleeps for an unbounded remainder below that spins on a clock that stands still.
"""

import ast
import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pykubelet
from pykubelet.api.pod import Pod
from pykubelet.podsync.contract import KillPodOptions, Outcome, Remnants
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.util.tasks import SHORTEST_WAIT_SECONDS, TaskScope, in_own_thread, wait_seconds
from pykubelet.volumes.usage import VolumeStatCalculator
from tests.unit.apiserver.test_event_recorder import WEB, Store, recording
from tests.unit.podworkers.test_worker import pod as plain_pod
from tests.unit.volumes.test_usage import pod as pod_with_disk

TINY = 6e-10
"""Seconds below the resolution of asyncio's timers."""

pytestmark = pytest.mark.timeout(20)


def test_wait_seconds_short_remainder_is_bounded() -> None:
    assert wait_seconds(5.0) == 5.0
    assert wait_seconds(TINY) == wait_seconds(0) == wait_seconds(-3.0) == SHORTEST_WAIT_SECONDS


@pytest.mark.looptime
async def test_volume_usage_due_time_between_ticks_measures_again(tmp_path: Path) -> None:
    found: list[float] = []

    def pods() -> list[Pod]:
        assert len(found) < 50, "the loop spins"
        found.append(asyncio.get_running_loop().time())
        return [pod_with_disk()]

    usage = VolumeStatCalculator(tmp_path, pods, 60.0, rng=lambda: 0.25 + TINY / 60)
    async with TaskScope() as scope:
        running = scope.start(usage.run(), name="usage")
        await asyncio.sleep(200)
        assert not running.done()
    assert found[-1] > 100


@pytest.mark.looptime
async def test_pod_worker_deadline_between_ticks_is_reached() -> None:
    class Deadline:
        """A pod that ends at a time of the loop's clock."""

        steps = 0

        async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
            self.steps += 1
            assert self.steps < 50, "the worker spins"
            left = 10 + TINY - asyncio.get_running_loop().time()
            return left <= 0, left

        async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
            pass

        async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
            return None

        async def remove(self, remnants: Remnants) -> None:
            pass

    life = Deadline()
    async with TaskScope() as scope:
        workers = PodWorkers(scope, 60)
        workers.start(life)
        workers.sync(plain_pod("1"))
        await asyncio.sleep(11)
        assert len(workers) == 0
    assert life.steps < 5


@pytest.mark.looptime
async def test_event_recorder_hold_between_ticks_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykubelet.apiserver.events.HOLD_SECONDS", 1 + TINY)
    store, looks = Store(), 0

    def crowded() -> bool:
        nonlocal looks
        looks += 1
        assert looks < 100, "the recorder spins"
        return True

    async with recording(store, crowded) as recorder:
        recorder.record(WEB, "Normal", "Pulled", "a")
        await asyncio.sleep(2)
    assert store.calls == ["create"]


@pytest.mark.looptime
async def test_in_own_thread_caller_cancelled_waits_at_most_cancel_timeout() -> None:
    release = threading.Event()
    waiting = asyncio.ensure_future(in_own_thread(release.wait, name="stuck", cancel_timeout=3 + TINY))
    await asyncio.sleep(1)
    waiting.cancel()
    try:
        await asyncio.wait([waiting], timeout=10)
        assert waiting.cancelled()
    finally:
        release.set()


# The source itself

_CLOCKS = {"time", "monotonic", "clock", "_clock", "now"}
_WAITS = {"sleep", "timeout", "wait", "call_later", "wait_for"}
# Parsing takes long: only a file that subtracts the present time from something has to be looked at.
_SUBTRACTS_CLOCK = re.compile(rf" - [\w.()]*\b({'|'.join(_CLOCKS)})\(\)")


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_remainder(node: ast.AST, remainders: set[str]) -> bool:
    """Return whether an expression has a due time less the present one that `wait_seconds` does not bound."""
    if isinstance(node, ast.Call) and _name(node.func) == "wait_seconds":
        return False
    if isinstance(node, ast.Name) and node.id in remainders:
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        right = node.right
        if isinstance(right, ast.Call) and not right.args and _name(right.func) in _CLOCKS:
            return True
    return any(_is_remainder(child, remainders) for child in ast.iter_child_nodes(node))


def _unbounded(function: ast.AsyncFunctionDef | ast.FunctionDef) -> Iterator[int]:
    """Yield the lines of a function at which it waits for a remainder that is not bounded."""
    remainders: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.NamedExpr) and _is_remainder(node.value, set()):
            remainders.add(node.target.id)
        elif isinstance(node, ast.Assign) and _is_remainder(node.value, set()):
            remainders |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _name(node.func) in _WAITS:
            delays = [*node.args[:1], *(key.value for key in node.keywords if key.arg == "timeout")]
            if any(_is_remainder(delay, remainders) for delay in delays):
                yield node.lineno


def _places(source: str) -> list[int]:
    if _SUBTRACTS_CLOCK.search(source) is None:
        return []
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sorted({line for function in functions for line in _unbounded(function)})


def test_source_waits_for_remainders_are_bounded() -> None:
    root = Path(pykubelet.__file__).parent
    found = {str(path.relative_to(root)): _places(path.read_text()) for path in root.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_source_check_unbounded_remainder_is_found() -> None:
    loop = """
async def run(self):
    while (left := self.due - loop.time()) > 0:
        await asyncio.sleep({})
"""
    assert _places(loop.format("left")) == [4]
    assert _places(loop.format("min(self.due - loop.time(), 5)")) == [4]
    assert _places(loop.format("wait_seconds(left)")) == []
    assert _places(loop.format("5")) == []

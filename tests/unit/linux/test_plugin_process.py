"""Programs of others are ended with everything they started, whenever nobody waits for them any more."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from pykubelet.linux.processes import run_bounded
from pykubelet.util.tasks import run_or_undo


async def test_run_or_undo_cancelled_undoes_result() -> None:
    going, begins, undone = asyncio.Event(), asyncio.Event(), []

    async def begin() -> str:
        begins.set()
        await going.wait()
        return "it"

    async def undo(what: str) -> None:
        undone.append(what)

    waiting = asyncio.ensure_future(run_or_undo(begin(), undo))
    await begins.wait()
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert undone == ["it"]
    # And kept when somebody does; what fails to begin has nothing to undo.
    assert await run_or_undo(begin(), undo) == "it"

    async def fail() -> str:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await run_or_undo(fail(), undo)
    assert undone == ["it"]


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_run_bounded_cancelled_during_start_leaves_no_processes(
    tmp_path: Path, scripts: Callable[[str, str], Path], factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """At any moment of its start: neither it nor what it has started by then is left."""
    script = scripts("program", "sleep 300 & echo $! $$ > $1.new; mv $1.new $1; wait")
    argv, environment = [str(script)], {"PATH": "/usr/bin:/bin"}

    async def once(number: int) -> None:
        told = tmp_path / str(number)
        running = asyncio.ensure_future(
            run_bounded([*argv, str(told)], environment, seconds=60, max_bytes=1000)
        )
        await asyncio.sleep(0)
        for _ in range(number):
            await asyncio.sleep(0)
        # The last ones have time to start something.
        await asyncio.sleep(max(0, number - 19) * 0.01)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=30)
        assert done, "it waits for what it should have ended"

    async def all_of_them() -> None:
        for number in range(30):
            await once(number)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(all_of_them())
    deadline = time.monotonic() + 30
    for told in tmp_path.glob("[0-9]*"):
        # What it started was killed with it, and nobody waits for that to be over.
        while any(is_alive(pid) for pid in told.read_text().split()):
            assert time.monotonic() < deadline, "something is left"
            time.sleep(0.01)

import asyncio
import errno
import gc
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.linux.inotify import Event, Inotify, Mask, parse_events

IN_FOLDER = Mask.CREATE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.DELETE


def packed(event: Event) -> bytes:
    name = os.fsencode(event.name)
    if name:
        name += b"\0" * (16 - len(name) % 16)
    return struct.pack("iIII", event.watch, event.mask, event.cookie, len(name)) + name


events = st.builds(
    Event,
    st.integers(-1, 2**31 - 1),
    st.sampled_from(Mask),
    st.integers(0, 2**32 - 1),
    st.text(st.characters(blacklist_characters="\0/", blacklist_categories=["Cs"]), max_size=60),
)


@given(st.lists(events))
def test_parse_events_joined_events_round_trip(many: list[Event]) -> None:
    assert parse_events(b"".join(map(packed, many))) == many


def test_parse_events_non_utf8_name_is_preserved() -> None:
    [event] = parse_events(struct.pack("iIII", 1, Mask.CREATE, 0, 16) + b"\xff\xfe".ljust(16, b"\0"))
    assert os.fsencode(event.name) == b"\xff\xfe"


def test_parse_events_queue_overflow_is_flagged() -> None:
    [event] = parse_events(struct.pack("iIII", -1, Mask.Q_OVERFLOW, 0, 0))
    assert event.overflowed


async def next_of(changes: Inotify) -> Event:
    async with asyncio.timeout(45):
        return await anext(changes)


async def everyday_use(folder: Path) -> None:
    with Inotify() as changes:
        watch = changes.watch(folder, IN_FOLDER)
        (folder / "a").write_text("x")
        assert await next_of(changes) == Event(watch, Mask.CREATE, 0, "a")
        (folder / "a").rename(folder / "b")
        left, arrived = await next_of(changes), await next_of(changes)
        assert (left.mask, left.name) == (Mask.MOVED_FROM, "a")
        assert (arrived.mask, arrived.name) == (Mask.MOVED_TO, "b")
        assert left.cookie == arrived.cookie != 0

        # now the event comes while somebody already waits
        waiting = asyncio.ensure_future(next_of(changes))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        (folder / "b").unlink()
        assert (await waiting).mask == Mask.DELETE
        (folder / "d").mkdir()
        assert (await next_of(changes)).mask == Mask.CREATE | Mask.ISDIR


async def unwatching_is_confirmed(folder: Path) -> None:
    with Inotify() as changes:
        watch = changes.watch(folder, IN_FOLDER)
        changes.unwatch(watch)
        changes.unwatch(watch)  # the kernel already forgot it: fine
        (folder / "a").touch()
        assert (await next_of(changes)).mask == Mask.IGNORED


async def cancelling_frees_everything(folder: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def watch_for_ever() -> None:
        with Inotify() as changes:
            changes.watch(folder, IN_FOLDER)
            started.set()
            async for _ in changes:
                pass

    started = asyncio.Event()
    gc.collect()  # what earlier tests left open is closed now and not meanwhile
    before = descriptors()
    task = asyncio.ensure_future(watch_for_ever())
    await started.wait()
    await asyncio.sleep(0)
    assert descriptors() == before + 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert descriptors() == before

    # the loop must not think that the number still is a reader
    with Inotify() as again:
        again.watch(folder, IN_FOLDER)
        (folder / "later").touch()
        assert (await next_of(again)).name == "later"


async def closing_ends_the_iteration(folder: Path) -> None:
    changes = Inotify()
    changes.watch(folder, IN_FOLDER)

    heard: list[Event] = []

    async def collect() -> None:
        async for event in changes:
            heard.append(event)

    collecting = asyncio.ensure_future(collect())
    await asyncio.sleep(0.01)
    (folder / "a").touch()
    async with asyncio.timeout(45):
        while not heard:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    changes.close()
    changes.close()
    async with asyncio.timeout(45):
        await collecting
    assert len(heard) == 1
    with pytest.raises(OSError, match="closed"):
        changes.watch(folder, IN_FOLDER)


SCENARIOS = [
    everyday_use,
    unwatching_is_confirmed,
    cancelling_frees_everything,
    closing_ends_the_iteration,
]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_inotify_scenario_passes_on_asyncio_and_uvloop(
    loop: Callable[[], asyncio.AbstractEventLoop],
    scenario: Callable[[Path], Coroutine[Any, Any, None]],
    tmp_path: Path,
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario(tmp_path))


async def test_inotify_kernel_queue_overflow_is_reported(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 20_000:
        pytest.skip("the queue is too long to fill here")
    with Inotify() as changes:
        changes.watch(tmp_path, Mask.CREATE | Mask.DELETE)
        for number in range(limit // 2 + 10):
            file = tmp_path / str(number)
            file.touch()
            file.unlink()
        async with asyncio.timeout(45):
            async for event in changes:
                if event.overflowed:
                    break
        assert event.watch == -1


def test_inotify_watch_missing_path_error_names_it() -> None:
    with Inotify() as changes, pytest.raises(FileNotFoundError) as caught:
        changes.watch("/no/such/place", Mask.OPEN)
    assert caught.value.filename == "/no/such/place"


def test_inotify_too_many_instances_error_names_sysctl() -> None:
    # A process of its own with few descriptors gets the same answer without harm to its neighbours.
    script = (
        "import resource\n"
        "from pykubelet.linux.inotify import Inotify\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "try:\n"
        "    held = [Inotify() for _ in range(20)]\n"
        "except OSError as err:\n"
        "    print(err)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert f"[Errno {errno.EMFILE}]" in out
    assert "fs.inotify.max_user_instances" in out

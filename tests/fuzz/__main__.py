"""Fuzz each target for a bounded time; non-zero, with the input that did it, when something broke.

    python -m tests.fuzz                                  a minute each
    python -m tests.fuzz --only manifests --seconds 5     one of them, quickly
    python -m tests.fuzz --only manifests --input FILE    an input again: the bytes as they were printed

An input that takes longer than ten seconds counts as one that broke it. Whoever interrupts it finds
nothing left behind.
"""

import argparse
import ast
import asyncio
import itertools
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.fuzz.mutate import spoil
from tests.fuzz.targets import TARGETS, Target

LONGEST_SECONDS = 10.0
"""How long a target may take for one input."""


class Hung(Exception):
    """A target took too long for its input; not a TimeoutError, which targets may expect."""


class Broken(Exception):
    """An input broke a target; the text has all that it takes to do it again."""


async def fuzz(name: str, target: Target, seconds: float, seed: int) -> int:
    """Fuzz one target; gives how many inputs it took. Raises Broken."""
    dice = random.Random(f"{name} {seed}")
    spoiled = (spoil(dice.choice(target.seeds), target.seeds, dice) for _ in itertools.count())
    return await feed(f"{name}, seed {seed}", target, itertools.chain(target.seeds, spoiled), seconds)


async def feed(name: str, target: Target, inputs: Iterable[bytes], seconds: float) -> int:
    """Give a target inputs until they or the time are over; gives how many. Raises Broken."""
    count = 0
    async with target.open() as take:
        end = time.monotonic() + seconds
        for data in inputs:
            if time.monotonic() >= end:
                break
            await asyncio.sleep(0)  # many a target never waits, and an interruption must be heard
            try:
                with _alarm():
                    await take(data)
            except Exception as err:  # whatever it is: finding it is what this is for
                told = "".join(traceback.format_exception(err))
                raise Broken(f"{name}, input {count}:\n{data!r}\n{told}") from err
            count += 1
    return count


@contextmanager
def _alarm() -> Iterator[None]:
    """Raise Hung in the middle of whatever is being done when the block takes too long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hung(f"it took longer than {LONGEST_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def _until_interrupted(work: "asyncio.Task[int]") -> int:
    """Wait for the work; an interruption lets it clean up first."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    return await work


def main(argv: Sequence[str] | None = None, targets: Mapping[str, Target] = TARGETS) -> int:
    """Fuzz everything, or what is asked for."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seconds", type=float, default=60, help="how long to fuzz each target")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="repeat a run")
    parser.add_argument("--only", choices=sorted(targets), help="fuzz only this")
    parser.add_argument("--input", help="a file with one input as it was printed; needs --only")
    options = parser.parse_args(argv)
    if options.input and not options.only:
        parser.error("--input needs --only")
    broken = False
    for name, target in targets.items():
        if options.only not in (None, name):
            continue

        async def run(name: str = name, target: Target = target) -> int:
            if options.input:
                text = sys.stdin.read() if options.input == "-" else Path(options.input).read_text()
                work = feed(name, target, [ast.literal_eval(text.strip())], options.seconds)
            else:
                work = fuzz(name, target, options.seconds, options.seed)
            return await _until_interrupted(asyncio.create_task(work))

        try:
            count = asyncio.run(run())
        except Broken as err:
            broken = True
            print(f"BROKE {err}", flush=True)
        except asyncio.CancelledError:
            print("interrupted", flush=True)
            return 130
        else:
            print(f"ok    {name}: {count} inputs, seed {options.seed}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Fuzz each target for a bounded time; non-zero, with the input that did it, when something broke."""

import argparse
import asyncio
import random
import sys
import time
import traceback

from tests.fuzz.mutate import spoil
from tests.fuzz.targets import TARGETS, Target


async def fuzz(name: str, target: Target, seconds: float, seed: int) -> int:
    """Fuzz one target; gives how many inputs it took. Raises AssertionError when one of them broke it."""
    dice = random.Random(f"{name} {seed}")
    count, end = 0, time.monotonic() + seconds
    async with target.open() as take:
        for good in target.seeds:
            await take(good)
        while time.monotonic() < end:
            data = spoil(dice.choice(target.seeds), target.seeds, dice)
            try:
                await take(data)
            except Exception as err:  # whatever it is: finding it is what this is for
                told = "".join(traceback.format_exception(err))
                raise AssertionError(f"{name}, seed {seed}, input {count}: {data!r}\n{told}") from err
            count += 1
    return count


def main() -> int:
    """Fuzz everything."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seconds", type=float, default=60, help="how long to fuzz each target")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="repeat a run")
    parser.add_argument("--only", choices=sorted(TARGETS), help="fuzz only this")
    options = parser.parse_args()
    broken = False
    for name, target in TARGETS.items():
        if options.only not in (None, name):
            continue
        try:
            count = asyncio.run(fuzz(name, target, options.seconds, options.seed))
        except AssertionError as err:
            broken = True
            print(f"BROKE {err}")
        else:
            print(f"ok    {name}: {count} inputs in {options.seconds:g} s, seed {options.seed}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

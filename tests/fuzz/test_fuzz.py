"""The fuzzers themselves, for a moment each, with dice that always fall the same way."""

import random

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.mutate import spoil
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
async def test_a_moment_of_each(name: str) -> None:
    assert await fuzz(name, TARGETS[name], 1, 1) > 5


def test_the_same_dice_give_the_same_input() -> None:
    seeds = TARGETS["requests"].seeds
    once, again = (spoil(seeds[0], seeds, random.Random(7)) for _ in range(2))
    assert once == again

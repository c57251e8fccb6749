"""The fuzzers themselves, for a moment each, with dice that always fall the same way."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fuzz import __main__ as program
from tests.fuzz.__main__ import Broken, fuzz, main
from tests.fuzz.mutate import spoil
from tests.fuzz.targets import TARGETS, Take, Target

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
async def test_fuzz_each_target_runs_briefly_without_failure(name: str) -> None:
    assert await fuzz(name, TARGETS[name], 1, 1) > 5


def test_spoil_same_seed_yields_same_input() -> None:
    seeds = TARGETS["requests"].seeds
    once, again = (spoil(seeds[0], seeds, random.Random(7)) for _ in range(2))
    assert once == again


@asynccontextmanager
async def _weak() -> AsyncIterator[Take]:
    async def take(data: bytes) -> None:
        if b"loop" in data:
            while True:
                pass
        if not data.startswith(b"good"):
            raise KeyError("a bug")

    yield take


WEAK = {"weak": Target([b"good"], _weak), "strong": TARGETS["kmsg lines"]}


def test_fuzz_failure_is_printed_and_reproducible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--seconds", "5", "--seed", "3", "--only", "weak"], WEAK) == 1
    words, data, *_ = capsys.readouterr().out.splitlines()
    assert words.startswith("BROKE weak, seed 3, input ")
    file = tmp_path / "input"
    file.write_text(data)
    assert main(["--only", "weak", "--input", str(file)], WEAK) == 1
    assert "KeyError: 'a bug'" in capsys.readouterr().out
    assert main(["--only", "strong", "--input", str(file)], WEAK) == 0


async def test_feed_target_hangs_raises_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LONGEST_SECONDS", 0.2)
    with pytest.raises(Broken, match="took longer"):
        await program.feed("weak", WEAK["weak"], [b"good", b"loop"], 60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["requests", "configuration"])
def test_fuzz_interrupted_leaves_no_files(name: str, number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--only", name]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not any(tmp_path.iterdir()):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []

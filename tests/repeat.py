"""Run the tests repeatedly, each time with another seed, until a run fails or hangs.

    python -m tests.repeat --times=20 -- -m "not machine" --ignore=tests/cluster

The seeds follow from the first one (`--seed`, else $PYKUBELET_SEED, else a new one), so that a whole series
can be repeated. Exits with the status of the run that failed, after printing the seed that reproduces it.
"""

import argparse
import os
import random
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

WORKERS = ("--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile", "--no-loadscope-reorder")

HUNG = 124
"""Exit status after a run that did not end, as of timeout(1)."""


def run(arguments: Sequence[str], seed: int, limit: float) -> int:
    """Run pytest with a seed and return its exit status, HUNG when it has not ended after `limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-q", *WORKERS, f"--seed={seed}", *arguments]
    with (
        # The paths of sockets must be short.
        tempfile.TemporaryDirectory(prefix="pyt-", dir="/tmp", ignore_cleanup_errors=True) as base,
        subprocess.Popen([*command, f"--basetemp={base}/t"], start_new_session=True) as process,
    ):
        try:
            return process.wait(timeout=limit)
        except BaseException as err:
            # Its workers are in its session, not in ours.
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(err, subprocess.TimeoutExpired):
                return HUNG
            raise


def main() -> int:
    """Parse the command line and run the series."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument(
        "--seed", type=int, default=int(os.environ.get("PYKUBELET_SEED") or secrets.randbelow(2**32))
    )
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which a run counts as hung")
    parser.add_argument("arguments", nargs="*", help="what pytest gets")
    options = parser.parse_args()
    seeds = random.Random(options.seed)
    for number in range(1, options.times + 1):
        seed = options.seed if number == 1 else seeds.randrange(2**32)
        print(f"=== run {number} of {options.times}, seed {seed}", flush=True)
        began = time.monotonic()
        # Each run chooses its own hash seed.
        os.environ.pop("PYTHONHASHSEED", None)
        if status := run(options.arguments, seed, options.limit):
            what = f"hung for {options.limit:.0f} s" if status == HUNG else f"failed with status {status}"
            print(f"=== run {number} {what}; again: {_again(options.arguments, seed)}", file=sys.stderr)
            return status
        print(f"=== run {number} passed in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _again(arguments: Sequence[str], seed: int) -> str:
    return f"PYKUBELET_SEED={seed} make unit ARGS={shlex.quote(shlex.join(arguments))}"


if __name__ == "__main__":
    sys.exit(main())

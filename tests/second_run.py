"""A second run, alone, of the few tests with real containers that failed in a run of the whole suite.

    python -m tests.second_run STATUS

`make test` calls it with pytest's exit status, and it exits with that status unless PYKUBELET_SECOND_RUN=1,
as in `.ci/run`: three workers share two processors there with containers and control planes, so that a wait
in a test can expire although nothing is wrong. Unit tests get no second run, nor does a run with more than
MOST failures or one that did not end properly. Every test that failed first is printed at the end, so that
it can be examined.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

ENABLED = "PYKUBELET_SECOND_RUN"
"""Environment variable with which failed tests run again."""
MOST = 3
"""Number of failed tests above which nothing runs again."""
_TESTS_FAILED = 1
"""Exit status of pytest when tests failed and nothing else happened."""
_DIRECTORIES = ("tests/machine/", "tests/cluster/")
_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def may_run_again(status: int, failed: Collection[str]) -> bool:
    """Return whether the failed tests of a run with this exit status get a second run."""
    return (
        status == _TESTS_FAILED
        and 0 < len(failed) <= MOST
        and all(test.startswith(_DIRECTORIES) for test in failed)
    )


def main() -> int:
    """Run the failed tests again if they may, and return the exit status of the whole."""
    status = int(sys.argv[1])
    if os.environ.get(ENABLED) != "1" or not _LAST_FAILED.exists():
        return status
    failed = sorted(json.loads(_LAST_FAILED.read_text()))
    if not may_run_again(status, failed):
        return status
    print(f"=== second run, alone: {shlex.join(failed)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pyt-", dir="/tmp", ignore_cleanup_errors=True) as base:
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--basetemp={base}/t", *failed], check=False
        ).returncode
    outcome = "FLAKY, passed alone" if status == 0 else "failed again, or another one failed with it"
    for test in failed:
        print(f"=== {outcome}: {test}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

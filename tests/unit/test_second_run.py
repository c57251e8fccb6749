"""Which failed tests get a second run in CI."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.second_run import ENABLED, MOST, may_run_again

CLUSTER = "tests/cluster/test_pods.py::test_a"
MACHINE = "tests/machine/cli/test_exec.py::test_b[x]"
UNIT = "tests/unit/api/test_quantity.py::test_c"


@pytest.mark.parametrize(
    ("status", "failed", "expected"),
    [
        (1, [CLUSTER, MACHINE], True),
        (1, [], False),
        (1, [UNIT], False),
        (1, [CLUSTER, UNIT], False),
        (1, [f"{CLUSTER}{number}" for number in range(MOST)], True),
        (1, [f"{CLUSTER}{number}" for number in range(MOST + 1)], False),
        (2, [CLUSTER], False),  # interrupted
        (3, [CLUSTER], False),
    ],
)
def test_may_run_again_failed_tests_expected(status: int, failed: list[str], expected: bool) -> None:
    assert may_run_again(status, failed) is expected


@pytest.mark.parametrize(
    ("enabled", "body", "status"),
    [("1", "pass", 0), ("1", "assert False", 1), ("0", "pass", 1)],
)
def test_second_run_failed_test_status(tmp_path: Path, enabled: str, body: str, status: int) -> None:
    test = tmp_path / "tests/machine/test_sample.py"
    test.parent.mkdir(parents=True)
    test.write_text(f"def test_sample():\n    {body}\n")
    (tmp_path / "pytest.ini").touch()
    cache = tmp_path / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{"tests/machine/test_sample.py::test_sample": true}')
    repository = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "tests.second_run", "1"],
        cwd=tmp_path,
        env={ENABLED: enabled, "PYTHONPATH": repository, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("=== FLAKY, passed alone" in done.stdout) is (status == 0)

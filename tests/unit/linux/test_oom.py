import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.process_limits import has_capability, oom_score, set_oom_score


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_set_oom_score_raised_is_written(sleeper: int) -> None:
    set_oom_score(500, sleeper)
    assert oom_score(sleeper) == 500
    assert Path(f"/proc/{sleeper}/oom_score_adj").read_text().strip() == "500"


@pytest.mark.skipif(has_capability("CAP_SYS_RESOURCE"), reason="only without CAP_SYS_RESOURCE")
def test_set_oom_score_lowered_without_capability_error_names_it() -> None:
    with pytest.raises(PermissionError, match="CAP_SYS_RESOURCE") as caught:
        set_oom_score(-999)
    assert caught.value.filename == "/proc/self/oom_score_adj"


@pytest.mark.skipif(not has_capability("CAP_SYS_RESOURCE"), reason="only with CAP_SYS_RESOURCE")
def test_set_oom_score_lowered_with_capability_is_written(sleeper: int) -> None:
    set_oom_score(-999, sleeper)
    assert oom_score(sleeper) == -999


def test_set_oom_score_pid_zero_is_own_process(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/oom_score_adj").write_text("0\n")
    set_oom_score(-999, proc=tmp_path)
    assert oom_score(proc=tmp_path) == -999
    assert oom_score() == int(Path("/proc/self/oom_score_adj").read_text())


def test_oom_score_missing_process_raises() -> None:
    with pytest.raises(ProcessLookupError, match="no process 4194999"):
        set_oom_score(0, 4194999)
    with pytest.raises(ProcessLookupError, match="no process 4194999"):
        oom_score(4194999)


@pytest.mark.parametrize(("score", "pid"), [(1001, 0), (-1001, 0), (0, -1)])
def test_set_oom_score_invalid_values_raises(score: int, pid: int) -> None:
    with pytest.raises(ValueError, match=r"OOM score|process id"):
        set_oom_score(score, pid)

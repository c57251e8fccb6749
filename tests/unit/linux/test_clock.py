import time
from pathlib import Path

import pytest

from pykubelet.linux.host_info import (
    ClockState,
    boot_id,
    boot_time,
    clock_state,
    decide_clock_state,
    parse_boot_time,
)


@pytest.mark.parametrize(
    ("state", "status", "synchronised"),
    [(0, 0x2001, True), (1, 0, True), (5, 0x40, False), (0, 0x40, False), (5, 0, False)],
)
def test_decide_clock_state_follows_adjtimex_result(state: int, status: int, synchronised: bool) -> None:
    assert decide_clock_state(state, status, 1_500_000) == ClockState(synchronised, 1.5)


def test_clock_state_on_host_is_plausible() -> None:
    state = clock_state()
    assert 0 <= state.max_error_seconds <= 16.5
    assert isinstance(state.synchronised, bool)


def test_boot_time_and_boot_id_are_read(tmp_path: Path) -> None:
    assert parse_boot_time("cpu 1 2\nbtime 1794779685\nprocesses 4\n") == 1794779685
    with pytest.raises(ValueError, match="no btime"):
        parse_boot_time("cpu 1 2\n")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert abs(time.time() - uptime - boot_time()) < 5
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36

import logging

import pytest

from pykubelet.apiserver.errors import TimedOut, Unreachable
from pykubelet.logs import get_logger
from pykubelet.util.backoff import MAX_CAUSES, REPEAT_SECONDS, STABLE_SECONDS, Backoff, ErrorLogLimiter


def test_backoff_grows_to_limit_and_resets_after_two_minutes() -> None:
    pauses = Backoff(rng=lambda: 0.0)
    now, found = 0.0, []
    for _ in range(8):
        found.append(pauses.next(now))
        now += found[-1] + 0.1
    assert found == [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    # Tries that fail slowly are no sign of health, two minutes without failure are.
    now += 119
    assert pauses.next(now) == 30
    assert pauses.next(now + 30 + 121) == 0.8


def test_backoff_cause_changed_resets_delay() -> None:
    pauses = Backoff(rng=lambda: 0.0)
    causes = [True, True, True, False, False, True]
    assert [pauses.next(0, cause) for cause in causes] == [0.8, 1.6, 3.2, 0.8, 1.6, 0.8]


def test_backoff_jitter_at_most_doubles_delay() -> None:
    assert Backoff(rng=lambda: 0.999).next(0) == pytest.approx(1.6, rel=0.01)
    assert len({Backoff().next(0) for _ in range(20)}) > 10


def test_error_log_limiter_hour_of_failures_logs_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    complaints = ErrorLogLimiter(get_logger("pykubelet.test"), "Failed to list", resource="pods")
    refused, late = Unreachable("https://x", "refused"), TimedOut("https://x", "late")
    with caplog.at_level(logging.INFO, "pykubelet"):
        for second in range(3600):
            complaints.failed(late if second % 7 == 6 else refused, float(second))
        lines = [record.levelname for record in caplog.records]
        assert lines == ["ERROR"] * 12
        complaints.succeeded(3600)
        complaints.succeeded(3601)
    assert [record.getMessage() for record in caplog.records[12:]] == ["Works again"]


def test_error_log_limiter_flapping_logs_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    complaints = ErrorLogLimiter(get_logger("pykubelet.test"), "Failed to list", resource="pods")
    with caplog.at_level(logging.INFO, "pykubelet"):
        for second in range(0, 1200, 5):
            complaints.failed(Unreachable("https://x", f"cause {second}"), float(second))
            complaints.succeeded(second + 1.0)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"] * 2


def test_error_log_limiter_failure_after_stable_success_logged(caplog: pytest.LogCaptureFixture) -> None:
    limiter = ErrorLogLimiter(get_logger("pykubelet.test"), "Failed to list", resource="pods")
    refused = Unreachable("https://x", "refused")
    with caplog.at_level(logging.INFO, "pykubelet"):
        limiter.failed(refused, 0.0)
        limiter.succeeded(10.0)
        limiter.failed(refused, 10.0 + STABLE_SECONDS)
        limiter.succeeded(80.0)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"] * 2


def test_error_log_limiter_each_text_is_a_cause_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    limiter = ErrorLogLimiter(get_logger("pykubelet.test"), "Failed to read")
    with caplog.at_level(logging.INFO, "pykubelet"):
        for second in range(20):
            limiter.failed(f"problem {second % 2}", float(second))
        assert [vars(record)["klog_keys"]["err"] for record in caplog.records] == ["problem 0", "problem 1"]
        caplog.clear()
        for number in range(2 * MAX_CAUSES):
            limiter.failed(f"cause {number}", 20.0)
        assert len(caplog.records) == MAX_CAUSES - 2
        caplog.clear()
        limiter.failed("a later one", 20.0 + REPEAT_SECONDS)
        assert len(caplog.records) == 1

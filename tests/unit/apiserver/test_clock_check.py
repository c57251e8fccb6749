"""The API server's time beside ours: a difference is said once, whatever else is in the header."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.apiserver.transport import ClockCheck

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
MOMENT = 784111777.0


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (0, None),
        (59, None),
        (-59, None),
        (7200, "it is 2:00:00 ahead of the API server's clock"),
        (-61.4, "it is 0:01:01 behind the API server's clock"),
        (400 * 86400, "it is 400 days, 0:00:00 ahead of"),
    ],
)
def test_clock_check_skew_logged_once(
    ahead: float, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    check = ClockCheck(lambda: MOMENT + ahead)
    with caplog.at_level(logging.INFO, "pykubelet"):
        for second in range(300):
            check.check_date(DATE, float(second))
    told = [str(record.__dict__["klog_keys"]["err"]) for record in caplog.records]
    assert len(told) == (0 if said is None else 1)
    assert all(text.startswith(said or "") for text in told)


def test_clock_check_skew_resolved_logs_recovery(caplog: pytest.LogCaptureFixture) -> None:
    now = [MOMENT + 7200]
    check = ClockCheck(lambda: now[0])
    with caplog.at_level(logging.INFO, "pykubelet"):
        check.check_date(DATE, 100.0)
        now[0] = MOMENT
        check.check_date(DATE, 101.0)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        check.check_date(DATE, 111.0)
    assert [record.getMessage() for record in caplog.records] == [
        "Host clock may be wrong",
        "Works again",
    ]


@given(st.text() | st.sampled_from(["Sun, 06 Nov 99999 08:49:37 GMT", "0", "Mon, 31 Feb 2020 00:00:00 GMT"]))
def test_clock_check_any_date_header_never_raises(date: str) -> None:
    ClockCheck(lambda: MOMENT).check_date(date, 100.0)

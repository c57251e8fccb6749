"""Cron schedules against a brute-force search minute by minute, and wrong ones with their remedies."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.podconfig.workloads.schedule import MINUTE, Schedule, ScheduleError, time_zone

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = (
    UTC,
    BERLIN,
    ZoneInfo("Australia/Lord_Howe"),
    ZoneInfo("Asia/Kathmandu"),
    ZoneInfo("America/New_York"),
)


def unix(text: str, zone: tzinfo = UTC) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=zone).timestamp())


def expand(field: str, low: int, high: int) -> set[int]:
    """Independent reading of a field of numbers: lists, ranges and steps."""
    found: set[int] = set()
    for item in field.split(","):
        base, _, step = item.partition("/")
        first, _, last = base.partition("-")
        if base == "*":
            first, last = str(low), str(high)
        elif not last:
            last = str(high) if step else first
        found |= set(range(int(first), int(last) + 1, int(step or 1)))
    return found


def oracle(text: str, zone: tzinfo) -> Callable[[int], bool]:
    """Return an independent decision whether a schedule of five numeric fields runs in a minute."""
    minute, hour, day, month, weekday = text.split()
    minutes, hours, months = expand(minute, 0, 59), expand(hour, 0, 23), expand(month, 1, 12)
    days, weekdays = expand(day, 1, 31), {value % 7 for value in expand(weekday, 0, 6)}
    # `*/1` is the same as `*`; every other step restricts the day.
    stars = any(item in ("*", "*/1") for field in (day, weekday) for item in field.split(","))

    def runs(time: int) -> bool:
        local = datetime.fromtimestamp(time, zone)
        if local.minute not in minutes or local.hour not in hours or local.month not in months:
            return False
        matches = (local.day in days, local.isoweekday() % 7 in weekdays)
        return (all(matches) if stars else any(matches)) and (local.fold == 0 or len(hours) == 24)

    return runs


def field(low: int, high: int) -> st.SearchStrategy[str]:
    numbers = st.integers(low, high)
    ranges = st.tuples(numbers, numbers).map(lambda pair: f"{min(pair)}-{max(pair)}")
    items = st.one_of(
        st.just("*"),
        numbers.map(str),
        ranges,
        st.tuples(st.one_of(st.just("*"), ranges, numbers.map(str)), st.integers(1, 20)).map(
            lambda pair: f"{pair[0]}/{pair[1]}"
        ),
    )
    return st.one_of(st.just("*"), st.lists(items, min_size=1, max_size=3).map(",".join))


schedules = st.tuples(field(0, 59), field(0, 23), field(1, 31), st.just("*"), field(0, 6)).map(" ".join)
# Two days around the changes of the clocks of 2026, and others.
starts = st.sampled_from(
    [unix(day) for day in ("2026-03-28T12:00", "2026-10-24T20:00", "2026-04-04T10:00", "2026-10-03T10:00",
                           "2026-03-07T22:00", "2026-11-01T01:00", "2024-02-28T12:00", "2026-12-31T12:00")]
)  # fmt: skip


@given(schedules, starts, st.integers(0, 24 * 60), st.sampled_from(ZONES))
def test_next_after_random_schedules_equals_search_by_minute(
    text: str, start: int, offset: int, zone: tzinfo
) -> None:
    time = start + offset * MINUTE + offset % 60
    schedule, runs_at = Schedule.parse(text), oracle(text, zone)
    expected = next(
        (
            minute
            for minute in range(time - time % MINUTE + MINUTE, time + 2 * 24 * 60 * MINUTE, MINUTE)
            if runs_at(minute)
        ),
        None,
    )
    found = schedule.next_after(time, zone)
    if expected is None:
        assert found is None or found >= time + 2 * 24 * 60 * MINUTE - MINUTE
        assert found is None or runs_at(found)
    else:
        assert found == expected


@given(schedules, starts, st.integers(0, 36 * 60), st.sampled_from(ZONES))
def test_last_until_random_schedules_equals_search_by_minute(
    text: str, start: int, minutes: int, zone: tzinfo
) -> None:
    now, runs_at = start + minutes * MINUTE + 7, oracle(text, zone)
    expected = [
        minute for minute in range(start - start % MINUTE + MINUTE, now + 1, MINUTE) if runs_at(minute)
    ]
    assert Schedule.parse(text).last_until(now, start, zone) == (expected[-1] if expected else None)


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("@hourly", "2026-01-01T00:00", "2026-01-01T01:00"),
        ("@daily", "2026-01-01T00:00", "2026-01-02T00:00"),
        ("@weekly", "2026-01-01T00:00", "2026-01-04T00:00"),
        ("@monthly", "2026-01-01T00:00", "2026-02-01T00:00"),
        ("@yearly", "2026-01-01T00:00", "2027-01-01T00:00"),
        ("0 0 29 2 *", "2097-01-01T00:00", "2104-02-29T00:00"),
        ("0 0 13 * FRI", "2026-01-01T00:00", "2026-01-02T00:00"),
        ("0 0 13 * ?", "2026-01-01T00:00", "2026-01-13T00:00"),
        ("0 0 * * 7", "2026-01-01T00:00", "2026-01-04T00:00"),
        ("0 0 * jan-MAR mon", "2026-03-31T00:00", "2027-01-04T00:00"),
        ("59/5 22/2 * * *", "2026-01-01T00:00", "2026-01-01T22:59"),
    ],
)
def test_next_after_names_and_rare_dates_are_found(text: str, after: str, expected: str) -> None:
    assert Schedule.parse(text).next_after(unix(after), UTC) == unix(expected)


def test_next_after_clock_changes_skip_the_gap_and_run_once_in_the_fold() -> None:
    half_past_two = Schedule.parse("30 2 * * *")
    assert half_past_two.next_after(unix("2026-03-28T12:00", BERLIN), BERLIN) == unix(
        "2026-03-30T02:30", BERLIN
    )
    first = half_past_two.next_after(unix("2026-10-24T12:00", BERLIN), BERLIN)
    assert first == unix("2026-10-25T00:30")
    assert half_past_two.next_after(first, BERLIN) == unix("2026-10-26T02:30", BERLIN)
    hourly = Schedule.parse("30 * * * *")
    assert hourly.next_after(first, BERLIN) == first + 3600


def test_last_until_years_of_sleep_is_found_quickly() -> None:
    now = unix("2026-05-05T05:05")
    assert Schedule.parse("* * * * *").last_until(now, 0, UTC) == now
    assert Schedule.parse("0 0 29 2 *").last_until(now, 0, UTC) == unix("2024-02-29T00:00")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 fields, but must have five"),
        ("* * * *", "has 4 fields"),
        ("* * * * * *", "has 6 fields"),
        ("60 * * * *", "is not a valid minute: it must be from 0 to 59"),
        ("* 24 * * *", "is not a valid hour"),
        ("* * 0 * *", "is not a valid day of the month"),
        ("* * * 13 *", "is not a valid month"),
        ("* * * * 8", "is not a valid day of the week"),
        ("*/0 * * * *", "the step must not be 0"),
        ("5-1 * * * *", "the range is reversed"),
        ("a * * * *", "it must be a number"),
        ("1, * * * *", "it must be a number"),
        ("0 0 30 2 *", "a date that does not exist"),
        ("@every 5m", "is not known: write five fields, or one of @yearly"),
        ("TZ=UTC * * * * *", "write it as timeZone"),
        ("9" * 10_000, "longer than 300 characters"),
        ("٣ * * * *", "it must be a number"),
    ],
)
def test_parse_wrong_schedule_raises_with_remedy(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message.replace("(", "\\(")):
        Schedule.parse(text)


@given(st.text(max_size=40))
def test_parse_any_text_raises_only_schedule_errors(text: str) -> None:
    try:
        schedule = Schedule.parse(text)
    except ScheduleError:
        return
    assert schedule.next_after(0, UTC) is not None


@pytest.mark.parametrize(
    "name", ["", "Local", "Mars/Olympus", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 500]
)
def test_time_zone_unknown_name_raises(name: str) -> None:
    with pytest.raises(ScheduleError, match="write one such as Europe/Berlin"):
        time_zone(name)


def test_time_zone_known_name_differs_from_utc() -> None:
    assert datetime(2026, 1, 1, tzinfo=time_zone("Europe/Berlin")).utcoffset() == timedelta(hours=1)


def test_last_until_many_runs_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = Schedule.next_after

    def next_after(self: Schedule, time: int, zone: tzinfo | None) -> int | None:
        calls.append(time)
        return original(self, time, zone)

    monkeypatch.setattr(Schedule, "next_after", next_after)
    # 260,640 runs, half a year before.
    found = Schedule.parse("* * * 1-6 *").last_until(unix("2026-12-30T23:30"), unix("2025-06-30T00:00"), UTC)
    assert found == unix("2026-06-30T23:59")
    assert len(calls) < 100

"""Cron schedules with five fields, and the names of common ones, as the CronJob controller reads them.

A minute matches if its local time in the time zone matches the fields; a day matches both day fields, or one
of them if neither begins with `*`. A local time that a change of the clocks skips does not occur, and of one
that occurs twice only the first counts, unless the schedule has every hour.

`next_after` and `last_until` take and return Unix time in whole minutes. Their cost is bounded: days are
skipped by date, and minutes are searched only within a matching day.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Self

from pykubelet.util.text import quoted

MINUTE = 60
_QUARTER = 15 * MINUTE
"""Time zones differ from UTC by multiples of this."""
_DAY = 24 * 60 * MINUTE
_MAX_DAYS = 366 * 9
"""Days to search: February 29 occurs at least once in eight years, also around 2100."""
MAX_CHARACTERS = 300
_NAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS = {
    name: index
    for index, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), start=1
    )
}
_WEEKDAYS = {name: index for index, name in enumerate(["sun", "mon", "tue", "wed", "thu", "fri", "sat"])}
_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
_LONGEST_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class ScheduleError(ValueError):
    """Raised for an invalid schedule or time zone; the text names the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    low: int
    high: int
    names: tuple[tuple[str, int], ...] = ()


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, tuple(_MONTHS.items())),
    _Field("day of the week", 0, 7, tuple(_WEEKDAYS.items())),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A parsed schedule: the matching values of each field."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    any_day: bool
    """Whether one of the day fields begins with `*`, so that both must match."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a schedule. Raises ScheduleError."""
        if len(text) > MAX_CHARACTERS:
            raise ScheduleError(f"is longer than {MAX_CHARACTERS} characters: write five fields")
        written = text.strip()
        if written.startswith(("TZ=", "CRON_TZ=")):
            raise ScheduleError("must not contain a time zone: write it as timeZone")
        if written.startswith("@"):
            if written not in _NAMES:
                known = ", ".join(_NAMES)
                raise ScheduleError(f"{quoted(written)} is not known: write five fields, or one of {known}")
            written = _NAMES[written]
        parts = written.split()
        if len(parts) != len(_FIELDS):
            raise ScheduleError(
                f"{quoted(text)} has {len(parts)} fields, but must have five: minute, hour, "
                "day of the month, month, day of the week"
            )
        values, stars = zip(*map(_parse_field, _FIELDS, parts), strict=True)
        minutes, hours, days, months, weekdays = values
        any_day = stars[2] or stars[4]
        if any_day and not any(day <= _LONGEST_MONTH[month - 1] for month in months for day in days):
            raise ScheduleError(f"{quoted(text)} is a date that does not exist: it would never run")
        return cls(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), any_day)

    def matches_date(self, day: date) -> bool:
        """Return whether the schedule runs on a day."""
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_day and by_weekday if self.any_day else by_day or by_weekday

    def matches(self, when: datetime) -> bool:
        """Return whether the schedule runs at a local time."""
        return (
            when.minute in self.minutes
            and when.hour in self.hours
            and self.matches_date(when.date())
            and (when.fold == 0 or len(self.hours) == 24)
        )

    def next_after(self, time: int, zone: tzinfo | None) -> int | None:
        """Return the first run after a Unix time; None if there is none within nine years.

        `zone`: None for the local time of the host.
        """
        current = time - time % MINUTE + MINUTE
        end = current + _MAX_DAYS * _DAY
        while current < end:
            local = _local(current, zone)
            if not self.matches_date(local.date()):
                current = _skip_days(self, current, local)
            elif local.hour not in self.hours:
                current = current - current % _QUARTER + _QUARTER
            elif self.matches(local):
                return current
            else:
                current += MINUTE
        return None

    def last_until(self, time: int, since: int, zone: tzinfo | None) -> int | None:
        """Return the last run after `since` and until `time`, both Unix times; None if there is none."""
        window = MINUTE
        while True:
            start = max(since, time - window)
            found = self.next_after(start, zone)
            if found is not None and found <= time:
                return self._last_from(found, time, zone)
            if start == since or window > _MAX_DAYS * _DAY:
                return None
            window *= 2

    def _last_from(self, found: int, time: int, zone: tzinfo | None) -> int:
        """Return the last run until `time`; `found` is one of them."""
        end = time
        while end - found >= MINUTE:
            # No run is after `end`: half of the rest is decided at a time, however many runs it has.
            middle = found + (end - found) // 2
            later = self.next_after(middle, zone)
            if later is not None and later <= time:
                found = later
            else:
                end = middle
        return found


def time_zone(name: str) -> tzinfo:
    """Return a time zone by its name. Raises ScheduleError."""
    import zoneinfo

    if not name or name == "Local" or len(name) > 100:
        raise ScheduleError(f"{quoted(name)} is not a time zone: write one such as Europe/Berlin")
    if name == "UTC":
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as err:
        raise ScheduleError(
            f"{quoted(name)} is not known on this host: write one such as Europe/Berlin, or install tzdata"
        ) from err


def _local(time: int, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(time, zone)


def _skip_days(schedule: Schedule, current: int, local: datetime) -> int:
    """Return a time shortly before the next matching day begins, or a quarter of an hour later."""
    day, days = local.date(), 0
    while days < _MAX_DAYS:
        day += timedelta(days=1)
        days += 1
        if schedule.matches_date(day):
            break
    seconds_left = _DAY - local.hour * 60 * MINUTE - local.minute * MINUTE
    # Three hours before midnight no change of the clocks can have skipped the day.
    target = current + seconds_left + (days - 1) * _DAY - 3 * 60 * MINUTE
    return max(target - target % _QUARTER, current - current % _QUARTER + _QUARTER)


@functools.lru_cache(maxsize=256)
def _parse_field(field: _Field, text: str) -> tuple[frozenset[int], bool]:
    """Return the values of a field, and whether it begins with `*`."""
    values: set[int] = set()
    star = False
    for item in text.split(","):
        found, is_star = _parse_item(field, item)
        values.update(found)
        star = star or is_star
    return frozenset(values), star


def _parse_item(field: _Field, item: str) -> tuple[range, bool]:
    base, slash, step_text = item.partition("/")
    step = _number(field, step_text) if slash else 1
    if step == 0:
        raise _bad(field, item, "the step must not be 0")
    first_text, dash, last_text = base.partition("-")
    if base in ("*", "?"):
        low, high = field.low, min(field.high, 6) if field.names and field.high == 7 else field.high
        return range(low, high + 1, step), step == 1
    low = _value(field, first_text)
    high = _value(field, last_text) if dash else (low if not slash else _highest(field))
    if high < low:
        raise _bad(field, item, "the range is reversed")
    return range(low, high + 1, step), False


def _highest(field: _Field) -> int:
    return 6 if field.high == 7 else field.high


def _value(field: _Field, text: str) -> int:
    named = dict(field.names).get(text.lower())
    value = named if named is not None else _number(field, text)
    if not field.low <= value <= field.high:
        raise _bad(field, text, f"it must be from {field.low} to {field.high}")
    return value


def _number(field: _Field, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise _bad(field, text, "it must be a number, a range such as 1-5, a list, or a step such as */5")
    return int(text)


def _bad(field: _Field, text: str, reason: str) -> ScheduleError:
    return ScheduleError(f"{quoted(text)} is not a valid {field.name}: {reason}")

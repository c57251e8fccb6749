"""Questions to `/logs/?query=…`: which services' or which file's log, since when, how much.

Pure: what a query asks for, whether that is allowed, and the arguments for journalctl. A service's name goes
to a program and into a path, so it may hold only characters that mean nothing to either (CVE-2024-9042 was
a command run through a name, elsewhere); nothing here passes through a shell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from multidict import MultiMapping

from pykubelet.server.refused import Refused

MOST_SERVICES = 4
MOST_TAIL_LINES = 100_000
LONGEST_NAME = 256
LONGEST_PATTERN = 4096

_UNSAFE = re.compile(r"[^a-zA-Z\-_.:0-9@]")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """What was asked; times are without fractions of a second, as the journal is asked."""

    services: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    tail: int | None = None
    boot: int | None = None
    pattern: str = ""

    @property
    def has_options(self) -> bool:
        """Whether more was said than whose log is meant."""
        options = (self.since, self.until, self.tail, self.boot)
        return any(option is not None for option in options) or bool(self.pattern)


def read_log_query(query: MultiMapping[str]) -> LogQuery | None:
    """Read a query; None when it asks nothing of these. Raises Refused (400) when it cannot be read."""
    problems: list[str] = []
    asked = query.getall("query", [])
    files = tuple(each for each in asked if "/" in each or "\\" in each)
    services = tuple(each for each in asked if each.strip() and each not in files)
    if asked and not files and not services:
        problems.append(f"query: Invalid value: {asked}: may not be empty")
    read = LogQuery(
        services=services,
        files=files,
        since=_time(query, "sinceTime", problems),
        until=_time(query, "untilTime", problems),
        tail=_number(query, "tailLines", problems),
        boot=_number(query, "boot", problems),
        pattern=query.get("pattern", ""),
    )
    _refuse(400, problems)
    return read if read != LogQuery() else None


def check_log_query(query: LogQuery) -> None:
    """Return when the query may be answered; raises Refused (406) with all that is wrong with it."""
    problems = [
        f"query: Invalid value: {name!r}: {why}" for name in query.services if (why := _bad_name(name))
    ]
    files, services = query.files, query.services
    if len(services) > MOST_SERVICES:
        problems.append(f"query: Too many: {len(services)}: must have at most {MOST_SERVICES} items")
    if not files and not services:
        problems.append("query: Required value: cannot be empty with options")
    elif files and services:
        problems.append("query: Invalid value: cannot specify a file and service")
    elif len(files) > 1:
        problems.append("query: Invalid value: cannot specify more than one file")
    elif files and query.has_options:
        problems.append("query: Invalid value: cannot specify file with options")
    if query.since is not None and query.until is not None and query.since > query.until:
        problems.append("untilTime: Invalid value: must be after `sinceTime`")
    if query.boot is not None and query.boot > 0:
        problems.append(f"boot: Invalid value: {query.boot}: must be less than 1")
    if query.tail is not None and not 0 <= query.tail <= MOST_TAIL_LINES:
        problems.append(
            f"tailLines: Invalid value: {query.tail}: must be between 0 and {MOST_TAIL_LINES}, inclusive"
        )
    problems += _bad_pattern(query.pattern)
    _refuse(406, problems)


def journal_arguments(query: LogQuery) -> list[str]:
    """The arguments with which journalctl answers; each value is behind its option's `=`."""
    arguments = ["--utc", "--no-pager", "--output=short-precise"]
    if query.since is not None:
        arguments.append(f"--since={query.since:%Y-%m-%d %H:%M:%S}")
    if query.until is not None:
        arguments.append(f"--until={query.until:%Y-%m-%d %H:%M:%S}")
    if query.tail is not None:
        arguments += ["--pager-end", f"--lines={query.tail}"]
    arguments += [f"--unit={service}" for service in query.services]
    if query.pattern:
        arguments.append(f"--grep={query.pattern}")
    if query.boot is not None:
        arguments.append(f"--boot={query.boot}")
    return arguments


def places_of(service: str) -> tuple[str, str, str]:
    """Where a service that writes files has its log, below the folder of logs; the first that is there."""
    return service, f"{service}.log", f"{service}/{service}.log"


def _bad_name(name: str) -> str:
    if len(name) > LONGEST_NAME:
        return f"length must be less than {LONGEST_NAME}"
    return "input contains unsupported characters" if _UNSAFE.search(name) else ""


def _bad_pattern(pattern: str) -> list[str]:
    if len(pattern) > LONGEST_PATTERN:
        return [f"pattern: Invalid value: must have at most {LONGEST_PATTERN} characters"]
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as err:
        return [f"pattern: Invalid value: {pattern!r}: {err}"]
    return ["pattern: Invalid value: must not contain NUL"] if "\0" in pattern else []


def _time(query: MultiMapping[str], key: str, problems: list[str]) -> datetime | None:
    text = query.get(key, "")
    if not text:
        return None
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        return datetime.fromisoformat(match[1] + match[2].replace("Z", "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):
        problems.append(f"{key}: Invalid value: {text!r}: invalid time format")
        return None


def _number(query: MultiMapping[str], key: str, problems: list[str]) -> int | None:
    text = query.get(key, "")
    if not text:
        return None
    if _NUMBER.fullmatch(text) is None:
        problems.append(f"{key}: Invalid value: {text!r}: not a number")
        return None
    return int(text)


def _refuse(status: int, problems: list[str]) -> None:
    if problems:
        text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
        raise Refused(status, text + "\n")

r"""Watcher of OOM kills in the kernel log.

Only kills after `open_log` are reported: the previous kubelet process reported earlier ones, and reporting
them at each start would send operators after a fault that is long over. If the kernel log cannot be read (as
in many containers), no kills are reported and nothing else is affected.

A read from `/dev/kmsg` returns one record:

    4,118683,25622588356,-,caller=T741;oom-kill:constraint=CONSTRAINT_MEMCG,...
     SUBSYSTEM=memory

That is the priority (facility and level in one number), the sequence number, the microseconds since boot, the
flags and optional further values, then the text, then lines of fields that begin with a blank. Unprintable
bytes and the backslash are escaped as `\xNN`. Processes can write to this log, but never with the kernel's
facility: only records with `from_kernel` are used.

The kernel logs a kill in several lines that differ between versions: the process that triggered the OOM
killer, the cgroup whose limit was reached (`Task in … killed as a result of limit of …` up to 4.20,
`oom-kill:constraint=…` since 5.0), and finally the killed process. `follow` processes one record after the
other and returns a kill at its last line:

    state = OomState()
    for record in records:
        state, kill = follow(state, record)

Process names are chosen by users and may contain any text; they are separated from the rest of a line by
their maximum length of 15 bytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")
_MAX_DIGITS = 20


class KmsgError(ValueError):
    """Raised for data that is not a record of the kernel log."""


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One record of the kernel log."""

    facility: int
    """syslog facility: 0 is the kernel, processes have others."""
    level: int
    """syslog level: 0 (emergency) to 7 (debug)."""
    sequence: int
    """Sequence number, increasing by one: a gap means that records were lost."""
    microseconds: int
    """Microseconds since boot."""
    flags: str
    """`-`, `c` for a fragment of a line, `+` for its continuation."""
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that the kernel adds, such as SUBSYSTEM and DEVICE."""

    @property
    def from_kernel(self) -> bool:
        """Whether the kernel wrote the record, not a process."""
        return self.facility == 0


def parse_record(data: bytes) -> KernelRecord:
    """Parse one record. Raises KmsgError."""
    head, found, body = data.partition(b";")
    if not found:
        raise KmsgError("there is no ';' after the record's head")
    parts = head.split(b",")
    if len(parts) < 3:
        raise KmsgError("the record's head has fewer than three parts")
    priority, sequence, microseconds = map(_number, parts[:3])
    text, *lines = body.split(b"\n")
    return KernelRecord(
        facility=priority >> 3,
        level=priority & 7,
        sequence=sequence,
        microseconds=microseconds,
        flags=_text(parts[3]) if len(parts) > 3 else "-",
        text=_text(text),
        fields=dict(_fields(lines)),
    )


def _number(data: bytes) -> int:
    if not data.isdigit() or len(data) > _MAX_DIGITS:
        raise KmsgError("a number in the record's head is none")
    return int(data)


def _fields(lines: list[bytes]) -> list[tuple[str, str]]:
    pairs = [line[1:].partition(b"=") for line in lines if line.startswith(b" ")]
    return [(_text(name), _text(value)) for name, found, value in pairs if found]


def _text(data: bytes) -> str:
    plain = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), data)
    return plain.decode("utf-8", "replace")


_LONGEST_NAME = 15
_LONGEST_LINE = 4096
_INVOKED = re.compile(r".* invoked oom-killer: ", re.DOTALL)
_TASK_IN = re.compile(r"Task in (?P<cgroup>.*) killed as a result of limit of (?P<limit>.*)", re.DOTALL)
_REASON = "oom-kill:constraint="
_REASON_END = re.compile(r",pid=\d{1,10},uid=\d{1,10}\Z")
_GROUP = re.compile(
    r"Tasks in (?P<cgroup>.*) are going to be killed due to memory\.oom\.group set", re.DOTALL
)
_KILLED = re.compile(
    r"(?:Memory cgroup out of memory: |Out of memory(?: \(oom_kill_allocating_task\))?: )?"
    r"Killed process (?P<pid>\d{1,10})(?:, UID \d+,)? \((?P<name>.*)\)(?P<sizes>,? total-vm:.*)?",
    re.DOTALL,
)
_ANON_RSS = re.compile(r"\banon-rss:(?P<kib>\d{1,17})kB")
_MEMORY = re.compile(r"memory: usage \d{1,17}kB, limit (?P<kib>\d{1,17})kB, failcnt \d+")
_UNLIMITED_KIB = 1 << 50
"""Limits above this one mean no limit: the kernel rounds the largest number to pages."""


@dataclass(frozen=True, slots=True)
class OomKill:
    """A process that the OOM killer killed."""

    pid: int
    process: str
    """Process name, which is user-controlled."""
    cgroup: str
    """Cgroup of the process, from the root of the hierarchy; empty if the kernel did not log it."""
    limit: str
    """Cgroup whose limit was reached; empty if it was no cgroup limit, or the kernel did not log it."""
    microseconds: int
    """Microseconds between boot and the kill."""
    sequence: int
    """Sequence number of the record that reported the kill."""
    system_oom: bool = False
    """Whether the host was out of memory, not a cgroup."""
    anon_rss: int | None = None
    """Bytes of anonymous memory of the process, if the kernel logged them."""
    limit_bytes: int | None = None
    """Limit that was reached, if the kernel logged it."""


@dataclass(frozen=True, slots=True)
class OomState:
    """Parser state between the records of a kill."""

    cgroup: str = ""
    limit: str = ""
    reported: bool = False
    """Whether the kill that these values belong to has been returned."""
    group: bool = False
    """Whether all processes of the cgroup are killed (`memory.oom.group`), with one line each."""
    system_oom: bool = False
    """Whether the host is out of memory, not a cgroup."""
    limit_bytes: int | None = None
    """Memory limit of the cgroup, which the kernel logs before the cgroup."""
    fragment: str = ""
    """Text of a line that may be continued."""


def follow(state: OomState, record: KernelRecord) -> tuple[OomState, OomKill | None]:
    """Process the next record; return the new state, and the kill if this is the last line about one."""
    if not record.from_kernel:
        return state, None
    continued = "+" in record.flags
    text = state.fragment + record.text if continued else record.text
    state = replace(state, fragment=text[:_LONGEST_LINE] if continued or "c" in record.flags else "")
    scope = _scope(text)
    if found := _KILLED.fullmatch(text):
        known = OomState() if state.reported and not state.group else state
        kill = OomKill(
            pid=int(found["pid"]),
            process=found["name"],
            cgroup=known.cgroup,
            limit=known.limit,
            microseconds=record.microseconds,
            sequence=record.sequence,
            system_oom=not known.limit and (known.system_oom if scope is None else scope),
            anon_rss=_bytes(_ANON_RSS.search(found["sizes"] or "")),
            limit_bytes=known.limit_bytes if known.limit else None,
        )
        return replace(state, reported=True), kill
    return _parse_context(state if scope is None else replace(state, system_oom=scope), text), None


def _parse_context(state: OomState, text: str) -> OomState:
    if _INVOKED.match(text):
        return OomState(fragment=state.fragment)
    limit_bytes = None if state.reported else state.limit_bytes
    if found := _MEMORY.fullmatch(text):
        # Up to 4.20 it follows the cgroup, since 5.0 it precedes it.
        state = OomState(fragment=state.fragment) if state.reported else state
        return replace(state, limit_bytes=_bytes(found))
    if found := _TASK_IN.fullmatch(text):
        return OomState(found["cgroup"], found["limit"], fragment=state.fragment)
    if (reason := _reason(text)) is not None:
        cgroup, limit = reason
        return OomState(cgroup, limit, system_oom=not limit, limit_bytes=limit_bytes, fragment=state.fragment)
    if found := _GROUP.fullmatch(text):
        return replace(state, cgroup=found["cgroup"], group=True)
    return state


def _bytes(found: re.Match[str] | None) -> int | None:
    """Return a size in bytes; None if there is none, or it means no limit."""
    kib = int(found["kib"]) if found is not None else _UNLIMITED_KIB
    return kib << 10 if kib < _UNLIMITED_KIB else None


def _scope(text: str) -> bool | None:
    """Return True for a line about the whole host, False for one about a cgroup, None if it is about neither.

    During many kills in a short time, the kernel logs nothing else.
    """
    if text.startswith("Memory cgroup out of memory: "):
        return False
    return True if text.startswith("Out of memory") else None


def _reason(text: str) -> tuple[str, str] | None:
    """Parse the line that Linux 5.0+ logs before a kill: the process's cgroup, and the limited cgroup."""
    end = _REASON_END.search(text)
    if not text.startswith(_REASON) or end is None:
        return None
    before, found, after = text[: end.start()].partition(",task_memcg=")
    _, limited, limit = before.partition(",oom_memcg=")
    if not found or not (limited or before.endswith(",global_oom")):
        return None
    return _without_name(after), limit


def _without_name(text: str) -> str:
    """Return the cgroup in `<cgroup>,task=<name>`; both may contain `,task=`."""
    mark = ",task="
    at = text.find(mark)
    while at >= 0:
        if len(text[at + len(mark) :].encode()) <= _LONGEST_NAME:
            return text[:at]
        at = text.find(mark, at + 1)
    return text


KMSG = Path("/dev/kmsg")
_LONGEST_RECORD = 16384
"""Bytes; reading a record that does not fit fails with EINVAL."""
_RECORDS_PER_YIELD = 100
"""Records to read before yielding to other tasks: a packet filter can fill the log quickly."""


def read_oom_kills(memory_cgroup: Path) -> int | None:
    """Return how many processes of a cgroup the OOM killer has killed; None if the kernel does not report it.

    Of many kills in a short time, the kernel logs the cgroup of only ten every five seconds; this counter has
    all of them.
    """
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (memory_cgroup / name).read_text().splitlines()
        except OSError:
            continue
        for key, _, value in (line.partition(" ") for line in lines):
            if key == "oom_kill" and value.isdigit():
                return int(value)
    return None


def open_log(path: Path = KMSG) -> int:
    """Open the kernel log at its end; return a descriptor for `kills`. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        raise
    return fd


async def kills(fd: int) -> AsyncGenerator[OomKill, None]:
    """Yield each kill in the log behind `fd`, until the log ends. Raises OSError."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    # Registered once: the log has several records per pod that starts, each of which wakes the reader.
    loop.add_reader(fd, readable.set)
    try:
        async for kill in _read_kills(fd, readable):
            yield kill
    finally:
        loop.remove_reader(fd)


async def _read_kills(fd: int, readable: asyncio.Event) -> AsyncIterator[OomKill]:
    state, taken = OomState(), 0
    while True:
        readable.clear()
        try:
            data = os.read(fd, _LONGEST_RECORD)
        except BlockingIOError:
            await readable.wait()
            continue
        except BrokenPipeError:
            # The kernel has overwritten unread records; the next read returns the oldest one left.
            state = OomState()
            continue
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            continue  # the record is longer than any relevant one, and the kernel has skipped it
        if not data:
            return
        taken += 1
        if taken % _RECORDS_PER_YIELD == 0:
            await asyncio.sleep(0)
        try:
            state, kill = follow(state, parse_record(data))
        except KmsgError:
            continue
        if kill is not None:
            yield kill

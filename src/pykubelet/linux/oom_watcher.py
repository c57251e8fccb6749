r"""Hearing of processes that the kernel kills for want of memory, the moment it says so.

Only what is killed from now on is told: what happened before was told by the agent that ran then, and
telling it again with each start would have people look for a fault that is long over. Where the kernel's log
cannot be read (in a container, often) nothing is told, and nothing else suffers.

Records of the kernel's log, as `/dev/kmsg` gives them: one record for each read.

    4,118683,25622588356,-,caller=T741;oom-kill:constraint=CONSTRAINT_MEMCG,...
     SUBSYSTEM=memory

Priority (facility and level in one number), sequence number, microseconds since the boot, flags and perhaps
more, then the text, then lines of fields that begin with a blank. Bytes that are not printable, and the
backslash itself, are written as `\xNN`. Programs can write into this log, too, but never as the kernel:
whoever decides something by a record asks `from_kernel` first.

Processes that the kernel killed for want of memory, found in its log.

The kernel tells it in several lines, which differ between versions: who asked for memory, whose limit was
reached (`Task in … killed as a result of limit of …` up to 4.20, `oom-kill:constraint=…` from 5.0 on), and at
last who was killed. `follow` takes one record after the other and gives a kill when its last line comes:

    state = OomState()
    for record in records:
        state, kill = follow(state, record)

Names of processes are whatever their owners like, so they are told from the rest by what cannot be in
them: they have fifteen bytes at most. Only what the kernel itself wrote counts.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")
_MOST_DIGITS = 20


class KmsgError(ValueError):
    """This is no record of the kernel's log."""


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One message."""

    facility: int
    """Who wrote it: 0 is the kernel, programs have others."""
    level: int
    """How bad it is: 0 (emergency) to 7 (debug)."""
    sequence: int
    """Grows by one with each record: a gap means that some were lost."""
    microseconds: int
    """Since the boot of the machine."""
    flags: str
    """`-`, `c` for a part of a line, `+` for what continues it."""
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """What the kernel adds, such as SUBSYSTEM and DEVICE."""

    @property
    def from_kernel(self) -> bool:
        """Whether the kernel said it, and not a program."""
        return self.facility == 0


def parse_record(data: bytes) -> KernelRecord:
    """Read one record; raises KmsgError."""
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
    if not data.isdigit() or len(data) > _MOST_DIGITS:
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
    r"Killed process (?P<pid>\d{1,10})(?:, UID \d+,)? \((?P<name>.*)\)(?:,? total-vm:.*)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class OomKill:
    """One process that was killed."""

    pid: int
    process: str
    """Its name, which its owner chose."""
    cgroup: str
    """The cgroup that it was in, from the root of the hierarchy; empty when the kernel did not say."""
    limit: str
    """The cgroup whose limit was reached; empty when there was none, or the kernel did not say."""
    microseconds: int
    """Since the boot of the machine."""
    sequence: int
    """Of the record that told of it."""
    of_the_machine: bool = False
    """Whether the machine itself was out of memory, and not a cgroup."""


@dataclass(frozen=True, slots=True)
class OomState:
    """What is known of a kill whose last line has not come yet."""

    cgroup: str = ""
    limit: str = ""
    told: bool = False
    """Whether the one that this is about has been told already."""
    group: bool = False
    """Whether everybody in the cgroup is killed, one after the other and without another word."""
    whole: bool = False
    """Whether the machine itself is out of memory."""
    fragment: str = ""
    """The part of a line that may be continued."""


def follow(state: OomState, record: KernelRecord) -> tuple[OomState, OomKill | None]:
    """Take the next record of the log; gives a kill when it is the last line about one."""
    if not record.from_kernel:
        return state, None
    continued = "+" in record.flags
    text = state.fragment + record.text if continued else record.text
    state = replace(state, fragment=text[:_LONGEST_LINE] if continued or "c" in record.flags else "")
    scope = _scope(text)
    if found := _KILLED.fullmatch(text):
        known = OomState() if state.told and not state.group else state
        kill = OomKill(
            pid=int(found["pid"]),
            process=found["name"],
            cgroup=known.cgroup,
            limit=known.limit,
            microseconds=record.microseconds,
            sequence=record.sequence,
            of_the_machine=not known.limit and (known.whole if scope is None else scope),
        )
        return replace(state, told=True), kill
    return _learn(state if scope is None else replace(state, whole=scope), text), None


def _learn(state: OomState, text: str) -> OomState:
    if _INVOKED.match(text):
        return OomState(fragment=state.fragment)
    if found := _TASK_IN.fullmatch(text):
        return OomState(found["cgroup"], found["limit"], fragment=state.fragment)
    if (reason := _reason(text)) is not None:
        cgroup, limit = reason
        return OomState(cgroup, limit, whole=not limit, fragment=state.fragment)
    if found := _GROUP.fullmatch(text):
        return replace(state, cgroup=found["cgroup"], group=True)
    return state


def _scope(text: str) -> bool | None:
    """Say whether a line is about the machine (true) or a cgroup; None when it does not say.

    When there are many kills in a short time, this is all that the kernel says.
    """
    if text.startswith("Memory cgroup out of memory: "):
        return False
    return True if text.startswith("Out of memory") else None


def _reason(text: str) -> tuple[str, str] | None:
    """Read the line that newer kernels write before a kill: the process's cgroup, and whose limit it was."""
    end = _REASON_END.search(text)
    if not text.startswith(_REASON) or end is None:
        return None
    before, found, after = text[: end.start()].partition(",task_memcg=")
    _, limited, limit = before.partition(",oom_memcg=")
    if not found or not (limited or before.endswith(",global_oom")):
        return None
    return _without_name(after), limit


def _without_name(text: str) -> str:
    """Give the cgroup of `<cgroup>,task=<name>`; either may have that very mark in it."""
    mark = ",task="
    at = text.find(mark)
    while at >= 0:
        if len(text[at + len(mark) :].encode()) <= _LONGEST_NAME:
            return text[:at]
        at = text.find(mark, at + 1)
    return text


KMSG = Path("/dev/kmsg")
_LONGEST_RECORD = 16384
"""Bytes; the kernel refuses to give a record that does not fit."""
_AT_ONCE = 100
"""How many records to read before others get their turn: a packet filter can fill the log quickly."""


def open_log(path: Path = KMSG) -> int:
    """Open the kernel's log at its end; gives a descriptor for `kills`. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        raise
    return fd


async def kills(fd: int) -> AsyncIterator[OomKill]:
    """Give each kill that the log behind `fd` tells of; ends with the log, raises OSError."""
    state, taken = OomState(), 0
    while True:
        try:
            data = os.read(fd, _LONGEST_RECORD)
        except BlockingIOError:
            await _readable(fd)
            continue
        except BrokenPipeError:
            # The kernel has overwritten what was not read yet; it goes on with the oldest that it has.
            state = OomState()
            continue
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            continue  # longer than any record that matters, and passed over by the kernel
        if not data:
            return
        taken += 1
        if taken % _AT_ONCE == 0:
            await asyncio.sleep(0)
        try:
            state, kill = follow(state, parse_record(data))
        except KmsgError:
            continue
        if kill is not None:
            yield kill


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)

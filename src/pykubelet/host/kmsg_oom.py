"""Processes that the kernel killed for want of memory, found in its log.

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

import re
from dataclasses import dataclass, replace

from pykubelet.host.kmsg import KernelRecord

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

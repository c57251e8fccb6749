"""The kernel's log: its records, and what it says of processes killed for want of memory.

`kmsg-oom-6.18.txt` was read from a real `/dev/kmsg`: a process with a nasty name ran into the limit of its
cgroup, and then a program tried to forge the kernel's words. The texts of older kernels are in the forms of
their sources.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.linux.oom_watcher import KernelRecord, KmsgError, OomKill, OomState, follow, parse_record

RECORDED = Path(__file__).parents[2] / "data" / "kmsg-oom-6.18.txt"
POD = "/kubepods/burstable/pod0a1b"


def record(text: str, *, sequence: int = 7, facility: int = 0, flags: str = "-") -> KernelRecord:
    return KernelRecord(facility=facility, level=3, sequence=sequence, microseconds=5, flags=flags, text=text)


def kills_with_sizes(*records: KernelRecord | str) -> list[OomKill]:
    state, found = OomState(), []
    for each in records:
        state, kill = follow(state, record(each) if isinstance(each, str) else each)
        found += [kill] if kill is not None else []
    return found


def kills(*records: KernelRecord | str) -> list[OomKill]:
    """Return the kills without sizes, which have tests of their own."""
    return [replace(kill, anon_rss=None, limit_bytes=None) for kill in kills_with_sizes(*records)]


def killed(pid: int, process: str, cgroup: str = "", limit: str = "", *, whole: bool = False) -> OomKill:
    return OomKill(
        pid=pid,
        process=process,
        cgroup=cgroup,
        limit=limit,
        microseconds=5,
        sequence=7,
        system_oom=whole,
    )


def reason(
    limit: str = f"oom_memcg={POD}", cgroup: str = f"{POD}/c1", task: str = "app", pid: int = 9
) -> str:
    return (
        f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c1,mems_allowed=0,{limit},"
        f"task_memcg={cgroup},task={task},pid={pid},uid=0"
    )


def last_words(pid: int = 9, name: str = "app") -> str:
    return (
        f"Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:1460016kB, anon-rss:1414008kB, "
        "file-rss:4kB, shmem-rss:0kB, UID:0 pgtables:2808kB oom_score_adj:0"
    )


class TestRecords:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (
                b"6,339,5140900,-;NET: Registered protocol family 10\n",
                KernelRecord(0, 6, 339, 5140900, "-", "NET: Registered protocol family 10"),
            ),
            (
                b"30,340,5690716,-;udevd[80]: starting version 181\n",
                KernelRecord(3, 6, 340, 5690716, "-", "udevd[80]: starting version 181"),
            ),
            (
                b"7,160,424069,-;pci_root PNP0A03:00: host bridge window (ignored)\n"
                b" SUBSYSTEM=acpi\n DEVICE=+acpi:PNP0A03:00\n",
                KernelRecord(
                    *(0, 7, 160, 424069, "-", "pci_root PNP0A03:00: host bridge window (ignored)"),
                    {"SUBSYSTEM": "acpi", "DEVICE": "+acpi:PNP0A03:00"},
                ),
            ),
            (b"4,1,2,-,caller=T741;a;b", KernelRecord(0, 4, 1, 2, "-", "a;b")),
            (b"4,1,2,c;part of", KernelRecord(0, 4, 1, 2, "c", "part of")),
            (b"12,1,2;old", KernelRecord(1, 4, 1, 2, "-", "old")),
            (
                b"4,1,2,-;\\xc3\\xbc \\x5cx41 \\x0a \\xff \\xg",
                KernelRecord(0, 4, 1, 2, "-", "ü \\x41 \n � \\xg"),
            ),
            (
                b"4,1,2,-;text\nno field\n without equal\n A=b=c\n",
                KernelRecord(0, 4, 1, 2, "-", "text", {"A": "b=c"}),
            ),
            (b"4,1,2,-;", KernelRecord(0, 4, 1, 2, "-", "")),
        ],
    )
    def test_parse_record_valid_returns_fields(self, data: bytes, expected: KernelRecord) -> None:
        assert parse_record(data) == expected

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\n",
            b"text",
            b";",
            b"4;x",
            b"4,1;x",
            b"a,1,2;x",
            b"-4,1,2;x",
            b"4,1, 2;x",
            b"4,1,2" + b"0" * 30 + b";x",
        ],
    )
    def test_parse_record_malformed_raises(self, data: bytes) -> None:
        with pytest.raises(KmsgError):
            parse_record(data)

    @given(st.binary(max_size=300))
    def test_parse_record_any_bytes_raises_only_kmsg_error(self, data: bytes) -> None:
        with suppress(KmsgError):
            parse_record(data)

    @given(st.text(max_size=100))
    def test_parse_record_any_escaped_text_round_trips(self, text: str) -> None:
        escaped = b"".join(
            bytes([byte]) if 32 <= byte < 127 and byte != 0x5C else b"\\x%02x" % byte
            for byte in text.encode("utf-8", "replace")
        )
        assert parse_record(b"6,1,2,-;" + escaped + b"\n").text == text


class TestKills:
    def test_follow_recorded_log_finds_kill_and_ignores_forged(self) -> None:
        state, found = OomState(), []
        records = [parse_record(line) for line in RECORDED.read_bytes().splitlines(keepends=True)]
        for each in records:
            state, kill = follow(state, each)
            found += [kill] if kill is not None else []
        (kill,) = found
        assert (kill.process, kill.cgroup) == ("a) (b,task=c", "/pykubelet-oomtest/inner")
        assert kill.limit == "/pykubelet-oomtest"
        assert not kill.system_oom
        assert (kill.microseconds, kill.sequence) == (25622588378, 118684)
        assert (kill.anon_rss, kill.limit_bytes) == (20096 << 10, 20480 << 10)
        forged = [each for each in records if "forged" in each.text]
        assert [each.facility for each in forged] == [1]

    def test_follow_pre_linux_5_format_finds_kill(self) -> None:
        lines = (
            "memhog invoked oom-killer: gfp_mask=0x24000c0, order=0, oom_score_adj=999",
            f"Task in {POD}/c1 killed as a result of limit of {POD}",
            "memory: usage 204800kB, limit 204800kB, failcnt 61",
            "Memory cgroup out of memory: Kill process 512 (memhog) score 1971 or sacrifice child",
            "Killed process 512 (memhog) total-vm:307200kB, anon-rss:203000kB, file-rss:120kB",
        )
        assert kills(*lines) == [killed(512, "memhog", f"{POD}/c1", POD)]

        (kill,) = kills_with_sizes(*lines)
        assert (kill.anon_rss, kill.limit_bytes) == (203000 << 10, 204800 << 10)

    def test_follow_sizes_do_not_outlive_their_kill(self) -> None:
        """Verify that neither a kill without its cgroup nor one of the host has the limit of another kill."""
        memory = "memory: usage 64kB, limit 64kB, failcnt 1"
        host = reason("global_oom", "/user.slice")
        found = kills_with_sizes(memory, reason(), last_words(), last_words(), reason(), last_words())
        assert [kill.limit_bytes for kill in found] == [64 << 10, None, None]
        assert [kill.limit_bytes for kill in kills_with_sizes(memory, host, last_words())] == [None]
        unlimited = "memory: usage 64kB, limit 9007199254740988kB, failcnt 0"
        assert [kill.limit_bytes for kill in kills_with_sizes(unlimited, reason(), last_words())] == [None]

    def test_follow_hostile_process_name_does_not_change_sizes(self) -> None:
        (kill,) = kills_with_sizes(last_words(name="x) anon-rss:1kB"))
        assert (kill.process, kill.anon_rss) == ("x) anon-rss:1kB", 1414008 << 10)
        (kill,) = kills_with_sizes("Killed process 9 (app)")
        assert kill.anon_rss is None

    def test_follow_global_oom_is_system_oom(self) -> None:
        new = reason("global_oom", "/user.slice")
        words = "Out of memory: Killed process 9 (app) total-vm:1kB, anon-rss:1kB"
        assert kills("x invoked oom-killer: order=0", new, words) == [
            killed(9, "app", "/user.slice", whole=True)
        ]
        old = "Killed process 9, UID 48, (app) total-vm:1kB, anon-rss:1kB"
        (kill,) = kills("x invoked oom-killer: order=0", "Out of memory: Kill process 9 (app) score 1", old)
        assert kill == killed(9, "app", whole=True)

    def test_follow_only_last_line_finds_kill(self) -> None:
        """Of many kills in a short time only the last line is written."""
        assert kills(last_words()) == [killed(9, "app")]
        words = "Out of memory: Killed process 9 (app) total-vm:1kB, anon-rss:1kB"
        assert kills(words, last_words(10), words) == [
            killed(9, "app", whole=True),
            killed(10, "app"),
            killed(9, "app", whole=True),
        ]
        old = (
            "Memory cgroup out of memory: Kill process 9 (app) score 1",
            "Killed process 9 (app) total-vm:1kB",
        )
        assert kills(*old) == [killed(9, "app")]

    def test_follow_continued_line_is_joined(self) -> None:
        parts = (
            record("Task in ", flags="c"),
            record(f"{POD}/c1", flags="+"),
            record(" killed as a result of limit of ", flags="+"),
            record(POD, flags="+"),
            record("something else"),
            record("Killed process 9 (app) total-vm:1kB"),
        )
        assert kills(*parts) == [killed(9, "app", f"{POD}/c1", POD)]

    def test_follow_oom_group_kill_finds_all_processes(self) -> None:
        group = f"Tasks in {POD} are going to be killed due to memory.oom.group set"
        found = kills(reason(), last_words(), group, last_words(10, "b"), last_words(11, "c"))
        assert found == [
            killed(9, "app", f"{POD}/c1", POD),
            killed(10, "b", POD, POD),
            killed(11, "c", POD, POD),
        ]

    def test_follow_next_kill_does_not_inherit_cgroup(self) -> None:
        found = kills(reason(), last_words(), last_words(10), "x invoked oom-killer: order=0", last_words(11))
        assert found == [killed(9, "app", f"{POD}/c1", POD), killed(10, "app"), killed(11, "app")]

    @pytest.mark.parametrize("name", ["a,pid=1,uid=0", "x) total-vm:1", "a,task=b", "(((", "", "ü\n,"])
    def test_follow_hostile_process_name_is_preserved(self, name: str) -> None:
        (kill,) = kills(reason(task=name), last_words(name=name))
        assert kill == killed(9, name, f"{POD}/c1", POD)

    def test_follow_hostile_cgroup_path_is_preserved(self) -> None:
        cgroup = "/a,task=b/c,pid=1,uid=0/and/so/on"
        assert kills(reason(cgroup=cgroup), last_words()) == [killed(9, "app", cgroup, POD)]

    def test_follow_user_space_record_is_ignored(self) -> None:
        forged = [record(text, facility=1) for text in (reason(), last_words())]
        assert kills(*forged) == []
        assert kills(reason(), record("x invoked oom-killer: ", facility=3), last_words()) == [
            killed(9, "app", f"{POD}/c1", POD)
        ]

    @pytest.mark.parametrize(
        "text",
        [
            "app[12]: Killed process 9 (app) total-vm:1kB",
            "Killed process x (app) total-vm:1kB",
            "Memory cgroup out of memory: OOM victim 9 (app) is already exiting. Skip killing the task",
            "oom_reaper: reaped process 9 (app), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
            "Killed process 99999999999 (app) total-vm:1kB",
        ],
    )
    def test_follow_similar_text_finds_no_kill(self, text: str) -> None:
        assert kills(text) == []

    @given(
        st.lists(st.tuples(st.sampled_from("-c+"), st.text(max_size=60) | st.just(last_words())), max_size=8)
    )
    def test_follow_any_texts_never_raises(self, said: list[tuple[str, str]]) -> None:
        for kill in kills(*(record(text, flags=flags) for flags, text in said)):
            assert kill.pid >= 0

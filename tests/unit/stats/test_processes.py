"""Processes of cgroups: real processes, in a cgroup.procs of our own."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pykubelet.stats import processes
from pykubelet.stats.processes import ProcessCounts, ProcessScan, first_process, max_open_files, read_pids
from pykubelet.stats.samples import CgroupError, CgroupGone, Details

_HOLD = """
import resource, socket, sys
wanted = int(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.socket() for _ in range(wanted)]
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(sockets: int) -> Iterator[int]:
    """Yield the pid of a process with a number of sockets, and three other descriptors."""
    command = [sys.executable, "-c", _HOLD, str(sockets)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            process.stdin.close()


def procs_file(tmp_path: Path, *pids: int) -> Path:
    path = tmp_path / "cgroup.procs"
    path.write_text("".join(f"{pid}\n" for pid in pids))
    return path


def test_count_processes_returns_descriptors_and_sockets(tmp_path: Path) -> None:
    with holder(5) as first, holder(7) as second:
        counts = ProcessScan().count(procs_file(tmp_path, first, second))
    assert counts == ProcessCounts(processes=2, file_descriptors=18, sockets=12)


def test_count_empty_cgroup_is_zero(tmp_path: Path) -> None:
    assert ProcessScan().count(procs_file(tmp_path)) == ProcessCounts()


def test_count_ended_process_counts_without_descriptors(tmp_path: Path) -> None:
    with holder(1) as pid:
        path = procs_file(tmp_path, pid)
    assert ProcessScan().count(path) == ProcessCounts(processes=1)


def test_count_process_with_many_descriptors_is_bounded(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = min(15_000, hard - 100)
    if held <= processes.MAX_LINKS_PER_PROCESS:
        pytest.skip(f"the hard limit on open files is {hard}")
    scan = ProcessScan()
    with holder(held) as pid:
        counts = scan.count(procs_file(tmp_path, pid))
        reported = Path(f"/proc/{pid}/fd").stat().st_size
    assert counts.file_descriptors == (held + 3 if reported else processes.MAX_LINKS_PER_PROCESS)
    assert processes.MAX_LINKS_PER_PROCESS - 3 <= counts.sockets <= processes.MAX_LINKS_PER_PROCESS
    assert scan.calls_left >= processes.MAX_CALLS_PER_SCAN - processes.MAX_LINKS_PER_PROCESS - 5


def test_count_many_processes_are_bounded(tmp_path: Path) -> None:
    scan = ProcessScan()
    with holder(0) as pid:
        counts = scan.count(procs_file(tmp_path, *[pid] * 50_000))
    assert counts.processes == 50_000
    assert 0 < counts.file_descriptors <= processes.MAX_CALLS_PER_CGROUP // 2
    assert scan.calls_left == processes.MAX_CALLS_PER_SCAN - processes.MAX_CALLS_PER_CGROUP


def test_count_all_exhausted_budget_still_counts_processes(tmp_path: Path) -> None:
    scan = ProcessScan(max_calls=10)
    with holder(100) as pid:
        path = procs_file(tmp_path, pid)
        counts = scan.count_all({"first": path, "second": path, "absent": tmp_path / "absent/cgroup.procs"})
    assert list(counts) == ["first", "second"]
    assert counts["first"].sockets <= 5
    assert counts["second"] == ProcessCounts(processes=1)
    assert scan.calls_left == 0


def test_read_pids_huge_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "cgroup.procs"
    path.write_text("1234567\n" * 400_000)
    pids = read_pids(path)
    assert set(pids) == {1234567}
    assert len(pids) <= (processes.MAX_PROCS_BYTES + 65536) // 8


def test_read_pids_garbage_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "cgroup.procs"
    path.write_bytes(b"1\n-5\n\xff\xfe\n\n22\nabc\n33")
    assert read_pids(path) == [1, 22]


def test_read_pids_removed_cgroup_raises_gone(tmp_path: Path) -> None:
    with pytest.raises(CgroupGone):
        read_pids(tmp_path / "absent/cgroup.procs")


def test_read_pids_unreadable_raises_error_with_path(tmp_path: Path) -> None:
    with pytest.raises(CgroupError, match="Is a directory"):
        read_pids(tmp_path)


def test_process_counts_add_to_fills_details() -> None:
    details = ProcessCounts(1, 2, 3).add_to(Details(threads=9))
    assert (details.threads, details.processes, details.file_descriptors, details.sockets) == (9, 1, 2, 3)


def test_count_own_process_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(socket.socket())
        path = procs_file(tmp_path, os.getpid())
        first = ProcessScan().count(path)
        assert ProcessScan().count(path) == first
        assert first.sockets >= 1


def test_max_open_files_is_soft_limit() -> None:
    assert max_open_files(os.getpid()) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_max_open_files_ended_process_is_none() -> None:
    with holder(0) as pid:
        pass
    assert max_open_files(pid) is None


def test_first_process_pids_started_over_is_oldest(tmp_path: Path) -> None:
    """Verify that neither a lower pid nor a name with fields in it misleads."""
    procs = tmp_path / "cgroup.procs"
    procs.write_text("7\n8\n30000\n")
    for pid, name, started in ((7, "sh", 900), (30000, "a) S 1 1", 300)):
        (tmp_path / str(pid)).mkdir()
        fields = ["S", *(["1"] * 18), str(started), "0", "0"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    assert first_process(procs, tmp_path) == 30000
    procs.write_text("8\n")
    assert first_process(procs, tmp_path) == 0


def test_max_open_files_process_of_other_user_is_read(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    limits = tmp_path / "5" / "limits"
    head = "Limit                     Soft Limit           Hard Limit           Units     \n"
    for soft, value in (("1024", 1024), ("unlimited", -1), ("nonsense", None)):
        limits.write_text(f"{head}Max open files            {soft}   524288   files     \n")
        assert max_open_files(5, tmp_path) == value
    limits.write_text(head)
    assert max_open_files(5, tmp_path) is None

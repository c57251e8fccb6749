"""Termination messages: what is kept of them, and files that are not what they should be."""

import asyncio
import fcntl
import os
import signal
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.labels import TERMINATION_MESSAGE_PATH, TERMINATION_MESSAGE_POLICY
from pykubelet.kuberuntime.observe import LOG_BYTES, MESSAGE_BYTES, Observer, termination_message
from pykubelet.linux.untrusted_files import open_regular, read_tail

STAMP = "2026-01-01T00:00:00.000000000Z"


def exited(
    host_path: Path | None = None,
    *,
    path: str = "/dev/termination-log",
    log_path: Path | None = None,
    policy: str = "File",
    reason: str = "",
    message: str = "",
) -> pb.ContainerStatus:
    """The status of a container that exited with 1."""
    absolute = path if path.startswith("/") else f"/{path}"
    mounts = [pb.Mount(container_path=absolute, host_path=str(host_path))] if host_path else []
    return pb.ContainerStatus(
        id="c1",
        state=pb.CONTAINER_EXITED,
        started_at=1,
        exit_code=1,
        reason=reason,
        message=message,
        mounts=mounts,
        log_path=str(log_path or ""),
        annotations={TERMINATION_MESSAGE_PATH: path, TERMINATION_MESSAGE_POLICY: policy},
    )


def make_special(kind: str, path: Path) -> None:
    """Put something at a path that is not a regular file."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.mkdir()


@pytest.fixture
def soon() -> Any:
    """Fail, instead of hanging, when a call does not return: run it in a thread that nothing waits for."""

    def call(work: Any, *args: Any) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(work(*args)), daemon=True)
        thread.start()
        thread.join(10)
        assert results, "blocked"
        return results[0]

    return call


def test_termination_message_over_limit_keeps_last_bytes(tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text("first" + "x" * MESSAGE_BYTES + "last")
    message = termination_message(exited(file))
    assert len(message) == MESSAGE_BYTES
    assert message == "x" * (MESSAGE_BYTES - 4) + "last"


def test_termination_message_within_limit_returned_complete(tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text("out of ideas")
    assert termination_message(exited(file)) == "out of ideas"
    assert termination_message(exited(file, message="killed")) == "killed: out of ideas"
    assert termination_message(exited(tmp_path / "none", message="killed")) == "killed"


@pytest.mark.parametrize("path", ["tmp/end", "/tmp/end"])
def test_termination_message_relative_path_found(tmp_path: Path, path: str) -> None:
    file = tmp_path / "message"
    file.write_text("found")
    assert termination_message(exited(file, path=path)) == "found"


def test_termination_message_fallback_returns_end_of_log(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text("".join(f"{STAMP} stdout F line {number}\n" for number in range(500)))
    fallback: dict[str, Any] = {"log_path": log, "policy": "FallbackToLogsOnError"}
    message = termination_message(exited(**fallback))
    assert len(message) <= LOG_BYTES
    assert message.splitlines() == [f"line {number}" for number in range(420, 500)]
    # Some runtimes put a symbolic link there.
    link = tmp_path / "link.log"
    link.symlink_to(log)
    assert termination_message(exited(**{**fallback, "log_path": link})) == message
    assert termination_message(exited(**fallback, reason="ContainerCannotRun", message="no")) == "no"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"F {'x' * 30_000}end"], "x" * (LOG_BYTES - 4) + "end\n"),
        ([f"F {'x' * 30_000}", "F end"], "x" * (LOG_BYTES - 5) + "\nend\n"),
        # A runtime splits long lines, and only the last part has a line end.
        ([f"P {'x' * 16_384}", "F end"], "x" * (LOG_BYTES - 4) + "end\n"),
        (["F first", "F 10%\rone two three four"], "first\n10%\rone two three four\n"),
    ],
    ids=["long line", "long line before the last", "partial line", "carriage return"],
)
def test_termination_message_fallback_unusual_line_preserved(
    tmp_path: Path, lines: list[str], expected: str
) -> None:
    log = tmp_path / "0.log"
    log.write_bytes("".join(f"{STAMP} stdout {line}\n" for line in lines).encode())
    assert termination_message(exited(log_path=log, policy="FallbackToLogsOnError")) == expected


def log_lines(first: int, stop: int) -> str:
    return "".join(f"{STAMP} stdout F line {number}\n" for number in range(first, stop))


@pytest.mark.parametrize(
    ("rotated", "expected"),
    [
        ({"0.log.20260101-000000": (0, 100), "0.log.20260102-000000_000001": (100, 200)}, (123, 203)),
        ({"0.log.20260101-000000": (190, 200), "0.log.bak": (0, 100)}, (190, 203)),
        ({"0.log.20260101-000000": (0, 100), "0.log.20260102-000000.gz": (100, 200)}, (200, 203)),
        ({"0.log.20260101-000000.gz": (0, 200), "0.log.bak": (0, 200), "00.log": (0, 200)}, (200, 203)),
        ({}, (200, 203)),
    ],
    ids=["newest", "short", "newest compressed", "others", "none"],
)
def test_termination_message_fallback_after_rotation_continues_in_rotated_file(
    tmp_path: Path, rotated: dict[str, tuple[int, int]], expected: tuple[int, int]
) -> None:
    log = tmp_path / "0.log"
    log.write_text(log_lines(200, 203))
    for name, lines in rotated.items():
        (tmp_path / name).write_text(log_lines(*lines))
    message = termination_message(exited(log_path=log, policy="FallbackToLogsOnError"))
    assert message.splitlines() == [f"line {number}" for number in range(*expected)]
    assert len(message) <= LOG_BYTES


def test_termination_message_fallback_long_rotated_lines_cut_at_limit(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(f"{STAMP} stdout F end\n")
    (tmp_path / "0.log.20260101-000000").write_text(f"{STAMP} stdout F {'x' * 30_000}\n")
    message = termination_message(exited(log_path=log, policy="FallbackToLogsOnError"))
    assert message == "x" * (LOG_BYTES - 5) + "\nend\n"


def test_termination_message_fallback_rotated_symlink_not_followed(tmp_path: Path) -> None:
    log, secret = tmp_path / "0.log", tmp_path / "secret"
    log.write_text(log_lines(0, 1))
    secret.write_text(log_lines(5, 6))
    (tmp_path / "0.log.20260101-000000").symlink_to(secret)
    assert termination_message(exited(log_path=log, policy="FallbackToLogsOnError")) == "line 0\n"


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "directory"])
def test_termination_message_special_file_reported_without_blocking(
    tmp_path: Path, kind: str, soon: Any
) -> None:
    special = tmp_path / "special"
    make_special(kind, special)
    told = soon(termination_message, exited(special))
    assert told == f"Error on reading termination log {special}: not a regular file"
    told = soon(termination_message, exited(log_path=special, policy="FallbackToLogsOnError"))
    assert told == f"Error on reading termination message from logs: {special}: not a regular file"


def test_termination_message_symlink_not_followed(tmp_path: Path) -> None:
    secret, link = tmp_path / "secret", tmp_path / "message"
    secret.write_text("secret")
    link.symlink_to(secret)
    assert "secret" not in termination_message(exited(link)).replace(str(tmp_path), "")


def test_open_regular_device_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify that a device is not even opened: a watchdog would start to count."""
    special, flags = tmp_path / "special", list[int]()
    make_special("device", special)
    real = os.open

    def opening(path: Any, how: int, *args: Any, **more: Any) -> int:
        flags.append(how)
        return real(path, how, *args, **more)

    monkeypatch.setattr(os, "open", opening)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(special)
    assert flags
    assert all(how & os.O_PATH for how in flags)


def test_open_regular_leased_file_does_not_wait_for_holder(tmp_path: Path) -> None:
    """Verify that a container with a lease on its file does not occupy a thread for 45 seconds."""
    path = tmp_path / "message"
    path.touch()
    with path.open("rb+") as held:
        # By default the holder is notified with SIGIO, which ends the process.
        fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(BlockingIOError):
            open_regular(path)


def test_read_tail_reports_whether_more_precedes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    assert read_tail(file, 4) == (b"6789", True)
    assert read_tail(file, 10) == (b"0123456789", False)
    assert read_tail(file, 99) == (b"0123456789", False)


async def test_observe_termination_message_read_off_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, threads = tmp_path / "message", list[int]()
    file.write_text("the end")

    def reading(status: pb.ContainerStatus) -> str:
        threads.append(threading.get_ident())
        return termination_message(status)

    monkeypatch.setattr("pykubelet.kuberuntime.observe.termination_message", reading)

    async def sandboxes(*_: object) -> list[pb.PodSandbox]:
        return []

    async def containers(*_: object) -> list[pb.Container]:
        return [pb.Container(id="c1", state=pb.CONTAINER_EXITED)]

    async def status(_: str) -> Any:
        return SimpleNamespace(status=exited(file))

    runtime = SimpleNamespace(list_pod_sandbox=sandboxes, list_containers=containers, container_status=status)
    observer = Observer(cast(Any, SimpleNamespace(runtime=runtime)))
    async with asyncio.timeout(10):
        observed = await observer.observe_pod("u1")
        again = await observer.observe_pod("u1")
    assert [one.message for one in observed.containers] == ["the end"]
    assert again == observed
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()

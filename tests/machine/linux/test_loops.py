import fcntl
import gc
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pykubelet.linux.loop_devices import attach_loop, attached_loops, detach_loop, loops_of

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to attach devices"),
]


LOOP_CTL_ADD, LOOP_CTL_REMOVE = 0x4C80, 0x4C81


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(b"begin" + bytes((1 << 20) - 5))
    return path


def loops_in_the_end(file: Path) -> list[str]:
    """The devices of a file; one that somebody else looks at just now is let go a moment later."""
    end = time.monotonic() + 30
    while (found := loops_of(file)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def test_attach_loop_file_is_readable_and_writable(file: Path) -> None:
    device, at = attach_loop(file)
    try:
        assert loops_of(file) == [device]
        assert (device, str(file)) in attached_loops()
        assert os.pread(at, 5, 0) == b"begin"
        os.pwrite(at, b"BEGIN", 0)
        os.fsync(at)
    finally:
        os.close(at)
        detach_loop(device)
    assert loops_in_the_end(file) == []
    assert file.read_bytes()[:5] == b"BEGIN"


def test_detach_loop_free_device_is_noop() -> None:
    """Of a number that nobody else takes: a low one might be another's by the time it is detached."""
    device = Path("/dev/loop799")
    with Path("/dev/loop-control").open("rb") as control:
        with suppress(FileExistsError):
            fcntl.ioctl(control, LOOP_CTL_ADD, 799)
        assert device.is_block_device()
        detach_loop(str(device))
        with suppress(OSError):  # somebody looks at it just now
            fcntl.ioctl(control, LOOP_CTL_REMOVE, 799)


def test_attach_loop_read_only_rejects_writes(file: Path) -> None:
    file.chmod(0o400)
    device, at = attach_loop(file, read_only=True)
    try:
        with pytest.raises(OSError, match=r"Bad file descriptor|not permitted|Read-only"):
            os.pwrite(at, b"BEGIN", 0)
    finally:
        os.close(at)
        detach_loop(device)


def test_attach_loop_until_closed_detaches_on_last_close(file: Path) -> None:
    device, at = attach_loop(file, until_closed=True)
    again = os.open(device, os.O_RDONLY)
    os.close(at)
    assert loops_of(file) == [device]
    os.close(again)
    assert loops_in_the_end(file) == []


def test_attach_loop_until_closed_process_killed_detaches(file: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from pykubelet.linux.loop_devices import attach_loop\n"
        "attach_loop(Path(sys.argv[1]), until_closed=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, file], check=False)
    assert loops_in_the_end(file) == []


def test_loops_of_deleted_file_returns_device(file: Path) -> None:
    device, at = attach_loop(file)
    os.close(at)
    file.unlink()
    try:
        assert loops_of(file) == [device]
    finally:
        detach_loop(device)


def test_loop_functions_missing_file_or_device_handled(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        attach_loop(tmp_path / "nothing")
    assert loops_of(tmp_path / "nothing") == []
    detach_loop("/dev/loop-of-nobody")


def test_attach_loop_leaks_no_descriptor(file: Path) -> None:
    gc.collect()  # what earlier tests left open is closed now and not meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    device, at = attach_loop(file)
    assert fcntl.fcntl(at, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(at)
    detach_loop(device)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

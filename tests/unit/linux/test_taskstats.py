"""Numbers of tasks from taskstats: the kernel's for real directories, and malformed responses."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.taskstats import TaskStates, TaskstatsClient


@pytest.fixture
def client() -> TaskstatsClient:
    try:
        return TaskstatsClient()
    except OSError as err:
        pytest.skip(f"the kernel has no taskstats: {err}")


def test_read_own_cgroup_counts_this_process(client: TaskstatsClient) -> None:
    cgroups = detect_cgroups()
    if cgroups.unified:
        pytest.skip("the kernel counts tasks only on cgroup v1")
    directory = cgroups.path("cpu", cgroups.own["cpu"])
    for _ in range(3):
        tasks = client.read(str(directory))
        assert tasks.running >= 1
    client.close()


def test_read_other_directory_raises(client: TaskstatsClient, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        client.read(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        client.read(str(tmp_path / "none"))
    client.close()


def test_read_other_directory_leaves_no_descriptor(client: TaskstatsClient, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(OSError, match="Invalid argument"):
            client.read(str(tmp_path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    client.close()


class Kernel:
    """A socket whose responses are given: attributes, or an errno."""

    def __init__(self, *responses: bytes | int) -> None:
        self._responses = list(responses)
        self._sequence = 0

    def __call__(self, *_: int) -> Kernel:
        return self

    def settimeout(self, seconds: float) -> None: ...

    def bind(self, address: object) -> None: ...

    def close(self) -> None: ...

    def send(self, message: bytes) -> None:
        (self._sequence,) = struct.unpack_from("=I", message, 8)

    def recv(self, size: int) -> bytes:
        response = self._responses.pop(0)
        if isinstance(response, int):
            return struct.pack("=IHHIIi", 20, 2, 0, self._sequence, 0, -response)
        body = bytes(4) + response
        return struct.pack("=IHHII", 16 + len(body), 31, 0, self._sequence, 0) + body


FAMILY = struct.pack("=HH", 14, 2) + b"TASKSTATS\0\0\0" + struct.pack("=HHHH", 6, 1, 31, 0)


def kernel_client(monkeypatch: pytest.MonkeyPatch, *responses: bytes | int) -> TaskstatsClient:
    monkeypatch.setattr("pykubelet.linux.taskstats.socket.socket", Kernel(*responses))
    return TaskstatsClient()


def test_read_response_states_in_kernel_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stats = struct.pack("=HH5Q", 44, 5, 1, 2, 3, 4, 5)
    client = kernel_client(monkeypatch, FAMILY, stats)
    assert client.read(str(tmp_path)) == TaskStates(
        sleeping=1, running=2, stopped=3, uninterruptible=4, io_wait=5
    )


@pytest.mark.parametrize("body", [b"", bytes(4), bytes(43)])
def test_read_short_response_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: bytes) -> None:
    client = kernel_client(monkeypatch, FAMILY, body)
    with pytest.raises(OSError, match="taskstats returned"):
        client.read(str(tmp_path))


@pytest.mark.parametrize("body", [b"", b"\0", bytes(8), struct.pack("=HH", 65535, 2)])
def test_client_response_without_family_raises(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    with pytest.raises(OSError, match="no family"):
        kernel_client(monkeypatch, body)


def test_client_kernel_without_taskstats_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        kernel_client(monkeypatch, 2)

"""Commands of one guest in the other, with two threads in place of the guests."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubeadm import remote
from tests.kubeadm.remote import RemoteHost, run_command, serve


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteHost]:
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.01)
    made = RemoteHost(tmp_path)
    server = threading.Thread(target=serve, args=(tmp_path, run_command))
    server.start()
    yield made
    made.stop()
    server.join(10)
    assert not server.is_alive()


def test_run_commands_in_order_returns_output_and_code(host: RemoteHost) -> None:
    assert host.run("echo", "one", timeout=10) == remote.Result(0, "one\n")
    done = host.run("sh", "-c", "echo two >&2; exit 3", timeout=10)
    assert (done.code, done.output) == (3, "two\n")


def test_run_command_missing_or_too_slow_returns_code_of_shell_and_timeout(host: RemoteHost) -> None:
    assert host.run("no-such-program", timeout=10).code == 127
    assert run_command(["sh", "-c", "echo begun; exec sleep 30"], timeout=0.5) == remote.Result(
        124, "begun\n"
    )


def test_run_no_other_machine_raises_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="no result of the other machine"):
        RemoteHost(tmp_path).run("echo", timeout=0)

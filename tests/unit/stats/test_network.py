"""Interfaces of network namespaces."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from pykubelet.stats import network
from pykubelet.stats.network import NamespaceGone, NetworkReader, parse_net_dev
from pykubelet.stats.samples import NetworkInterface

HEADER = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls …
"""


def line(name: str, first: int = 1) -> str:
    return f"{name}:{' '.join(str(first + index) for index in range(16))}\n"


def test_parse_net_dev_returns_counters_of_both_directions() -> None:
    assert parse_net_dev((HEADER + "  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n").encode()) == (
        NetworkInterface(
            name="eth0",
            rx_bytes=1,
            rx_packets=2,
            rx_errors=3,
            rx_dropped=4,
            tx_bytes=9,
            tx_packets=10,
            tx_errors=11,
            tx_dropped=12,
        ),
    )


def test_parse_net_dev_ignores_loopback_veth_and_bridges_of_docker() -> None:
    names = ("lo", "lonely0", "veth12ab", "VETH1", "docker0", "nerdctl0", "eth0", "cni0", "ifb0", "lab0")
    found = parse_net_dev((HEADER + "".join(map(line, names))).encode())
    assert [interface.name for interface in found] == ["eth0", "cni0", "ifb0", "lab0"]


def test_parse_net_dev_name_with_colon_is_complete() -> None:
    assert [found.name for found in parse_net_dev((HEADER + line("eth0:1")).encode())] == ["eth0:1"]


@pytest.mark.parametrize(
    "text", ["eth0\n", "eth0: 1 2\n", "eth0: a b\n", ":" + " 1" * 16 + "\n", "\n", "\xff"]
)
def test_parse_net_dev_malformed_line_is_ignored(text: str) -> None:
    assert [found.name for found in parse_net_dev((HEADER + text + "\n" + line("ok0")).encode())] == ["ok0"]


def test_parse_net_dev_many_interfaces_are_bounded() -> None:
    data = (HEADER + "".join(line(f"dummy{n}") for n in range(20_000))).encode()
    assert len(parse_net_dev(data)) == network.MAX_INTERFACES


def test_network_reader_running_process_returns_its_interfaces() -> None:
    reader = NetworkReader(os.getpid())
    expected = parse_net_dev(Path("/proc/self/net/dev").read_bytes())
    assert [found.name for found in reader.read()] == [found.name for found in expected]
    reader.close()
    with pytest.raises(NamespaceGone):
        reader.read()


def test_network_reader_ended_process_raises_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        reader = NetworkReader(process.pid)
        reader.read()
        process.kill()
        # A zombie has no namespace either.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(NamespaceGone):
            reader.read()
    with pytest.raises(NamespaceGone):
        reader.read()
    with pytest.raises(NamespaceGone):
        NetworkReader(process.pid)


def test_network_reader_process_in_another_cgroup_raises_gone() -> None:
    with pytest.raises(NamespaceGone, match="not in cgroup"):
        NetworkReader(os.getpid(), cgroup="/kubepods/absent")


def test_network_reader_process_in_its_cgroup_is_accepted() -> None:
    own = Path("/proc/self/cgroup").read_text().splitlines()[0].split(":", 2)[2]
    reader = NetworkReader(os.getpid(), cgroup=own)
    reader.read()
    reader.close()


def test_network_reader_large_file_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "7/net").mkdir(parents=True)
    (tmp_path / "7/net/dev").write_text(HEADER + line("veth0") * 200_000 + line("eth0"))
    reader = NetworkReader(7, proc=tmp_path)
    assert reader.read() == ()
    reader.close()


def test_network_reader_no_descriptor_for_cgroup_closes_process(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, processes = os.open, []

    def fail(path: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        processes.append(opened(path, flags))
        return processes[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(OSError, match="Too many open files"):
            NetworkReader(os.getpid(), cgroup="/mine")
    (process,) = processes
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process)

import os
import socket
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest

from pykubelet.linux.port_owner import Listener, PortOwner, find_port_owner, parse_listeners

HEADINGS = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
)
TAIL = "00000000:00000000 00:00000000 00000000     0        0"


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes in the machine's byte order")
def test_parse_listeners_returns_listening_sockets() -> None:
    text = (
        HEADINGS
        + f"   0: 0100007F:2808 00000000:0000 0A {TAIL} 1664 1 0000 100 0 0 10 0\n"
        + f"   1: 020200C0:07E8 010200C0:D903 01 {TAIL} 1700 1 0000 20 4 30 10 -1\n"
        + f"   2: 00000000000000000000000001000000:0016 {'0' * 32}:0000 0A {TAIL} 1701 1 0000 100 0 0 10 0\n"
        + "   3: nothing\n"
    )
    assert parse_listeners(text) == [
        Listener(ip_address("127.0.0.1"), 10248, 1664),
        Listener(ip_address("::1"), 22, 1701),
    ]
    assert parse_listeners("") == []


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
)
def test_find_port_owner_own_listener_returns_own_pid(family: socket.AddressFamily, address: str) -> None:
    with bound(family, address) as sock:
        port = sock.getsockname()[1]
        sock.listen()
        holder = find_port_owner(port)
        assert holder is not None
        assert (holder.port, holder.address, holder.pid) == (port, address, os.getpid())
        assert holder.command == Path("/proc/self/comm").read_text().strip()
        assert str(holder) == f"pid {os.getpid()} ({holder.command})"
    assert not is_ours(find_port_owner(port))


def test_find_port_owner_bound_not_listening_is_not_owner() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert not is_ours(find_port_owner(sock.getsockname()[1]))


def bound(family: socket.AddressFamily, address: str) -> socket.socket:
    """A port that nobody else listens on at another address: the kernel does not mind giving out those."""
    while True:
        sock = socket.socket(family)
        sock.bind((address, 0))
        if find_port_owner(sock.getsockname()[1]) is None:
            return sock
        sock.close()


def is_ours(holder: PortOwner | None) -> bool:
    return holder is not None and holder.pid == os.getpid()


def test_find_port_owner_unreadable_process_is_another_process(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(HEADINGS + f"   0: 0100007F:2808 00000000:0000 0A {TAIL} 1664 1 0 0\n")
    (tmp_path / "12/fd").mkdir(parents=True)
    (tmp_path / "13").mkdir()
    holder = find_port_owner(10248, tmp_path)
    assert holder is not None
    assert holder.pid == 0
    assert str(holder) == "another process"
    assert str(PortOwner(1, "::", 5, "foo")) == "pid 5 (foo)"


def test_find_port_owner_any_bytes_in_process_name_replaced(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    entry = f"   0: 0100007F:2808 00000000:0000 0A {TAIL} 1664 1 0000 100 0 0 10 0\n"
    (tmp_path / "net" / "tcp").write_text(HEADINGS + entry)
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "3").symlink_to("socket:[1664]")
    (tmp_path / "7" / "comm").write_bytes(b"a\xff\n")
    owner = find_port_owner(10248, tmp_path)
    assert owner is not None
    assert (owner.pid, owner.command) == (7, "a\ufffd")

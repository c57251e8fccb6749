import asyncio
import contextlib
import errno
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import uvloop

from pykubelet.linux.dbus import DBusError, MessageType, connect
from tests.unit.linux.bus import Peer, listening

TARGET = ("org.example", "/org/example", "org.example.Things")


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "bus"


async def test_dbus_call_replies_out_of_order_are_matched(at: Path) -> None:
    greeting: list[bytes] = []

    async def serve(peer: Peer) -> None:
        greeting.append(await peer.welcome())
        calls = [await peer.read() for _ in range(3)]
        assert {call.kind for call in calls} == {MessageType.CALL}
        assert {(call.destination, call.path, call.interface) for call in calls} == {TARGET}
        peer.signal("Noise")
        for call in reversed(calls):
            peer.answer(call, "u", call.body[0] + 1)
        await peer.gone()

    async with listening(at, serve), connect(at, bus=False) as connection:
        answers = await asyncio.gather(
            *(connection.call(*TARGET, "Increase", "u", number) for number in (1, 2, 3))
        )
    assert answers == [(2,), (3,), (4,)]
    assert greeting == [b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\n"]


def test_dbus_call_on_uvloop_succeeds(at: Path) -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        peer.answer(await peer.read(), "s", "heard")
        await peer.gone()

    async def ask() -> None:
        async with listening(at, serve), connect(at, bus=False) as connection:
            assert await connection.call(*TARGET, "Do") == ("heard",)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


async def test_dbus_connect_bus_sends_hello_and_error_has_name(at: Path) -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        hello = await peer.read()
        assert (hello.destination, hello.member) == ("org.freedesktop.DBus", "Hello")
        peer.answer(hello, "s", ":1.7")
        peer.refuse(await peer.read(), "org.example.No", "not today")
        await peer.gone()

    async with listening(at, serve), connect(at, bus=True) as connection:
        with pytest.raises(DBusError, match=r"^Do: not today$") as refused:
            await connection.call(*TARGET, "Do")
    assert refused.value.name == "org.example.No"


async def test_dbus_signals_are_queued_in_order(at: Path) -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        call = await peer.read()
        peer.signal("First", "s", "a")
        peer.answer(call)
        peer.signal("Second")
        peer.vanish()

    async with listening(at, serve), connect(at, bus=False) as connection:
        with connection.signals() as heard:
            await connection.call(*TARGET, "Do")
            told = [await heard.get() for _ in range(3)]
        assert [message and message.member for message in told] == ["First", "Second", None]
        assert told[0] is not None
        assert told[0].body == ("a",)
        with connection.signals() as heard:
            assert heard.get_nowait() is None
        with pytest.raises(DBusError, match="closed the connection"):
            await connection.call(*TARGET, "Do")


class TestBadPeers:
    @pytest.mark.parametrize("bus", [False, True])
    async def test_connect_silent_peer_times_out(self, at: Path, bus: bool) -> None:
        async def serve(peer: Peer) -> None:
            if bus:
                await peer.welcome()
            await peer.gone()

        async with listening(at, serve):
            with pytest.raises(DBusError, match="does not answer") as failed:
                async with connect(at, bus=bus, seconds=0.1):
                    pass
        assert failed.value.errno == errno.ETIMEDOUT

    async def test_connect_missing_socket_raises(self, at: Path) -> None:
        with pytest.raises(DBusError, match=r"bus cannot be reached: No such file"):
            async with connect(at, bus=False):
                pass

    async def test_connect_full_backlog_times_out(self, at: Path) -> None:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(at))
            listener.listen(0)
            while True:
                client = stack.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                )
                try:
                    client.connect(str(at))
                except BlockingIOError:
                    break
            with pytest.raises(DBusError, match="does not answer"):
                async with connect(at, bus=False, seconds=0.3):
                    pass

    async def test_connect_auth_rejected_raises_eacces(self, at: Path) -> None:
        async def serve(peer: Peer) -> None:
            await peer.welcome(b"REJECTED EXTERNAL\r\n")
            await peer.gone()

        async with listening(at, serve):
            with pytest.raises(DBusError, match="does not let us in: REJECTED EXTERNAL") as failed:
                async with connect(at, bus=False):
                    pass
        assert failed.value.errno == errno.EACCES

    @pytest.mark.parametrize("data", [b"x" * 20_000, b"HTTP/1.1 400 Bad Request\r\n"])
    async def test_connect_not_dbus_peer_raises(self, at: Path, data: bytes) -> None:
        async def serve(peer: Peer) -> None:
            peer.write(data)
            await peer.gone()

        async with listening(at, serve):
            with pytest.raises(DBusError):
                async with connect(at, bus=False):
                    pass

    @pytest.mark.parametrize(
        "data",
        [
            b"z" * 16,
            b"l\x02\x00\x01" + b"\xff" * 12,
            b"l\x02\x00\x01" + bytes(4) + b"\1\0\0\0\4\0\0\0" + b"z" * 8,
        ],
    )
    async def test_malformed_message_fails_all_calls(self, at: Path, data: bytes) -> None:
        async def serve(peer: Peer) -> None:
            await peer.welcome()
            await peer.read()
            peer.write(data)
            await peer.gone()

        async with listening(at, serve), connect(at, bus=False) as connection:
            results = await asyncio.gather(
                *(connection.call(*TARGET, "Do") for _ in range(2)), return_exceptions=True
            )
        assert [str(result).partition(":")[0] for result in results] == [f"{at} talks nonsense"] * 2

    async def test_connection_closed_during_call_raises_econnreset(self, at: Path) -> None:
        async def serve(peer: Peer) -> None:
            await peer.welcome()
            await peer.read()
            peer.vanish()

        async with listening(at, serve), connect(at, bus=False) as connection:
            with pytest.raises(DBusError, match="closed the connection") as failed:
                await connection.call(*TARGET, "Do")
            assert failed.value.errno == errno.ECONNRESET

    async def test_call_timeout_raises_and_late_reply_is_ignored(self, at: Path) -> None:
        async def serve(peer: Peer) -> None:
            await peer.welcome()
            late, other = await peer.read(), await peer.read()
            peer.answer(late, "s", "late")
            peer.answer(other, "s", "in time")
            await peer.gone()

        async with listening(at, serve), connect(at, bus=False) as connection:
            with pytest.raises(DBusError, match=r"Do is not answered after 0.05s"):
                await connection.call(*TARGET, "Do", seconds=0.05)
            assert await connection.call(*TARGET, "Do") == ("in time",)

    async def test_stalled_peer_is_woken_by_ping(self, at: Path) -> None:
        """As systemd, which may read the first call with the greeting and then forget it."""
        looked: list[str] = []

        async def serve(peer: Peer) -> None:
            await peer.welcome()
            first = await peer.read()
            looked.append((await peer.read(nudges=True)).member)
            peer.answer(first, "s", "here")
            await peer.gone()

        async with listening(at, serve), connect(at, bus=False) as connection:
            assert await connection.call(*TARGET, "Do") == ("here",)
        assert looked == ["Ping"]

    async def test_call_cancelled_closes_connection(self, at: Path) -> None:
        called, gone = asyncio.Event(), asyncio.Event()

        async def serve(peer: Peer) -> None:
            await peer.welcome()
            await peer.read()
            called.set()
            await peer.gone()
            gone.set()

        async def ask() -> None:
            async with connect(at, bus=False) as connection:
                await connection.call(*TARGET, "Do")

        async with listening(at, serve), asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(ask())
            await called.wait()
            asking.cancel()
            await asyncio.wait_for(gone.wait(), 45)
        assert asking.cancelled()


@pytest.mark.skipif(
    shutil.which("dbus-daemon") is None, reason="needs dbus-daemon (Debian package dbus-daemon)"
)
async def test_dbus_daemon_names_errors_and_signals_work(at: Path) -> None:
    """Two clients of one bus: names, errors, and a signal that was asked for."""
    bus = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
    command = [
        "dbus-daemon",
        "--session",
        f"--address=unix:path={at}",
        "--nofork",
        "--nopidfile",
        "--print-address",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            assert await asyncio.to_thread(daemon.stdout.readline)
            async with connect(at, bus=True) as one, connect(at, bus=True) as other:
                await one.subscribe(
                    "type='signal',interface='org.freedesktop.DBus',member='NameOwnerChanged'"
                )
                with one.signals() as heard:
                    assert await other.call(*bus, "RequestName", "su", "org.example.Name", 0) == (1,)
                    while (signal := await asyncio.wait_for(heard.get(), 45)) is not None:
                        if signal.member == "NameOwnerChanged":
                            break
                assert signal is not None
                assert signal.body[0] == "org.example.Name"
                (names,) = await one.call(*bus, "ListNames")
                assert "org.example.Name" in names
                with pytest.raises(DBusError) as failed:
                    await one.call(*bus, "NoSuchMethod")
                assert failed.value.name == "org.freedesktop.DBus.Error.UnknownMethod"
                daemon.kill()
                with pytest.raises(DBusError, match="closed the connection"):
                    while True:
                        await one.call(*bus, "ListNames")
        finally:
            daemon.kill()

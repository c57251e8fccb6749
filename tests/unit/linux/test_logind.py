"""logind on a real bus: inhibitors are descriptors, signals arrive, files are read."""

import asyncio
import shutil
from pathlib import Path

import pytest
import uvloop

from pykubelet.linux.dbus import DBusError, Message, MessageType, connect, encode_message
from pykubelet.linux.logind import (
    DROP_IN_NAME,
    DelayDropIn,
    LogindRestarted,
    PrepareForShutdown,
    connect_logind,
    overriding_delay,
    parse_signal,
    parse_time_span,
    read_delay_settings,
    system_bus,
    write_delay_drop_in,
)
from tests.support.logind import LogindPeer, bus_daemon, logind_on_bus

BUS = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
needs_bus = pytest.mark.skipif(
    shutil.which("dbus-daemon") is None, reason="needs dbus-daemon (Debian package dbus-daemon)"
)


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@needs_bus
async def test_logind_inhibit_returns_descriptor_and_release_ends_it(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, delay=7.5) as (bus, peer), connect_logind(bus) as logind:
        assert await logind.max_delay() == 7.5
        assert not await logind.is_preparing()
        lock = await logind.inhibit("kubelet", "a reason")
        assert peer.inhibitors == [("shutdown", "kubelet", "a reason", "delay")]
        assert peer.held == 1
        assert lock.is_held
        lock.release()
        await peer.until(lambda: peer.held == 0)
        lock.release()
        assert not lock.is_held


@needs_bus
def test_logind_on_uvloop_inhibits(tmp_path: Path) -> None:
    async def work() -> None:
        async with logind_on_bus(tmp_path) as (bus, peer), connect_logind(bus) as logind:
            (await logind.inhibit("kubelet", "a reason")).release()
            await peer.until(lambda: peer.held == 0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


@needs_bus
async def test_logind_inhibit_while_preparing_raises(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, preparing=True) as (bus, _), connect_logind(bus) as logind:
        with pytest.raises(DBusError, match="already running"):
            await logind.inhibit("kubelet", "a reason")


@needs_bus
async def test_logind_lock_outlives_connection(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path) as (bus, peer):
        async with connect_logind(bus) as logind:
            lock = await logind.inhibit("kubelet", "a reason")
        async with connect_logind(bus) as logind:
            await logind.max_delay()
            assert peer.held == 1
        lock.release()
        await peer.until(lambda: peer.held == 0)


@needs_bus
async def test_logind_unclaimed_descriptors_are_closed(tmp_path: Path) -> None:
    """Verify that a descriptor is closed if its caller was cancelled, or did not expect one."""
    async with logind_on_bus(tmp_path) as (bus, peer):
        before = descriptors()
        async with connect_logind(bus) as logind:
            for _ in range(3):
                asking = asyncio.ensure_future(logind.inhibit("kubelet", "a reason"))
                count = len(peer.inhibitors)
                await peer.until(lambda count=count: len(peer.inhibitors) > count)
                asking.cancel()
                await asyncio.wait([asking])
            await logind.max_delay()
        async with connect(bus, bus=True, descriptors=True) as plain:
            manager = "org.freedesktop.login1.Manager"
            target = ("org.freedesktop.login1", "/org/freedesktop/login1", manager)
            assert await plain.call(*target, "Inhibit", "ssss", "shutdown", "a", "b", "delay") == (0,)
            with pytest.raises(DBusError, match="not one file descriptor"):
                await plain.call_for_descriptor(
                    *target[:2],
                    "org.freedesktop.DBus.Properties",
                    "Get",
                    "ss",
                    manager,
                    "PreparingForShutdown",
                )
        await peer.until(lambda: peer.held == 0)
        assert descriptors() == before


@needs_bus
async def test_logind_events_arrive_in_order_and_restart_is_noticed(tmp_path: Path) -> None:
    with bus_daemon(tmp_path) as bus:
        async with LogindPeer(bus, tmp_path) as peer, connect_logind(bus) as logind:
            async with logind.watch() as events:
                peer.prepare_for_shutdown(True)
                peer.prepare_for_shutdown(False)
                assert await events.next() == PrepareForShutdown(True)
                assert await events.next() == PrepareForShutdown(False)
                await peer.__aexit__()
                async with LogindPeer(bus, tmp_path, delay=9):
                    assert await events.next() == LogindRestarted()
                    assert await logind.max_delay() == 9


@needs_bus
async def test_logind_signals_of_another_client_are_ignored(tmp_path: Path) -> None:
    """Verify that a local process cannot announce a shutdown, or that logind has another owner."""
    async with logind_on_bus(tmp_path) as (bus, peer), connect_logind(bus) as logind:
        async with logind.watch() as events, connect(bus, bus=True) as other:
            names = (await other.call(*BUS, "ListNames"))[0]
            unique = [name for name in names if name.startswith(":")]
            for destination in unique:
                for interface, member, signature, body in (
                    ("org.freedesktop.login1.Manager", "PrepareForShutdown", "b", (True,)),
                    (
                        "org.freedesktop.DBus",
                        "NameOwnerChanged",
                        "sss",
                        ("org.freedesktop.login1", "", unique[-1]),
                    ),
                ):
                    signal = Message(
                        kind=MessageType.SIGNAL,
                        serial=1000,
                        path="/org/freedesktop/login1",
                        destination=destination,
                        interface=interface,
                        member=member,
                        signature=signature,
                        body=body,
                    )
                    assert other._transport is not None
                    other._transport.write(encode_message(signal))
            # The bus has passed them on when it has replied.
            await other.call(*BUS, "ListNames")
            peer.prepare_for_shutdown(False)
            assert await events.next() == PrepareForShutdown(False)


@needs_bus
async def test_logind_absent_raises(tmp_path: Path) -> None:
    with bus_daemon(tmp_path) as bus:
        async with connect_logind(bus) as logind:
            with pytest.raises(DBusError, match=r"login1"):
                await logind.max_delay()
    with pytest.raises(DBusError, match="cannot be reached"):
        async with connect_logind(tmp_path / "nothing"):
            pass


@pytest.mark.parametrize(
    ("interface", "member", "signature", "body", "event"),
    [
        ("login1.Manager", "PrepareForShutdown", "b", (True,), PrepareForShutdown(True)),
        ("login1.Manager", "PrepareForShutdown", "b", (False,), PrepareForShutdown(False)),
        ("login1.Manager", "PrepareForShutdown", "s", ("true",), None),
        ("login1.Manager", "PrepareForShutdown", "", (), None),
        ("login1.Manager", "PrepareForSleep", "b", (True,), None),
        ("other.Manager", "PrepareForShutdown", "b", (True,), None),
        ("DBus", "NameOwnerChanged", "sss", ("org.freedesktop.login1", "", ":1.2"), LogindRestarted()),
        ("DBus", "NameOwnerChanged", "sss", ("org.freedesktop.login1", ":1.2", ""), None),
        ("DBus", "NameOwnerChanged", "sss", ("org.freedesktop.other", "", ":1.2"), None),
        ("DBus", "NameOwnerChanged", "s", ("org.freedesktop.login1",), None),
    ],
)
def test_parse_signal_returns_event_of_known_signals(
    interface: str, member: str, signature: str, body: tuple[object, ...], event: object
) -> None:
    signal = Message(
        kind=MessageType.SIGNAL,
        serial=1,
        interface=f"org.freedesktop.{interface}",
        member=member,
        signature=signature,
        body=body,
    )
    assert parse_signal(signal) == event


@pytest.mark.parametrize(
    ("address", "path"),
    [
        (None, "/run/dbus/system_bus_socket"),
        ("", "/run/dbus/system_bus_socket"),
        ("tcp:host=localhost,port=1", "/run/dbus/system_bus_socket"),
        ("unix:path=/a%20b,guid=0", "/a b"),
        ("tcp:host=h;unix:guid=1,path=/x", "/x"),
        ("unix:abstract=/x", "/run/dbus/system_bus_socket"),
    ],
)
def test_system_bus_follows_environment(address: str | None, path: str) -> None:
    assert system_bus({} if address is None else {"DBUS_SYSTEM_BUS_ADDRESS": address}) == Path(path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("5s", 5),
        (" 1min 30s ", 90),
        ("1h", 3600),
        ("500ms", 0.5),
        ("2.5 min", 150),
        ("infinity", float("inf")),
        ("", None),
        ("soon", None),
        ("5 parsecs", None),
        ("-5", None),
    ],
)
def test_parse_time_span_reads_systemd_spans(text: str, seconds: float | None) -> None:
    assert parse_time_span(text) == seconds


def test_delay_settings_later_name_overrides_kubelet(tmp_path: Path) -> None:
    vendor, etc = tmp_path / "usr", tmp_path / "etc"
    vendor.mkdir()
    write_delay_drop_in(35, etc)
    assert (etc / DROP_IN_NAME).read_text() == ("# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=35\n")
    assert (etc / DROP_IN_NAME).stat().st_mode & 0o777 == 0o644
    (vendor / "10-vendor.conf").write_text("[Login]\nInhibitDelayMaxSec=90\n")
    assert overriding_delay(read_delay_settings([vendor, etc])) is None
    late = vendor / "unattended-upgrades-logind-maxdelay.conf"
    late.write_text("[Login]\n# InhibitDelayMaxSec=1\nInhibitDelayMaxSec=30\n")
    (vendor / "zz.conf").write_text("[Login]\nKillUserProcesses=no\n")
    settings = read_delay_settings([vendor, etc, tmp_path / "absent"])
    assert [(found.path.name, found.seconds) for found in settings] == [
        ("10-vendor.conf", 90),
        (DROP_IN_NAME, 35),
        (late.name, 30),
    ]
    assert overriding_delay(settings) == DelayDropIn(late, 30)
    # A file of the same name in /etc replaces the vendor's.
    (etc / late.name).write_text("[Login]\n")
    assert overriding_delay(read_delay_settings([vendor, etc])) is None

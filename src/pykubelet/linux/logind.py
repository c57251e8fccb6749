"""systemd-logind over D-Bus: delay inhibitors, the signal before a shutdown, and the longest delay.

An inhibitor is a file descriptor: logind delays a shutdown until it is closed, at most by InhibitDelayMaxSec.
The descriptor belongs to no connection, so it outlives a lost bus and a restarted logind.

    async with connect_logind() as logind:
        async with logind.watch() as events:    # subscribe first: no signal is missed
            lock = await logind.inhibit("kubelet", "…")
            while (event := await events.next()) is not None: …

Every client of the bus can send PrepareForShutdown directly to the kubelet, so only signals of the owner of
logind's name count.

Every failure is a `DBusError`. `read_delay_settings` and `parse_time_span` read logind's drop-in files, for
diagnosis; of several files that set the delay, the one with the last name applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pykubelet.linux.dbus import DBusConnection, DBusError, Message, connect
from pykubelet.util.files import write_if_changed

SYSTEM_BUS = Path("/run/dbus/system_bus_socket")
DROP_IN_DIRECTORY = Path("/etc/systemd/logind.conf.d")
DROP_IN_NAME = "99-kubelet.conf"
"""File by which the kubelet raises InhibitDelayMaxSec; upstream's name."""
DROP_IN_DIRECTORIES = (
    Path("/usr/lib/systemd/logind.conf.d"),
    Path("/usr/local/lib/systemd/logind.conf.d"),
    Path("/run/systemd/logind.conf.d"),
    DROP_IN_DIRECTORY,
)
"""Directories of logind's drop-in files; a file in a later one replaces one of the same name."""
_NAME = "org.freedesktop.login1"
_PATH = "/org/freedesktop/login1"
_MANAGER = "org.freedesktop.login1.Manager"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_BUS, _BUS_PATH = "org.freedesktop.DBus", "/org/freedesktop/DBus"
_SYSTEMD = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
_PREPARE_RULE = (
    f"type='signal',sender='{_NAME}',path='{_PATH}',interface='{_MANAGER}',member='PrepareForShutdown'"
)
_OWNER_RULE = f"type='signal',sender='{_BUS}',interface='{_BUS}',member='NameOwnerChanged',arg0='{_NAME}'"
_OWNER_FIELDS = 3
_SIGHUP = 1


@dataclass(frozen=True, slots=True)
class PrepareForShutdown:
    """The signal before a shutdown (`active`), and after one that was cancelled or has failed."""

    active: bool


@dataclass(frozen=True, slots=True)
class LogindRestarted:
    """logind was stopped and runs again."""


LogindEvent = PrepareForShutdown | LogindRestarted


class InhibitorLock:
    """A delay inhibitor; `release` ends the delay. Releasing twice is harmless."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @property
    def is_held(self) -> bool:
        """Whether the lock was not released."""
        return self._descriptor is not None

    def release(self) -> None:
        """Close the descriptor: without other inhibitors, logind continues the shutdown."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class LogindEvents:
    """Events of logind in the order of their arrival."""

    def __init__(self, signals: asyncio.Queue[Message | None]) -> None:
        self._signals = signals

    async def next(self) -> LogindEvent | None:
        """Return the next event; None when the connection has ended."""
        while (signal := await self._signals.get()) is not None:
            if (event := parse_signal(signal)) is not None:
                return event
        return None


def parse_signal(signal: Message) -> LogindEvent | None:
    """Return the event of a signal; None for any other signal."""
    if signal.interface == _MANAGER and signal.member == "PrepareForShutdown":
        return PrepareForShutdown(signal.body[0]) if signal.signature == "b" else None
    if signal.interface == _BUS and signal.member == "NameOwnerChanged":
        is_owner_change = len(signal.body) == _OWNER_FIELDS and signal.body[0] == _NAME
        return LogindRestarted() if is_owner_change and signal.body[2] else None
    return None


class _TrustedSignals:
    """Filter of signals by sender: the bus itself, and the owner of logind's name."""

    def __init__(self) -> None:
        self.owner = ""
        """Unique name of logind's connection; empty while it does not run."""

    def accepts(self, signal: Message) -> bool:
        """Return whether a signal is from the bus or from logind, and follow changes of the owner."""
        if signal.sender != _BUS:
            return bool(self.owner) and signal.sender == self.owner
        is_owner_change = signal.member == "NameOwnerChanged" and len(signal.body) == _OWNER_FIELDS
        if is_owner_change and signal.body[0] == _NAME:
            self.owner = signal.body[2]
        return True


class Logind:
    """Client of logind on one connection to the system bus; created by `connect_logind`."""

    def __init__(self, connection: DBusConnection) -> None:
        self._connection = connection

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[LogindEvents]:
        """Collect the events within the block. Raises DBusError."""
        trusted = _TrustedSignals()
        with self._connection.signals(trusted.accepts) as signals:
            await self._connection.subscribe(_OWNER_RULE)
            trusted.owner = await self._owner()
            await self._connection.subscribe(_PREPARE_RULE)
            yield LogindEvents(signals)

    async def max_delay(self) -> float:
        """Return the longest delay of a shutdown, in seconds. Raises DBusError."""
        return int(await self._property("InhibitDelayMaxUSec", "t")) / 1e6

    async def is_preparing(self) -> bool:
        """Return whether a shutdown is being delayed or has begun. Raises DBusError."""
        return bool(await self._property("PreparingForShutdown", "b"))

    async def inhibit(self, who: str, why: str) -> InhibitorLock:
        """Delay shutdowns until the lock is released. Raises DBusError, also while a shutdown is delayed."""
        descriptor = await self._connection.call_for_descriptor(
            _NAME, _PATH, _MANAGER, "Inhibit", "ssss", "shutdown", who, why, "delay"
        )
        return InhibitorLock(descriptor)

    async def reload(self) -> None:
        """Request systemd to send SIGHUP to logind, which reads its files again. Raises DBusError."""
        await self._connection.call(*_SYSTEMD, "KillUnit", "ssi", "systemd-logind.service", "all", _SIGHUP)

    async def _owner(self) -> str:
        """Return the unique name of logind's connection; empty if it does not run."""
        try:
            (owner,) = await self._connection.call(_BUS, _BUS_PATH, _BUS, "GetNameOwner", "s", _NAME)
        except DBusError as err:
            if err.name != "org.freedesktop.DBus.Error.NameHasNoOwner":
                raise
            return ""
        return str(owner)

    async def _property(self, name: str, signature: str) -> int | bool:
        (found,) = await self._connection.call(_NAME, _PATH, _PROPERTIES, "Get", "ss", _MANAGER, name)
        if getattr(found, "signature", "") != signature:
            raise DBusError(errno.EBADMSG, f"the property {name} of logind is not of the type {signature}")
        value: int | bool = found.value
        return value


def system_bus(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the socket of the system bus: that of $DBUS_SYSTEM_BUS_ADDRESS, or the usual one."""
    for address in environ.get("DBUS_SYSTEM_BUS_ADDRESS", "").split(";"):
        transport, _, options = address.partition(":")
        values = dict(option.split("=", 1) for option in options.split(",") if "=" in option)
        if transport == "unix" and "path" in values:
            return Path(urllib.parse.unquote(values["path"]))
    return SYSTEM_BUS


@contextlib.asynccontextmanager
async def connect_logind(bus: Path | None = None) -> AsyncIterator[Logind]:
    """Connect to the system bus. Raises DBusError; whether logind runs shows with the first call."""
    async with connect(bus or system_bus(), bus=True, descriptors=True) as connection:
        yield Logind(connection)


def write_delay_drop_in(seconds: int, directory: Path = DROP_IN_DIRECTORY) -> None:
    """Write the file that sets InhibitDelayMaxSec. Raises OSError."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    content = f"# Kubelet logind override\n[Login]\nInhibitDelayMaxSec={seconds}\n"
    write_if_changed(directory / DROP_IN_NAME, content.encode(), 0o644)


@dataclass(frozen=True, slots=True)
class DelayDropIn:
    """InhibitDelayMaxSec in a drop-in file."""

    path: Path
    seconds: float


def read_delay_settings(directories: Sequence[Path] = DROP_IN_DIRECTORIES) -> list[DelayDropIn]:
    """Return the drop-in files that set InhibitDelayMaxSec, in the order in which they apply."""
    files: dict[str, Path] = {}
    for directory in directories:
        with contextlib.suppress(OSError):
            files |= {path.name: path for path in directory.glob("*.conf")}
    found = []
    for _, path in sorted(files.items()):
        with contextlib.suppress(OSError):
            found += [DelayDropIn(path, seconds) for seconds in _delays(path.read_text(errors="replace"))]
    return found


def overriding_delay(settings: Sequence[DelayDropIn]) -> DelayDropIn | None:
    """Return the setting that applies instead of the kubelet's, because its file has a later name."""
    return next((found for found in reversed(settings) if found.path.name > DROP_IN_NAME), None)


def _delays(text: str) -> Iterator[float]:
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "InhibitDelayMaxSec" and (seconds := parse_time_span(value)) is not None:
            yield seconds


_UNITS = {
    **dict.fromkeys(("us", "usec"), 1e-6),
    **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


def parse_time_span(text: str) -> float | None:
    """Parse a time span of systemd (`1min 30s`, `infinity`) and return seconds; None if it is not valid."""
    text = text.strip()
    if text == "infinity":
        return float("inf")
    total, at = 0.0, 0
    while at < len(text):
        match = _SPAN.match(text, at)
        if match is None or match[2] not in _UNITS:
            return None
        total += float(match[1]) * _UNITS[match[2]]
        at = match.end()
    return total if text else None

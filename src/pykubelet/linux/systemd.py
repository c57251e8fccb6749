"""systemd: transient units over D-Bus, readiness notification (sd_notify) and the watchdog.

On a host with systemd it owns the cgroup tree and removes cgroups that it did not create, so cgroups are
created as units. Each operation opens a connection of its own, because systemd's private socket sends all
signals to every client, which is not worth receiving for longer than necessary. Root connects to systemd's
private socket, which works without a bus; other users connect to the system bus.

The notifications do nothing without $NOTIFY_SOCKET, so that they can be called unconditionally. The watchdog
is not pinged while the kubelet is unhealthy, and systemd restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pykubelet.linux import HostError
from pykubelet.linux.dbus import DBusConnection, DBusError, Variant, connect
from pykubelet.logs import get_logger

log = get_logger(__name__)
JOB_SECONDS = 30.0
"""Seconds that the start or stop of a unit may take."""
INFINITY = 2**64 - 1
"""systemd's value for no limit."""
Property = tuple[str, Variant]
_SYSTEMD = "org.freedesktop.systemd1"
_PATH = "/org/freedesktop/systemd1"
_MANAGER = "org.freedesktop.systemd1.Manager"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_EXISTS = "org.freedesktop.systemd1.UnitExists"
_UNKNOWN = "org.freedesktop.systemd1.NoSuchUnit"
_JOB_RULE = f"type='signal',interface='{_MANAGER}',member='JobRemoved',path='{_PATH}'"
_JOB_FIELDS = 4


class SystemdError(DBusError):
    """Raised when systemd cannot be reached or rejects a call; one line that names the unit."""


class Systemd:
    """Client of the system's service manager."""

    def __init__(
        self,
        private: Path = Path("/run/systemd/private"),
        bus: Path = Path("/run/dbus/system_bus_socket"),
        *,
        job_seconds: float = JOB_SECONDS,
    ) -> None:
        self._private = private
        self._bus = bus
        self._job_seconds = job_seconds
        self._version: int | None = None

    async def version(self) -> int:
        """Return systemd's version number, such as 252; read once and cached. Raises SystemdError."""
        if self._version is None:
            async with self._connected("its version") as connection:
                (told,) = await connection.call(
                    _SYSTEMD, _PATH, _PROPERTIES, "Get", "ss", _MANAGER, "Version"
                )
            self._version = parse_version(told.value)
        return self._version

    async def start(self, unit: str, properties: Iterable[Property]) -> None:
        """Start a transient unit and wait until it is active; an existing one is left unchanged.

        Raises SystemdError.
        """
        async with self._connected(unit) as connection:
            try:
                result = await self._job(
                    connection, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "replace", [*properties], []
                )
            except DBusError as err:
                if err.name == _EXISTS:
                    return
                raise
            if result != "done":
                await self._reset(connection, unit)
                raise SystemdError(errno.EIO, f"systemd could not start {unit}: {result}")

    async def set(self, unit: str, properties: Iterable[Property]) -> None:
        """Set properties of a unit until the next boot. Raises SystemdError."""
        async with self._connected(unit) as connection:
            await self._call(connection, "SetUnitProperties", "sba(sv)", unit, True, [*properties])

    async def stop(self, unit: str) -> None:
        """Stop a unit, wait for its end and reset its failed state. Raises SystemdError.

        An unknown unit is not an error.
        """
        async with self._connected(unit) as connection:
            try:
                result = await self._job(connection, "StopUnit", "ss", unit, "replace")
            except DBusError as err:
                if err.name == _UNKNOWN:
                    return
                raise
            if result != "done":
                log.warning("Failed to stop systemd unit cleanly", unit=unit, result=result)
            await self._reset(connection, unit)

    async def _reset(self, connection: DBusConnection, unit: str) -> None:
        """Reset the failed state of a unit, so that systemd unloads it; others are unloaded automatically."""
        with contextlib.suppress(DBusError):
            await self._call(connection, "ResetFailedUnit", "s", unit)

    async def _job(self, connection: DBusConnection, member: str, signature: str, *args: Any) -> str:
        """Call a method that starts a job, wait for the job and return its result, `done` for success."""
        with connection.signals() as heard:
            # systemd's private socket needs no AddMatch, and has no bus that would handle one.
            await self._call(connection, "Subscribe", "")
            (job,) = await self._call(connection, member, signature, *args)
            try:
                async with asyncio.timeout(self._job_seconds):
                    while (signal := await heard.get()) is not None:
                        if signal.member == "JobRemoved" and signal.body[1:2] == (job,):
                            return str(signal.body[3]) if len(signal.body) == _JOB_FIELDS else "done"
            except TimeoutError:
                raise DBusError(
                    errno.ETIMEDOUT, f"{member} is not done after {self._job_seconds:g}s"
                ) from None
        raise connection.over or DBusError(errno.ECONNRESET, "the connection is lost")

    async def _call(self, connection: DBusConnection, member: str, signature: str, *args: Any) -> Any:
        return await connection.call(_SYSTEMD, _PATH, _MANAGER, member, signature, *args)

    @contextlib.asynccontextmanager
    async def _connected(self, about: str) -> AsyncIterator[DBusConnection]:
        """Open a connection; its errors are raised as SystemdError about this unit."""
        try:
            if os.geteuid() == 0 and self._private.exists():
                async with connect(self._private, bus=False) as connection:
                    yield connection
            else:
                async with connect(self._bus, bus=True) as connection:
                    await connection.subscribe(_JOB_RULE)
                    yield connection
        except SystemdError:
            raise
        except DBusError as err:
            raise SystemdError(err.errno or errno.EIO, f"systemd, about {about}: {err}", err.name) from err


def is_running(run: Path = Path("/run/systemd/system")) -> bool:
    """Return whether the host was booted with systemd, as sd_booted(3) does."""
    return run.is_dir() and not run.is_symlink()


def parse_version(text: str) -> int:
    """Parse a version such as `252.38-1~deb12u1` or `v245`; 0 if it is neither."""
    found = re.match(r"v?(\d+)", text)
    return int(found[1]) if found else 0


# Seconds. systemd reads immediately; a receiver that does not must not block the kubelet.
_PATIENCE = 1.0
_SHORTEST_WATCHDOG = 1.0
_TRIES, _PAUSE = 2, 1.0


class WatchdogError(HostError):
    """Raised when the unit's WatchdogSec is not valid or too short."""


def ready() -> None:
    """Notify systemd that the start-up is complete."""
    _tell("READY=1")


def stopping() -> None:
    """Notify systemd that the shutdown has begun."""
    _tell("STOPPING=1")


def extend_timeout(seconds: float) -> None:
    """Request so many seconds from systemd for the shutdown, regardless of TimeoutStopSec."""
    _tell(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send a notification such as `STATUS=...`; return False without $NOTIFY_SOCKET.

    Raises OSError if the socket cannot be reached.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(_PATIENCE)
        sock.connect(address)
        sock.send(state.encode())
    return True


def watchdog_interval(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """Return the seconds between two pings, half of WatchdogSec; None if this process is not watched.

    Raises WatchdogError if the setting is not valid, or is one second or less.
    """
    text = environ.get("WATCHDOG_USEC", "")
    if not text:
        return None
    try:
        seconds = int(text) / 1_000_000
        watched = int(environ.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        raise WatchdogError(
            f"WATCHDOG_USEC={text!r} or WATCHDOG_PID={environ.get('WATCHDOG_PID')!r} is not a number: "
            "set WatchdogSec= in the unit and let systemd set these"
        ) from None
    if seconds <= 0:
        raise WatchdogError(f"WATCHDOG_USEC={text} is not a time: set WatchdogSec= in the unit")
    if watched != (os.getpid() if pid is None else pid):
        return None
    if seconds <= _SHORTEST_WATCHDOG:
        raise WatchdogError(
            f"the watchdog's time of {seconds:g}s is too short: set WatchdogSec= to more than one second"
        )
    return seconds / 2


async def feed_watchdog(
    interval: float,
    unwell: Callable[[], str | None],
    send: Callable[[str], bool] = notify,
) -> None:
    """Ping the watchdog now and every `interval` seconds while the kubelet is healthy, until cancelled.

    `unwell` returns the reason why the kubelet is unhealthy, or None. A failed ping is retried once after a
    second.
    """
    log.info("Starting systemd watchdog with interval", interval=f"{interval:g}s")
    while True:
        if reason := unwell():
            log.error(
                reason, "Do not notify watchdog this iteration as the kubelet is reportedly not healthy"
            )
        else:
            await _ping(send)
        await asyncio.sleep(interval)


async def _ping(send: Callable[[str], bool]) -> None:
    for attempt in range(1, _TRIES + 1):
        try:
            if not send("WATCHDOG=1"):
                log.error("NOTIFY_SOCKET is not set", "Failed to notify watchdog")
            return
        except OSError as err:
            if attempt == _TRIES:
                log.error(err, "Failed to notify watchdog")
                return
            log.v(5).info("Failed to notify systemd watchdog, retrying", error=err)
            await asyncio.sleep(_PAUSE)


def _tell(state: str) -> None:
    try:
        notify(state)
    except OSError as err:
        log.error(err, "Failed to notify systemd", state=state)

"""systemd's units, over D-Bus: starting transient slices, setting their properties, stopping them.

Where systemd runs the machine it owns the cgroups, and takes back what it did not hand out; so
whoever wants cgroups of his own there asks for units. Each task opens a connection of its own:
on systemd's own socket everybody is told everything that happens, which is nothing to listen
to for longer than needed.

Root speaks to systemd itself, which works without a bus; others go through the system's bus.

Telling systemd how we are: started, stopping, alive.

Nothing happens when systemd did not ask ($NOTIFY_SOCKET), so the agent calls these
unconditionally. The watchdog's pings stop when the agent is not healthy, and systemd restarts it.
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
"""How long a unit may take to start or to stop."""
INFINITY = 2**64 - 1
"""systemd's "no limit"."""
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
    """systemd cannot be reached, or refuses; one line that names the unit."""


class Systemd:
    """The system's own systemd."""

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
        """Give the number of its release, such as 252; asked once. Raises SystemdError."""
        if self._version is None:
            async with self._connected("its version") as connection:
                (told,) = await connection.call(
                    _SYSTEMD, _PATH, _PROPERTIES, "Get", "ss", _MANAGER, "Version"
                )
            self._version = parse_version(told.value)
        return self._version

    async def start(self, unit: str, properties: Iterable[Property]) -> None:
        """Have a transient unit and wait until it is up; one that exists is left as it is.

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
        """Set properties of a unit until the next boot; raises SystemdError."""
        async with self._connected(unit) as connection:
            await self._call(connection, "SetUnitProperties", "sba(sv)", unit, True, [*properties])

    async def stop(self, unit: str) -> None:
        """Stop a unit, wait for its end and have it forgotten; raises SystemdError.

        A unit that systemd does not know is fine.
        """
        async with self._connected(unit) as connection:
            try:
                result = await self._job(connection, "StopUnit", "ss", unit, "replace")
            except DBusError as err:
                if err.name == _UNKNOWN:
                    return
                raise
            if result != "done":
                log.warning("systemd could not stop a unit cleanly", unit=unit, result=result)
            await self._reset(connection, unit)

    async def _reset(self, connection: DBusConnection, unit: str) -> None:
        """Have systemd forget a unit that failed; one that did not fail is forgotten by itself."""
        with contextlib.suppress(DBusError):
            await self._call(connection, "ResetFailedUnit", "s", unit)

    async def _job(self, connection: DBusConnection, member: str, signature: str, *args: Any) -> str:
        """Have systemd do something, and wait; gives its word for how it ended, `done` when well."""
        with connection.signals() as heard:
            # On systemd's own socket nobody needs to subscribe, and no bus is there to be asked.
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
        """Open a connection; what goes wrong on it is told as being about this unit."""
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
    """Whether systemd runs this machine, by the sign that it gives for the purpose."""
    return run.is_dir() and not run.is_symlink()


def parse_version(text: str) -> int:
    """Read `252.38-1~deb12u1`, or `v245`; 0 when it is neither."""
    found = re.match(r"v?(\d+)", text)
    return int(found[1]) if found else 0


# systemd reads at once; a receiver that does not must not hold up the agent.
_PATIENCE = 1.0
_SHORTEST_WATCHDOG = 1.0
_TRIES, _PAUSE = 2, 1.0


class WatchdogError(HostError):
    """The unit's WatchdogSec cannot be served."""


def ready() -> None:
    """Say that the start is over."""
    _tell("READY=1")


def stopping() -> None:
    """Say that the end has begun."""
    _tell("STOPPING=1")


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send a line, such as `STATUS=...`; False when systemd does not listen.

    Raises OSError when it should but cannot be reached.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket: a name without a file
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(_PATIENCE)
        sock.connect(address)
        sock.send(state.encode())
    return True


def watchdog_interval(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """Give the seconds between two pings, half of what systemd allows; None when it does not watch us.

    Raises WatchdogError when the setting makes no sense or allows a second or less.
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
    """Ping at once and then every `interval` seconds, for ever, as long as the agent is well.

    `unwell` says what is wrong, or None. A ping that fails is tried again once after a second.
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
        log.error(err, "Could not notify systemd", state=state)

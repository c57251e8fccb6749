"""Telling systemd how we are: started, stopping, alive.

Nothing happens when systemd did not ask ($NOTIFY_SOCKET), so the agent calls these
unconditionally. The watchdog's pings stop when the agent is not healthy, and systemd restarts it.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping

from pykubelet.host import HostError
from pykubelet.logs import get_logger

log = get_logger(__name__)

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

"""Health of the devices of resource claims, as reported by DRA drivers.

A report is valid for a limited time, HOLDS_SECONDS unless the driver specifies it; after that the health is
unknown. Reports survive kubelet restarts in `dra_health_state`, in upstream's format, so that a restart does
not make all devices unknown; an unreadable file is logged and ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import time

import msgspec

from pykubelet.api.pod_status import ResourceHealth
from pykubelet.cm.dra import dra_health_pb2 as pb
from pykubelet.cm.dra.claims import PreparedDevice
from pykubelet.logs import get_logger
from pykubelet.podconfig.static_pods import write_atomically
from pykubelet.util.tasks import TaskScope, finish_in_thread

log = get_logger(__name__)
FILE_NAME = "dra_health_state"
HOLDS_SECONDS = 30.0
"""Seconds that a report is valid if the driver does not specify it."""
MOST_SECONDS = 10.0 * 365 * 86400
"""Maximum validity in seconds; the file stores nanoseconds, which must fit into upstream's integers."""
LONGEST_MESSAGE = 1024
_PRIVATE = 0o600
_UNKNOWN = "Unknown"
_NAMES = {pb.HEALTHY: "Healthy", pb.UNHEALTHY: "Unhealthy"}
Device = tuple[str, str]
"""Pool and name of a device."""


@dataclass(frozen=True, slots=True)
class Health:
    """Reported health of a device: `said` is a Unix time, `holds` the validity in seconds."""

    status: str
    message: str
    holds: float
    said: float

    def at(self, now: float) -> Health:
        """Return the health at a Unix time: unknown if the report has expired."""
        fresh = now - self.said <= self.holds
        return self if fresh else Health(_UNKNOWN, "", self.holds, self.said)

    @property
    def words(self) -> tuple[str, str, float]:
        """Content of the report, without its time."""
        return self.status, self.message, self.holds


class _Device(msgspec.Struct):
    pool: str = msgspec.field(name="PoolName", default="")
    device: str = msgspec.field(name="DeviceName", default="")
    health: str = msgspec.field(name="Health", default=_UNKNOWN)
    said: datetime = msgspec.field(name="LastUpdated", default_factory=lambda: datetime.fromtimestamp(0, UTC))
    holds: int = msgspec.field(name="HealthCheckTimeout", default=0)
    message: str = msgspec.field(name="Message", default="")


class _Driver(msgspec.Struct):
    devices: dict[str, _Device] | None = msgspec.field(name="Devices", default=None)


class DeviceHealthCache:
    """Cache of device health (a `DeviceHealthListener` of `plugins`).

    `changed` is called with a driver and its devices whose health changed.
    """

    def __init__(
        self,
        folder: Path,
        tasks: TaskScope,
        changed: Callable[[str, set[Device]], None] = lambda driver, devices: None,
        *,
        messages: bool = True,
        clock: Callable[[], float] = time,
    ) -> None:
        """Initialize; `messages` shows drivers' messages, `clock` returns Unix time in seconds."""
        self._path = folder / FILE_NAME
        self._tasks = tasks
        self.changed = changed
        self._messages = messages
        self._clock = clock
        self._known: dict[str, dict[Device, Health]] = _read(self._path)
        self._saving: asyncio.Task[None] | None = None
        self._unsaved = False

    def told(self, driver: str, answer: pb.NodeWatchResourcesResponse) -> None:
        """Handle a new list of a driver."""
        now = self._clock()
        before = self._known.setdefault(driver, {})
        after = updated(before, answer, now)
        different = {
            device
            for device, health in after.items()
            if device not in before or _differs(before[device], health)
        }
        self._known[driver] = after
        if different:
            self._save_soon()
            self.changed(driver, different)

    def ended(self, driver: str) -> None:
        """Drop the health of a driver whose reports have ended."""
        if self._known.pop(driver, None) is not None:
            self._save_soon()

    def of(self, driver: str, device: PreparedDevice) -> ResourceHealth:
        """Return the current health of a device for a pod's status."""
        place = (device.pool, device.device)
        health = self._known.get(driver, {}).get(place)
        found = health.at(self._clock()) if health is not None else None
        name = device.cdi_devices[0] if device.cdi_devices else f"{driver}/{device.pool}/{device.device}"
        message = found.message if found is not None and self._messages else ""
        return ResourceHealth(
            resource_id=name,
            health=found.status if found is not None else _UNKNOWN,
            message=message or msgspec.UNSET,
        )

    def _save_soon(self) -> None:
        """Write the file in a task; changes during a write are combined into the next one."""
        self._unsaved = True
        if self._saving is None or self._saving.done():
            self._saving = self._tasks.start(self._save(), name="dra-health")

    async def _save(self) -> None:
        while self._unsaved:
            self._unsaved = False
            write = partial(write_atomically, self._path, _encode(self._known), _PRIVATE)
            try:
                await finish_in_thread(write)
            except OSError as err:
                log.error(err, "Failed to write DRA device health, a restart loses it")


def updated(
    before: Mapping[Device, Health], answer: pb.NodeWatchResourcesResponse, now: float
) -> dict[Device, Health]:
    """Return the health after a driver's list; a device that it omits becomes unknown when it expires."""
    after = {device: health.at(now) for device, health in before.items()}
    for one in answer.devices:
        holds = float(one.health_check_timeout_seconds)
        after[one.device.pool_name, one.device.device_name] = Health(
            _NAMES.get(one.health, _UNKNOWN),
            shortened(one.message),
            min(holds, MOST_SECONDS) if holds > 0 else HOLDS_SECONDS,
            now,
        )
    return after


def shortened(message: str) -> str:
    """Return a message cut to the maximum length of the API, in bytes."""
    encoded = message.encode()
    if len(encoded) <= LONGEST_MESSAGE:
        return message
    return encoded[: LONGEST_MESSAGE - 3].decode(errors="ignore") + "..."


def _differs(before: Health, after: Health) -> bool:
    return before.words != after.words


def _read(path: Path) -> dict[str, dict[Device, Health]]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, _Driver])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as err:
        log.error(err, "Failed to read DRA device health, ignored the file", path=path)
        return {}
    return {
        driver: {
            (one.pool, one.device): Health(
                one.health, one.message, one.holds / 1e9 or HOLDS_SECONDS, one.said.timestamp()
            )
            for one in (state.devices or {}).values()
        }
        for driver, state in found.items()
    }


def _encode(known: Mapping[str, Mapping[Device, Health]]) -> bytes:
    found = {
        driver: _Driver(
            {
                f"{pool}/{name}": _Device(
                    pool,
                    name,
                    one.status,
                    datetime.fromtimestamp(one.said, UTC),
                    int(one.holds * 1e9),
                    one.message,
                )
                for (pool, name), one in sorted(devices.items())
            }
        )
        for driver, devices in sorted(known.items())
    }
    return msgspec.json.encode(found)

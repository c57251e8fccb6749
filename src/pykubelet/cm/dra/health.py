"""Health of the devices of resource claims, as reported by DRA drivers.

A report is valid for a limited time, DEFAULT_VALIDITY_SECONDS unless the driver specifies it; after that the
health is unknown. Reports survive kubelet restarts in `dra_health_state`, in upstream's format, so that a
restart does not make all devices unknown; an unreadable file is logged and ignored.
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
from pykubelet.util.files import write_atomically
from pykubelet.util.tasks import TaskScope, finish_in_thread

log = get_logger(__name__)
FILE_NAME = "dra_health_state"
DEFAULT_VALIDITY_SECONDS = 30.0
"""Seconds that a report is valid if the driver does not specify it."""
MAX_VALIDITY_SECONDS = 10.0 * 365 * 86400
"""Maximum validity in seconds; the file stores nanoseconds, which must fit into upstream's integers."""
MAX_MESSAGE_BYTES = 1024
_PRIVATE = 0o600
_UNKNOWN = "Unknown"
_NAMES = {pb.HEALTHY: "Healthy", pb.UNHEALTHY: "Unhealthy"}
Device = tuple[str, str]
"""Pool and name of a device."""


@dataclass(frozen=True, slots=True)
class Health:
    """Reported health of a device: `reported_at` is a Unix time, `validity` is in seconds."""

    status: str
    message: str
    validity: float
    reported_at: float

    def at(self, now: float) -> Health:
        """Return the health at a Unix time: unknown if the report has expired."""
        fresh = now - self.reported_at <= self.validity
        return self if fresh else Health(_UNKNOWN, "", self.validity, self.reported_at)

    @property
    def content(self) -> tuple[str, str, float]:
        """Content of the report, without its time."""
        return self.status, self.message, self.validity


class _Device(msgspec.Struct):
    pool: str = msgspec.field(name="PoolName", default="")
    device: str = msgspec.field(name="DeviceName", default="")
    health: str = msgspec.field(name="Health", default=_UNKNOWN)
    reported_at: datetime = msgspec.field(
        name="LastUpdated", default_factory=lambda: datetime.fromtimestamp(0, UTC)
    )
    validity: int = msgspec.field(name="HealthCheckTimeout", default=0)
    message: str = msgspec.field(name="Message", default="")


class _Driver(msgspec.Struct):
    devices: dict[str, _Device] | None = msgspec.field(name="Devices", default=None)


class DeviceHealthCache:
    """Cache of device health; `DraPluginRegistry` calls it with the reports of its plugins."""

    def __init__(
        self,
        directory: Path,
        tasks: TaskScope,
        *,
        messages: bool = True,
        clock: Callable[[], float] = time,
    ) -> None:
        """Initialize; `messages` shows drivers' messages, `clock` returns Unix time in seconds."""
        self._path = directory / FILE_NAME
        self._tasks = tasks
        self._messages = messages
        self._clock = clock
        self._known: dict[str, dict[Device, Health]] = _read(self._path)
        self._saving: asyncio.Task[None] | None = None
        self._unsaved = False
        self._listeners: list[Callable[[str, set[Device]], None]] = []

    def add_listener(self, listener: Callable[[str, set[Device]], None]) -> None:
        """Call `listener` with a driver and its devices whose health changed; it must not block."""
        self._listeners.append(listener)

    def on_report(self, driver: str, response: pb.NodeWatchResourcesResponse) -> None:
        """Handle a new list of a driver."""
        now = self._clock()
        before = self._known.setdefault(driver, {})
        after = updated(before, response, now)
        different = {
            device
            for device, health in after.items()
            if device not in before or _differs(before[device], health)
        }
        self._known[driver] = after
        if different:
            self._save_soon()
            for listener in self._listeners:
                listener(driver, different)

    def on_reports_ended(self, driver: str) -> None:
        """Drop the health of a driver whose reports have ended."""
        if self._known.pop(driver, None) is not None:
            self._save_soon()

    def health_of(self, driver: str, device: PreparedDevice) -> ResourceHealth:
        """Return the current health of a device for a pod's status."""
        key = (device.pool, device.device)
        health = self._known.get(driver, {}).get(key)
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
    before: Mapping[Device, Health], response: pb.NodeWatchResourcesResponse, now: float
) -> dict[Device, Health]:
    """Return the health after a driver's list; a device that it omits becomes unknown when it expires."""
    after = {device: health.at(now) for device, health in before.items()}
    for report in response.devices:
        validity = float(report.health_check_timeout_seconds)
        after[report.device.pool_name, report.device.device_name] = Health(
            _NAMES.get(report.health, _UNKNOWN),
            shortened(report.message),
            min(validity, MAX_VALIDITY_SECONDS) if validity > 0 else DEFAULT_VALIDITY_SECONDS,
            now,
        )
    return after


def shortened(message: str) -> str:
    """Return a message cut to the maximum length of the API, in bytes."""
    encoded = message.encode()
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return message
    return encoded[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."


def _differs(before: Health, after: Health) -> bool:
    return before.content != after.content


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
            (device.pool, device.device): Health(
                device.health,
                device.message,
                device.validity / 1e9 or DEFAULT_VALIDITY_SECONDS,
                device.reported_at.timestamp(),
            )
            for device in (state.devices or {}).values()
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
                    health.status,
                    datetime.fromtimestamp(health.reported_at, UTC),
                    int(health.validity * 1e9),
                    health.message,
                )
                for (pool, name), health in sorted(devices.items())
            }
        )
        for driver, devices in sorted(known.items())
    }
    return msgspec.json.encode(found)

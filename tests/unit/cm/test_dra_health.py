"""How long a driver's word on its devices holds, and what is kept of it."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from pykubelet.api.pod_status import ResourceHealth
from pykubelet.cm.dra import dra_health_pb2 as pb
from pykubelet.cm.dra import health as dra_health
from pykubelet.cm.dra.claims import PreparedDevice
from pykubelet.cm.dra.health import Device, DeviceHealthCache, Health, shortened, updated
from pykubelet.util.files import write_atomically
from pykubelet.util.tasks import TaskScope

DEVICE = PreparedDevice("pool", "dev", (), ("v/c=dev", "v/c=more"))


def answer(*devices: tuple[str, pb.HealthStatus, str, int]) -> pb.NodeWatchResourcesResponse:
    """A driver's list: name, health, message and how long it holds, in seconds."""
    found = pb.NodeWatchResourcesResponse()
    for name, health, message, holds in devices:
        one = found.devices.add(health=health, message=message, health_check_timeout_seconds=holds)
        one.device.pool_name, one.device.device_name = "pool", name
    return found


def test_updated_report_merged_and_expired_device_unknown() -> None:
    before = {
        ("pool", "same"): Health("Healthy", "", 30, 100),
        ("pool", "left-out"): Health("Unhealthy", "broken", 30, 100),
        ("pool", "long-gone"): Health("Healthy", "fine", 5, 100),
    }
    said = answer(
        ("same", pb.HEALTHY, "", 0),
        ("new", pb.UNHEALTHY, "on fire", 7),
        ("odd", pb.UNKNOWN, "", -5),
    )
    assert updated(before, said, 110) == {
        ("pool", "same"): Health("Healthy", "", 30, 110),
        ("pool", "left-out"): Health("Unhealthy", "broken", 30, 100),
        ("pool", "long-gone"): Health("Unknown", "", 5, 100),
        ("pool", "new"): Health("Unhealthy", "on fire", 7, 110),
        ("pool", "odd"): Health("Unknown", "", 30, 110),
    }


@pytest.mark.parametrize(
    ("message", "length"), [("", 0), ("a" * 1024, 1024), ("a" * 1025, 1024), ("é" * 600, 1023)]
)
def test_shortened_long_message_truncated_to_1024_bytes(message: str, length: int) -> None:
    found = shortened(message)
    assert len(found.encode()) == length
    assert found == message or (found.endswith("...") and message.startswith(found[:-3]))


class HealthScene:
    """A health cache, its clock, and what its listeners received."""

    def __init__(self, folder: Path, tasks: TaskScope, *, messages: bool = True) -> None:
        self.now = 1_800_000_000.0
        self.told: list[set[Device]] = []
        self.cache = DeviceHealthCache(folder, tasks, messages=messages, clock=self.clock)
        self.cache.add_listener(lambda _, devices: self.told.append(devices))

    def clock(self) -> float:
        return self.now

    @property
    def health(self) -> ResourceHealth:
        return self.cache.health_of("d", DEVICE)


async def test_device_health_cache_report_expires_after_timeout(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        found = HealthScene(tmp_path, tasks)
        unknown = ResourceHealth(resource_id="v/c=dev", health="Unknown")
        assert found.health == unknown
        found.cache.on_report("d", answer(("dev", pb.UNHEALTHY, "on fire", 0)))
        unhealthy = ResourceHealth(resource_id="v/c=dev", health="Unhealthy", message="on fire")
        assert found.health == unhealthy
        found.now += 30
        assert found.health == unhealthy
        found.now += 0.5
        assert found.health == unknown
        found.cache.on_report("d", answer(("dev", pb.UNHEALTHY, "on fire", 100)))
        found.now += 90
        assert found.health == unhealthy
        assert found.cache.health_of("e", DEVICE) == unknown
        found.cache.on_reports_ended("d")
        assert found.health == unknown


async def test_device_health_cache_listener_notified_of_changes_only(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        found = HealthScene(tmp_path, tasks, messages=False)
        found.cache.on_report("d", answer(("dev", pb.HEALTHY, "", 0), ("other", pb.HEALTHY, "", 0)))
        found.cache.on_report("d", answer(("dev", pb.HEALTHY, "", 0), ("other", pb.HEALTHY, "", 0)))
        found.cache.on_report("d", answer(("dev", pb.HEALTHY, "well", 0), ("other", pb.HEALTHY, "", 0)))
        found.now += 31
        found.cache.on_report("d", answer(("dev", pb.HEALTHY, "well", 0)))
        assert found.health == ResourceHealth(resource_id="v/c=dev", health="Healthy")
    assert found.told == [
        {("pool", "dev"), ("pool", "other")},
        {("pool", "dev")},
        {("pool", "other")},
    ]


async def test_device_health_cache_device_without_cdi_id_named_by_pool(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        health = HealthScene(tmp_path, tasks).cache.health_of("d", PreparedDevice("pool", "dev"))
    assert health.resource_id == "d/pool/dev"


async def test_device_health_cache_upstream_state_file_read_and_updated(tmp_path: Path) -> None:
    device = {
        "PoolName": "pool",
        "DeviceName": "dev",
        "Health": "Unhealthy",
        "LastUpdated": "2027-01-15T08:00:00.123456789Z",
        "HealthCheckTimeout": 30_000_000_000,
        "Message": "on fire",
    }
    path = tmp_path / "dra_health_state"
    path.write_text(json.dumps({"d": {"Devices": {"pool/dev": device}}, "e": {"Devices": None}}))
    async with TaskScope() as tasks:
        found = HealthScene(tmp_path, tasks)
        assert found.health.health == "Unhealthy"
        found.now += 31
        assert found.health.health == "Unknown"
        found.cache.on_report("d", answer(("dev", pb.HEALTHY, "", 60)))
        async with asyncio.timeout(30):
            while "Unhealthy" in path.read_text():
                await asyncio.sleep(0.01)
    written = json.loads(path.read_text())["d"]["Devices"]["pool/dev"]
    assert written == device | {
        "Health": "Healthy",
        "HealthCheckTimeout": 60_000_000_000,
        "LastUpdated": "2027-01-15T08:00:31Z",
        "Message": "",
    }


@pytest.mark.parametrize("content", [b"", b"{", b'{"d": 1}', b"\xff"])
async def test_device_health_cache_invalid_state_file_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dra_health_state").write_bytes(content)
    async with TaskScope() as tasks:
        assert HealthScene(tmp_path, tasks).health.health == "Unknown"


async def test_device_health_cache_frequent_reports_writes_coalesced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []

    def counted(path: Path, content: bytes, mode: int) -> None:
        time.sleep(0.05)  # a slow disk
        write_atomically(path, content, mode)
        written.append(content)

    monkeypatch.setattr(dra_health, "write_atomically", counted)
    async with TaskScope() as tasks:
        found = HealthScene(tmp_path, tasks)
        for number in range(100):
            found.cache.on_report("d", answer(("dev", pb.HEALTHY, f"{number} degrees", 0)))
            await asyncio.sleep(0)
        writers = [task for task in asyncio.all_tasks() if task.get_name() == "dra-health"]
        assert len(writers) == 1
        async with asyncio.timeout(60):
            await writers[0]
    assert b"99 degrees" in written[-1]
    assert len(written) < 50
    assert len(found.told) == 100


def test_updated_huge_timeout_capped_to_int64_nanoseconds() -> None:
    found = updated({}, answer(("dev", pb.HEALTHY, "", 2**62)), 100)["pool", "dev"]
    assert found.at(100 + 86400.0) == found
    assert found.validity * 1e9 < 2**63

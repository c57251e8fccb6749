"""Health of devices that real drivers report, in the status of pods."""

from collections.abc import AsyncIterator

import pytest

from pykubelet.api.pod import Pod
from pykubelet.cm.dra.health import DeviceHealthCache
from pykubelet.util.tasks import TaskScope
from tests.support.dra_plugin.process import DRIVER
from tests.unit.cm.dra_node import Node, driver_of, new_node, pod_using


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with new_node() as running:
        yield running


async def test_dra_health_driver_reports_shown_in_pod_status(node: Node) -> None:
    pod = pod_using("c")
    node.claim("c", pod)
    with driver_of(node, "--health") as driver:
        driver.behave(health={"pool/dev-0": ["HEALTHY", "fine"]})
        await node.registered()
        await node.claims.prepare(pod)
        await node.until(lambda: _health(node, pod) == ("Healthy", "fine"))
        driver.behave(health={"pool/dev-0": ["UNHEALTHY", "on fire"]})
        await node.until(lambda: _health(node, pod) == ("Unhealthy", "on fire"))
        assert node.unwell[-1] == (DRIVER, {("pool", "dev-0")})
        assert node.claims.users(*node.unwell[-1]) == {pod.uid}
        assert node.claims.users(DRIVER, {("pool", "else")}) == set()
        await node.until(lambda: "on fire" in (node.folder / "dra_health_state").read_text())
        async with TaskScope() as tasks:
            later = DeviceHealthCache(node.folder, tasks)
            (record,) = node.claims.records(pod.uid)
            assert later.health_of(DRIVER, record.devices[DRIVER][0]).health == "Unhealthy"
        driver.kill()
        await node.until(lambda: _health(node, pod) == ("Unknown", None))
    assert node.claims.health(pod, pod.spec.containers[1]) == []


def _health(node: Node, pod: Pod) -> tuple[str, str | None]:
    (status,) = node.claims.health(pod, pod.spec.containers[0])
    assert status.name == "claim:c"
    (device,) = status.resources
    assert device.resource_id == f"{DRIVER}/claim=uid-c-dev-0"
    return device.health, device.message if isinstance(device.message, str) else None


async def test_dra_health_driver_without_health_service_is_unknown(node: Node) -> None:
    pod = pod_using("c", requests=("req-0", "req-1"))
    node.claim("c", pod)
    with driver_of(node, "--devices=2", "--request=req-{}"):
        await node.registered()
        await node.claims.prepare(pod)
        found = node.claims.health(pod, pod.spec.containers[0])
        assert [(one.name, [device.health for device in one.resources]) for one in found] == [
            ("claim:c/req-0", ["Unknown"]),
            ("claim:c/req-1", ["Unknown"]),
        ]


async def test_dra_health_old_plugin_stops_newer_report_stays(node: Node) -> None:
    """During an update two plugins of a driver tell; the new one does not repeat itself."""
    pod = pod_using("c")
    node.claim("c", pod)
    with driver_of(node, "--health") as old:
        old.behave(health={"pool/dev-0": ["HEALTHY", "fine"]})
        await node.registered()
        await node.claims.prepare(pod)
        await node.until(lambda: _health(node, pod) == ("Healthy", "fine"))
        with driver_of(node, "--health", "--instance=b", folder="new") as new:
            new.behave(health={"pool/dev-0": ["UNHEALTHY", "on fire"]})
            await node.until(lambda: _health(node, pod) == ("Unhealthy", "on fire"))
            old.stop()
            await node.until(lambda: len(node.drivers._plugins[DRIVER]) == 1)
            assert _health(node, pod) == ("Unhealthy", "on fire")
            new.stop()
            await node.until(lambda: _health(node, pod) == ("Unknown", None))

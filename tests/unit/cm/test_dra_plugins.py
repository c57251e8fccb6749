"""How drivers of claims come and go: registration, versions, several plugins of one, lost connections."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pykubelet.cm.dra import plugins as dra_plugins
from pykubelet.cm.dra.claims import ClaimError
from pykubelet.cm.dra.plugins import DraPluginRegistry
from pykubelet.pluginmanager.registration import Plugin, RegistrationRefused
from pykubelet.util.tasks import TaskScope
from tests.support.dra_plugin.process import DRIVER, PREPARE, UNPREPARE
from tests.unit.cm.dra_node import Node, driver_of, new_node, pod_using


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with new_node() as running:
        yield running


async def test_dra_plugins_driver_registers_waiting_pod_is_woken(node: Node) -> None:
    pod = pod_using("c")
    node.claim("c", pod)
    with pytest.raises(ClaimError, match="is not registered"):
        await node.claims.prepare(pod)
    with driver_of(node):
        await node.until(lambda: node.woken)
        assert node.woken == [pod.uid]
        await node.claims.prepare(pod)


async def test_dra_plugins_rolling_update_newest_reachable_plugin_called(node: Node) -> None:
    with driver_of(node) as old:
        await node.registered()
        pod = pod_using("c")
        node.claim("c", pod)
        await node.claims.prepare(pod)
        assert old.calls(PREPARE)[-1]["by"] == "a"
        with driver_of(node, "--instance=b") as new:
            await node.until(lambda: node.drivers.get(DRIVER).path.endswith("b.sock"))
            await node.claims.unprepare(pod.uid)
            assert new.calls(UNPREPARE)[-1]["by"] == "b", "the newest answers"
            # One that cannot be reached is not asked while another can.
            new.kill()
            await node.until(lambda: node.drivers.get(DRIVER).path.endswith("a.sock"))
            await node.claims.prepare(pod)
            assert old.calls(PREPARE)[-1]["by"] == "a"
            old.stop()
            await node.until(lambda: node.drivers.get(DRIVER).path.endswith("b.sock"))
            new.start()
            await node.registered_anew(new, by="b")
            await node.claims.unprepare(pod.uid)
            assert new.calls(UNPREPARE)[-1]["by"] == "b"


async def test_dra_plugins_v1beta1_driver_prepares_and_unprepares(node: Node) -> None:
    pod = pod_using("c")
    node.claim("c", pod)
    with driver_of(node, "--versions=v1beta1.DRAPlugin") as driver:
        await node.registered()
        await node.claims.prepare(pod)
        await node.claims.unprepare(pod.uid)
        assert (driver.claims(PREPARE), driver.claims(UNPREPARE)) == ([["c"]], [["c"]])


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (("v1.DRAPlugin", "v1beta1.DRAPlugin"), "v1.DRAPlugin"),
        (("v1beta1.DRAPlugin", "v1.DRAPlugin"), "v1.DRAPlugin"),
        (("v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"), "v1beta1.DRAPlugin"),
        ((), "empty list of supported gRPC services"),
        (("v1alpha3.Node", "1.0.0"), "none of services supported by the plugin"),
    ],
)
def test_chosen_service_prefers_v1_and_rejects_unsupported(versions: tuple[str, ...], chosen: str) -> None:
    if chosen.endswith(".DRAPlugin"):
        assert dra_plugins.chosen_service(versions) == chosen
    else:
        with pytest.raises(ValueError, match=chosen):
            dra_plugins.chosen_service(versions)


@pytest.mark.parametrize(
    "plugin",
    [
        Plugin("DRAPlugin", "", "/x.sock", ("v1.DRAPlugin",)),
        Plugin("DRAPlugin", "d", "/x.sock", ("1.0.0",)),
        Plugin("DRAPlugin", "d", "tcp://host", ("v1.DRAPlugin",)),
        Plugin("DRAPlugin", "d", "/" + 200 * "x", ("v1.DRAPlugin",)),
    ],
)
async def test_dra_plugin_registry_validate_unusable_plugin_rejected(plugin: Plugin) -> None:
    async with TaskScope() as tasks:
        with pytest.raises(RegistrationRefused):
            DraPluginRegistry(tasks).validate(plugin)


async def test_dra_plugin_registry_duplicate_registration_rejected_first_stays(tmp_path: Path) -> None:
    first = Plugin("DRAPlugin", "d", str(tmp_path / "x.sock"), ("v1.DRAPlugin",))
    again = Plugin("DRAPlugin", "d", str(tmp_path / "x.sock"), ("v1.DRAPlugin",))
    told: list[tuple[str, bool]] = []
    async with TaskScope() as tasks:
        drivers = DraPluginRegistry(tasks)
        drivers.add_listener(lambda driver, usable: told.append((driver, usable)))
        await drivers.register(first)
        with pytest.raises(RegistrationRefused, match="already registered for DRA driver plugin d"):
            await drivers.register(again)
        await drivers.deregister(again)
        assert drivers.get("d").plugin is first
        await drivers.deregister(first)
        with pytest.raises(ClaimError):
            drivers.get("d")
    assert told
    assert not any(usable for _, usable in told)


async def test_dra_plugin_registry_connection_lost_listener_notified(node: Node) -> None:
    told: list[bool] = []
    node.drivers.add_listener(lambda driver, usable: told.append(usable))
    with driver_of(node) as driver:
        await node.registered()
        driver.kill()
        await node.until(lambda: told[-1:] == [False])
        driver.start()
        await node.until(lambda: told[-1:] == [True])

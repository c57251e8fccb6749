"""The device manager with real plugin processes: what they offer, and what pods get and keep."""

import asyncio
from pathlib import Path

import pytest

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import ExtendedRequestMapping, ExtendedResourceClaimStatus
from pykubelet.cm.devices.run_options import DeviceNode
from pykubelet.cm.topology.hints import AllocationError, TopologyHint
from tests.support.device_plugin.process import RESOURCE
from tests.support.pod_resources import pod_of
from tests.unit.cm.device_node import TWO, node_in, plugin_in, wanting


async def test_device_manager_admit_allocates_device_and_grants_run_options(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO, "--pre-start", "--cdi") as plugin:
            await node.offers(2)
            pod = wanting(1)
            await node.admit(pod)
            await node.admit(pod)  # asked again, it has the same
            assert len(plugin.calls("Allocate")) == 1
            assert node.ids(pod) == "d1"
            grants = await node.manager.grants(pod, pod.spec.containers[0])
            assert grants.devices == (DeviceNode("/dev/null", "/dev/d1", "rw"),)
            assert grants.env == {"TEST_DEVICES": "d1", "TEST_PLUGIN": "first"}
            assert grants.annotations == {"example.com/devices": "d1"}
            assert grants.cdi_devices == ("example.com/dongle=d1",)
            assert [(one.container_path, one.read_only) for one in grants.mounts] == [("/plugin", True)]
            assert plugin.calls("PreStartContainer") == [{"devices_ids": ["d1"]}]
            [entry] = node.checkpoint()["PodDeviceEntries"]
            assert (entry["PodUID"], entry["DeviceIDs"]) == (pod.metadata.uid, {"-1": ["d1"]})
            assert node.checkpoint()["RegisteredDevices"] == {RESOURCE: ["d1", "d2"]}
            # Who wants none gets none.
            plain = pod_of({"limits": {"cpu": "1", RESOURCE: "0"}})
            await node.admit(plain)
            assert not (await node.manager.grants(plain, plain.spec.containers[0])).devices


async def test_device_manager_admit_no_device_available_raises_until_pod_ends(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO):
            await node.offers(2)
            first, second, third = wanting(1), wanting(1), wanting(1)
            await asyncio.gather(node.admit(first), node.admit(second))
            assert {node.ids(first), node.ids(second)} == {"d1", "d2"}
            with pytest.raises(AllocationError) as caught:
                await node.admit(third)
            text = f"requested number of devices unavailable for {RESOURCE}. Requested: 1, Available: 0"
            assert (str(caught.value), caught.value.reason) == (text, None)
            given = node.ids(first)
            node.pods.uids = {second.metadata.uid}
            await node.admit(third)
            assert node.ids(third) == given
            assert node.ids(first) == ""


async def test_device_manager_init_container_devices_reused_by_app_container(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO):
            await node.offers(2)
            limits = {"limits": {RESOURCE: "1"}}
            pod = pod_of(limits, limits, init=[limits])
            await node.admit(pod)
            assert node.ids(pod, "i0") == node.ids(pod, "c0") == "d1"
            assert node.ids(pod, "c1") == "d2"


async def test_device_manager_preferred_allocation_used_if_device_available(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO, "--device=d3", "--prefers") as plugin:
            await node.offers(3)
            plugin.behave(prefer=["d9", "d3"])
            first, second, third = wanting(1), wanting(1), wanting(1)
            await node.admit(first)
            assert node.ids(first) == "d3"
            assert plugin.calls("GetPreferredAllocation") == [
                {"container_requests": [{"available_deviceIDs": ["d1", "d2", "d3"], "allocation_size": 1}]}
            ]
            await node.admit(second)
            assert node.ids(second) == "d1"
            plugin.behave(fail={"GetPreferredAllocation": ["INTERNAL", "lost"]})
            with pytest.raises(AllocationError) as caught:
                await node.admit(third)
            failed = "device plugin GetPreferredAllocation rpc failed with err: "
            assert str(caught.value) == f"{failed}rpc error: code = Internal desc = lost"


async def test_device_manager_hints_follow_device_numa_nodes(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            pod, other = wanting(1), wanting(2)
            assert node.manager.hints(pod, pod.spec.containers[0]) == {RESOURCE: None}
            plugin.behave(devices={"d1": "Healthy", "d2": "Healthy"}, nodes={"d1": [0], "d2": [1]})
            container = pod.spec.containers[0]
            await node.until(lambda: node.manager.hints(pod, container)[RESOURCE] is not None)
            zero, one = (
                TopologyHint(frozenset({0}), preferred=True),
                TopologyHint(frozenset({1}), preferred=True),
            )
            both = frozenset({0, 1})
            assert node.manager.hints(pod, container) == {
                RESOURCE: [zero, one, TopologyHint(both, preferred=False)]
            }
            assert node.manager.pod_hints(pod) == node.manager.hints(pod, container)
            await node.admit(pod, one)
            assert node.manager.held(pod.metadata.uid, "c0") == {RESOURCE: {"d2": {1}}}
            assert node.manager.hints(pod, container) == {
                RESOURCE: [one, TopologyHint(both, preferred=False)]
            }
            assert node.manager.pod_hints(pod) == node.manager.hints(pod, container)
            assert node.manager.hints(other, other.spec.containers[0]) == {RESOURCE: []}
            assert node.checkpoint()["PodDeviceEntries"][0]["DeviceIDs"] == {"1": ["d2"]}


async def test_device_manager_unhealthy_device_stays_allocated_rejects_admission(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            pod, other = wanting(1), wanting(2)
            await node.admit(pod)
            node.told.clear()
            plugin.behave(devices={"d1": "Unhealthy", "d2": "Healthy"})
            await node.offers(2, 1)
            assert frozenset({pod.metadata.uid}) in node.told
            assert node.manager.health(pod.metadata.uid, "c0") == {RESOURCE: {"d1": False}}
            # The container has it still, and is not admitted with it again.
            assert node.ids(pod) == "d1"
            with pytest.raises(AllocationError, match="previously allocated devices are no longer healthy"):
                await node.admit(pod)
            with pytest.raises(AllocationError, match="Requested: 2, Available: 1"):
                await node.admit(other)
            plugin.behave(devices={"d2": "Healthy"})
            await node.offers(1)
            assert node.ids(pod) == "d1"
            assert node.manager.usable() == {RESOURCE: {"d2": frozenset()}}


async def test_device_manager_restart_restores_allocations(tmp_path: Path) -> None:
    pod, late, gone = wanting(1), wanting(1), wanting(1)
    some = {"limits": {RESOURCE: "1"}}
    staged = pod_of(some, init=[some])
    with plugin_in(tmp_path, *TWO, "--device=d3", "--device=d4") as plugin:
        async with node_in(tmp_path) as node:
            await node.offers(4)
            for one in (gone, pod, staged):
                await node.admit(one)
            given = node.ids(pod)
        plugin.kill()
        async with node_in(tmp_path) as node:
            node.pods.uids = None  # its sources have not been heard
            node.pods.running = {(pod.metadata.uid, "c0"), (staged.metadata.uid, "c0")}
            assert node.numbers() == (0, 0)
            assert {
                name: int(one) for name, one in node.manager.minimum_amounts(pod.metadata.uid).items()
            } == {RESOURCE: 3}
            assert node.manager.minimum_amounts(late.metadata.uid) == {}
            await node.admit(pod)  # it runs, so it has all that it needs
            await node.admit(staged)  # so does this, although one of its containers has ended long ago
            with pytest.raises(AllocationError, match="no healthy devices present"):
                await node.admit(late)
            assert node.ids(pod) == given
            plugin.start()
            await node.offers(4)
            node.pods.uids = {pod.metadata.uid, staged.metadata.uid}
            await node.admit(pod)
            await node.admit(late)
            assert node.ids(pod) == given
            assert node.ids(late) == "d1"
            grants = await node.manager.grants(pod, pod.spec.containers[0])
            assert grants.env["TEST_DEVICES"] == given
            assert len(plugin.calls("Allocate")) == 5


async def test_allocatable_for_counts_healthy_and_own_devices(tmp_path: Path) -> None:
    def counted(pod: Pod) -> dict[str, int]:
        return {name: int(one) for name, one in node.manager.allocatable_for(pod.metadata.uid).items()}

    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            pod, other = wanting(1), wanting(1)
            await node.admit(pod)
            plugin.behave(devices={"d1": "Unhealthy", "d2": "Healthy"})
            await node.offers(2, 1)
            # One that holds nothing may have what can be had; the others have what they have.
            assert (counted(other), counted(pod)) == ({RESOURCE: 1}, {RESOURCE: 1})
            await node.admit(other)
            assert (counted(other), counted(wanting(1))) == ({RESOURCE: 2}, {RESOURCE: 1})
            node.manager.forget(other.metadata.uid)
            assert (node.ids(other), node.manager.holders) == ("", {pod.metadata.uid})


async def test_device_manager_resource_mapped_to_claim_not_allocated_by_plugin(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            pod = pod_of({"limits": {RESOURCE: "1"}}, {"limits": {RESOURCE: "1"}})
            mapping = ExtendedRequestMapping(container_name="c0", resource_name=RESOURCE, request_name="r")
            pod.status.extended_resource_claim_status = ExtendedResourceClaimStatus(
                request_mappings=[mapping]
            )
            await node.admit(pod)
            assert (node.ids(pod, "c0"), node.ids(pod, "c1")) == ("", "d1")
            assert not (await node.manager.grants(pod, pod.spec.containers[0])).devices
            assert len(plugin.calls("Allocate")) == 1


async def test_device_manager_grants_plugin_registered_after_admission_allocates(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        pod = wanting(1)
        await node.admit(pod)  # nobody knows the resource: not ours
        assert not (await node.manager.grants(pod, pod.spec.containers[0])).devices
        with plugin_in(tmp_path, *TWO):
            await node.offers(2)
            grants = await node.manager.grants(pod, pod.spec.containers[0])
            assert grants.env["TEST_DEVICES"] == node.ids(pod) == "d1"


async def test_awaited_after_restart_until_plugin_has_registered(tmp_path: Path) -> None:
    with plugin_in(tmp_path, *TWO) as plugin:
        pod, plain = wanting(1), pod_of({"limits": {"cpu": "1"}})
        async with node_in(tmp_path) as node:
            await node.offers(2)
            await node.admit(pod)
            assert node.manager.awaited(pod) == []
        plugin.kill()
        # The node has rebooted: nothing runs, and the pod comes before the plugin.
        async with node_in(tmp_path) as node:
            node.pods.uids = {pod.metadata.uid}
            assert node.manager.awaited(pod) == [RESOURCE]
            assert node.manager.awaited(plain) == []
            waiting = asyncio.create_task(node.manager.wait_registered(pod))
            plugin.start()
            async with asyncio.timeout(60):
                await waiting
            assert node.manager.awaited(pod) == []
            await node.admit(pod)
            assert node.ids(pod) == "d1"
            # A plugin that was here and went is not waited for.
            plugin.kill()
            await node.offers(2, 0)
            assert node.manager.awaited(pod) == []


async def test_wait_registered_plugin_never_registers_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plugin_in(tmp_path, *TWO) as plugin:
        pod = wanting(1)
        async with node_in(tmp_path) as node:
            await node.offers(2)
        plugin.kill()
        monkeypatch.setattr("pykubelet.cm.devices.manager.GRACE_SECONDS", 0.3)
        async with node_in(tmp_path) as node:
            assert node.manager.awaited(pod) == [RESOURCE]
            async with asyncio.timeout(60):
                await node.manager.wait_registered(pod)
            assert node.manager.awaited(pod) == []
            with pytest.raises(AllocationError, match="no healthy devices present"):
                await node.admit(pod)

"""The device manager with real plugin processes: what they offer, what pods get, and what goes wrong."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import ExtendedRequestMapping, ExtendedResourceClaimStatus
from pykubelet.cri.grpc_server import Streaming, Unary, serving
from pykubelet.host.plugin_registration import Plugin, PluginRegistration
from pykubelet.resources import device_manager, device_plugin, device_plugins
from pykubelet.resources import device_plugin_pb2 as pb
from pykubelet.resources.device_manager import DeviceManager
from pykubelet.resources.grants import DeviceNode
from pykubelet.resources.hints import ANYWHERE, AllocationError, Hint, PolicyError
from pykubelet.tasks import TaskScope
from tests.device_plugin.process import RESOURCE, plugin_process
from tests.resources.making import pod_of

TWO = ("--device=d1", "--device=d2")


class Pods:
    """The pods that there are, as the rest of an agent would know them."""

    def __init__(self) -> None:
        self.uids: set[str] | None = set()
        self.running: set[tuple[str, str]] = set()

    def active(self) -> set[str] | None:
        return self.uids

    def running_before(self, uid: str) -> set[str]:
        return {container for one, container in self.running if one == uid}


class Node:
    """A manager that serves, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods = Pods()
        self.told: list[frozenset[str]] = []
        self.manager = DeviceManager(folder, (0, 1), self.pods, changed=self._changed)

    def _changed(self, uids: frozenset[str]) -> None:
        self.told.append(uids)

    async def until(self, what: Callable[[], Any], seconds: float = 60, pause: float = 0.01) -> None:
        async with asyncio.timeout(seconds):
            while not what():
                await asyncio.sleep(pause)

    async def offers(self, capacity: int, allocatable: int | None = None, resource: str = RESOURCE) -> None:
        wanted = (capacity, capacity if allocatable is None else allocatable)
        await self.until(lambda: self.numbers(resource) == wanted)

    def numbers(self, resource: str = RESOURCE) -> tuple[int, int] | None:
        capacity, allocatable, _ = self.manager.amounts()
        return (int(capacity[resource]), int(allocatable[resource])) if resource in capacity else None

    async def admit(self, pod: Pod, chosen: Hint = ANYWHERE) -> None:
        if self.pods.uids is not None:
            self.pods.uids.add(pod.metadata.uid)
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            if (waiting := self.manager.allocate(pod, container, chosen)) is not None:
                await waiting

    def ids(self, pod: Pod, container: str = "c0") -> str:
        held = self.manager.held(pod.metadata.uid, container)
        return ",".join(held.get(RESOURCE, {}))

    def checkpoint(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "kubelet_internal_checkpoint").read_text())["Data"]
        return found


@asynccontextmanager
async def node_in(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder / "device-plugins")
    async with node.manager.serving():
        yield node


def wanting(count: int, **spec: Any) -> Pod:
    return pod_of({"limits": {RESOURCE: str(count)}}, **spec)


def plugin_in(folder: Path, *options: str) -> Any:
    return plugin_process(folder / "plugin", folder / "device-plugins", *options)


async def test_a_container_gets_its_devices_and_what_belongs_to_them(tmp_path: Path) -> None:
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


async def test_there_are_no_more_than_there_are_and_pods_that_end_give_back(tmp_path: Path) -> None:
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


async def test_init_containers_hand_their_devices_on(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO):
            await node.offers(2)
            limits = {"limits": {RESOURCE: "1"}}
            pod = pod_of(limits, limits, init=[limits])
            await node.admit(pod)
            assert node.ids(pod, "i0") == node.ids(pod, "c0") == "d1"
            assert node.ids(pod, "c1") == "d2"


async def test_the_plugins_wish_is_heard_as_far_as_it_makes_sense(tmp_path: Path) -> None:
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
            with pytest.raises(AllocationError, match="code = Internal desc = lost"):
                await node.admit(third)


async def test_devices_near_to_the_chosen_nodes(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            pod, other = wanting(1), wanting(2)
            assert node.manager.hints(pod, pod.spec.containers[0]) == {RESOURCE: None}
            plugin.behave(devices={"d1": "Healthy", "d2": "Healthy"}, nodes={"d1": [0], "d2": [1]})
            container = pod.spec.containers[0]
            await node.until(lambda: node.manager.hints(pod, container)[RESOURCE] is not None)
            zero, one = Hint(frozenset({0}), preferred=True), Hint(frozenset({1}), preferred=True)
            both = frozenset({0, 1})
            assert node.manager.hints(pod, container) == {RESOURCE: [zero, one, Hint(both, preferred=False)]}
            assert node.manager.pod_hints(pod) == node.manager.hints(pod, container)
            await node.admit(pod, one)
            assert node.manager.held(pod.metadata.uid, "c0") == {RESOURCE: {"d2": {1}}}
            assert node.manager.hints(pod, container) == {RESOURCE: [one, Hint(both, preferred=False)]}
            assert node.manager.pod_hints(pod) == node.manager.hints(pod, container)
            assert node.manager.hints(other, other.spec.containers[0]) == {RESOURCE: []}
            assert node.checkpoint()["PodDeviceEntries"][0]["DeviceIDs"] == {"1": ["d2"]}


async def test_a_device_that_is_lost(tmp_path: Path) -> None:
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


async def test_a_plugin_that_dies_and_comes_back(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO, "--pre-start") as plugin:
            await node.offers(2)
            pod, other = wanting(1), wanting(1)
            await node.admit(pod)
            plugin.kill()
            await node.offers(2, 0)
            with pytest.raises(AllocationError) as caught:
                await node.admit(other)
            text = f"no healthy devices present; cannot allocate unhealthy devices {RESOURCE}"
            assert str(caught.value) == text
            with pytest.raises(AllocationError, match="PreStartContainer rpc failed"):
                await node.manager.grants(pod, pod.spec.containers[0])
            plugin.start("--mark=second")
            await node.offers(2)
            await node.admit(other)
            grants = [await node.manager.grants(one, one.spec.containers[0]) for one in (pod, other)]
            assert [one.env["TEST_PLUGIN"] for one in grants] == ["first", "second"]


@pytest.mark.parametrize("call", ["Allocate", "GetPreferredAllocation", "PreStartContainer"])
async def test_a_plugin_that_dies_in_a_call(tmp_path: Path, call: str) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO, "--pre-start", "--prefers") as plugin:
            await node.offers(2)
            pod = wanting(1)
            plugin.behave(die=[call])
            with pytest.raises(AllocationError, match="Unavailable"):
                await node.admit(pod)
                await node.manager.grants(pod, pod.spec.containers[0])
            await node.offers(2, 0)


async def test_a_plugin_that_hangs_holds_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plugin, "ALLOCATE_SECONDS", 1.0)
    other = "example.com/other"
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            options = ("--device=x", f"--resource={other}", "--socket=dongle2.sock")
            with plugin_process(tmp_path / "second", node.folder, *options):
                await node.offers(2)
                await node.offers(1, resource=other)
                plugin.behave(hang=["Allocate"])
                stuck = asyncio.ensure_future(node.admit(wanting(1)))
                await node.until(lambda: plugin.calls("Allocate"))
                await node.admit(pod_of({"limits": {other: "1"}}))
                assert not stuck.done()
                with pytest.raises(AllocationError, match="DeadlineExceeded"):
                    await stuck
                plugin.behave()
                both = wanting(2)
                await node.admit(both)  # nothing was lost by it
                assert node.ids(both) == "d1,d2"


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        ({"answers": 0}, "no containers return in allocation response"),
        ({"fail": {"Allocate": ["INVALID_ARGUMENT", "the dongle is warm"]}}, "desc = the dongle is warm"),
    ],
)
async def test_a_plugin_that_refuses_or_lies(tmp_path: Path, behaviour: dict[str, Any], problem: str) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            pod = wanting(2)
            plugin.behave(**behaviour)
            with pytest.raises(AllocationError, match=problem):
                await node.admit(pod)
            plugin.behave()
            await node.admit(pod)
            assert node.ids(pod) == "d1,d2"


async def test_a_plugin_that_is_stuck_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plugin, "ALLOCATE_SECONDS", 0.5)
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            plugin.pause()
            pod = wanting(1)
            with pytest.raises(AllocationError, match="context deadline exceeded"):
                await node.admit(pod)
            assert node.ids(pod) == ""
            plugin.kill()
            await node.offers(2, 0)


async def test_who_registers_twice_takes_over(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as first:
            await node.offers(2)
            pod = wanting(1)
            await node.admit(pod)
            options = ("--device=d1", "--device=d2", "--device=d3", "--socket=dongle2.sock", "--mark=second")
            with plugin_process(tmp_path / "second", node.folder, *options) as second:
                await node.offers(3)
                assert (first.registrations(), second.registrations()) == (["registered"], ["registered"])
                other = wanting(1)
                await node.admit(other)
                grants = await node.manager.grants(other, other.spec.containers[0])
                assert grants.env["TEST_PLUGIN"] == "second"
                # The end of the one before means nothing any more.
                first.kill()
                await node.admit(wanting(1))
                assert node.numbers() == (3, 3)


async def test_a_list_that_ends_is_the_end_of_the_plugin(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            plugin.behave(end_list=True)
            await node.offers(2, 0)


async def test_allocations_outlive_the_agent(tmp_path: Path) -> None:
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
            assert {name: int(one) for name, one in node.manager.at_least(pod.metadata.uid).items()} == {
                RESOURCE: 3
            }
            assert node.manager.at_least(late.metadata.uid) == {}
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


async def test_what_a_pod_is_counted_against(tmp_path: Path) -> None:
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


async def test_a_claims_device_is_not_asked_of_a_plugin(tmp_path: Path) -> None:
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


async def test_a_plugin_registers_again_with_the_next_agent(tmp_path: Path) -> None:
    with plugin_in(tmp_path, *TWO) as plugin:
        for _ in range(2):
            async with node_in(tmp_path) as node:
                await node.offers(2)
        assert plugin.registrations() == ["registered"] * 2


async def test_devices_that_were_never_given_are_given_at_the_start(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        pod = wanting(1)
        await node.admit(pod)  # nobody knows the resource: not ours
        assert not (await node.manager.grants(pod, pod.spec.containers[0])).devices
        with plugin_in(tmp_path, *TWO):
            await node.offers(2)
            grants = await node.manager.grants(pod, pod.spec.containers[0])
            assert grants.env["TEST_DEVICES"] == node.ids(pod) == "d1"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ["--version=v1alpha"],
            'requested API version "v1alpha" is not supported by kubelet. Supported version is ["v1beta1"]',
        ),
        (["--resource=cpu"], 'the ResourceName "cpu" is invalid'),
        (["--resource=kubernetes.io/x"], 'the ResourceName "kubernetes.io/x" is invalid'),
    ],
)
async def test_registrations_that_are_refused(tmp_path: Path, options: list[str], problem: str) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *options) as plugin:
            await node.until(plugin.registrations)
            assert plugin.registrations() == [f"UNKNOWN: {problem}"]
        assert node.manager.amounts() == ({}, {}, [])


async def test_a_registration_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plugin, "CONNECT_SECONDS", 0.3)
    async with node_in(tmp_path) as node:
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(str(node.folder / "silent.sock"))
        silent.listen()
        async with grpc.aio.insecure_channel(f"unix://{node.folder / 'kubelet.sock'}") as channel:
            call = channel.unary_unary("/v1beta1.Registration/Register")
            for endpoint in ("nobody.sock", "silent.sock", "kubelet.sock", "", "\0", "x" * 200, "../../x"):
                request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=RESOURCE)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(request.SerializeToString(), timeout=60)
                assert caught.value.code() == grpc.StatusCode.UNKNOWN, endpoint
        silent.close()
        assert node.manager.amounts() == ({}, {}, [])


async def test_registration_through_the_folder_of_all_plugins(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    async with node_in(tmp_path) as node, TaskScope() as scope:
        with plugin_in(tmp_path, *TWO, f"--registry={registry}"):
            handlers = {"DevicePlugin": node.manager.handler}
            scope.start(PluginRegistration(registry, handlers).run(), name="registration")
            await node.offers(2)
            (registry / "dongle.sock").unlink()
            await node.offers(2, 0)


@pytest.mark.looptime
async def test_a_resource_is_forgotten_five_minutes_after_its_plugin(tmp_path: Path) -> None:
    folder = tmp_path / "device-plugins"
    loop = asyncio.get_running_loop()
    silent = loop.create_future()

    async def options(_: pb.Empty) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions()

    async def devices(_: pb.Empty) -> AsyncGenerator[pb.ListAndWatchResponse, None]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID="d1", health="Healthy")])
        await silent

    methods: dict[str, Any] = {
        "/v1beta1.DevicePlugin/GetDevicePluginOptions": Unary(pb.Empty, options),
        "/v1beta1.DevicePlugin/ListAndWatch": Streaming(pb.Empty, devices),
    }
    async with node_in(tmp_path) as node:
        plugin = Plugin("DevicePlugin", RESOURCE, str(folder / "p.sock"), ("v1beta1",))
        async with serving(folder / "p.sock", methods):
            await node.manager.handler.register(plugin)
            await node.offers(1)
        await node.offers(1, 0)
        began = loop.time()
        await asyncio.sleep(device_plugins.GRACE_SECONDS - 30)
        assert node.numbers() == (1, 0)
        async with serving(folder / "p.sock", methods):
            await node.manager.handler.register(plugin)
            await node.offers(1)
            await asyncio.sleep(60)
            assert node.numbers() == (1, 1)
        await node.offers(1, 0)
        again = loop.time()
        await node.until(lambda: node.numbers() is None, 1000, 1.0)
        assert loop.time() - again == pytest.approx(300, abs=5)
        assert loop.time() - began > 500
        assert node.manager.amounts() == ({}, {}, [RESOURCE])
        await node.until(lambda: node.checkpoint()["RegisteredDevices"] == {})


async def test_a_damaged_checkpoint_stops_the_agent_from_guessing(tmp_path: Path) -> None:
    folder = tmp_path / "device-plugins"
    folder.mkdir()
    (folder / "kubelet_internal_checkpoint").write_text('{"Data":{},"Checksum":1}')
    with pytest.raises(PolicyError, match="kubelet_internal_checkpoint"):
        async with node_in(tmp_path):
            pass


async def test_a_checkpoint_that_cannot_be_written_refuses_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO):
            await node.offers(2)
            pod = wanting(1)
            monkeypatch.setattr(device_manager, "write_checkpoint", full)
            with pytest.raises(AllocationError, match="failed to write checkpoint file"):
                await node.admit(pod)

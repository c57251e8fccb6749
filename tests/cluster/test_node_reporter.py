"""The node's own objects on a real API server: allowed by the Node authorizer and NodeRestriction."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.api.node import NodeAddress
from pykubelet.apiserver import rest_config as kubeconfig
from pykubelet.apiserver.client import Clients, Limits, make_clients
from pykubelet.apiserver.errors import Forbidden
from pykubelet.apiserver.events import EventRecorder, node_reference
from pykubelet.apiserver.transport import Transport
from pykubelet.cm.capacity import node_capacity
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.network import IPAddress, is_global_unicast, read_interfaces
from pykubelet.node.addresses import PROVIDED_IP
from pykubelet.node.conditions import NodePressure
from pykubelet.node.informer import NodeInformer
from pykubelet.node.registration import blank_node, try_register
from pykubelet.node.reporter import NodeReporter
from pykubelet.node.settings import NodeSettings
from pykubelet.util.tasks import TaskScope
from tests.support.node_status import FakeRuntime, make_settings, runtime_status
from tests.support.plane import Document, Plane, unique

SECONDS = 90.0
"""How long to wait at most: the cluster's own controllers take their time."""
LIMITS = Limits(50, 100)


class Reported:
    """One node without pods, spoken for by a reporter of its own."""

    def __init__(self, plane: Plane, name: str, tmp_path: Path) -> None:
        self.plane = plane
        self.name = name
        self.runtime = FakeRuntime()
        self.pressures = NodePressure()
        self.addresses: list[NodeAddress] = []
        """As pods would be told of them."""
        self.answers = asyncio.Event()
        """Whether the runtime's status can be had; the node is not registered without."""
        self.answers.set()
        self.config = KubeletConfiguration(eviction_hard={"memory.available": "100Mi"})
        self.capacity = node_capacity(self.config, tmp_path)

    def settings(self, **changes: Any) -> NodeSettings:
        given: dict[str, Any] = {"name": self.name, "hostname": self.name, "config": self.config}
        return make_settings(**given | changes)

    @contextlib.asynccontextmanager
    async def running(self, **changes: Any) -> AsyncIterator[NodeReporter]:
        async with clients(self.plane.node_kubeconfig(self.name)) as made, TaskScope() as scope:
            recorder = EventRecorder(made.events, self.name)
            about = node_reference(self.name)
            sources = self.runtime.sources(
                capacity=self.capacity,
                pressures=lambda: self.pressures,
                refresh=self.refresh,
            )
            self.informer = NodeInformer(made.objects, self.name)
            reporter = NodeReporter(
                made,
                self.settings(**changes),
                sources,
                lambda kind, reason, message: recorder.record(about, kind, reason, message),
                self.informer,
            )
            reporter.add_address_listener(self.addressed)
            scope.start(recorder.run(), name="events")
            scope.start(self.poll(), name="poll")
            scope.start(reporter.run(), name="node")
            yield reporter
            assert await recorder.flush(SECONDS)

    def addressed(self, addresses: list[NodeAddress]) -> None:
        self.addresses = addresses

    async def refresh(self) -> None:
        await self.answers.wait()
        await self.runtime.health.status()

    async def poll(self) -> None:
        while True:
            await self.runtime.health.status()
            await asyncio.sleep(1)

    async def wait(self, what: str, fits: Callable[[Document], object]) -> Document:
        return await asyncio.to_thread(self.plane.wait_for, "node", self.name, "", fits, SECONDS)

    async def ready(self) -> Document:
        return await self.wait("to be ready", lambda node: condition(node, "Ready")["status"] == "True")

    async def lease(self) -> Document:
        return await asyncio.to_thread(
            self.plane.wait_for, "lease", self.name, "kube-node-lease", lambda _: True, SECONDS
        )

    def told(self) -> list[tuple[str, int]]:
        """Reasons of the agent's events, and how often each was recorded."""
        events = self.plane.events("default", self.name)
        return [
            (event["reason"], event["count"]) for event in events if event["source"]["component"] == "kubelet"
        ]


@contextlib.asynccontextmanager
async def clients(path: Path) -> AsyncIterator[Clients]:
    access = kubeconfig.load(path, lambda file: dict(yaml.safe_load(file.read_text())))
    async with Transport(access) as transport:
        yield make_clients(transport, objects=LIMITS, events=LIMITS, lease_seconds=40, status_seconds=10)


@pytest.fixture
def reported(plane: Plane, tmp_path: Path) -> Iterator[Reported]:
    node = Reported(plane, unique("rep"), tmp_path)
    yield node
    plane.delete("node", node.name)
    plane.delete("lease", node.name, "kube-node-lease")


def condition(node: Document, kind: str) -> Document:
    found = node.get("status", {}).get("conditions", [])
    return next((item for item in found if item["type"] == kind), {"status": "missing"})


def taints(node: Document) -> set[str]:
    return {taint["key"] for taint in node["spec"].get("taints", [])}


async def test_node_reporter_registers_node_and_writes_status_and_lease(reported: Reported) -> None:
    reported.runtime.answer = runtime_status(network=False)
    mark = reported.plane.audit_mark()
    async with reported.running(labels={"role": "web"}, provider_id="test:///1"):
        node = await reported.wait("to exist", lambda node: condition(node, "Ready")["status"] == "False")
        assert condition(node, "Ready")["message"].startswith("container runtime network not ready: Network")
        reported.runtime.answer = runtime_status()
        node = await reported.ready()
        assert node["metadata"]["labels"]["role"] == "web"
        assert node["metadata"]["annotations"]["volumes.kubernetes.io/controller-managed-attach-detach"]
        assert node["spec"]["providerID"] == "test:///1"
        assert [address["type"] for address in node["status"]["addresses"]] == ["InternalIP", "Hostname"]
        assert node["status"]["allocatable"].keys() == node["status"]["capacity"].keys()
        assert node["status"]["daemonEndpoints"] == {"kubeletEndpoint": {"Port": 10250}}
        assert node["status"]["images"][1] == {"names": None, "sizeBytes": 203899579}
        kinds = [item["type"] for item in node["status"]["conditions"]]
        assert kinds == ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]
        lease = await reported.lease()
        assert lease["metadata"]["ownerReferences"] == [
            {"apiVersion": "v1", "kind": "Node", "name": reported.name, "uid": node["metadata"]["uid"]}
        ]
        # The node lifecycle controller sees that the node is ready.
        await reported.wait("to be untainted", lambda node: not taints(node))
        await reported.informer.synced()
        seen = reported.informer.node
        assert seen is not None
        assert seen.metadata.labels["role"] == "web"
    assert sorted(reported.told()) == [
        ("NodeHasNoDiskPressure", 1),
        ("NodeHasSufficientMemory", 1),
        ("NodeHasSufficientPID", 1),
        ("NodeReady", 1),
        ("Starting", 1),
    ]
    # What a busy API server puts off is asked for again.
    writes = [
        event
        for event in reported.plane.writes(f"system:node:{reported.name}", mark)
        if event["responseStatus"]["code"] < 500 and event["responseStatus"]["code"] != 429
    ]
    on_node = [event["verb"] for event in writes if event["objectRef"]["resource"] == "nodes"]
    assert on_node[0] == "create"
    assert len(on_node) <= 5, "a status is written when it differs, and not otherwise"
    assert {event["responseStatus"]["code"] for event in writes} <= {200, 201}


async def test_node_reporter_status_patch_preserves_other_controllers_fields(reported: Reported) -> None:
    """What the server makes of our patches is what we meant."""
    plane = reported.plane
    async with reported.running() as reporter:
        await reported.ready()
        added = {"type": "NetworkUnavailable", "status": "False", "reason": "RouteCreated"}
        plane.request(
            "PATCH",
            f"/api/v1/nodes/{reported.name}/status",
            {"status": {"conditions": [added], "capacity": {"example.com/dongle": "4"}}},
            content_type="application/strategic-merge-patch+json",
        )
        node = await reported.wait(
            "the dongle", lambda node: node["status"]["allocatable"].get("example.com/dongle") == "4"
        )
        assert condition(node, "NetworkUnavailable")["reason"] == "RouteCreated"
        reported.pressures = NodePressure(memory=True)
        reporter.wake()
        # The cluster acts upon it.
        await reported.wait("a taint", lambda node: "node.kubernetes.io/memory-pressure" in taints(node))
        node = plane.get("node", reported.name)
        assert condition(node, "MemoryPressure")["reason"] == "KubeletHasInsufficientMemory"
        assert condition(node, "NetworkUnavailable")["reason"] == "RouteCreated"
        assert len(node["status"]["conditions"]) == 5
        plane.patch("node", reported.name, "", {"spec": {"unschedulable": True}})
        await asyncio.to_thread(
            plane.wait, "the event", lambda: ("NodeNotSchedulable", 1) in reported.told(), SECONDS
        )


async def test_node_reporter_restart_reconciles_existing_node(reported: Reported) -> None:
    plane = reported.plane
    async with reported.running(labels={"role": "web"}, taints=()):
        before = await reported.ready()
        await reported.lease()
    plane.patch(
        "node", reported.name, "", {"metadata": {"labels": {"kubernetes.io/arch": "z80", "my": "own"}}}
    )
    usable = [ip for ip in own_ips() if ip.version == 4]
    external = {"external_cloud": True, "ips": (usable[0],)} if usable else {"external_cloud": True}
    reported.addresses = []
    reported.answers.clear()
    async with reported.running(attach_detach=False, **external):
        # Pods of the cluster wait for the node to be known, so it must be told to them by then.
        await reported.informer.synced()
        told = [(address.type, address.address) for address in reported.addresses]
        assert told == [(address["type"], address["address"]) for address in before["status"]["addresses"]]
        reported.answers.set()
        node = await reported.wait(
            "to be corrected", lambda node: node["metadata"]["labels"]["kubernetes.io/arch"] != "z80"
        )
        assert node["metadata"]["uid"] == before["metadata"]["uid"]
        assert node["metadata"]["labels"]["my"] == "own"
        annotation = "volumes.kubernetes.io/controller-managed-attach-detach"
        assert annotation not in node["metadata"].get("annotations", {})
        if usable:
            await reported.wait(
                "to tell its address",
                lambda node: (
                    node["metadata"].get("annotations", {}).get("alpha.kubernetes.io/provided-node-ip")
                    == str(usable[0])
                ),
            )
        assert node["status"]["addresses"] == before["status"]["addresses"]
    async with reported.running(hostname="another"):
        node = await reported.wait(
            "another name", lambda node: node["status"]["addresses"][-1]["address"] == "another"
        )
        assert node["metadata"]["labels"]["kubernetes.io/hostname"] == "another"
        assert PROVIDED_IP not in node["metadata"]["annotations"]
        assert [address["type"] for address in node["status"]["addresses"]] == ["InternalIP", "Hostname"]


async def test_node_reporter_deleted_node_not_recreated_until_restart(reported: Reported) -> None:
    plane = reported.plane
    async with reported.running(update_seconds=1.0, lease_seconds=4):
        before = await reported.ready()
        await reported.lease()
        mark = plane.audit_mark()
        await asyncio.to_thread(plane.delete, "node", reported.name)
        await asyncio.to_thread(plane.wait_gone, "lease", reported.name, "kube-node-lease", SECONDS)

        def looked_for() -> bool:
            answers = [
                event["responseStatus"]["code"]
                for event in plane.audit(mark)
                if event.get("objectRef", {}).get("name") == reported.name and event["verb"] == "get"
                if event["user"]["username"] == f"system:node:{reported.name}"
            ]
            return answers.count(404) >= 3

        await asyncio.to_thread(plane.wait, "the node to be missed", looked_for, SECONDS)
        assert plane.find("node", reported.name) is None
        assert plane.find("lease", reported.name, "kube-node-lease") is None
        assert reported.informer.node is None
    async with reported.running(lease_seconds=4):
        node = await reported.ready()
        assert node["metadata"]["uid"] != before["metadata"]["uid"]
        lease = await reported.lease()
        assert lease["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]


async def test_node_reporter_unschedulable_external_cloud_registers_with_taints(reported: Reported) -> None:
    async with reported.running(schedulable=False, external_cloud=True):
        node = await reported.ready()
        assert node["spec"]["unschedulable"] is True
        assert taints(node) >= {
            "node.kubernetes.io/unschedulable",
            "node.cloudprovider.kubernetes.io/uninitialized",
        }
        assert [address["type"] for address in node["status"]["addresses"]] == ["Hostname"]
        # With the field set, the cluster leaves the taint alone.
        await reported.wait(
            "to be untainted", lambda node: "node.kubernetes.io/not-ready" not in taints(node)
        )
        assert "node.kubernetes.io/unschedulable" in taints(plane_node(reported))


def plane_node(reported: Reported) -> Document:
    return reported.plane.get("node", reported.name)


async def test_node_reporter_dual_stack_reports_both_addresses(reported: Reported) -> None:
    """Two addresses of one type, which a merge by type would lose."""
    found = {ip.version: ip for ip in own_ips()}
    if len(found) < 2:
        pytest.skip("this machine has no address of one of the families")
    async with reported.running():
        await reported.ready()
    async with reported.running(ips=(found[6], found[4])):
        node = await reported.wait("two addresses", lambda node: len(node["status"]["addresses"]) == 3)
        assert [ip_address(address["address"]) for address in node["status"]["addresses"][:2]] == [
            found[6],
            found[4],
        ]


def own_ips() -> list[IPAddress]:
    """This machine's addresses; those of its loopback and of bridges come and go with other tests."""
    found = [
        ip
        for one in read_interfaces()
        if not one.loopback and not Path(f"/sys/class/net/{one.name}/bridge").exists()
        for ip in one.addresses
    ]
    return [ip for ip in found if is_global_unicast(ip)]


async def test_try_register_without_permission_raises_forbidden(plane: Plane, reported: Reported) -> None:
    async with clients(plane.user_kubeconfig("somebody")) as made:
        ours = blank_node(reported.settings(), "amd64")
        with pytest.raises(Forbidden, match=r'resources: \["nodes"\], verbs: \["create"\]'):
            await try_register(made.objects, ours, reported.settings(), reset_extended=False)


async def test_node_reporter_api_server_restart_status_and_lease_resume(reported: Reported) -> None:
    plane = reported.plane
    async with reported.running(update_seconds=1.0, lease_seconds=4):
        await reported.ready()
        before = await reported.lease()
        await asyncio.to_thread(plane.kill_server)
        try:
            reported.pressures = NodePressure(disk=True)
            # Long enough for several rounds to fail.
            await asyncio.sleep(3)
        finally:
            # Not in another thread: it ends with the thread that started it.
            plane.start_server()
        await reported.wait("the pressure", lambda node: condition(node, "DiskPressure")["status"] == "True")
        await asyncio.to_thread(
            plane.wait_for,
            "lease",
            reported.name,
            "kube-node-lease",
            lambda lease: lease["spec"]["renewTime"] > before["spec"]["renewTime"],
            SECONDS,
        )

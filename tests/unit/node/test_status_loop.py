import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from pykubelet.api.node import NodeAddress
from pykubelet.apiserver.client import NODES
from pykubelet.apiserver.errors import Conflict, Forbidden, KubeError, ServerError, Unreachable
from pykubelet.node.conditions import NodePressure
from pykubelet.node.registration import blank_node
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import next_node
from pykubelet.node.status_inputs import NodeStatusCollector
from pykubelet.node.status_loop import NodeEvents, StatusLoop
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope
from tests.support.node_status import NOW, FakeRuntime, MemoryApi, Recorded, runtime_status, settings

pytestmark = pytest.mark.looptime
AWAY = Unreachable("https://api", "refused")


class Reporting:
    """A status loop on an API server in memory, with a wall clock that follows the loop's."""

    def __init__(self, node: NodeSettings | None = None, **sources: Any) -> None:
        self.settings = node or settings()
        self.api = MemoryApi()
        self.runtime = FakeRuntime()
        self.recorded = Recorded()
        self.changes: dict[str, Any] = sources
        self.pressures = NodePressure()
        self.reported: list[list[str]] = []
        made = self.runtime.sources(
            **{
                "pressures": lambda: self.pressures,
                "volumes_reported": self.reported.append,
                **sources,
            }
        )
        self.observer = NodeStatusCollector(made, self.settings)
        self.loop = StatusLoop(
            self.api,
            self.settings,
            made,
            self.observer,
            NodeEvents(self.recorded, "vm"),
            self.api.close_all,
            clock=lambda: NOW + timedelta(seconds=int(asyncio.get_running_loop().time())),
            rng=lambda: 0.5,
        )
        self.api.on_change = self.loop.handle_update
        self.runtime.health.add_listener(self.loop.wake)

    async def register(self) -> None:
        blank = blank_node(self.settings, "amd64")
        node, _ = next_node(blank, await self.observer.facts(), self.settings, NOW)
        self.loop.set_latest(await self.api.create(NODES, node))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with TaskScope() as scope:
            scope.start(self.loop.run(), name="status")
            yield

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """Registered, ready, and with the first report sent."""
        await self.runtime.health.status()
        await self.register()
        async with TaskScope() as scope:
            scope.start(self.poll(), name="poll")
            scope.start(self.loop.run(), name="status")
            await asyncio.sleep(1.5)
            self.api.patches.clear()
            self.api.asked.clear()
            self.api.times.clear()
            yield

    async def poll(self) -> None:
        while True:
            with suppress(CriError):
                await self.runtime.health.status()
            await asyncio.sleep(5)

    def patch_times(self) -> list[float]:
        pairs = zip(self.api.asked, self.api.times, strict=True)
        return [round(time, 1) for verb, time in pairs if verb == "patch nodes"]


class TestRhythm:
    async def test_status_loop_runtime_ready_reports_ready_immediately(self) -> None:
        it = Reporting()
        await it.register()
        assert it.api.conditions()["Ready"] == "False"
        async with it.running():
            await asyncio.sleep(0.25)
            assert it.api.conditions()["Ready"] == "True"
            assert it.recorded.reasons == ["NodeReady"]

    async def test_status_loop_csi_node_late_ready_node_stays_ready_briefly(self) -> None:
        """A new node waits for it; a node that is ready already is not made unready by a restart."""
        problems = ["CSINode is not yet initialized"]
        it = Reporting(problems=lambda: problems)
        await it.runtime.health.status()
        await it.register()
        ready = it.api.node["status"]["conditions"][-1]
        assert (ready["status"], ready["message"]) == ("False", "CSINode is not yet initialized")
        async with it.running():
            await asyncio.sleep(0.5)
            assert it.patch_times() == []
            problems.clear()
            await asyncio.sleep(0.2)
            assert it.api.conditions()["Ready"] == "True"
        problems.append("CSINode is not yet initialized")
        async with it.running():
            await asyncio.sleep(0.8)
            assert it.api.conditions()["Ready"] == "True"
            await asyncio.sleep(0.4)
            assert it.api.conditions()["Ready"] == "False", "it takes longer than a moment"

    async def test_status_loop_network_late_polls_and_reports_ready_immediately(self) -> None:
        """Looked for ten times a second, and told at once."""
        it = Reporting()
        it.runtime.answer = runtime_status(network=False)
        await it.runtime.health.status()
        await it.register()
        async with it.running():
            await asyncio.sleep(5.05)
            assert it.runtime.asked == pytest.approx(50, abs=3)
            ready = it.api.node["status"]["conditions"][-1]
            assert ready["message"] == (
                "container runtime network not ready: NetworkReady=false "
                "reason:NetworkPluginNotReady message:cni plugin not initialized"
            )
            it.runtime.answer = runtime_status()
            await asyncio.sleep(0.2)
            assert it.api.conditions()["Ready"] == "True"
            asked = it.runtime.asked
            await asyncio.sleep(5)
            assert it.runtime.asked == asked, "the hurry is over"

    async def test_status_loop_never_ready_stops_fast_polling(self) -> None:
        it = Reporting()
        it.runtime.answer = runtime_status(network=False)
        await it.register()
        async with it.running():
            await asyncio.sleep(125)
            asked = it.runtime.asked
            await asyncio.sleep(30)
            assert it.runtime.asked == asked
            it.runtime.answer = runtime_status()
            await it.runtime.health.status()
            await asyncio.sleep(1.1)
            assert it.api.conditions()["Ready"] == "True"

    async def test_status_loop_unchanged_patches_every_report_frequency(self) -> None:
        it = Reporting()
        async with it.settled():
            await asyncio.sleep(295)
            assert it.api.asked == []
            await asyncio.sleep(20)
            (patch,) = it.api.patches
            assert list(patch["status"]) == ["$setElementOrder/conditions", "conditions"]
            await asyncio.sleep(310)
            assert len(it.api.patches) == 2

    async def test_status_loop_pressure_change_reported_within_update_frequency(self) -> None:
        it = Reporting()
        async with it.settled():
            it.pressures = NodePressure(memory=True)
            await asyncio.sleep(11)
            assert it.api.conditions()["MemoryPressure"] == "True"
            assert it.recorded.reasons[-1] == "NodeHasInsufficientMemory"
            assert it.recorded.events[-1] == (
                "Normal",
                "NodeHasInsufficientMemory",
                "Node vm status is now: NodeHasInsufficientMemory",
            )
            assert len(it.api.patches) == 1

    async def test_status_loop_runtime_health_change_wakes_loop(self) -> None:
        it = Reporting()
        async with it.settled():
            it.runtime.answer = runtime_status(runtime=False)
            await it.runtime.health.status()
            await asyncio.sleep(1)
            ready = it.api.node["status"]["conditions"][-1]
            assert (ready["status"], ready["message"]) == (
                "False",
                "container runtime not ready: RuntimeReady=false reason:Down message:",
            )

    async def test_status_loop_runtime_hangs_reports_not_ready_after_30_seconds(self) -> None:
        """Unready after half a minute, not before; and the rounds go on."""
        it = Reporting()
        async with it.settled():
            it.runtime.hangs = True
            await asyncio.sleep(24)
            assert it.api.conditions()["Ready"] == "True"
            await asyncio.sleep(26)
            assert it.api.node["status"]["conditions"][-1]["message"] == "container runtime is down"
            assert it.recorded.reasons[-1] == "NodeNotReady"
            assert len(it.api.node["status"]["images"]) == 2
            it.runtime.hangs = False
            await asyncio.sleep(120)
            assert it.api.conditions()["Ready"] == "True"


class TestFaults:
    async def test_status_loop_conflict_rereads_node_and_retries(self) -> None:
        it = Reporting()
        async with it.settled():
            it.api.fails = [Conflict(409)]
            it.pressures = NodePressure(disk=True)
            it.loop.wake()
            await asyncio.sleep(1)
            assert it.api.asked == ["patch nodes", "get nodes", "patch nodes"]
            assert it.recorded.reasons.count("NodeHasDiskPressure") == 1
            assert it.api.closed == 0

    async def test_status_loop_server_unreachable_retries_and_closes_connections(self) -> None:
        it = Reporting()
        async with it.settled():
            it.api.away = AWAY
            it.pressures = NodePressure(disk=True)
            it.loop.wake()
            await asyncio.sleep(1)
            assert it.api.asked == ["patch nodes", *["get nodes"] * 4]
            assert it.api.closed == 4
            it.api.away = None
            await asyncio.sleep(10)
            assert it.api.conditions()["DiskPressure"] == "True"
            assert it.recorded.reasons.count("NodeHasDiskPressure") == 1

    @pytest.mark.parametrize("err", [Forbidden(403, "Forbidden", "no"), ServerError(500)])
    async def test_status_loop_forbidden_or_server_error_keeps_connections_open(self, err: KubeError) -> None:
        it = Reporting()
        async with it.settled():
            it.api.away = err
            it.pressures = NodePressure(disk=True)
            it.loop.wake()
            await asyncio.sleep(1)
            assert len(it.api.asked) == (1 if isinstance(err, Forbidden) else 5)
            assert it.api.closed == 0

    async def test_status_loop_fact_collection_fails_retries_next_round(self) -> None:
        failing = False

        def volumes() -> list[str]:
            if failing:
                raise FileNotFoundError("a folder that went away")
            return ["csi/x"]

        it = Reporting(volumes_in_use=volumes)
        async with it.settled():
            failing = True
            it.pressures = NodePressure(disk=True)
            it.loop.wake()
            await asyncio.sleep(1)
            assert it.api.conditions()["DiskPressure"] == "False"
            failing = False
            await asyncio.sleep(11)
            assert it.api.conditions()["DiskPressure"] == "True"

    async def test_status_loop_server_away_at_start_limits_requests(self) -> None:
        it = Reporting()
        await it.runtime.health.status()
        it.api.away = AWAY
        async with it.running():
            await asyncio.sleep(60)
            assert len(it.api.asked) < 60 * 5
            it.api.away = None
            it.api.put_node({})
            await asyncio.sleep(1.5)
            assert it.api.conditions()["Ready"] == "True"


class TestOthers:
    async def test_status_loop_conditions_marked_unknown_reports_ready(self) -> None:
        """A controller marks a silent node; the node says that it lives as soon as it hears of it."""
        it = Reporting()
        async with it.settled():
            document = it.api.node
            for condition in document["status"]["conditions"]:
                condition["status"] = "Unknown"
            it.api.put_node(document, uid=document["metadata"]["uid"])
            await asyncio.sleep(1.1)
            assert set(it.api.conditions().values()) == {"True", "False"}
            assert it.recorded.reasons[-1] == "NodeReady"

    async def test_status_loop_own_patch_does_not_wake_loop(self) -> None:
        it = Reporting()
        async with it.settled():
            it.pressures = NodePressure(disk=True)
            it.loop.wake()
            await asyncio.sleep(9)
            assert it.api.asked == ["patch nodes"]

    async def test_status_loop_cordon_and_uncordon_emit_events(self) -> None:
        it = Reporting()
        async with it.settled():
            uid = it.api.node["metadata"]["uid"]
            for flag in (True, False):
                it.api.put_node({**it.api.node, "spec": {"unschedulable": flag}}, uid=uid)
                await asyncio.sleep(1.1)
            assert it.recorded.reasons[-2:] == ["NodeNotSchedulable", "NodeSchedulable"]

    async def test_status_loop_node_deleted_is_not_recreated(self) -> None:
        """As the reference: a node that was deleted stays so until the agent starts again."""
        it = Reporting()
        async with it.settled():
            it.api.delete_node()
            assert it.loop.node_uid == ""
            await asyncio.sleep(60)
            assert "create nodes" not in it.api.asked
            assert "nodes/vm" not in it.api.objects
            it.api.put_node({}, uid="n2")
            await asyncio.sleep(10.5)
            assert it.loop.node_uid == "n2"
            assert it.api.conditions()["Ready"] == "True"

    async def test_status_loop_pod_cidr_update_fails_is_retried(self) -> None:
        it = Reporting()
        async with it.settled():
            uid = it.api.node["metadata"]["uid"]
            it.runtime.cidr_error = CriError("UpdateRuntimeConfig", "Unavailable", "busy")
            spec = {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00::/64"]}
            it.api.put_node({**it.api.node, "spec": spec}, uid=uid)
            await asyncio.sleep(1.1)
            assert it.runtime.cidrs == []
            it.runtime.cidr_error = None
            await asyncio.sleep(30)
            assert it.runtime.cidrs == ["10.1.0.0/24,fd00::/64"]

    async def test_status_loop_boot_id_changed_emits_rebooted_once(self) -> None:
        it = Reporting()
        it.api.put_node({"status": {"nodeInfo": {"bootID": "before"}}})
        await it.runtime.health.status()
        async with it.running():
            await asyncio.sleep(25)
        assert [event for event in it.recorded.events if event[1] == "Rebooted"] == [
            ("Warning", "Rebooted", "Node vm has been rebooted, boot id: UUID")
        ]

    async def test_status_loop_volumes_in_use_are_reported(self) -> None:
        it = Reporting(volumes_in_use=lambda: ["csi/x"])
        async with it.settled():
            assert it.api.node["status"]["volumesInUse"] == ["csi/x"]
            assert it.reported[-1] == ["csi/x"]

    async def test_status_loop_server_restored_with_lower_versions_still_updates(self) -> None:
        """Restored from a copy, its versions are lower than those that we have seen."""
        it = Reporting()
        async with it.settled():
            document, uid = it.api.node, it.api.node["metadata"]["uid"]
            for condition in document["status"]["conditions"]:
                condition["status"] = "Unknown"
            it.api.version = 50
            it.api.put_node(document, uid=uid)
            await asyncio.sleep(12)
            assert set(it.api.conditions().values()) == {"True", "False"}

    async def test_status_loop_watch_stale_gets_node_each_round(self) -> None:
        """Then the node is asked for, once a round, until the watch shows what was written."""
        it = Reporting()
        async with it.settled():
            listener, it.api.on_change = it.api.on_change, lambda node: None
            it.pressures = NodePressure(disk=True)
            await asyncio.sleep(31)
            assert it.api.asked == ["patch nodes", "get nodes", "get nodes"]
            document = it.api.node
            for condition in document["status"]["conditions"]:
                condition["status"] = "Unknown"
            it.api.put_node(document, uid=document["metadata"]["uid"])
            await asyncio.sleep(11)
            assert set(it.api.conditions().values()) == {"True", "False"}
            it.api.on_change = listener
            listener(it.api.known())
            it.api.asked.clear()
            await asyncio.sleep(60)
            assert it.api.asked == []

    async def test_status_loop_addresses_changed_notifies_listener(self) -> None:
        """Also of those that somebody else wrote, as a cloud does."""
        heard: list[list[NodeAddress]] = []
        it = Reporting(settings(ips=(), external_cloud=True))
        it.loop.add_address_listener(heard.append)
        async with it.settled():
            assert heard[-1] == [NodeAddress(type="Hostname", address="vm")]
            document = it.api.node
            document["status"]["addresses"] = [{"type": "InternalIP", "address": "10.0.0.9"}]
            it.api.put_node(document, uid=document["metadata"]["uid"])
            await asyncio.sleep(1.1)
            assert heard[-1] == [NodeAddress(type="InternalIP", address="10.0.0.9")]

    async def test_status_loop_watched_status_unreadable_gets_node(self) -> None:
        it = Reporting()
        async with it.settled():
            it.api.on_change = lambda node: None
            it.api.put_node(it.api.node, uid=it.api.node["metadata"]["uid"])
            known = it.api.known()
            known.status = msgspec.Raw(b'{"capacity": {"cpu": "many"}}')
            it.pressures = NodePressure(disk=True)
            it.loop.handle_update(known)
            await asyncio.sleep(1.1)
            assert it.api.asked == ["get nodes", "patch nodes"]
            assert it.api.conditions()["DiskPressure"] == "True"

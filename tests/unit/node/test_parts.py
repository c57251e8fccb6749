"""The informer, the runtime's health, and the bell."""

import asyncio
import json
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from pykubelet.apiserver.client import Page
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.node.conditions import RuntimeHealth
from pykubelet.node.informer import CachedNode, NodeInformer
from pykubelet.node.lease import WakeupTimer, jittered
from pykubelet.node.status import plain_version
from pykubelet.node.status_inputs import NodeStatusCollector
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope
from tests.support.node_status import FakeRuntime, golden_node, runtime_status, settings
from tests.support.watch_events import ScriptedSource, event, page

pytestmark = pytest.mark.looptime


def node(version: int, **changes: Any) -> dict[str, Any]:
    document = golden_node()
    document["metadata"] = {"name": "vm", "uid": "n1", "resourceVersion": str(version), **changes}
    for condition in document["status"]["conditions"]:
        condition["lastHeartbeatTime"] = condition["lastTransitionTime"] = "2026-07-24T08:30:00Z"
    return document


class TestInformer:
    async def test_informer_node_added_modified_deleted_notifies_listener(self) -> None:
        source = ScriptedSource(
            page(version="1"),
            [
                1,
                event("ADDED", node(2, labels={"a": "b"})),
                1,
                event("MODIFIED", node(3)),
                1,
                event("DELETED", node(4)),
                1000,
            ],
        )
        heard: list[str] = []
        informer = NodeInformer(source, "vm")
        informer.add_listener(lambda node: heard.append(node.metadata.resource_version if node else "gone"))
        assert (informer.node, informer.has_synced) == (None, False)
        async with TaskScope() as scope:
            scope.start(informer.run(), name="informer")
            await informer.synced()
            assert informer.node is None
            await asyncio.sleep(1.5)
            assert informer.node is not None
            assert informer.node.metadata.labels == {"a": "b"}
            await asyncio.sleep(2)
        assert source.asked[0][1]["fieldSelector"] == "metadata.name=vm"
        assert heard == ["2", "3", "gone"]
        assert informer.node is None

    def test_cached_node_to_node_decodes_status_lazily(self) -> None:
        known = msgspec.json.decode(json.dumps(node(1)).encode(), type=CachedNode)
        whole = known.to_node()
        assert len(whole.status.images) == 2
        assert whole.status.images[1].names is None
        assert str(whole.status.capacity["memory"]) == "24682416Ki"
        assert CachedNode().to_node().status.conditions == []
        with pytest.raises(ValueError, match="many"):
            CachedNode(status=msgspec.Raw(b'{"capacity": {"cpu": "many"}}')).to_node()

    async def test_informer_unreadable_node_keeps_last_readable(self) -> None:
        bad = {"metadata": {"name": "vm", "uid": "n1", "resourceVersion": "9"}, "spec": {"taints": 3}}
        source = ScriptedSource(
            Page([msgspec.Raw(json.dumps(node(2)).encode())], "2", ""), [1, event("MODIFIED", bad), 100]
        )
        informer = NodeInformer(source, "vm")
        async with TaskScope() as scope:
            scope.start(informer.run(), name="informer")
            await asyncio.sleep(2)
            assert informer.node is not None
            assert informer.node.metadata.resource_version == "2"


class TestHealth:
    async def test_runtime_health_before_first_status_reports_unknown(self) -> None:
        health = RuntimeHealth(FakeRuntime().status)
        assert health.problems() == [
            "container runtime status check may not have completed yet",
            "network state unknown",
        ]

    @pytest.mark.parametrize(
        ("answer", "problems"),
        [
            (runtime_status(), []),
            (
                runtime_status(network=False),
                [
                    "container runtime network not ready: NetworkReady=false "
                    "reason:NetworkPluginNotReady message:cni plugin not initialized"
                ],
            ),
            (
                runtime_status(runtime=False),
                [
                    "container runtime status check may not have completed yet",
                    "container runtime not ready: RuntimeReady=false reason:Down message:",
                ],
            ),
            (
                pb.StatusResponse(),
                [
                    "container runtime status check may not have completed yet",
                    "container runtime not ready: the runtime does not say",
                    "container runtime network not ready: the runtime does not say",
                ],
            ),
        ],
    )
    async def test_runtime_health_status_response_sets_problems(
        self, answer: pb.StatusResponse, problems: list[str]
    ) -> None:
        runtime = FakeRuntime()
        runtime.answer = answer
        await runtime.health.status()
        assert runtime.health.problems() == problems

    async def test_runtime_health_no_status_for_30_seconds_is_down(self) -> None:
        rung: list[float] = []
        loop = asyncio.get_running_loop()
        runtime = FakeRuntime()
        runtime.health.add_listener(lambda: rung.append(loop.time()))
        await runtime.health.status()
        await runtime.health.status()
        assert len(rung) == 1, "only differences ring"
        await asyncio.sleep(29)
        assert runtime.health.problems() == []
        await asyncio.sleep(2)
        assert runtime.health.problems() == ["container runtime is down"]
        await runtime.health.status()
        assert len(rung) == 2

    async def test_runtime_health_added_check_is_reported(self) -> None:
        runtime = FakeRuntime()
        await runtime.health.status()
        reasons: list[str | None] = ["late", None]
        runtime.health.add_check("PLEG", lambda: reasons[0])
        assert runtime.health.problems() == ["PLEG is not healthy: late"]
        reasons.pop(0)
        assert runtime.health.problems() == []


class TestObserver:
    async def test_node_status_collector_image_list_is_cached(self) -> None:
        runtime = FakeRuntime()
        asked: list[float] = []
        loop = asyncio.get_running_loop()

        async def images() -> list[pb.Image]:
            asked.append(loop.time())
            if len(asked) == 2:
                raise CriError("ListImages", "Unavailable", "no")
            return runtime.images

        sources = runtime.sources(list_images=images, problems=lambda: ["shutting down"])
        observer = NodeStatusCollector(sources, settings(ips=(ip_address("203.0.113.77"),)))
        for _ in range(8):
            found = await observer.facts()
            assert found.runtime_version == "containerd://1.6.20"
            assert len(found.images or []) == 2
            assert found.problems[-1] == "shutting down"
            # It is for documentation, no machine's own.
            assert not found.addresses_valid
            await asyncio.sleep(10)
        assert [round(moment) for moment in asked] == [0, 30, 40, 70]

    async def test_node_status_collector_runtime_hangs_times_out(self) -> None:
        runtime = FakeRuntime()
        runtime.hangs = True
        loop = asyncio.get_running_loop()
        observer = NodeStatusCollector(runtime.sources(), settings())
        found = await observer.facts()
        await observer.refresh()
        assert loop.time() <= 10.1
        assert (found.images, found.runtime_version) == (None, None)


async def test_wakeup_timer_wake_ends_sleep() -> None:
    bell, loop = WakeupTimer(), asyncio.get_running_loop()
    assert not await bell.sleep(3)
    assert loop.time() == pytest.approx(3)
    bell.wake()
    bell.wake()
    assert await bell.sleep(3)
    loop.call_later(1, bell.wake)
    assert await bell.sleep(3)
    assert loop.time() == pytest.approx(4)
    assert not await bell.sleep(1)


def test_jittered_adds_up_to_four_percent() -> None:
    assert jittered(10, lambda: 0) == 10
    assert jittered(10, lambda: 1) == pytest.approx(10.4)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1.6.20~ds1", "1.6.20"),
        ("v2.1.0", "2.1.0"),
        ("2.1.0-rc.1+dirty", "2.1.0-rc.1+dirty"),
        ("1.30.2+ds1~1", "1.30.2"),
        ("1.7", "1.7"),
        ("1.2.3.4-x", "1.2.3.4"),
        (" 1.0.0\n", "1.0.0"),
        ("devel", "devel"),
        ("", ""),
    ],
)
def test_plain_version_strips_distribution_suffix(text: str, plain: str) -> None:
    assert plain_version(text) == plain

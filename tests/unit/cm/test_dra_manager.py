"""Claims on a node with real driver processes: prepared, shared, given back, and taken over."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pykubelet.cm.dra.claims import ClaimError
from pykubelet.util.tasks import TaskScope
from tests.support.dra_plugin.process import DRIVER, PREPARE, UNPREPARE
from tests.unit.cm.dra_node import OTHER, Node, agent, cdi, driver_of, new_node, pod_using


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with new_node() as running:
        yield running


async def test_dra_manager_prepare_and_unprepare_call_driver_once(node: Node) -> None:
    pod = pod_using("one", "two")
    node.claim("one", pod)
    node.claim("two", pod)
    with driver_of(node, "--devices=2", "--share-id=s-7") as driver:
        await node.registered()
        await node.claims.prepare(pod)
        assert driver.claims(PREPARE) == [["one", "two"]], "one call for all claims of a driver"
        (call,) = driver.calls(PREPARE)
        assert call["request"]["claims"][0] == {"namespace": "ns", "uid": "uid-one", "name": "one"}
        assert cdi(node, pod) == tuple(
            f"{DRIVER}/claim=uid-{name}-dev-{number}" for name in ("one", "two") for number in (0, 1)
        )
        assert cdi(node, pod, 1) == ()
        uses = node.claims.claims(pod, pod.spec.containers[0])
        assert [(use.namespace, use.name, len(use.devices)) for use in uses] == [
            ("ns", "one", 2),
            ("ns", "two", 2),
        ]
        first = uses[0].devices[0]
        assert (first.driver, first.pool, first.device, first.share_id) == (DRIVER, "pool", "dev-0", "s-7")
        assert first.cdi_devices == (f"{DRIVER}/claim=uid-one-dev-0",)
        assert node.count("dra_resource_claims_in_use", driver_name="<any>") == 2
        assert node.count("dra_resource_claims_in_use", driver_name=DRIVER) == 2

        await node.claims.prepare(pod)
        assert len(driver.calls(PREPARE)) == 1, "what is ready is not prepared again"

        await node.claims.unprepare(pod.uid)
        assert driver.claims(UNPREPARE) == [["one", "two"]]
        assert driver.prepared() == []
        assert node.state() == {}
        assert node.count("dra_resource_claims_in_use", driver_name="<any>") == 0
        await node.claims.unprepare(pod.uid)
        assert len(driver.calls(UNPREPARE)) == 1
        with pytest.raises(ClaimError, match="unable to get information for ResourceClaim one"):
            cdi(node, pod)
    method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
    labels = {"driver_name": DRIVER, "method_name": method, "grpc_status_code": "OK"}
    assert node.count("dra_grpc_operations_duration_seconds_count", **labels) == 1
    operations = "dra_operations_duration_seconds_count"
    assert node.count(operations, operation_name="PrepareResources", is_error="false") == 2
    assert node.count(operations, operation_name="UnprepareResources", is_error="false") == 2


async def test_dra_manager_container_request_gets_matching_devices_only(node: Node) -> None:
    pod = pod_using("c", requests=("req-1",))
    node.claim("c", pod)
    with driver_of(node, "--devices=3", "--request=req-{}"):
        await node.registered()
        await node.claims.prepare(pod)
    assert cdi(node, pod) == (f"{DRIVER}/claim=uid-c-dev-1",)


async def test_dra_manager_claim_of_two_drivers_retained_until_both_unprepare(node: Node) -> None:
    pod = pod_using("c")
    node.claim("c", pod, drivers=(DRIVER, OTHER))
    with driver_of(node) as driver, driver_of(node, f"--name={OTHER}", folder="other") as other:
        await node.registered()
        await node.registered(OTHER)
        await node.claims.prepare(pod)
        assert len(cdi(node, pod)) == 2
        other.behave(refuse={"c": "still busy"})
        with pytest.raises(ClaimError, match="NodeUnprepareResources failed for ResourceClaim c: still busy"):
            await node.claims.unprepare(pod.uid)
        assert node.state().keys() == {"c"}, "until all drivers have given it back"
        other.behave()
        await node.claims.unprepare(pod.uid)
        assert (driver.prepared(), other.prepared(), node.state()) == ([], [], {})


async def test_dra_manager_shared_claim_unprepared_after_last_pod(node: Node) -> None:
    first, second = pod_using("c", uid="pod-1"), pod_using("c", uid="pod-2")
    node.claim("c", first, second)
    with driver_of(node) as driver:
        await node.registered()
        await asyncio.gather(node.claims.prepare(first), node.claims.prepare(second))
        assert len(driver.calls(PREPARE)) == 1
        assert node.state()["c"]["PodUIDs"] == {"pod-1": {}, "pod-2": {}}
        await node.claims.unprepare("pod-1")
        assert driver.calls(UNPREPARE) == []
        assert cdi(node, second)
        assert node.state()["c"]["PodUIDs"] == {"pod-2": {}}
        await node.claims.unprepare("pod-2")
        assert driver.prepared() == []


async def test_dra_manager_prepare_waits_for_running_unprepare(node: Node) -> None:
    first, second = pod_using("c", uid="pod-1"), pod_using("c", uid="pod-2")
    node.claim("c", first, second)
    with driver_of(node) as driver:
        await node.registered()
        await node.claims.prepare(first)
        driver.behave(late={UNPREPARE: 0.3})
        async with asyncio.TaskGroup() as group:
            group.create_task(node.claims.unprepare("pod-1"))
            await node.until(lambda: driver.calls(UNPREPARE))
            group.create_task(node.claims.prepare(second))
        assert [call["call"] for call in driver.calls() if "Resources" in call["call"]] == [
            PREPARE,
            UNPREPARE,
            PREPARE,
        ]
        assert driver.prepared() == ["uid-c"]
        assert cdi(node, second)


async def test_dra_manager_restart_restores_claims_and_unprepares_orphaned(node: Node) -> None:
    pod, gone = pod_using("c"), pod_using("d", uid="gone")
    node.claim("c", pod)
    node.claim("d", gone)
    with driver_of(node) as driver:
        await node.registered()
        await node.claims.prepare(pod)
        await node.claims.prepare(gone)
        async with agent(node.folder) as later:
            assert cdi(later, pod) == cdi(node, pod), "a container may be started again"
            async with TaskScope() as tasks:
                active: set[str] | None = None
                tasks.start(later.claims.run(lambda: active), name="sweep")
                await later.registered()
                assert len(driver.calls(PREPARE)) == 2, "what runs is left alone"
                assert later.state().keys() == {"c", "d"}, "nobody is gone before all sources were heard"
                active = {pod.uid}
                later.claims._resync.set()
                await later.until(lambda: later.state().keys() == {"c"})
                assert driver.claims(UNPREPARE) == [["d"]]
            # After a boot nothing of what drivers made may be left: a new sandbox asks again.
            later.objects = node.objects
            await later.claims.prepare(pod)
            assert driver.claims(PREPARE) == [["c"], ["d"], ["c"]]
            assert len(cdi(later, pod)) == 1
            await later.claims.unprepare(pod.uid)
            assert driver.prepared() == []

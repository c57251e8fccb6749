"""Drivers that fail, hang and are away, and claims that are not to be had: what is left, and what is not."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pykubelet.cm.dra import plugins as dra_plugins
from pykubelet.cm.dra.claims import ClaimError
from pykubelet.util.tasks import TaskScope
from tests.support.dra_plugin.process import PREPARE, UNPREPARE
from tests.unit.cm.dra_node import OTHER, Node, cdi, driver_of, new_node, pod_using


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with new_node() as running:
        yield running


async def test_dra_unprepare_dead_driver_releases_claims_of_other_drivers(node: Node) -> None:
    pod = pod_using("mine", "theirs")
    node.claim("mine", pod)
    node.claim("theirs", pod, drivers=(OTHER,))
    with driver_of(node) as driver, driver_of(node, f"--name={OTHER}", folder="other") as other:
        await node.registered()
        await node.registered(OTHER)
        await node.claims.prepare(pod)
        other.kill()
        with pytest.raises(ClaimError, match="NodeUnprepareResources: rpc error: code = Unavailable"):
            await node.claims.unprepare(pod.uid)
        assert driver.prepared() == []
        assert node.state().keys() == {"theirs"}
        other.start()
        await node.registered_anew(other, OTHER)
        await node.claims.unprepare(pod.uid)
        assert (other.prepared(), node.state()) == ([], {})


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"refuse": {"two": "full"}}, "NodePrepareResources failed for ResourceClaim two: full"),
        ({"skip": ["two"]}, "NodePrepareResources skipped 1 ResourceClaims"),
        (
            {"unknown": True},
            "NodePrepareResources returned result for unknown claim UID nobody-asked",
        ),
        (
            {"fail": {PREPARE: ["INTERNAL", "on fire"]}},
            "NodePrepareResources: rpc error: code = Internal desc = on fire",
        ),
        ({"die": [PREPARE]}, "NodePrepareResources: rpc error: code = Unavailable"),
    ],
)
async def test_dra_prepare_driver_error_is_retried(node: Node, behaviour: dict[str, Any], said: str) -> None:
    pod = pod_using("one", "two")
    node.claim("one", pod)
    node.claim("two", pod)
    with driver_of(node, "--devices=1") as driver:
        await node.registered()
        driver.behave(**behaviour)
        with pytest.raises(ClaimError) as caught:
            await node.claims.prepare(pod)
        assert str(caught.value).startswith(f"prepare dynamic resources: {said}")
        assert node.state().keys() == {"one", "two"}, "the driver may have prepared them"
        assert node.count("dra_resource_claims_in_use", driver_name="<any>") == 0
        driver.behave()
        if "die" in behaviour:
            driver.kill()
            driver.start()
            await node.registered_anew(driver)
        await node.claims.prepare(pod)
        assert len(cdi(node, pod)) == 2, "each device once, however often it was prepared"
        await node.claims.unprepare(pod.uid)
        assert driver.prepared() == []
    operations = "dra_operations_duration_seconds_count"
    assert node.count(operations, operation_name="PrepareResources", is_error="true") == 1


async def test_dra_prepare_driver_hangs_raises_deadline_exceeded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dra_plugins, "CALL_SECONDS", 0.5)
    pod = pod_using("c")
    node.claim("c", pod)
    with driver_of(node) as driver:
        await node.registered()
        driver.behave(hang=[PREPARE])
        assert "code = DeadlineExceeded" in await _problem(node.claims.prepare(pod))


async def test_dra_prepare_driver_hangs_other_drivers_unaffected(node: Node) -> None:
    pod, neighbour = pod_using("c"), pod_using("d", uid="pod-2")
    node.claim("c", pod)
    node.claim("d", neighbour, drivers=(OTHER,))
    with driver_of(node) as driver, driver_of(node, f"--name={OTHER}", folder="other"):
        await node.registered()
        await node.registered(OTHER)
        driver.behave(hang=[PREPARE])
        async with asyncio.TaskGroup() as group:
            stuck = group.create_task(_problem(node.claims.prepare(pod)))
            await node.until(lambda: driver.calls(PREPARE))
            await node.claims.prepare(neighbour)
            assert not stuck.done()
            driver.kill()
        assert "code = Unavailable" in stuck.result()


async def _problem(work: Any) -> str:
    with pytest.raises(ClaimError) as caught:
        await work
    return str(caught.value)


async def test_dra_prepare_cancelled_claim_is_unprepared(node: Node) -> None:
    pod = pod_using("c")
    node.claim("c", pod)
    with driver_of(node) as driver:
        await node.registered()
        driver.behave(hang=[PREPARE])
        task = asyncio.ensure_future(node.claims.prepare(pod))
        await node.until(lambda: driver.calls(PREPARE))
        task.cancel()
        await asyncio.wait([task])
        await node.claims.unprepare(pod.uid)
        assert driver.claims(UNPREPARE) == [["c"]], "nobody knows how far it had got"
        assert node.state() == {}


async def test_dra_prepare_claim_check_fails_leaves_no_state(node: Node) -> None:
    pod = pod_using("c", "d")
    node.claim("c", pod)
    with driver_of(node) as driver:
        await node.registered()
        with pytest.raises(ClaimError, match=r'fetch ResourceClaim d: resourceclaims.* "d" not'):
            await node.claims.prepare(pod)
        node.claim("d", pod, drivers=("gone.example.com",))
        with pytest.raises(ClaimError, match=r"DRA driver gone\.example\.com is not registered"):
            await node.claims.prepare(pod)
        node.claim("d", pod_using(uid="else"))
        with pytest.raises(ClaimError, match="is not allowed to use ResourceClaim d"):
            await node.claims.prepare(pod)
        assert node.state() == {}
        await node.claims.unprepare(pod.uid)
        assert driver.calls(PREPARE) == driver.calls(UNPREPARE) == []


async def test_dra_prepare_recreated_claim_fails_until_old_unprepared(node: Node) -> None:
    old, new = pod_using("c", uid="old"), pod_using("c", uid="new")
    node.claim("c", old)
    with driver_of(node) as driver:
        await node.registered()
        await node.claims.prepare(old)
        node.claim("c", new, uid="another")
        with pytest.raises(
            ClaimError, match="old ResourceClaim with same name c and different UID uid-c still exists"
        ):
            await node.claims.prepare(new)
        assert node.state()["c"]["PodUIDs"] == {"old": {}}
        await node.claims.unprepare("old")
        await node.claims.prepare(new)
        assert driver.prepared() == ["another"]


async def test_dra_orphaned_claims_unprepared_after_driver_registers(node: Node) -> None:
    gone = pod_using("c")
    node.claim("c", gone)
    with driver_of(node) as driver:
        await node.registered()
        await node.claims.prepare(gone)
        driver.stop()
        await node.until(lambda: not node.drivers._plugins)
        async with TaskScope() as tasks:
            tasks.start(node.claims.run(lambda: set()), name="sweep")
            await asyncio.sleep(0.1)
            assert node.state().keys() == {"c"}
            driver.start()
            await node.until(lambda: not node.state())
            assert driver.prepared() == []


async def test_dra_prepare_checkpoint_write_fails_driver_not_called(node: Node) -> None:
    pod = pod_using("c")
    node.claim("c", pod)
    with driver_of(node) as driver:
        await node.registered()
        path = node.folder / "dra_manager_state"
        path.unlink()
        path.mkdir()
        with pytest.raises(ClaimError, match=r"checkpoint ResourceClaim state: .*directory"):
            await node.claims.prepare(pod)
        assert driver.calls(PREPARE) == []
        path.rmdir()
        await node.claims.prepare(pod)
        assert cdi(node, pod)

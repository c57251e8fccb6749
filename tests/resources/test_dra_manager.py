"""Claims on a node with real driver processes: prepared, shared, given back, and what goes wrong."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.api.resource_claim import ResourceClaim
from pykubelet.host.plugin_registration import Plugin, PluginRegistration, RegistrationRefused
from pykubelet.kube.errors import NotFound
from pykubelet.resources import dra_plugins
from pykubelet.resources.dra_claims import ClaimError
from pykubelet.resources.dra_health import HealthBook
from pykubelet.resources.dra_manager import DynamicResources
from pykubelet.resources.dra_metrics import DraMetrics
from pykubelet.resources.dra_plugins import Drivers
from pykubelet.tasks import TaskScope
from tests.dra_plugin.process import DRIVER, PREPARE, UNPREPARE, driver_process

OTHER = "other.dra.example.com"


class Node:
    """The claims of an agent, with the API server's side made up."""

    def __init__(self, folder: Path, tasks: TaskScope) -> None:
        self.folder = folder
        self.woken: list[str] = []
        self.unwell: list[tuple[str, set[tuple[str, str]]]] = []
        self.objects: dict[str, ResourceClaim] = {}
        self.registry = CollectorRegistry()
        metrics = DraMetrics(self.registry)
        self.health = HealthBook(folder, tasks, lambda driver, devices: self.unwell.append((driver, devices)))
        self.drivers = Drivers(tasks, metrics, self.health, self.woken.append)
        self.claims = DynamicResources(folder, self.fetch, self.drivers, metrics=metrics, health=self.health)

    async def fetch(self, namespace: str, name: str) -> ResourceClaim:
        if name not in self.objects:
            raise NotFound(404, "NotFound", f'resourceclaims.resource.k8s.io "{name}" not found')
        return self.objects[name]

    def claim(self, name: str, *users: Pod, drivers: tuple[str, ...] = (DRIVER,), uid: str = "") -> None:
        """Have a claim that these pods may use."""
        self.objects[name] = from_document(
            ResourceClaim,
            {
                "metadata": {"name": name, "namespace": "ns", "uid": uid or f"uid-{name}"},
                "status": {
                    "allocation": {"devices": {"results": [{"driver": driver} for driver in drivers]}},
                    "reservedFor": [{"uid": user.uid} for user in users],
                },
            },
        )

    async def until(self, what: Callable[[], Any], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not what():
                await asyncio.sleep(0.01)

    async def registered(self, driver: str = DRIVER) -> None:
        await self.until(lambda: self._connected(driver))

    def _connected(self, driver: str) -> bool:
        try:
            return self.drivers.get(driver).connected
        except ClaimError:
            return False

    def state(self) -> dict[str, Any]:
        """What the file says: the claims by name."""
        data = json.loads(json.loads((self.folder / "dra_manager_state").read_text())["Data"])
        return {claim["ClaimName"]: claim for claim in data["ClaimInfoStateList"]}

    def count(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(metric, labels) or 0.0


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[Node]:
    """One agent's time."""
    async with TaskScope() as tasks:
        node = Node(folder, tasks)
        registration = PluginRegistration(folder / "registry", {"DRAPlugin": node.drivers})
        tasks.start(registration.run(), name="registration")
        yield node


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    # Sockets have short paths, and pytest's own temporary directories have long ones.
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as name:
        path = Path(name)
        (path / "registry").mkdir()
        async with agent(path) as running:
            yield running


def driver_of(node: Node, *options: str, folder: str = "driver") -> Any:
    return driver_process(node.folder / folder, node.folder / "registry", *options)


def pod_using(*claims: str, uid: str = "pod-1", requests: tuple[str, ...] = ("",)) -> Pod:
    used = [{"name": name, "request": request} for name in claims for request in requests]
    return from_document(
        Pod,
        {
            "metadata": {"name": uid, "namespace": "ns", "uid": uid},
            "spec": {
                "resourceClaims": [{"name": name, "resourceClaimName": name} for name in claims],
                "containers": [{"name": "main", "resources": {"claims": used}}, {"name": "bare"}],
            },
        },
    )


def cdi(node: Node, pod: Pod, container: int = 0) -> tuple[str, ...]:
    return node.claims.cdi_devices(pod, pod.spec.containers[container])


async def test_from_preparing_to_giving_back(node: Node) -> None:
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


async def test_a_request_gets_its_own_devices(node: Node) -> None:
    pod = pod_using("c", requests=("req-1",))
    node.claim("c", pod)
    with driver_of(node, "--devices=3", "--request=req-{}"):
        await node.registered()
        await node.claims.prepare(pod)
    assert cdi(node, pod) == (f"{DRIVER}/claim=uid-c-dev-1",)


async def test_a_claim_of_several_drivers(node: Node) -> None:
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


async def test_a_dead_driver_does_not_keep_the_claims_of_others(node: Node) -> None:
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
        await node.registered(OTHER)
        await node.claims.unprepare(pod.uid)
        assert (other.prepared(), node.state()) == ([], {})


async def test_a_claim_that_pods_share(node: Node) -> None:
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


async def test_a_pod_does_not_get_what_is_just_being_taken_away(node: Node) -> None:
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
async def test_what_drivers_get_wrong_is_tried_again(
    node: Node, behaviour: dict[str, Any], said: str
) -> None:
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
            # It may be reached before it has registered anew, and is gone for a moment when it does.
            await node.until(lambda: len(driver.calls("NotifyRegistrationStatus")) == 2)
            await node.registered()
        await node.claims.prepare(pod)
        assert len(cdi(node, pod)) == 2, "each device once, however often it was prepared"
        await node.claims.unprepare(pod.uid)
        assert driver.prepared() == []
    operations = "dra_operations_duration_seconds_count"
    assert node.count(operations, operation_name="PrepareResources", is_error="true") == 1


async def test_a_driver_that_hangs_holds_up_nobody_else(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dra_plugins, "CALL_SECONDS", 2.0)
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
        assert "code = DeadlineExceeded" in stuck.result()


async def _problem(work: Any) -> str:
    with pytest.raises(ClaimError) as caught:
        await work
    return str(caught.value)


async def test_a_pod_that_is_deleted_while_its_driver_hangs(node: Node) -> None:
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


async def test_a_pod_that_fails_the_checks_leaves_no_trace(node: Node) -> None:
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


async def test_a_claim_that_was_made_anew_waits_for_the_old_one(node: Node) -> None:
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


async def test_a_pod_is_woken_when_its_driver_comes(node: Node) -> None:
    pod = pod_using("c")
    node.claim("c", pod)
    with pytest.raises(ClaimError, match="is not registered"):
        await node.claims.prepare(pod)
    with driver_of(node):
        await node.until(lambda: node.woken)
        assert node.woken == [pod.uid]
        await node.claims.prepare(pod)


async def test_the_next_agent_goes_on(node: Node) -> None:
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
                later.claims._look.set()
                await later.until(lambda: later.state().keys() == {"c"})
                assert driver.claims(UNPREPARE) == [["d"]]
            # After a boot nothing of what drivers made may be left: a new sandbox asks again.
            later.objects = node.objects
            await later.claims.prepare(pod)
            assert driver.claims(PREPARE) == [["c"], ["d"], ["c"]]
            assert len(cdi(later, pod)) == 1
            await later.claims.unprepare(pod.uid)
            assert driver.prepared() == []


async def test_claims_of_the_gone_are_given_back_when_their_driver_is_there(node: Node) -> None:
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


async def test_a_full_disk_keeps_drivers_from_being_asked(node: Node) -> None:
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


# Registration


async def test_a_rolling_update(node: Node) -> None:
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
            await node.registered()
            await node.claims.unprepare(pod.uid)
            assert new.calls(UNPREPARE)[-1]["by"] == "b"


async def test_an_older_version_of_the_protocol(node: Node) -> None:
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
def test_versions(versions: tuple[str, ...], chosen: str) -> None:
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
async def test_a_plugin_that_can_never_be_asked_is_refused(plugin: Plugin) -> None:
    async with TaskScope() as tasks:
        with pytest.raises(RegistrationRefused):
            Drivers(tasks).validate(plugin)


async def test_who_registers_twice_stays_registered(tmp_path: Path) -> None:
    first = Plugin("DRAPlugin", "d", str(tmp_path / "x.sock"), ("v1.DRAPlugin",))
    again = Plugin("DRAPlugin", "d", str(tmp_path / "x.sock"), ("v1.DRAPlugin",))
    told: list[tuple[str, bool]] = []
    async with TaskScope() as tasks:
        drivers = Drivers(tasks)
        drivers.listen(lambda driver, usable: told.append((driver, usable)))
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


async def test_a_lost_connection_is_noticed(node: Node) -> None:
    told: list[bool] = []
    node.drivers.listen(lambda driver, usable: told.append(usable))
    with driver_of(node) as driver:
        await node.registered()
        driver.kill()
        await node.until(lambda: told[-1:] == [False])
        driver.start()
        await node.until(lambda: told[-1:] == [True])


# Health


async def test_how_devices_are(node: Node) -> None:
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
            later = HealthBook(node.folder, tasks)
            (record,) = node.claims.records(pod.uid)
            assert later.of(DRIVER, record.devices[DRIVER][0]).health == "Unhealthy"
        driver.kill()
        await node.until(lambda: _health(node, pod) == ("Unknown", None))
    assert node.claims.health(pod, pod.spec.containers[1]) == []


def _health(node: Node, pod: Pod) -> tuple[str, str | None]:
    (status,) = node.claims.health(pod, pod.spec.containers[0])
    assert status.name == "claim:c"
    (device,) = status.resources
    assert device.resource_id == f"{DRIVER}/claim=uid-c-dev-0"
    return device.health, device.message if isinstance(device.message, str) else None


async def test_a_driver_that_tells_nothing_of_health(node: Node) -> None:
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

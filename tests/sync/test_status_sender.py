"""The sender against an API server that is played in memory, in the loop's time."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looptime import new_event_loop
from prometheus_client import CollectorRegistry

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kube.client import ApiClient
from pykubelet.kube.errors import (
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    ServerError,
    Unreachable,
)
from pykubelet.kube.resources import Resource
from pykubelet.sync.metrics import StatusMetrics
from pykubelet.sync.status_sender import AT_ONCE, CROWDED_HOLD_SECONDS, HOLD_SECONDS, StatusSender
from pykubelet.tasks import TaskScope
from tests.kube.conftest import access, authority, client, opened, server, server_pair  # noqa: F401
from tests.kube.servers import Server, answer, refuse
from tests.sync.making import LATER, condition, container, ended, make_pod, make_status, waiting
from tests.sync.strategic import apply_patch


class Api:
    """Keeps pods, applies patches, and fails as it is told; the watch is `sync`, called by the test."""

    def __init__(self, *pods: Pod, delay: float = 0.01) -> None:
        self.pods = {pod.full_name: pod for pod in pods}
        self.watched = {pod.uid: pod for pod in pods}
        self.delay = delay
        self.down = False
        self.failures: list[KubeError] = []
        self.drops: set[str] = set()
        self.requests: list[tuple[float, str, str, Any]] = []
        self.busy: dict[str, int] = {}
        self.most = 0

    @asynccontextmanager
    async def _request(self, verb: str, name: str, body: Any = None) -> AsyncIterator[None]:
        self.requests.append((asyncio.get_running_loop().time(), verb, name, body))
        self.busy[name] = self.busy.get(name, 0) + 1
        assert self.busy[name] == 1, f"two requests at once for {name}"
        self.most = max(self.most, sum(self.busy.values()))
        try:
            await asyncio.sleep(self.delay)
            if self.down:
                raise Unreachable("https://api", "connection refused")
            if self.failures:
                raise self.failures.pop(0)
            yield
        finally:
            self.busy[name] -= 1

    async def get(self, resource: Resource[Pod], name: str, namespace: str = "") -> Pod:
        async with self._request("get", name):
            return self._find(namespace, name)

    async def patch(
        self,
        resource: Resource[Pod],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        subresource: str = "",
    ) -> Pod:
        assert subresource == "status"
        document = json.loads(msgspec.json.encode(to_document(patch)))
        async with self._request("patch", name, document["status"]):
            pod = self._find(namespace, name)
            if document["metadata"]["uid"] != pod.uid:
                raise Conflict(409, "Conflict", "Precondition failed: UID")
            for field in self.drops:
                document["status"].pop(field, None)
            return self.write(pod, apply_patch(to_document(pod.status), document["status"]))

    async def delete(
        self,
        resource: Resource[Pod],
        name: str,
        namespace: str = "",
        *,
        grace_period_seconds: int | None = None,
        uid: str = "",
    ) -> None:
        assert grace_period_seconds == 0
        async with self._request("delete", name):
            pod = self._find(namespace, name)
            if uid != pod.uid:
                raise Conflict(409, "Conflict", "Precondition failed: UID")
            del self.pods[pod.full_name]

    async def pause(self, seconds: float) -> None:
        self.requests.append((asyncio.get_running_loop().time(), "pause", "", seconds))
        await asyncio.sleep(seconds)

    def _find(self, namespace: str, name: str) -> Pod:
        if (pod := self.pods.get(f"{namespace}/{name}")) is None:
            raise NotFound(404, "NotFound", f"pods {name!r} not found")
        return pod

    def write(self, pod: Pod, status: Any) -> Pod:
        version = str(int(pod.metadata.resource_version) + 1)
        written = msgspec.structs.replace(
            pod,
            metadata=msgspec.structs.replace(pod.metadata, resource_version=version),
            status=from_document(PodStatus, status),
        )
        self.pods[pod.full_name] = written
        return written

    def sync(self, sender: StatusSender) -> None:
        """Have the watch catch up."""
        now = {pod.uid: pod for pod in self.pods.values()}
        for uid in {*self.watched, *now}:
            if self.watched.get(uid) is not now.get(uid):
                if uid in now:
                    self.watched[uid] = now[uid]
                else:
                    del self.watched[uid]
                sender.seen(uid)

    @property
    def verbs(self) -> list[str]:
        return [f"{verb} {name}" for _, verb, name, _ in self.requests if verb != "pause"]

    @property
    def phases(self) -> dict[str, str]:
        return {pod.metadata.name: pod.status.phase for pod in self.pods.values()}


@asynccontextmanager
async def sending(
    api: Api,
    running: set[str] | None = None,
    metrics: StatusMetrics | None = None,
    crowded: Callable[[], bool] = lambda: False,
) -> AsyncIterator[StatusSender]:
    sender = StatusSender(
        api,
        object_of=api.watched.get,
        may_run=lambda uid: uid in (running or ()),
        crowded=crowded,
        metrics=metrics,
        clock=lambda: LATER,
    )
    async with TaskScope() as scope:
        scope.start(sender.run(), name="sender")
        yield sender


def pending() -> PodStatus:
    return make_status("Pending", container("main", waiting()), ready="False")


pytestmark = pytest.mark.looptime


async def test_the_time_since_the_first_change_is_counted() -> None:
    pod, registry = make_pod(), CollectorRegistry()
    api = Api(pod)
    async with sending(api, metrics=StatusMetrics(registry)) as sender:
        sender.changed(pod, pending())
        await asyncio.sleep(0.3)
        sender.changed(pod, make_status())
        await asyncio.sleep(60)
    assert registry.get_sample_value("kubelet_pod_status_sync_duration_seconds_count") == 1
    total = registry.get_sample_value("kubelet_pod_status_sync_duration_seconds_sum")
    assert total == pytest.approx(0.3, abs=0.05)


async def test_a_quick_start_is_one_request() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        sender.changed(pod, pending())
        await asyncio.sleep(0.3)
        assert api.verbs == []
        sender.changed(pod, make_status())
        await asyncio.sleep(0.1)
        assert api.verbs == ["patch web"]
        assert api.phases == {"web": "Running"}
        api.sync(sender)
        await asyncio.sleep(60)
        assert api.verbs == ["patch web"]


async def test_a_slow_start_shows_what_it_waits_for() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        for _ in range(20):
            sender.changed(pod, pending())
            await asyncio.sleep(0.1)
        assert api.verbs == ["patch web"]
        assert abs(api.requests[0][0] - HOLD_SECONDS) < 0.1
        assert api.pods[pod.full_name].status.container_statuses[0].state.waiting is not None


async def test_in_a_crowd_only_what_users_wait_for_is_sent_at_once() -> None:
    first, second = make_pod("u1", "first"), make_pod("u2", "second")
    api = Api(first, second)
    async with sending(api, crowded=lambda: True) as sender:
        sender.changed(first, pending())
        sender.changed(second, pending())
        await asyncio.sleep(5)
        assert api.verbs == []
        sender.changed(first, make_status())
        await asyncio.sleep(0.1)
        assert api.verbs == ["patch first"]
        await asyncio.sleep(CROWDED_HOLD_SECONDS - 4)
        assert api.phases == {"first": "Running", "second": "Pending"}
        assert api.verbs == ["patch first", "patch second"]
        # A new wait is a new one, not the rest of the last.
        sender.changed(second, make_status("Pending", container("main", waiting("ErrImagePull"))))
        await asyncio.sleep(5)
        assert len(api.verbs) == 2
        await asyncio.wait_for(sender.told(second.uid), 1)
        assert len(api.verbs) == 3


async def test_a_crowd_that_goes_is_noticed() -> None:
    pod = make_pod()
    api = Api(pod)
    crowd = [True]
    async with sending(api, crowded=lambda: bool(crowd)) as sender:
        sender.changed(pod, pending())
        await asyncio.sleep(3.5)
        crowd.clear()
        await asyncio.sleep(1)
        assert api.verbs == ["patch web"]


async def test_that_a_deletion_was_seen_is_no_news_by_itself() -> None:
    known = make_status(conditions=[condition("Ready", observed_generation=1)], observed_generation=1)
    pod = make_pod(status=known)
    pod.metadata.deletion_timestamp = LATER
    api = Api(pod)
    async with sending(api, {pod.uid}) as sender:
        seen = make_status(conditions=[condition("Ready", observed_generation=2)], observed_generation=2)
        sender.changed(pod, seen)
        await asyncio.sleep(CROWDED_HOLD_SECONDS / 2)
        assert api.verbs == []
        await asyncio.sleep(CROWDED_HOLD_SECONDS)
        assert api.verbs == ["patch web"]
        gone = [condition("Ready", "False", observed_generation=2)]
        sender.changed(pod, make_status(conditions=gone, observed_generation=2))
        await asyncio.sleep(HOLD_SECONDS + 0.1)
        assert api.verbs == ["patch web"] * 2


async def test_nothing_is_sent_of_a_pod_that_is_as_the_api_server_knows() -> None:
    pod = make_pod(status=make_status())
    api = Api(pod)
    async with sending(api) as sender:
        again = make_status(
            conditions=[condition("ContainersReady", at=LATER), condition("Ready", at=LATER)],
            start_time=LATER,
        )
        sender.changed(pod, again)
        await asyncio.sleep(60)
        assert api.requests == []
        await asyncio.wait_for(sender.told(pod.uid), 1)


async def test_the_newest_wins_and_no_pod_is_asked_for_twice_at_once() -> None:
    pod = make_pod()
    api = Api(pod, delay=1.0)
    async with sending(api) as sender:
        sender.changed(pod, make_status(ready="False"))
        await asyncio.sleep(0.5)
        for count in range(1, 6):
            sender.changed(pod, make_status("Running", container(restart_count=count)))
        await asyncio.sleep(5)
        assert api.verbs == ["patch web"] * 2
        assert api.pods[pod.full_name].status.container_statuses[0].restart_count == 5


async def test_only_so_many_requests_are_under_way() -> None:
    pods = [make_pod(f"u{number}", f"p{number}") for number in range(40)]
    api = Api(*pods, delay=0.5)
    async with sending(api) as sender:
        for pod in pods:
            sender.changed(pod, make_status())
        await asyncio.sleep(30)
        assert set(api.phases.values()) == {"Running"}
        assert AT_ONCE - 1 <= api.most <= AT_ONCE


async def test_what_others_overwrote_is_corrected_but_not_in_a_race() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        sender.changed(pod, make_status())
        await asyncio.sleep(0.1)
        api.sync(sender)
        for _ in range(50):
            document = to_document(api.pods[pod.full_name].status)
            document["phase"] = "Pending"
            api.write(api.pods[pod.full_name], document)
            api.sync(sender)
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        assert api.phases == {"web": "Running"}
        assert 3 <= len(api.verbs) <= 8


async def test_foreign_conditions_survive() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        sender.changed(pod, make_status())
        await asyncio.sleep(0.1)
        document = to_document(api.pods[pod.full_name].status)
        document["conditions"].append({"type": "example.com/gate", "status": "True"})
        api.write(api.pods[pod.full_name], document)
        api.sync(sender)
        sender.changed(pod, make_status(ready="False"))
        await asyncio.sleep(5)
        conditions = {c.type: c.status for c in api.pods[pod.full_name].status.conditions}
        assert conditions == {"Ready": "False", "ContainersReady": "False", "example.com/gate": "True"}


async def test_a_field_that_the_server_drops_is_not_sent_again_and_again() -> None:
    pod = make_pod()
    api = Api(pod)
    api.drops = {"observedGeneration", "podIP"}
    async with sending(api) as sender:
        sender.changed(pod, make_status(pod_ip="10.0.0.1"))
        for _ in range(10):
            await asyncio.sleep(5)
            api.sync(sender)
            sender.check(pod.uid)
        assert api.verbs == ["patch web"]
        sender.changed(pod, make_status(pod_ip="10.0.0.1", ready="False"))
        await asyncio.sleep(5)
        assert api.verbs == ["patch web"] * 2


async def test_the_end_is_told_only_when_nothing_runs() -> None:
    pod = make_pod(policy="Never", status=make_status())
    api, running = Api(pod), {"u1"}
    async with sending(api, running) as sender:
        sender.changed(pod, make_status("Failed", container("main", ended(1)), ready="False"))
        await asyncio.sleep(5)
        assert api.phases == {"web": "Running"}
        running.clear()
        sender.check(pod.uid)
        await asyncio.sleep(1)
        assert api.phases == {"web": "Failed"}


async def test_an_outage_is_waited_for_and_pods_are_told_in_order() -> None:
    pods = [make_pod(f"u{number}", f"p{number}") for number in range(30)]
    api = Api(*pods)
    api.down = True
    async with sending(api) as sender:
        for pod in pods:
            sender.changed(pod, make_status())
            await asyncio.sleep(1)
        await asyncio.sleep(570)
        tried = len(api.verbs)
        # Few ask while nobody answers.
        assert tried < 60 * AT_ONCE
        sender.changed(pods[0], make_status(ready="False"))
        api.down = False
        await asyncio.sleep(65)
        assert set(api.phases.values()) == {"Running"}
        done = api.verbs[-len(pods) :]
        assert done == [f"patch p{number}" for number in range(30)]


async def test_failures_of_one_pod_do_not_delay_others() -> None:
    bad, good = make_pod("u1", "bad"), make_pod("u2", "good")
    api = Api(bad, good)
    api.failures = [ServerError(500, "InternalError", "webhook")] * 3
    async with sending(api) as sender:
        sender.changed(bad, make_status())
        await asyncio.sleep(0.5)
        api.failures, rest = [], api.failures
        sender.changed(good, make_status())
        await asyncio.sleep(0.1)
        assert api.phases["good"] == "Running"
        api.failures = rest
        await asyncio.sleep(60)
        assert api.phases["bad"] == "Running"


@pytest.mark.parametrize(
    "err",
    [
        NotFound(404, "NotFound", "pods not found"),
        Conflict(409, "Conflict", "the object has been modified"),
        Forbidden(403, "Forbidden", "no"),
        Unreachable("https://api", "reset"),
    ],
)
async def test_a_pod_that_was_made_anew_is_let_be(err: KubeError) -> None:
    """Whatever happens first, another pod of the same name never gets this one's status."""
    pod, other = make_pod(), make_pod("u2")
    api = Api(pod)
    api.pods[other.full_name] = other
    api.failures = [err]
    async with sending(api) as sender:
        sender.changed(pod, make_status())
        await asyncio.sleep(120)
        assert api.phases == {"web": "Pending"}
        tried = len(api.verbs)
        await asyncio.sleep(600)
        assert len(api.verbs) == tried
        await asyncio.wait_for(sender.told(pod.uid), 1)


async def test_a_real_conflict_is_tried_again() -> None:
    pod = make_pod()
    api = Api(pod)
    api.failures = [Conflict(409, "Conflict", "the object has been modified")]
    async with sending(api) as sender:
        sender.changed(pod, make_status())
        await asyncio.sleep(10)
        assert api.verbs == ["patch web", "get web", "patch web"]
        assert api.phases == {"web": "Running"}


async def test_told_waits_for_the_newest_status_without_hold() -> None:
    pod = make_pod(deleting=True)
    api = Api(pod)
    async with sending(api) as sender:
        sender.changed(pod, make_status())
        sender.changed(pod, make_status("Succeeded", container("main", ended(0)), ready="False"))
        began = asyncio.get_running_loop().time()
        await sender.told(pod.uid)
        assert asyncio.get_running_loop().time() - began < 0.1
        assert api.phases == {"web": "Succeeded"}
        assert api.verbs == ["patch web"]


async def test_told_waits_out_an_outage_and_ends_with_the_pod() -> None:
    pod = make_pod()
    api = Api(pod)
    api.down = True
    async with sending(api) as sender:
        sender.changed(pod, make_status("Failed"))
        waits = asyncio.ensure_future(sender.told(pod.uid))
        await asyncio.sleep(300)
        assert not waits.done()
        # Somebody deletes the pod by force, and the watch says so.
        api.pods.clear()
        api.down = False
        api.sync(sender)
        await asyncio.wait_for(waits, 70)


async def test_a_status_that_the_server_finds_invalid_does_not_hold_a_pod_for_ever() -> None:
    pod = make_pod()
    api = Api(pod)
    api.failures = [Invalid(422, "Invalid", "status.podIP: Invalid value")] * 1000
    async with sending(api) as sender:
        sender.changed(pod, make_status("Failed"))
        await asyncio.wait_for(sender.told(pod.uid), 5)


async def test_a_pod_that_is_forgotten_is_waited_for_by_nobody() -> None:
    pod = make_pod()
    api = Api(pod, delay=5)
    async with sending(api) as sender:
        sender.changed(pod, make_status("Failed"))
        waits = asyncio.ensure_future(sender.told(pod.uid))
        await asyncio.sleep(1)
        sender.forget(pod.uid)
        await asyncio.wait_for(waits, 1)
        await sender.told(pod.uid)
        await asyncio.sleep(60)
        assert len(api.verbs) == 1


async def test_removal_is_tried_until_it_works() -> None:
    pod = make_pod(deleting=True)
    api = Api(pod)
    api.failures = [ServerError(503, "", "busy"), Conflict(409, "Conflict", "modified")]
    api.down = True
    async with sending(api) as sender:
        removal = asyncio.ensure_future(sender.remove(pod))
        await asyncio.sleep(120)
        api.down = False
        await asyncio.wait_for(removal, 200)
        assert api.pods == {}
        # What is gone is gone, whoever did it.
        await asyncio.wait_for(sender.remove(pod), 5)
        api.pods[pod.full_name] = make_pod("u2")
        await asyncio.wait_for(sender.remove(pod), 5)
        assert [found.uid for found in api.pods.values()] == ["u2"]
        api.watched.clear()
        before = len(api.verbs)
        await sender.remove(pod)
        assert len(api.verbs) == before


async def test_a_mirror_gets_the_status_as_soon_as_it_is_there() -> None:
    static, mirror = make_pod("static"), make_pod("m1")
    api = Api()
    async with sending(api) as sender:
        sender.changed(static, make_status())
        await asyncio.sleep(10)
        assert api.verbs == []
        for uid in ("m1", "m2"):
            mirror = make_pod(uid)
            api.pods[mirror.full_name] = api.watched["static"] = mirror
            sender.seen("static")
            await asyncio.sleep(0.1)
            assert api.phases == {"web": "Running"}
            del api.pods[mirror.full_name], api.watched["static"]
            sender.changed(static, make_status(ready="False"))
            await asyncio.sleep(10)
            sender.changed(static, make_status())


events = st.lists(
    st.tuples(
        st.sampled_from(["status", "watch", "overwrite", "down", "up", "fail", "wait"]),
        st.integers(0, 2),
        st.sampled_from(["Pending", "Running", "Failed"]),
        st.booleans(),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(events, st.randoms(use_true_random=False))
def test_in_the_end_the_api_server_knows_the_truth(
    many: list[tuple[str, int, str, bool]], chance: random.Random
) -> None:
    """Whatever goes wrong and in whichever order, the last status arrives and nothing is left to send."""

    async def play() -> None:
        pods = [make_pod(f"u{number}", f"p{number}") for number in range(3)]
        api = Api(*pods, delay=0.05)
        truth: dict[str, PodStatus] = {}
        async with sending(api) as sender:
            for what, which, phase, ready in many:
                pod = pods[which]
                if what == "status":
                    ended_before = pod.uid in truth and truth[pod.uid].phase == "Failed"
                    truth[pod.uid] = make_status("Failed" if ended_before else phase, ready=str(ready))
                    sender.changed(pod, truth[pod.uid])
                elif what == "watch":
                    api.sync(sender)
                elif what == "overwrite" and api.pods[pod.full_name].status.phase != "Failed":
                    document = to_document(api.pods[pod.full_name].status)
                    api.write(api.pods[pod.full_name], {**document, "podIP": "1.2.3.4"})
                elif what in ("down", "up"):
                    api.down = what == "down"
                elif what == "fail":
                    api.failures.append(ServerError(500, "", "oops"))
                await asyncio.sleep(chance.choice([0, 0.02, 0.3, 3]))
            api.down, api.failures = False, []
            for _ in range(5):
                await asyncio.sleep(70)
                api.sync(sender)
            for uid, status in truth.items():
                found = next(pod for pod in api.pods.values() if pod.uid == uid).status
                assert (found.phase, found.pod_ip) == (status.phase, "")
            quiet = len(api.verbs)
            await asyncio.sleep(600)
            assert len(api.verbs) == quiet

    loop = new_event_loop()
    try:
        loop.run_until_complete(play())
    finally:
        loop.close()


@pytest.mark.looptime(False)
async def test_the_request_is_as_kubernetes_wants_it(server: Server, client: ApiClient) -> None:  # noqa: F811
    pod = make_pod()
    written = msgspec.structs.replace(pod, status=make_status())
    server.say(refuse(500, "InternalError", "etcd"), answer(to_document(written)), answer({"kind": "Status"}))
    sender = StatusSender(client, object_of=lambda uid: pod, may_run=lambda uid: False)
    async with TaskScope() as scope:
        scope.start(sender.run(), name="sender")
        sender.changed(pod, make_status())
        async with asyncio.timeout(30):
            await sender.told(pod.uid)
            await sender.remove(pod)
    first, patch, delete = server.seen
    assert first.body == patch.body
    assert (patch.method, patch.path) == ("PATCH", "/api/v1/namespaces/default/pods/web/status")
    assert patch.header("Content-Type") == "application/strategic-merge-patch+json"
    assert patch.json["metadata"] == {"uid": "u1"}
    assert patch.json["status"]["phase"] == "Running"
    assert patch.json["status"]["startTime"] == "2026-01-01T00:00:00Z"
    assert (delete.method, delete.path) == ("DELETE", "/api/v1/namespaces/default/pods/web")
    assert delete.json["gracePeriodSeconds"] == 0
    assert delete.json["preconditions"] == {"uid": "u1"}

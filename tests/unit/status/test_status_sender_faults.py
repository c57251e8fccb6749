"""The sender and an API server that fails, refuses, is away or has another pod of the same name."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looptime import new_event_loop

from pykubelet.api.meta import to_document
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.errors import (
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    ServerError,
    Unreachable,
)
from pykubelet.status.manager import MAX_CONCURRENT_REQUESTS
from tests.support.pods import make_pod, make_status
from tests.unit.status.sender_api import Api, sending

pytestmark = pytest.mark.looptime


async def test_status_manager_api_server_down_sends_in_order_after_recovery() -> None:
    pods = [make_pod(f"u{number}", f"p{number}") for number in range(30)]
    api = Api(*pods)
    api.down = True
    async with sending(api) as sender:
        for pod in pods:
            sender.set_status(pod, make_status())
            await asyncio.sleep(1)
        await asyncio.sleep(570)
        tried = len(api.verbs)
        # Few ask while nobody answers.
        assert tried < 60 * MAX_CONCURRENT_REQUESTS
        sender.set_status(pods[0], make_status(ready="False"))
        api.down = False
        await asyncio.sleep(65)
        assert set(api.phases.values()) == {"Running"}
        done = api.verbs[-len(pods) :]
        assert done == [f"patch p{number}" for number in range(30)]


async def test_status_manager_patch_fails_other_pods_not_delayed() -> None:
    bad, good = make_pod("u1", "bad"), make_pod("u2", "good")
    api = Api(bad, good)
    api.failures = [ServerError(500, "InternalError", "webhook")] * 3
    async with sending(api) as sender:
        sender.set_status(bad, make_status())
        await asyncio.sleep(0.5)
        api.failures, rest = [], api.failures
        sender.set_status(good, make_status())
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
async def test_status_manager_pod_recreated_new_pod_not_patched(err: KubeError) -> None:
    """Whatever happens first, another pod of the same name never gets this one's status."""
    pod, other = make_pod(), make_pod("u2")
    api = Api(pod)
    api.pods[other.full_name] = other
    api.failures = [err]
    async with sending(api) as sender:
        sender.set_status(pod, make_status())
        await asyncio.sleep(120)
        assert api.phases == {"web": "Pending"}
        tried = len(api.verbs)
        await asyncio.sleep(600)
        assert len(api.verbs) == tried
        await asyncio.wait_for(sender.wait_reported(pod.uid), 1)


async def test_status_manager_conflict_same_uid_is_retried() -> None:
    pod = make_pod()
    api = Api(pod)
    api.failures = [Conflict(409, "Conflict", "the object has been modified")]
    async with sending(api) as sender:
        sender.set_status(pod, make_status())
        await asyncio.sleep(10)
        assert api.verbs == ["patch web", "get web", "patch web"]
        assert api.phases == {"web": "Running"}


async def test_wait_reported_api_server_down_returns_when_pod_deleted() -> None:
    pod = make_pod()
    api = Api(pod)
    api.down = True
    async with sending(api) as sender:
        sender.set_status(pod, make_status("Failed"))
        waits = asyncio.ensure_future(sender.wait_reported(pod.uid))
        await asyncio.sleep(300)
        assert not waits.done()
        # Somebody deletes the pod by force, and the watch says so.
        api.pods.clear()
        api.down = False
        api.sync(sender)
        await asyncio.wait_for(waits, 70)


async def test_wait_reported_status_invalid_returns() -> None:
    pod = make_pod()
    api = Api(pod)
    api.failures = [Invalid(422, "Invalid", "status.podIP: Invalid value")] * 1000
    async with sending(api) as sender:
        sender.set_status(pod, make_status("Failed"))
        await asyncio.wait_for(sender.wait_reported(pod.uid), 5)


async def test_status_manager_remove_fails_is_retried_until_pod_gone() -> None:
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
def test_status_manager_any_faults_api_server_converges_to_last_status(
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
                    sender.set_status(pod, truth[pod.uid])
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

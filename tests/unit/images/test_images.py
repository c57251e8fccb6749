"""Policies, back-off, events and sharing, with time in our hands."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.credentials import Credentials, PullSecret, Registries
from pykubelet.images.image_manager import ImageManager, PresentImage
from pykubelet.images.metrics import ImageMetrics, size_label
from pykubelet.images.puller import (
    RESERVATION_SECONDS,
    ImageError,
    PullLimits,
    explain,
    failure_text,
    join_failures,
)
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.transport.errors import BadResponse, CriError, Unavailable
from pykubelet.util.tasks import TaskScope
from tests.support.image_service import FakeImages, a_pod, a_sandbox, an_image

pytestmark = pytest.mark.looptime

APP = "registry.example.com/app:1"
WHERE = "spec.containers{main}"


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_puller(
    service: FakeImages, journal: PodHistory, scope: TaskScope, metrics: ImageMetrics, **options: Any
) -> ImageManager:
    options.setdefault("limits", PullLimits(qps=0))
    return ImageManager(service, journal, scope, metrics=metrics, **options)


@pytest.fixture
def puller(
    service: FakeImages, journal: PodHistory, scope: TaskScope, metrics: ImageMetrics, clock: Clock
) -> ImageManager:
    return make_puller(service, journal, scope, metrics, clock=clock)


async def ensure(puller: ImageManager, pod: Pod, secrets: tuple[PullSecret, ...] = ()) -> PresentImage:
    return await puller.ensure(pod, pod.spec.containers[0], a_sandbox(pod), secrets)


async def refusal(puller: ImageManager, pod: Pod, secrets: tuple[PullSecret, ...] = ()) -> ImageError:
    with pytest.raises(ImageError) as caught:
        await ensure(puller, pod, secrets)
    return caught.value


def events(journal: PodHistory, uid: str = "uid-1") -> list[tuple[str, str, str]]:
    assert all(event.where == WHERE for event in journal.events(uid))
    return [(event.kind, event.reason, event.message) for event in journal.events(uid)]


async def test_ensure_image_present_is_not_pulled(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.present[APP] = an_image(APP, uid=1000)
    for policy in ("IfNotPresent", "Never"):
        assert await ensure(puller, a_pod(APP, policy)) == PresentImage(f"sha256:{APP}", 1000, "")
    text = f'Container image "{APP}" already present on machine'
    assert events(journal) == [("Normal", "Pulled", text)], "without checks nothing is claimed about access"
    assert service.pulls == []


async def test_ensure_image_absent_policy_never_fails(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered[APP] = an_image(APP)
    err = await refusal(puller, a_pod(APP, "Never"))
    text = f'Container image "{APP}" is not present with pull policy of Never'
    assert (err.reason, err.message) == ("ErrImageNeverPull", text)
    assert events(journal) == [("Warning", "ErrImageNeverPull", text)]
    assert service.pulls == []


async def test_ensure_image_absent_is_pulled_with_events(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered["registry.example.com/app:latest"] = an_image("x", size=12345)
    service.pull_seconds = 1.2345
    pod = a_pod("registry.example.com/app", annotations={"a": "b"})
    assert await ensure(puller, pod) == PresentImage("sha256:x", 0, "")
    assert events(journal) == [
        ("Normal", "Pulling", 'Pulling image "registry.example.com/app"'),
        (
            "Normal",
            "Pulled",
            'Successfully pulled image "registry.example.com/app" in 1.234s (1.234s including waiting). '
            "Image size: 12345 bytes.",
        ),
    ]
    [request] = service.pulls
    assert request.image.image == "registry.example.com/app:latest"
    assert dict(request.image.annotations) == {"a": "b"}
    assert request.sandbox_config == a_sandbox(pod)
    assert not request.HasField("auth")
    assert [note.text for note in journal.timeline("uid-1")] == [event[2] for event in events(journal)]


async def test_ensure_image_present_policy_always_is_pulled(
    puller: ImageManager, service: FakeImages
) -> None:
    service.offered[APP] = service.present[APP] = an_image(APP)
    for count in (1, 2):
        await ensure(puller, a_pod(APP, "Always"))
        assert len(service.pulls) == count


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (an_image("i", uid=0), (0, "")),
        (an_image("i", uid=7, username="x"), (7, "")),
        (an_image("i", username="nobody"), (None, "nobody")),
        (an_image("i"), (0, "")),
    ],
)
async def test_ensure_image_returns_uid_or_username(
    puller: ImageManager, service: FakeImages, image: pb.Image, expected: tuple[int | None, str]
) -> None:
    service.offered[APP] = image
    for _ in ("pulled", "present"):
        found = await ensure(puller, a_pod(APP))
        assert (found.uid, found.username) == expected


async def test_ensure_image_invalid_name_fails_without_cri_call(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    err = await refusal(puller, a_pod("Not Valid", "Always"))
    text = (
        'Failed to apply default image tag "Not Valid": couldn\'t parse image name "Not Valid": '
        "invalid reference format: repository name (library/Not Valid) must be lowercase"
    )
    assert (err.reason, err.message, err.retry_after) == ("InvalidImageName", text, None)
    assert events(journal) == [("Warning", "InspectFailed", text)]
    assert (service.statuses, service.pulls) == ([], [])
    huge = await refusal(puller, a_pod("a" * 10**6))
    assert len(huge.message) < 5000


async def test_ensure_image_status_fails_reports_inspect_error(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.broken = Unavailable("ImageStatus", "Unavailable", "gone")
    err = await refusal(puller, a_pod(APP))
    text = f'Failed to inspect image "{APP}": rpc error: code = Unavailable desc = gone'
    assert (err.reason, err.message) == ("ImageInspectError", text)
    assert events(journal) == [("Warning", "InspectFailed", text)]


async def test_ensure_image_status_fails_after_pull_reports_inspect_error(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered[APP] = an_image(APP, uid=1000)
    service.broken = Unavailable("ImageStatus", "Unavailable", "gone")
    err = await refusal(puller, a_pod(APP, "Always"))
    assert err.reason == "ImageInspectError", "nobody may guess the image's user"
    assert [reason for _, reason, _ in events(journal)] == ["Pulling", "Pulled", "InspectFailed"]
    assert "Image size: 0 bytes." in events(journal)[1][2]
    service.broken = None
    assert (await ensure(puller, a_pod(APP))).uid == 1000


async def test_pull_back_off_doubles_up_to_maximum(
    puller: ImageManager, service: FakeImages, journal: PodHistory, clock: Clock
) -> None:
    pod = a_pod(APP)
    failure = f"rpc error: code = NotFound desc = {APP}: not found"
    for pause in (10, 20, 40, 80, 160, 300, 300):
        tries = len(service.pulls)
        err = await refusal(puller, pod)
        assert (err.reason, err.message, err.retry_after) == ("ErrImagePull", failure, pause)
        clock.now += pause - 0.5
        err = await refusal(puller, pod)
        assert (err.reason, err.message) == (
            "ImagePullBackOff",
            f'Back-off pulling image "{APP}": ErrImagePull: {failure}',
        )
        assert err.retry_after == pytest.approx(0.5)
        assert len(service.pulls) == tries + 1
        clock.now += 0.5
    assert events(journal) == [
        ("Normal", "Pulling", f'Pulling image "{APP}"'),
        ("Warning", "Failed", f'Failed to pull image "{APP}": {failure}'),
        ("Normal", "BackOff", f'Back-off pulling image "{APP}"'),
    ]


async def test_pull_back_off_after_ten_idle_minutes_is_reset(
    puller: ImageManager, service: FakeImages, clock: Clock
) -> None:
    for pause in (10, 20, 40):
        assert (await refusal(puller, a_pod(APP))).retry_after == pause
        clock.now += pause
    clock.now += 601
    assert (await refusal(puller, a_pod(APP))).retry_after == 10


async def test_pull_back_off_is_per_pod_and_image(puller: ImageManager, service: FakeImages) -> None:
    service.offered["other:1"] = an_image("other:1")
    await refusal(puller, a_pod(APP))
    await ensure(puller, a_pod("other:1"))
    assert (await refusal(puller, a_pod(APP, uid="uid-2"))).reason == "ErrImagePull"
    assert (await refusal(puller, a_pod(APP))).reason == "ImagePullBackOff"
    puller.forget_pod("uid-1")
    assert (await refusal(puller, a_pod(APP))).retry_after == 10
    assert (await refusal(puller, a_pod(APP, uid="uid-2"))).reason == "ImagePullBackOff"


async def test_pull_back_off_image_present_is_not_delayed(puller: ImageManager, service: FakeImages) -> None:
    await refusal(puller, a_pod(APP))
    service.present[APP] = an_image(APP)
    await ensure(puller, a_pod(APP))


async def test_ensure_image_success_after_failure_records_events(
    puller: ImageManager, service: FakeImages, clock: Clock, journal: PodHistory
) -> None:
    await refusal(puller, a_pod(APP))
    clock.now += 10
    service.offered[APP] = an_image(APP)
    await ensure(puller, a_pod(APP))
    assert [reason for _, reason, _ in events(journal)] == ["Pulling", "Failed", "Pulled"]


async def test_ensure_image_qps_exceeded_fails_then_recovers(
    service: FakeImages, journal: PodHistory, scope: TaskScope, metrics: ImageMetrics
) -> None:
    puller = make_puller(service, journal, scope, metrics, limits=PullLimits(qps=1, burst=2))
    for number in range(3):
        service.offered[f"app:{number}"] = an_image(f"app:{number}")
    for number in range(2):
        await ensure(puller, a_pod(f"app:{number}"))
    err = await refusal(puller, a_pod("app:2"))
    assert (err.reason, err.message) == ("ErrImagePull", "pull QPS exceeded")
    assert events(journal)[-1] == ("Warning", "Failed", 'Failed to pull image "app:2": pull QPS exceeded')
    await asyncio.sleep(10)
    await ensure(puller, a_pod("app:2"))


async def test_ensure_image_forty_pods_share_one_pull(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered[APP] = an_image(APP)
    service.pull_seconds = 5
    pods = [
        a_pod(APP, uid=f"uid-{number}", annotations={"kubernetes.io/config.hash": str(number)})
        for number in range(40)
    ]
    async with asyncio.TaskGroup() as group:
        found = [group.create_task(ensure(puller, pod)) for pod in pods]
    assert {task.result().id for task in found} == {f"sha256:{APP}"}
    assert len(service.pulls) == 1
    assert len(service.statuses) == 2, "one before and one after"
    for pod in pods:
        assert [reason for _, reason, _ in events(journal, pod.uid)] == ["Pulling", "Pulled"]


async def test_ensure_image_policy_always_shares_only_later_pull(
    puller: ImageManager, service: FakeImages
) -> None:
    service.offered[APP] = an_image("old")
    service.pull_seconds = 5
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ensure(puller, a_pod(APP, "Always")))
        await asyncio.sleep(1)
        later = [group.create_task(ensure(puller, a_pod(APP, "Always", uid=f"u{n}"))) for n in range(20)]
        await asyncio.sleep(4.5)
        service.offered[APP] = an_image("new")
    assert first.result().id == "sha256:old"
    assert {task.result().id for task in later} == {"sha256:new"}
    assert (len(service.pulls), service.most_pulling) == (2, 1)


async def test_ensure_image_digest_policy_always_shares_pull(
    puller: ImageManager, service: FakeImages
) -> None:
    name = f"registry.example.com/app@sha256:{'a' * 64}"
    service.offered[name] = an_image("x")
    service.pull_seconds = 5
    async with asyncio.TaskGroup() as group:
        group.create_task(ensure(puller, a_pod(name, "Always")))
        await asyncio.sleep(1)
        group.create_task(ensure(puller, a_pod(name, "Always", uid="uid-2")))
    assert len(service.pulls) == 1


async def test_pulled_event_late_pod_reports_own_duration(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered[APP] = an_image(APP)
    service.pull_seconds = 5
    async with asyncio.TaskGroup() as group:
        group.create_task(ensure(puller, a_pod(APP)))
        await asyncio.sleep(3)
        group.create_task(ensure(puller, a_pod(APP, uid="uid-2")))
    assert "in 5s (5s including waiting)" in events(journal)[-1][2]
    assert "in 2s (2s including waiting)" in events(journal, "uid-2")[-1][2]


async def test_pulled_event_queued_pull_includes_waiting_time(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered["a:1"] = service.offered["b:1"] = an_image("x")
    service.pull_seconds = 5
    async with asyncio.TaskGroup() as group:
        group.create_task(ensure(puller, a_pod("a:1")))
        await asyncio.sleep(1)
        group.create_task(ensure(puller, a_pod("b:1", uid="uid-2")))
    assert "in 5s (9s including waiting)" in events(journal, "uid-2")[-1][2]
    assert service.most_pulling == 1


def secret(name: str, username: str) -> PullSecret:
    content = f'{{"auths": {{"registry.example.com": {{"username": "{username}", "password": "p"}}}}}}'
    return PullSecret(
        "default", name, "kubernetes.io/dockerconfigjson", {".dockerconfigjson": content.encode()}
    )


async def test_ensure_image_different_credentials_do_not_share_pull(
    puller: ImageManager, service: FakeImages
) -> None:
    service.offered[APP] = an_image(APP)
    service.logins = {("alice", "p")}
    service.pull_seconds = 5
    async with asyncio.TaskGroup() as group:
        alice = group.create_task(ensure(puller, a_pod(APP), (secret("a", "alice"),)))
        mallory = group.create_task(refusal(puller, a_pod(APP, uid="uid-2"), (secret("m", "mallory"),)))
        nobody = group.create_task(refusal(puller, a_pod(APP, uid="uid-3")))
    assert alice.result().id
    assert mallory.result().message == "unauthorized: mallory"
    assert nobody.result().message == "unauthorized: nobody"


async def test_ensure_image_credentials_are_tried_in_order(
    service: FakeImages, journal: PodHistory, scope: TaskScope, metrics: ImageMetrics
) -> None:
    service.offered[APP] = an_image(APP)
    service.logins = {("node", "p")}

    async def of_the_node() -> Registries:
        return {"registry.example.com": Credentials("node", "p")}

    puller = make_puller(service, journal, scope, metrics, node_credentials=of_the_node)
    secrets = (secret("a", "one"), secret("b", "two"), secret("c", "one"))
    await ensure(puller, a_pod(APP), secrets)
    assert [request.auth.username for request in service.pulls] == ["one", "two", "node"]
    service.logins = set()
    err = await refusal(puller, a_pod(APP, "Always"), secrets)
    assert err.message == "[unauthorized: one, unauthorized: two, unauthorized: node]"


async def test_ensure_image_malformed_secret_fails_without_leak(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    bad = PullSecret("default", "mine", "kubernetes.io/dockercfg", {".dockercfg": b"hunter2"})
    err = await refusal(puller, a_pod(APP), (bad,))
    assert err.reason == "ErrImagePull"
    assert err.message.startswith("pull secret default/mine: it is not JSON")
    assert "hunter2" not in str([*journal.events("uid-1"), *journal.timeline("uid-1")])
    assert service.pulls == []
    service.present[APP] = an_image(APP)
    await ensure(puller, a_pod(APP), (bad,))


async def test_ensure_image_one_waiter_cancelled_pull_continues(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered[APP] = an_image(APP)
    service.pull_seconds = 60
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ensure(puller, a_pod(APP)))
        second = group.create_task(ensure(puller, a_pod(APP, uid="uid-2")))
        await asyncio.sleep(10)
        first.cancel()
    assert first.cancelled()
    assert second.result().id
    assert (len(service.pulls), service.given_up) == (1, 0)
    assert [reason for _, reason, _ in events(journal)] == ["Pulling"]


async def test_ensure_image_last_waiter_cancelled_cancels_pull(
    puller: ImageManager, service: FakeImages
) -> None:
    service.offered[APP] = an_image(APP)
    service.pull_seconds = 60
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await ensure(puller, a_pod(APP))
    await asyncio.sleep(0)
    assert (service.given_up, service.pulling) == (1, 0)
    await ensure(puller, a_pod(APP))


async def test_ensure_image_kubelet_stopping_fails_pull(
    service: FakeImages, journal: PodHistory, metrics: ImageMetrics
) -> None:
    service.offered[APP] = an_image(APP)
    service.pull_seconds = 60
    async with asyncio.TaskGroup() as group:
        async with TaskScope() as scope:
            puller = make_puller(service, journal, scope, metrics)
            pulling = group.create_task(refusal(puller, a_pod(APP)))
            await asyncio.sleep(10)
        err = await pulling
    assert (err.reason, err.message) == ("ErrImagePull", "the agent is stopping")
    assert (await refusal(puller, a_pod(APP, uid="uid-2"))).reason == "ImageInspectError"


async def test_ensure_image_many_pods_image_status_is_cached(
    puller: ImageManager, service: FakeImages
) -> None:
    service.present[APP] = an_image(APP)
    for number in range(40):
        await ensure(puller, a_pod(APP, uid=f"uid-{number}"))
        await asyncio.sleep(0.125)  # five seconds in all
    assert 5 <= len(service.statuses) <= 6


async def test_ensure_image_removed_image_is_pulled_after_cache_expiry(
    puller: ImageManager, service: FakeImages
) -> None:
    service.present[APP] = service.offered[APP] = an_image(APP)
    await ensure(puller, a_pod(APP))
    del service.present[APP]
    await ensure(puller, a_pod(APP))
    assert service.pulls == [], "within a second nobody looks again"
    await asyncio.sleep(1)
    await ensure(puller, a_pod(APP))
    assert len(service.pulls) == 1
    del service.present[APP]
    await puller.images_removed([], datetime.now(UTC))
    await ensure(puller, a_pod(APP))
    assert len(service.pulls) == 2, "unless we removed it ourselves"


async def test_ensure_image_absence_is_not_cached(puller: ImageManager, service: FakeImages) -> None:
    await refusal(puller, a_pod(APP, "Never"))
    service.present[APP] = an_image(APP)
    await ensure(puller, a_pod(APP, "Never"))


async def test_ensure_image_pull_of_moved_tag_updates_cache(
    puller: ImageManager, service: FakeImages
) -> None:
    service.present[APP], service.offered[APP] = an_image("old"), an_image("new")
    assert (await ensure(puller, a_pod(APP))).id == "sha256:old"
    assert (await ensure(puller, a_pod(APP, "Always"))).id == "sha256:new"
    assert (await ensure(puller, a_pod(APP))).id == "sha256:new"


async def test_ensure_image_cache_is_per_handler_and_annotations(
    puller: ImageManager, service: FakeImages
) -> None:
    service.present[APP] = an_image(APP)
    pod = a_pod(APP)
    for handler in ("", "kata", ""):
        await puller.ensure(pod, pod.spec.containers[0], None, runtime_handler=handler)
    assert [spec.runtime_handler for spec in service.statuses] == ["", "kata"]
    for given in ({"example.com/arch": "arm64"}, {"kubectl.kubernetes.io/x": "1"}):
        await ensure(puller, a_pod(APP, annotations=given))
    assert len(service.statuses) == 3


async def test_ensure_image_without_container_event_has_no_field_path(
    puller: ImageManager, service: FakeImages, journal: PodHistory
) -> None:
    service.offered[APP] = an_image(APP)
    pod = a_pod("other")
    found = await puller.ensure_image(pod, APP, "IfNotPresent", a_sandbox(pod))
    assert found.id == f"sha256:{APP}"
    assert {event.where for event in journal.events(pod.uid)} == {""}


@pytest.mark.parametrize(
    ("failure", "reason", "message"),
    [
        ("boom", "ErrImagePull", "boom"),
        (
            "RegistryUnavailable: no route",
            "RegistryUnavailable",
            "image pull failed for app because the registry is unavailable: no route",
        ),
        (
            "SignatureValidationFailed",
            "SignatureValidationFailed",
            "image pull failed for app because the signature validation failed",
        ),
        ("rpc error: RegistryUnavailable", "ErrImagePull", "rpc error: RegistryUnavailable"),
    ],
)
def test_explain_returns_reason_and_message(failure: str, reason: str, message: str) -> None:
    assert explain("app", failure) == (reason, message)


def test_failure_text_formats_cri_errors() -> None:
    assert failure_text(CriError("PullImage", "Unknown", "boom")) == "boom"
    assert failure_text(BadResponse("PullImage", "not set: image_ref")) == "not set: image_ref"
    assert failure_text(CriError("PullImage", "NotFound", "x")) == "rpc error: code = NotFound desc = x"
    assert join_failures(["a"]) == join_failures(["a", "a"]) == "a"
    assert join_failures(["a", "b", "a"]) == "[a, b]"


async def test_image_manager_metrics_count_requests_and_durations(
    puller: ImageManager, service: FakeImages, registry: CollectorRegistry
) -> None:
    service.offered[APP] = an_image(APP, size=20 * 1024**2)
    service.pull_seconds = 3
    await refusal(puller, a_pod(APP, "Never"))
    await ensure(puller, a_pod(APP))
    await ensure(puller, a_pod(APP))
    await ensure(puller, a_pod(APP, "Always"))

    def requests(policy: str, present: str, pull: str) -> float | None:
        labels = {"pull_policy": policy, "present_locally": present, "pull_required": pull}
        return registry.get_sample_value("kubelet_image_manager_ensure_image_requests_total", labels)

    assert requests("never", "false", "unknown") == 1
    assert requests("ifnotpresent", "false", "true") == 1
    assert requests("ifnotpresent", "true", "false") == 1
    assert requests("always", "unknown", "true") == 1
    labels = {"image_size_in_bytes": "10MB-100MB"}
    assert registry.get_sample_value("kubelet_image_pull_duration_seconds_sum", labels) == pytest.approx(6)


@pytest.mark.parametrize(
    ("size", "label"),
    [
        (0, "N/A"),
        (1, "0-10MB"),
        (10 * 1024**2, "0-10MB"),
        (10 * 1024**2 + 1, "10MB-100MB"),
        (1024**3, "500MB-1GB"),
        (100 * 1024**3, "60GB-100GB"),
        (100 * 1024**3 + 1, "GT100GB"),
    ],
)
def test_size_label_returns_bucket(size: int, label: str) -> None:
    assert size_label(size) == label


# Garbage collection of images at the same time


async def remove(puller: ImageManager, service: FakeImages, name: str, seconds: float = 0.0) -> bool:
    """Remove an image as garbage collection does; return whether it was allowed."""
    image = service.present[name]
    with puller.removing(image.id, list(image.repo_tags)) as allowed:
        if allowed:
            await asyncio.sleep(seconds)
            del service.present[name]
    return allowed


async def test_removing_image_found_for_a_pod_is_refused_until_reservation_ends(
    puller: ImageManager, service: FakeImages
) -> None:
    service.present[APP] = an_image(APP)
    await ensure(puller, a_pod(APP))
    assert not await remove(puller, service, APP)
    await asyncio.sleep(RESERVATION_SECONDS - 1)
    assert not await remove(puller, service, APP)
    await asyncio.sleep(1)
    assert await remove(puller, service, APP)


async def test_removing_image_of_removed_pod_is_allowed(puller: ImageManager, service: FakeImages) -> None:
    service.present[APP] = an_image(APP)
    await ensure(puller, a_pod(APP, uid="one"))
    await ensure(puller, a_pod(APP, uid="two"))
    puller.forget_pod("one")
    assert not await remove(puller, service, APP)
    puller.forget_pod("two")
    assert await remove(puller, service, APP)


@pytest.mark.parametrize("policy", ["Always", "IfNotPresent"])
async def test_removing_image_during_and_after_its_pull_is_refused(
    puller: ImageManager, service: FakeImages, policy: str
) -> None:
    service.offered[APP] = an_image(APP)
    service.pull_seconds = 10
    if policy == "Always":
        service.present[APP] = an_image(APP)
    task = asyncio.create_task(ensure(puller, a_pod(APP, policy)))
    await asyncio.sleep(5)
    service.present.setdefault(APP, an_image(APP))
    assert not await remove(puller, service, APP)
    await task
    assert not await remove(puller, service, APP)


async def test_ensure_image_during_its_removal_waits_and_pulls(
    puller: ImageManager, service: FakeImages
) -> None:
    service.present[APP] = service.offered[APP] = an_image(APP)
    removal = asyncio.create_task(remove(puller, service, APP, seconds=10))
    await asyncio.sleep(1)
    pull = asyncio.create_task(ensure(puller, a_pod(APP)))
    await asyncio.sleep(5)
    assert not pull.done()
    assert await removal
    await pull
    assert len(service.pulls) == 1
    assert APP in service.present


async def test_ensure_image_removed_while_its_status_is_queried_pulls(
    puller: ImageManager, service: FakeImages
) -> None:
    """Verify that a status from before a removal is neither used nor cached."""
    service.present[APP] = service.offered[APP] = an_image(APP)

    async def slow_status(image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        found = service.present.get(image.image)
        await asyncio.sleep(0.5)
        return pb.ImageStatusResponse(image=found)

    service.image_status = slow_status  # type: ignore[method-assign]
    pull = asyncio.create_task(ensure(puller, a_pod(APP)))
    await asyncio.sleep(0.25)
    assert await remove(puller, service, APP)
    await pull
    assert len(service.pulls) == 1


async def test_removing_image_cancelled_releases_waiting_pods(
    puller: ImageManager, service: FakeImages
) -> None:
    service.present[APP] = an_image(APP)
    removal = asyncio.create_task(remove(puller, service, APP, seconds=100))
    await asyncio.sleep(1)
    pull = asyncio.create_task(ensure(puller, a_pod(APP)))
    await asyncio.sleep(1)
    removal.cancel()
    await pull
    assert service.pulls == []


async def test_removing_image_with_short_name_during_its_pull_is_refused(
    puller: ImageManager, service: FakeImages
) -> None:
    service.offered["busybox:latest"] = an_image("busybox:latest")
    service.pull_seconds = 10
    pull = asyncio.create_task(ensure(puller, a_pod("busybox")))
    await asyncio.sleep(5)
    with puller.removing("sha256:other", ["docker.io/library/busybox:latest"]) as allowed:
        assert not allowed
    await pull
    with puller.removing("sha256:other", ["docker.io/library/busybox:latest"]) as allowed:
        assert allowed, "the name is free after the pull"

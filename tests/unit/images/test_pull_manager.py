"""Which pods may use an image that is present: the decisions, their records, and crashes in between."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images import pull_manager
from pykubelet.images.credentials import (
    Credentials,
    PullSecret,
    SecretCoordinates,
    ServiceAccountCoordinates,
    read_config_json,
)
from pykubelet.images.image_manager import ImageManager, PresentImage
from pykubelet.images.image_reference import parse_image_name
from pykubelet.images.metrics import ImageMetrics, PullRecordMetrics
from pykubelet.images.pull_manager import (
    MATCH_WRITE_LIMIT,
    PullManager,
    credential_hash,
    match_secrets,
    merge,
    verification_policy,
)
from pykubelet.images.pull_records import (
    MAX_RECORD_BYTES,
    ImagePullCredentials,
    ImagePulledRecord,
    ImagePullSecret,
    ImagePullServiceAccount,
    PullRecordFiles,
    PullRecords,
    encode_pulled,
)
from pykubelet.images.puller import ImageError, PullLimits
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.transport.errors import CriError, Unavailable
from pykubelet.util.tasks import TaskScope
from tests.support.image_service import FakeImages, a_pod, a_sandbox, an_image

HASHES = Path(__file__).parents[2] / "data" / "images" / "credential-hashes.tsv"
"""Hashes that the upstream kubelet v1.36.3 computed."""
IMAGE = "registry.example.com/team/app:1"
NAME = "registry.example.com/team/app"
REF = f"sha256:{IMAGE}"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
POLICIES = ("NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages", "AlwaysVerify")

LOGIN = Credentials("user", "hunter2", source=SecretCoordinates("u1", "a", "login"))
ACCOUNT = Credentials("robot", "t0ken", source=ServiceAccountCoordinates("u2", "a", "builder"))
SECRET = ImagePullSecret("u1", "a", "login", credential_hash(LOGIN))
SAME_CONTENT = ImagePullSecret("u9", "b", "copy", credential_hash(LOGIN))
ROTATED = ImagePullSecret("u1", "a", "login", "0" * 64)
RECREATED = ImagePullSecret("u8", "a", "login", "0" * 64)
HASHLESS = ImagePullSecret("u7", "c", "other", "")
BUILDER = ImagePullServiceAccount("u2", "a", "builder")


class Rig:
    """A pull manager at a runtime in memory, that can be killed and started again on the same disk."""

    def __init__(
        self, root: Path, service: FakeImages, registry: CollectorRegistry, scope: TaskScope
    ) -> None:
        self.files = PullRecordFiles(root)
        self.files.prepare()
        self.root = root
        self.service = service
        self.registry = registry
        self.journal = PodHistory()
        self._scope = scope
        self._metrics = PullRecordMetrics(registry)
        self._image_metrics = ImageMetrics(registry)
        self._records: PullRecords | None = None
        """Of the manager that was started last."""

    async def manager(self, policy: str = POLICIES[1], *allowlist: str, cached: int = 100) -> PullManager:
        records = PullRecords(self.files, self._metrics, intents_size=cached, pulled_size=cached)
        self._records = records
        made = PullManager(
            records, verification_policy(policy, allowlist), self.service, self._scope, self._metrics
        )
        await made.start()
        return made

    async def puller(self, policy: str = POLICIES[1], *allowlist: str) -> ImageManager:
        return ImageManager(
            self.service,
            self.journal,
            self._scope,
            limits=PullLimits(qps=0),
            metrics=self._image_metrics,
            pull_manager=await self.manager(policy, *allowlist),
        )

    def checks(self, result: str) -> float:
        name = "kubelet_imagemanager_image_mustpull_checks_total"
        return self.registry.get_sample_value(name, {"result": result}) or 0

    def put(self, credentials: ImagePullCredentials) -> None:
        self.files.write_pulled(ImagePulledRecord(REF, NOW, {NAME: credentials}))

    @property
    def intents(self) -> list[str]:
        return self.files.list_intents()[0]

    @property
    def known(self) -> ImagePullCredentials | None:
        """What the disk has for the image."""
        found = self.files.get_pulled(REF)
        return found.credential_mapping.get(NAME) if found is not None else None

    @property
    def is_settled(self) -> bool:
        """Whether the image has no intent, neither on disk nor in the cache, which follows the disk."""
        assert self._records is not None
        cached = self._records.cached(IMAGE, REF)
        return not self.intents and cached is not None and not cached[1]

    async def until(self, fits: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not fits():
                await asyncio.sleep(0.01)


@pytest.fixture
async def rig(tmp_path: Path, service: FakeImages, registry: CollectorRegistry, scope: TaskScope) -> Rig:
    return Rig(tmp_path, service, registry, scope)


def having(*credentials: Credentials) -> Any:
    async def get() -> Sequence[Credentials]:
        return credentials

    return get


class State(NamedTuple):
    """What the disk has before a check, and what the check gives when the policy demands one."""

    prepare: Callable[[Rig], None]
    pulled_by_kubelet: bool
    result: str


def _record(**fields: Any) -> Callable[[Rig], None]:
    return lambda rig: rig.put(ImagePullCredentials(**fields))


def _broken(rig: Rig) -> None:
    rig.put(ImagePullCredentials(node_pods_accessible=True))
    [path] = (rig.root / "image_manager" / "pulled").iterdir()
    path.write_bytes(b"{")


def _other_name(rig: Rig) -> None:
    known = ImagePullCredentials(node_pods_accessible=True)
    rig.files.write_pulled(ImagePulledRecord(REF, NOW, {"mirror.example.com/app": known}))


STATES = {
    "preloaded": State(lambda rig: None, False, "mustAuthenticate"),
    "intent": State(lambda rig: rig.files.write_intent(IMAGE), True, "mustAuthenticate"),
    "intent of another tag": State(
        lambda rig: rig.files.write_intent(f"{NAME}:2"), False, "mustAuthenticate"
    ),
    "nobody's": State(
        lambda rig: rig.files.write_pulled(ImagePulledRecord(REF, NOW)), True, "mustAuthenticate"
    ),
    "empty": State(_record(), True, "mustAuthenticate"),
    "pulled by another name": State(_other_name, True, "mustAuthenticate"),
    "everybody's": State(_record(node_pods_accessible=True), True, "credentialRecordFound"),
    "the same secret": State(_record(kubernetes_secrets=(SECRET,)), True, "credentialRecordFound"),
    "the same content": State(_record(kubernetes_secrets=(SAME_CONTENT,)), True, "credentialRecordFound"),
    "the same coordinates": State(_record(kubernetes_secrets=(ROTATED,)), True, "credentialRecordFound"),
    "another uid": State(_record(kubernetes_secrets=(RECREATED,)), True, "mustAuthenticate"),
    "a secret without hash": State(_record(kubernetes_secrets=(HASHLESS,)), True, "mustAuthenticate"),
    "the same account": State(_record(kubernetes_service_accounts=(BUILDER,)), True, "credentialRecordFound"),
    "another account": State(
        _record(kubernetes_service_accounts=(ImagePullServiceAccount("u9", "a", "builder"),)),
        True,
        "mustAuthenticate",
    ),
    "another secret, the same account": State(
        _record(kubernetes_secrets=(HASHLESS,), kubernetes_service_accounts=(BUILDER,)),
        True,
        "credentialRecordFound",
    ),
}


@pytest.mark.parametrize("cached", [100, 1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", STATES)
async def test_must_pull_by_policy_and_record_state(rig: Rig, state: str, policy: str, cached: int) -> None:
    STATES[state].prepare(rig)
    manager = await rig.manager(policy, cached=cached)
    verified = {
        "NeverVerify": False,
        "NeverVerifyPreloadedImages": STATES[state].pulled_by_kubelet,
        "NeverVerifyAllowlistedImages": True,
        "AlwaysVerify": True,
    }[policy]
    expected = STATES[state].result if verified else "credentialPolicyAllowed"
    must_pull = await manager.must_pull(parse_image_name(IMAGE), REF, having(LOGIN, ACCOUNT))
    assert must_pull is (expected == "mustAuthenticate")
    assert {result: rig.checks(result) for result in (expected, "error")} == {expected: 1, "error": 0}


@pytest.mark.parametrize("policy", POLICIES)
async def test_must_pull_unreadable_record_counts_error_and_requires_pull(rig: Rig, policy: str) -> None:
    _broken(rig)
    manager = await rig.manager(policy)
    assert await manager.must_pull(parse_image_name(IMAGE), REF, having(LOGIN))
    assert rig.checks("error") == 1


async def test_must_pull_pod_without_credentials_matches_no_record(rig: Rig) -> None:
    rig.put(ImagePullCredentials((SECRET,), (BUILDER,)))
    manager = await rig.manager()
    assert await manager.must_pull(parse_image_name(IMAGE), REF, having())
    node_credentials = Credentials("user", "hunter2")
    assert await manager.must_pull(parse_image_name(IMAGE), REF, having(node_credentials))


async def test_must_pull_credentials_looked_up_only_if_recorded(rig: Rig) -> None:
    async def forbidden() -> Sequence[Credentials]:
        raise AssertionError("credentials were looked up")

    name = parse_image_name(IMAGE)
    assert not await (await rig.manager("NeverVerify")).must_pull(name, REF, forbidden)
    assert await (await rig.manager("AlwaysVerify")).must_pull(name, REF, forbidden)
    rig.put(ImagePullCredentials(node_pods_accessible=True))
    assert not await (await rig.manager("AlwaysVerify")).must_pull(name, REF, forbidden)


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        ("registry.example.com/app", True),
        ("registry.example.com/app:1", True),
        (f"registry.example.com/app:1@sha256:{'a' * 64}", True),
        (f"registry.example.com/app@sha256:{'a' * 64}", True),
        ("registry.example.com/app2", False),
        ("registry.example.com/app/sub", False),
        ("mirror.example.com:5000/x", True),
        ("mirror.example.com:5000/x/y:2", True),
        ("mirror.example.com:5001/x", False),
        ("mirror.example.com/x", False),
        ("team.example.com/team/app", True),
        ("team.example.com/teams/app", False),
        ("busybox", True),
        ("busybox:latest", True),
        ("docker.io/library/busybox", False),
    ],
)
def test_verification_policy_allowlist_matches_image_name_in_pod_spec(image: str, allowed: bool) -> None:
    patterns = (
        "registry.example.com/app",
        "mirror.example.com:5000/*",
        "team.example.com/team/*",
        "busybox",
    )
    policy = verification_policy("NeverVerifyAllowlistedImages", patterns)
    for pulled_by_kubelet in (True, False):
        assert policy(parse_image_name(image), pulled_by_kubelet) is not allowed


def test_verification_policy_unknown_name_raises() -> None:
    with pytest.raises(ValueError, match="unknown image pull credential verification policy: X"):
        verification_policy("X")


def test_credential_hash_matches_upstream() -> None:
    with HASHES.open(newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(lines)
        rows = list(lines)
    assert len(rows) == 7
    for entry, expected in rows:
        [credentials] = read_config_json(f'{{"auths": {{"host": {entry}}}}}'.encode()).values()
        assert credential_hash(credentials) == expected, entry


def test_credential_hash_differs_by_identity_token_and_email() -> None:
    entries = [{"identitytoken": "a"}, {"identitytoken": "a", "email": "x"}, {"identitytoken": "b"}]
    auths = {f"host-{number}": entry for number, entry in enumerate(entries)}
    found = read_config_json(json.dumps({"auths": auths}).encode()).values()
    assert len({credential_hash(credentials) for credentials in found}) == 3
    tokens = {credential_hash(Credentials(identity_token=token)) for token in ("a", "b", "")}
    assert len(tokens) == 3


def test_match_secrets_records_match_up_to_limit() -> None:
    assert match_secrets([SAME_CONTENT], [SECRET]) == (True, SECRET)
    assert match_secrets([ROTATED], [SECRET]) == (True, SECRET)
    assert match_secrets([SECRET], [SECRET]) == (True, None)
    assert match_secrets([SECRET], [HASHLESS]) == (False, None)
    assert match_secrets([HASHLESS], [ImagePullSecret("x", "y", "z", "")]) == (False, None)
    many = [ImagePullSecret(str(n), "n", "s", f"{n:064}") for n in range(MATCH_WRITE_LIMIT - 1)]
    assert match_secrets([*many, SAME_CONTENT], [SECRET]) == (True, None)
    assert match_secrets([*many, ROTATED], [SECRET]) == (False, None), (
        "coordinates count below the limit only"
    )


MERGES: list[tuple[ImagePullCredentials | None, ImagePullCredentials | None, ImagePullCredentials | None]] = [
    (None, None, None),
    (None, ImagePullCredentials(), None),
    (None, ImagePullCredentials((SECRET,)), ImagePullCredentials((SECRET,))),
    (ImagePullCredentials((SECRET,)), None, None),
    (ImagePullCredentials((SECRET,)), ImagePullCredentials(), None),
    (ImagePullCredentials((SECRET,)), ImagePullCredentials((SECRET,)), None),
    (ImagePullCredentials((SECRET,)), ImagePullCredentials((ROTATED,)), ImagePullCredentials((ROTATED,))),
    (
        ImagePullCredentials((SAME_CONTENT,)),
        ImagePullCredentials((SECRET,)),
        ImagePullCredentials((SECRET, SAME_CONTENT)),
    ),
    (
        ImagePullCredentials((SECRET,)),
        ImagePullCredentials(kubernetes_service_accounts=(BUILDER,)),
        ImagePullCredentials((SECRET,), (BUILDER,)),
    ),
    (
        ImagePullCredentials((SECRET,), (BUILDER,)),
        ImagePullCredentials(kubernetes_service_accounts=(BUILDER,)),
        None,
    ),
    (
        ImagePullCredentials((SECRET,), (BUILDER,)),
        ImagePullCredentials(node_pods_accessible=True),
        ImagePullCredentials(node_pods_accessible=True),
    ),
    (ImagePullCredentials(node_pods_accessible=True), ImagePullCredentials((SECRET,)), None),
]


@pytest.mark.parametrize(("known", "new", "expected"), MERGES)
def test_merge_adds_only_new_credentials(
    known: ImagePullCredentials | None,
    new: ImagePullCredentials | None,
    expected: ImagePullCredentials | None,
) -> None:
    other = ImagePullCredentials((HASHLESS,))
    before = {"other": other} if known is None else {"other": other, NAME: known}
    record = ImagePulledRecord(REF, NOW, before)
    merged = merge(record, REF, NAME, new, NOW + timedelta(1))
    if expected is None:
        assert merged is record
    else:
        assert merged == ImagePulledRecord(REF, NOW + timedelta(1), {"other": other, NAME: expected})


def test_merge_oversized_record_is_restarted() -> None:
    """Verify that secrets without end, each with credentials of its own, do not fill memory and disk."""
    record = None
    sizes = []
    for batch in range(20):
        secrets = tuple(
            ImagePullSecret(f"uid-{batch}-{n}", "n" * 63, "s" * 253, f"{n:064}") for n in range(100)
        )
        record = merge(record, REF, NAME, ImagePullCredentials(secrets), NOW)
        sizes.append(len(encode_pulled(record)))
        assert set(secrets) <= set(record.credential_mapping[NAME].kubernetes_secrets)
    assert max(sizes) <= MAX_RECORD_BYTES
    assert sizes != sorted(sizes)


# Through the puller.


def pull_secret(
    name: str = "login", password: str = "hunter2", *, uid: str = "u1", namespace: str = "a"
) -> PullSecret:
    auths = {"auths": {"registry.example.com": {"username": "user", "password": password}}}
    data = {".dockerconfigjson": json.dumps(auths).encode()}
    return PullSecret(namespace, name, "kubernetes.io/dockerconfigjson", data, uid)


@pytest.fixture
def private(service: FakeImages) -> FakeImages:
    """A registry that demands a password."""
    service.offered[IMAGE] = an_image(IMAGE)
    service.logins = {("user", "hunter2"), ("user", "rotated")}
    return service


async def ensure(puller: ImageManager, pod: Pod, *secrets: PullSecret) -> PresentImage:
    return await puller.ensure(pod, pod.spec.containers[0], a_sandbox(pod), secrets)


async def rejection(puller: ImageManager, pod: Pod, *secrets: PullSecret) -> ImageError:
    with pytest.raises(ImageError) as caught:
        await ensure(puller, pod, *secrets)
    return caught.value


async def test_puller_private_image_of_other_pod_is_rejected(rig: Rig, private: FakeImages) -> None:
    puller = await rig.puller()
    present = await ensure(puller, a_pod(IMAGE, uid="a"), pull_secret())
    assert rig.known == ImagePullCredentials((SECRET,))
    assert rig.intents == []

    none = await rejection(puller, a_pod(IMAGE, uid="b"))
    assert (none.reason, none.message) == ("ErrImagePull", "unauthorized: nobody")
    again = await rejection(puller, a_pod(IMAGE, uid="b"))
    assert again.reason == "ImagePullBackOff"
    never = await rejection(puller, a_pod(IMAGE, "Never", uid="never"))
    text = f'Container image "{IMAGE}" is not present with pull policy of Never'
    assert (never.reason, never.message) == ("ErrImageNeverPull", text)
    assert [event.reason for event in rig.journal.events("never")] == ["ErrImageNeverPull"]
    wrong = await rejection(puller, a_pod(IMAGE, uid="wrong"), pull_secret("x", "wrong", uid="u3"))
    assert wrong.reason == "ErrImagePull"
    assert rig.known == ImagePullCredentials((SECRET,)), "a refused login is not recorded"
    assert rig.intents == []

    count = len(private.pulls)
    copy = pull_secret("copy", uid="u9", namespace="b")
    for pod, secrets in (
        (a_pod(IMAGE, uid="a2"), [pull_secret()]),
        (a_pod(IMAGE, "Never", uid="c"), [copy]),
        (a_pod(IMAGE, uid="rotated"), [pull_secret(password="rotated")]),
    ):
        assert await ensure(puller, pod, *secrets) == present
        [event] = rig.journal.events(pod.uid)
        assert event.message == (
            f'Container image "{IMAGE}" already present on machine and can be accessed by the pod'
        )
    assert len(private.pulls) == count, "nothing was pulled again"
    assert rig.known is not None
    assert [secret.name for secret in rig.known.kubernetes_secrets] == ["login", "copy"]


async def test_puller_second_secret_is_verified_by_pull_and_recorded(rig: Rig, private: FakeImages) -> None:
    puller = await rig.puller()
    await ensure(puller, a_pod(IMAGE, uid="a"), pull_secret())
    other = pull_secret("other", "rotated", uid="u5", namespace="b")
    await ensure(puller, a_pod(IMAGE, uid="b"), other)
    assert len(private.pulls) == 2
    await ensure(puller, a_pod(IMAGE, "Never", uid="b2"), other)
    await ensure(puller, a_pod(IMAGE, "Never", uid="a2"), pull_secret())
    assert len(private.pulls) == 2


async def test_puller_public_or_preloaded_image_makes_no_cri_call(rig: Rig, service: FakeImages) -> None:
    service.offered[IMAGE] = an_image(IMAGE)
    service.present["preloaded:1"] = an_image("preloaded:1")
    puller = await rig.puller()
    await ensure(puller, a_pod(IMAGE, uid="a"))
    assert rig.known == ImagePullCredentials(node_pods_accessible=True)
    service.statuses.clear()
    service.pulls.clear()
    for image, policy in ((IMAGE, "Never"), (IMAGE, "IfNotPresent"), ("preloaded:1", "IfNotPresent")):
        await ensure(puller, a_pod(image, policy, uid=f"{image}{policy}"))
    assert [spec.image for spec in service.statuses] == ["preloaded:1"], "the other is known for a second"
    assert service.pulls == []
    assert (rig.checks("credentialRecordFound"), rig.checks("credentialPolicyAllowed")) == (2, 1)


async def test_puller_shared_pull_records_secret_of_each_pod(rig: Rig, private: FakeImages) -> None:
    private.pull_seconds = 0.05
    puller = await rig.puller()
    secrets = [pull_secret(f"s{n}", uid=f"u{n}") for n in range(5)]
    async with asyncio.TaskGroup() as group:
        for number, secret in enumerate(secrets):
            group.create_task(ensure(puller, a_pod(IMAGE, uid=str(number)), secret))
    assert len(private.pulls) == 1
    assert rig.known is not None
    assert [secret.name for secret in rig.known.kubernetes_secrets] == ["s0", "s1", "s2", "s3", "s4"]
    assert rig.intents == []


async def test_puller_records_accepted_credentials(rig: Rig, private: FakeImages) -> None:
    puller = await rig.puller()
    await ensure(puller, a_pod(IMAGE), pull_secret("bad", "wrong", uid="u6"), pull_secret())
    assert rig.known == ImagePullCredentials((SECRET,))


async def test_puller_pull_returns_digest_record_uses_present_image_id(
    rig: Rig, private: FakeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that a runtime whose pull returns something else than the image's id hides no record."""
    pull = private.pull_image

    async def by_digest(*arguments: Any) -> str:
        await pull(*arguments)
        return f"{NAME}@sha256:{'d' * 64}"

    monkeypatch.setattr(private, "pull_image", by_digest)
    puller = await rig.puller()
    await ensure(puller, a_pod(IMAGE, uid="a"), pull_secret())
    assert rig.known == ImagePullCredentials((SECRET,))
    assert (await rejection(puller, a_pod(IMAGE, "Never", uid="b"))).reason == "ErrImageNeverPull"


async def test_track_pull_failed_keeps_intent_of_concurrent_pull(rig: Rig) -> None:
    manager, spec = await rig.manager(), pb.ImageSpec(image=IMAGE)
    async with manager.track_pull(IMAGE, spec, None) as first:
        async with manager.track_pull(IMAGE, spec, None) as second:
            second.record_failure()
        assert rig.intents == [IMAGE]
        first.record_failure()
    assert rig.intents == []


async def test_puller_ensure_image_requests_are_counted(rig: Rig, private: FakeImages) -> None:
    puller = await rig.puller()
    await ensure(puller, a_pod(IMAGE, uid="a"), pull_secret())
    await rejection(puller, a_pod(IMAGE, uid="b"))
    await rejection(puller, a_pod(IMAGE, "Never", uid="c"))
    await rejection(puller, a_pod("BAD NAME", uid="d"))

    def requests(policy: str, present: str, pull: str) -> float | None:
        labels = {"pull_policy": policy, "present_locally": present, "pull_required": pull}
        return rig.registry.get_sample_value("kubelet_image_manager_ensure_image_requests_total", labels)

    assert requests("ifnotpresent", "false", "true") == 1
    assert requests("ifnotpresent", "true", "true") == 1
    assert requests("never", "true", "true") == 1
    assert requests("ifnotpresent", "unknown", "unknown") == 1


async def test_puller_malformed_secret_is_reported_and_grants_no_access(
    rig: Rig, private: FakeImages
) -> None:
    puller = await rig.puller()
    await ensure(puller, a_pod(IMAGE, uid="a"), pull_secret())
    bad = PullSecret("a", "bad", "kubernetes.io/dockerconfigjson", {".dockerconfigjson": b"{"}, "u4")
    for policy in ("IfNotPresent", "Never"):
        err = await rejection(puller, a_pod(IMAGE, policy, uid=policy), bad)
        assert err.reason == "ErrImagePull"
        assert "a/bad" in err.message
    assert rig.checks("error") == 2


async def test_puller_intent_write_fails_prevents_pull(
    rig: Rig, private: FakeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = await rig.puller()

    def full(image: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.files, "write_intent", full)
    err = await rejection(puller, a_pod(IMAGE), pull_secret())
    assert err.reason == "ErrImagePull"
    assert err.message == (
        f'Failed to record image pull intent for container image "{IMAGE}": '
        "failed to record image pull intent: [Errno 28] No space left on device"
    )
    assert private.pulls == []


# Crashes and other unknown outcomes.


async def killed(rig: Rig, puller: ImageManager, reached: Callable[[], bool], *secrets: PullSecret) -> None:
    """Leave the disk as a kill during a pull does, as soon as a condition holds."""
    snapshot: dict[Path, bytes] = {}
    task = asyncio.create_task(ensure(puller, a_pod(IMAGE, uid="killed"), *secrets))
    await rig.until(reached)
    snapshot = {path: path.read_bytes() for path in rig.root.glob("image_manager/*/*")}
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    for path in rig.root.glob("image_manager/*/*"):
        path.unlink()
    for path, content in snapshot.items():
        path.write_bytes(content)


async def test_pull_manager_restart_between_intent_and_pull_pulls_again(
    rig: Rig, private: FakeImages
) -> None:
    private.pull_seconds = 3600
    await killed(rig, await rig.puller(), lambda: bool(private.pulls), pull_secret())
    private.pull_seconds = 0
    puller = await rig.puller()
    assert rig.intents == [IMAGE]
    assert rig.known is None
    assert await ensure(puller, a_pod(IMAGE), pull_secret())
    assert rig.known == ImagePullCredentials((SECRET,))
    assert rig.intents == []


@pytest.mark.parametrize("lists", [True, False])
async def test_pull_manager_restart_between_pull_and_record_requires_verification(
    rig: Rig, private: FakeImages, lists: bool
) -> None:
    private.pull_seconds = 3600
    await killed(rig, await rig.puller(), lambda: bool(private.pulls), pull_secret())
    private.pull_seconds = 0
    private.present[IMAGE] = private.offered[IMAGE]
    if not lists:
        private.broken_list = Unavailable("ListImages", "Unavailable", "down")
    puller = await rig.puller()
    assert rig.intents == ([] if lists else [IMAGE])
    assert (rig.files.get_pulled(REF) is not None) is lists
    for attempt in ("first", "second"):
        # A refused pull must not make the image look preloaded.
        err = await rejection(puller, a_pod(IMAGE, uid=attempt))
        assert err.reason == "ErrImagePull"
    assert (await rejection(puller, a_pod(IMAGE, "Never", uid="never"))).reason == "ErrImageNeverPull"
    assert await ensure(puller, a_pod(IMAGE, uid="owner"), pull_secret())
    assert rig.known == ImagePullCredentials((SECRET,))
    assert rig.intents == []


async def test_pull_manager_restart_before_intent_deletion_keeps_record(
    rig: Rig, private: FakeImages
) -> None:
    private.present[IMAGE] = private.offered[IMAGE]
    rig.put(ImagePullCredentials((SECRET,)))
    rig.files.write_intent(IMAGE)
    await rig.manager()
    assert rig.intents == []
    assert rig.known == ImagePullCredentials((SECRET,))


async def test_pull_manager_restart_with_records_lists_no_images(rig: Rig, private: FakeImages) -> None:
    rig.put(ImagePullCredentials((SECRET,)))
    await rig.manager()
    assert private.lists == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_manager, "RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(pull_manager, "RETRY_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("arrives", [True, False])
async def test_track_pull_cancelled_but_completed_records_no_credentials(
    rig: Rig, private: FakeImages, arrives: bool
) -> None:
    """Verify that an image does not look preloaded when its pull ended while it was being cancelled."""
    puller = await rig.puller()
    private.pull_seconds = 3600
    task = asyncio.create_task(ensure(puller, a_pod(IMAGE, uid="deleted"), pull_secret()))
    await rig.until(lambda: bool(private.pulls))
    private.pull_seconds = 0
    if arrives:
        private.present[IMAGE] = private.offered[IMAGE]
    private.broken = Unavailable("ImageStatus", "Unavailable", "down")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await rig.until(lambda: len(private.statuses) > 3)
    assert rig.intents == [IMAGE], "while the runtime does not tell, the intent stays"
    private.broken = None
    await rig.until(lambda: rig.is_settled)
    assert (rig.files.get_pulled(REF) is not None) is arrives
    if arrives:
        assert (await rejection(puller, a_pod(IMAGE, uid="other"))).reason == "ErrImagePull"


@pytest.mark.usefixtures("quick")
async def test_track_pull_cancelled_of_preloaded_image_stays_preloaded(rig: Rig, service: FakeImages) -> None:
    """Verify that a deleted pod with pull policy Always does not take a preloaded image from others."""
    service.present[IMAGE] = an_image(IMAGE)
    puller = await rig.puller()
    service.pull_seconds = 3600
    task = asyncio.create_task(ensure(puller, a_pod(IMAGE, "Always", uid="deleted")))
    await rig.until(lambda: bool(service.pulls))
    assert rig.intents == [IMAGE]
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await rig.until(lambda: rig.is_settled)
    assert rig.files.get_pulled(REF) is None
    assert await ensure(puller, a_pod(IMAGE, "Never", uid="other"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("before", [(None, REF), (REF, None)])
async def test_track_pull_unknown_outcome_preloaded_only_if_present_for_all(
    rig: Rig, service: FakeImages, before: tuple[str | None, str | None]
) -> None:
    service.present[IMAGE] = an_image(IMAGE)
    manager, spec = await rig.manager(), pb.ImageSpec(image=IMAGE)
    async with manager.track_pull(IMAGE, spec, before[0]), manager.track_pull(IMAGE, spec, before[1]):
        assert rig.intents == [IMAGE]
    await rig.until(lambda: rig.is_settled)
    assert rig.files.get_pulled(REF) is not None


@pytest.mark.usefixtures("quick")
async def test_track_pull_no_runtime_response_keeps_intent_until_resolved(
    rig: Rig, private: FakeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = await rig.puller()

    async def lost(*arguments: object) -> str:
        private.present[IMAGE] = private.offered[IMAGE]
        raise CriError("PullImage", "Unavailable", "the connection broke")

    monkeypatch.setattr(private, "pull_image", lost)
    assert (await rejection(puller, a_pod(IMAGE, uid="a"), pull_secret())).reason == "ErrImagePull"
    await rig.until(lambda: rig.is_settled)
    record = rig.files.get_pulled(REF)
    assert record is not None
    assert record.credential_mapping == {}


async def test_pull_manager_record_write_fails_keeps_intent(
    rig: Rig, private: FakeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = await rig.puller()

    def full(record: ImagePulledRecord) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(rig.files, "write_pulled", full)
        assert await ensure(puller, a_pod(IMAGE, uid="a"), pull_secret())
    assert rig.intents == [IMAGE]
    for attempt in ("first", "second"):
        assert (await rejection(puller, a_pod(IMAGE, uid=attempt))).reason == "ErrImagePull"
    assert rig.intents == [IMAGE]


async def test_prune_unknown_records_removed_image_record_is_deleted(rig: Rig, private: FakeImages) -> None:
    manager = await rig.manager()
    rig.put(ImagePullCredentials((SECRET,)))
    manager = await rig.manager()
    await manager.prune_unknown_records([REF], NOW + timedelta(1))
    assert rig.known is not None
    await manager.prune_unknown_records([], NOW)
    assert rig.known is not None, "it is as new as the list of images"
    await manager.prune_unknown_records([], NOW + timedelta(1))
    assert rig.known is None

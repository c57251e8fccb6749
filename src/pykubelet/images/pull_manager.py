"""Access control for present images: a pod that cannot prove its access has to pull the image again.

`PullManager` owns the pull intents and pulled records (`pull_records.py`). `ImageManager` calls it for every
image that is present (`must_pull`) and around every pull (`track_pull`). After a restart:

- an intent without the image: the pull never finished;
- an intent with the image: the kubelet was killed before it wrote the record. The image gets a record
  without credentials, so that every pod must prove its own access;
- a record: access for the credentials in it.

An intent stays until the outcome of its pull is known. After a cancelled pull, or a lost connection to the
runtime, the image may still arrive: the intent is resolved later from the image status in the runtime. A
failure of the disk denies access, never grants it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeVar

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.credentials import Credentials, SecretCoordinates, ServiceAccountCoordinates
from pykubelet.images.image_reference import ImageName, InvalidImageName, parse_image_name
from pykubelet.images.metrics import PullRecordMetrics
from pykubelet.images.pull_records import (
    MAX_RECORD_BYTES,
    ImagePullCredentials,
    ImagePulledRecord,
    ImagePullSecret,
    ImagePullServiceAccount,
    PullRecords,
    RecordError,
    encode_pulled,
    go_json,
)
from pykubelet.images.puller import ImageService
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
RESOLVE_SECONDS = 10.0
"""Seconds after which the outcome of a pull that did not report one is looked up."""
RETRY_SECONDS = 60.0
"""Seconds between two such lookups when the runtime fails."""
MATCH_WRITE_LIMIT = 100
"""Number of secrets in a record from which on a match does not add another one."""
CheckResult = Literal["credentialPolicyAllowed", "credentialRecordFound", "mustAuthenticate", "error"]
T = TypeVar("T")
GetCredentials = Callable[[], Awaitable[Sequence[Credentials]]]
Policy = Callable[[ImageName, bool], bool]
"""Returns whether credentials must be verified; the flag: whether the kubelet pulled the image."""


def verification_policy(name: str, allowlist: Sequence[str] = ()) -> Policy:
    """Return the policy of `imagePullCredentialsVerificationPolicy`. Raises ValueError."""
    match name:
        case "NeverVerify":
            return lambda image, pulled_by_kubelet: False
        case "NeverVerifyPreloadedImages":
            return lambda image, pulled_by_kubelet: pulled_by_kubelet
        case "NeverVerifyAllowlistedImages":
            prefixes = tuple(pattern.removesuffix("*") for pattern in allowlist if pattern.endswith("/*"))
            names = frozenset(pattern for pattern in allowlist if not pattern.endswith("/*"))
            return lambda image, pulled_by_kubelet: (
                not (image.without_tag in names or image.without_tag.startswith(prefixes))
            )
        case "AlwaysVerify":
            return lambda image, pulled_by_kubelet: True
        case _:
            raise ValueError(f"unknown image pull credential verification policy: {name}")


@dataclass(slots=True)
class PullAttempt:
    """One pull of one pod; until an outcome is recorded, it is unknown."""

    pulled: tuple[str, ImagePullCredentials] | None = None
    failed: bool = False

    def record_success(self, image_ref: str, credentials: Credentials | None) -> None:
        """Record that the image was pulled with these credentials (None: anonymously)."""
        self.pulled = image_ref, pull_credentials(credentials)

    def record_failure(self) -> None:
        """Record that the pull has failed for certain, so that the image does not arrive later."""
        self.failed = True


@dataclass(slots=True)
class _UnresolvedPull:
    """An intent of a pull whose outcome is unknown."""

    spec: pb.ImageSpec
    before: str | None
    due: float


class PullManager:
    """Access control of one node's images; `start` must be called first."""

    def __init__(
        self,
        records: PullRecords,
        policy: Policy,
        service: ImageService,
        tasks: TaskScope,
        metrics: PullRecordMetrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._records = records
        self._policy = policy
        self._service = service
        self._tasks = tasks
        self._metrics = metrics
        self._now = now
        self._in_flight: Counter[str] = Counter()
        """Number of pulls in flight, by image."""
        self._unresolved: dict[str, _UnresolvedPull] = {}
        self._resolver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the records, and convert intents of images that are present to records. Raises OSError."""
        intents = await self._records.open()
        if not intents:
            return
        for image in intents:
            try:
                spec = pb.ImageSpec(image=parse_image_name(image).for_runtime)
            except InvalidImageName as err:
                log.error(err, "Failed to parse image of a pull intent", image=image)
            else:
                self._resolve_later(image, spec, None)
        try:
            images = await self._service.list_images()
        except CriError as err:
            log.error(err, "Failed to list images")
            return
        for found in images:
            for image in {*found.repo_tags, *found.repo_digests} & self._unresolved.keys():
                await self._resolve(image, found.id)

    async def must_pull(self, name: ImageName, image_ref: str, credentials: GetCredentials) -> bool:
        """Return whether a pod must pull an image that is present, to prove its access to it.

        `credentials` is called only when the records depend on them; its exceptions are propagated.
        """
        result: CheckResult = "error"
        try:
            result = await self._check(name, image_ref, credentials)
        except (OSError, RecordError) as err:
            log.error(err, "Unable to access cache records about image pulls", image=name.original)
        finally:
            self._metrics.count_check(result)
        return result in ("mustAuthenticate", "error")

    @asynccontextmanager
    async def track_pull(
        self, image: str, spec: pb.ImageSpec, before: str | None
    ) -> AsyncIterator[PullAttempt]:
        """Record a pull intent, and replace it by the attempt's outcome at the end.

        `before` is the reference of the image that was present under this name before the pull. Raises
        OSError when the intent cannot be written.
        """
        self._in_flight[image] += 1
        attempt, resolved = PullAttempt(), False
        try:
            async with self._records.intent_locks.for_key(image):
                try:
                    await self._records.write_intent(image)
                except OSError:
                    resolved = True
                    raise
            try:
                yield attempt
            finally:
                resolved = await self._finish(image, attempt)
        finally:
            self._in_flight[image] -= 1
            if not self._in_flight[image]:
                del self._in_flight[image]
            if not resolved:
                self._resolve_later(image, spec, before)

    async def prune_unknown_records(self, image_refs: Collection[str], until: datetime) -> None:
        """Delete the pulled records of images that the runtime no longer has.

        `until` is a time before the images were listed: records updated since are kept.
        """
        try:
            await self._records.prune_pulled(image_refs, until)
        except OSError as err:
            log.error(err, "Failed to prune image pulled records")

    async def _check(self, name: ImageName, image_ref: str, credentials: GetCredentials) -> CheckResult:
        record, pulled_by_kubelet = await self._find(name.original, image_ref)
        if not self._policy(name, pulled_by_kubelet):
            return "credentialPolicyAllowed"
        known = record.credential_mapping.get(name.without_tag) if record is not None else None
        if known is None or known.empty:
            return "mustAuthenticate"
        if known.node_pods_accessible:
            return "credentialRecordFound"
        secrets, account = pod_credentials(await credentials())
        matched, unrecorded = match_secrets(known.kubernetes_secrets, secrets)
        if matched:
            if unrecorded is not None:
                await self._record(name.original, image_ref, ImagePullCredentials((unrecorded,)))
            return "credentialRecordFound"
        if account is not None and account in known.kubernetes_service_accounts:
            return "credentialRecordFound"
        return "mustAuthenticate"

    async def _find(self, image: str, image_ref: str) -> tuple[ImagePulledRecord | None, bool]:
        """Return an image's record, and whether the kubelet pulled the image."""
        if (cached := self._records.cached(image, image_ref)) is not None:
            record, intended = cached
        else:
            async with (
                self._records.pulled_locks.for_key(image_ref),
                self._records.intent_locks.for_key(image),
            ):
                record = await self._records.get_pulled(image_ref)
                intended = record is None and await self._records.intent_exists(image)
        return record, record is not None or intended

    async def _finish(self, image: str, attempt: PullAttempt) -> bool:
        """Replace an attempt's intent by its outcome; return False when the intent must stay."""
        if attempt.pulled is not None:
            if not await self._record(image, *attempt.pulled):
                return False
            self._unresolved.pop(image, None)
        elif not attempt.failed:
            return False
        async with self._records.intent_locks.for_key(image):
            if self._in_flight[image] <= 1 and image not in self._unresolved:
                await self._delete_intent(image)
        return True

    async def _record(self, image: str, image_ref: str, credentials: ImagePullCredentials | None) -> bool:
        """Add credentials (None: none) to an image's record; return whether the record is on disk."""
        try:
            name = parse_image_name(image).without_tag
            async with self._records.pulled_locks.for_key(image_ref):
                try:
                    record = await self._records.get_pulled(image_ref)
                except (OSError, RecordError) as err:
                    log.info("Failed to retrieve an ImagePulledRecord", image=image, err=err)
                    record = None
                merged = merge(record, image_ref, name, credentials, self._now())
                if merged is not record:
                    await self._records.write_pulled(merged)
        except (OSError, InvalidImageName) as err:
            log.error(err, "Failed to write image pulled record", image=image, imageRef=image_ref)
            return False
        return True

    async def _delete_intent(self, image: str) -> None:
        try:
            await self._records.delete_intent(image)
        except OSError as err:
            log.error(err, "Failed to remove image pull intent", image=image)

    def _resolve_later(self, image: str, spec: pb.ImageSpec, before: str | None) -> None:
        due = asyncio.get_running_loop().time() + RESOLVE_SECONDS
        bare = pb.ImageSpec(image=spec.image, runtime_handler=spec.runtime_handler)
        other = self._unresolved.get(image)
        if other is not None and other.before != before:
            before = None
        self._unresolved[image] = _UnresolvedPull(bare, before, due)
        if self._resolver is not None and not self._resolver.done():
            return
        work = self._resolve_all()
        try:
            self._resolver = self._tasks.start(work, name="image-pull-intents")
        except RuntimeError:
            # The kubelet is stopping; the next process finds the intent.
            work.close()

    async def _resolve_all(self) -> None:
        """Look up the outcomes of unsettled pulls until no intent is left."""
        while self._unresolved:
            await asyncio.sleep(RESOLVE_SECONDS)
            now = asyncio.get_running_loop().time()
            for image, pull in list(self._unresolved.items()):
                if pull.due > now or image in self._in_flight:
                    continue
                try:
                    status = await self._service.image_status(pull.spec)
                except CriError as err:
                    log.v(2).info("Failed to inspect image of a pull intent", image=image, err=err)
                    pull.due = now + RETRY_SECONDS
                    continue
                found = status.image.id if status.HasField("image") else None
                # Access to an image that was present before the pull does not change.
                await self._resolve(image, found if found != pull.before else None)

    async def _resolve(self, image: str, image_ref: str | None) -> None:
        """Replace an intent by a record without credentials; delete it if the image does not exist."""
        if image_ref is not None and not await self._record(image, image_ref, None):
            return
        async with self._records.intent_locks.for_key(image):
            if image in self._in_flight:
                return
            self._unresolved.pop(image, None)
            await self._delete_intent(image)


def pull_credentials(credentials: Credentials | None) -> ImagePullCredentials:
    """Return the form in which a record stores the credentials of a pull."""
    match credentials.source if credentials is not None else None:
        case SecretCoordinates():
            assert credentials is not None
            return ImagePullCredentials(kubernetes_secrets=(_secret(credentials),))
        case ServiceAccountCoordinates(uid, namespace, name):
            account = ImagePullServiceAccount(uid, namespace, name)
            return ImagePullCredentials(kubernetes_service_accounts=(account,))
        case _:
            return ImagePullCredentials(node_pods_accessible=True)


def pod_credentials(
    credentials: Sequence[Credentials],
) -> tuple[list[ImagePullSecret], ImagePullServiceAccount | None]:
    """Return the secrets and the service account among a pod's credentials."""
    secrets = [_secret(login) for login in credentials if isinstance(login.source, SecretCoordinates)]
    accounts = (login.source for login in credentials)
    account = next((item for item in accounts if isinstance(item, ServiceAccountCoordinates)), None)
    return secrets, ImagePullServiceAccount(*account) if account is not None else None


def match_secrets(
    known: Sequence[ImagePullSecret], secrets: Sequence[ImagePullSecret]
) -> tuple[bool, ImagePullSecret | None]:
    """Return whether one of a pod's secrets is known, and that secret when the record lacks it.

    A secret is known by the hash of its content, whatever its name, or by its coordinates, after a rotation.
    """
    hashes = {secret.credential_hash for secret in known if secret.credential_hash}
    coordinates = {secret.coordinates for secret in known}
    may_write = len(known) < MATCH_WRITE_LIMIT
    for secret in secrets:
        if secret.credential_hash in hashes:
            return True, secret if may_write and secret not in known else None
        if may_write and secret.coordinates in coordinates:
            return True, secret
    return False, None


def merge(
    record: ImagePulledRecord | None,
    image_ref: str,
    image: str,
    credentials: ImagePullCredentials | None,
    now: datetime,
) -> ImagePulledRecord:
    """Return a record with credentials added for an image name, the same object when nothing changes.

    A record that would grow too large is replaced by one with only these credentials: others are verified
    again.
    """
    if record is None:
        return ImagePulledRecord(image_ref, now, {image: credentials} if credentials is not None else {})
    if credentials is None or credentials.empty:
        return record
    known = record.credential_mapping.get(image)
    merged = credentials if known is None else _merge_credentials(known, credentials)
    if merged == known:
        return record
    changed = ImagePulledRecord(image_ref, now, {**record.credential_mapping, image: merged})
    if len(encode_pulled(changed)) > MAX_RECORD_BYTES:
        return ImagePulledRecord(image_ref, now, {image: credentials})
    return changed


def _merge_credentials(known: ImagePullCredentials, new: ImagePullCredentials) -> ImagePullCredentials:
    if known.node_pods_accessible:
        return known
    if new.node_pods_accessible:
        return ImagePullCredentials(node_pods_accessible=True)
    if new.kubernetes_secrets:
        secrets = {
            secret.coordinates: secret for secret in (*known.kubernetes_secrets, *new.kubernetes_secrets)
        }
        if set(secrets.values()) == set(known.kubernetes_secrets):
            return known
        return ImagePullCredentials(_sorted(secrets), known.kubernetes_service_accounts)
    accounts = {
        account.coordinates: account
        for account in (*known.kubernetes_service_accounts, *new.kubernetes_service_accounts)
    }
    if set(accounts.values()) == set(known.kubernetes_service_accounts):
        return known
    return ImagePullCredentials(known.kubernetes_secrets, _sorted(accounts))


def _sorted(items: dict[tuple[str, str, str], T]) -> tuple[T, ...]:
    return tuple(item for _, item in sorted(items.items()))


def _secret(credentials: Credentials) -> ImagePullSecret:
    assert isinstance(credentials.source, SecretCoordinates)
    return ImagePullSecret(*credentials.source, credential_hash=credential_hash(credentials))


def credential_hash(credentials: Credentials) -> str:
    """Return the hash that identifies credentials; it equals the upstream kubelet's."""
    fields = {
        "username": credentials.username,
        "password": credentials.password,
        "email": credentials.email,
        "identitytoken": credentials.identity_token,
    }
    document = go_json({key: value for key, value in fields.items() if value})
    return hashlib.sha256(document).hexdigest()

"""Pod certificates: keys and certificate chains for podCertificate sources of projected volumes.

For each source the kubelet generates a key, creates a PodCertificateRequest with a stub PKCS#10 request, and
waits until the signer has issued, denied or failed it. An issued certificate is replaced after its
`beginRefreshAt`, with a new key. A denied or failed request is final for its pod. `PodCertificates.get` makes
the next step, so it is called with each sync of the pod; listeners are notified when a request changes, and
`notify_due` notifies them when a refresh is due.

The state is in memory only: a new kubelet process requests new certificates. Requests belong to their pod and
are deleted by the cluster. The PodCertificateRequests of this node are watched from the first use on.
"""

from __future__ import annotations

import asyncio
import base64
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet.api.certificates import (
    DENIED,
    FAILED,
    ISSUED,
    PodCertificateRequest,
    PodCertificateRequestSpec,
)
from pykubelet.api.meta import ObjectMeta, OwnerReference
from pykubelet.api.pod import Pod
from pykubelet.api.volume import PodCertificateProjection
from pykubelet.apiserver.certificates.key_generation import (
    KeyGenerationError,
    StubRequest,
    draft_stub_request,
)
from pykubelet.apiserver.client import SERVICE_ACCOUNTS, ApiClient, Resource
from pykubelet.apiserver.errors import KubeError
from pykubelet.apiserver.reflector import StoreDelta
from pykubelet.logs import get_logger
from pykubelet.objects.base import CertificateRefused, CredentialBundle, ObjectError, RecordPodEvent
from pykubelet.objects.fetch import err_text, fetch, retry_until_observed
from pykubelet.objects.watch_based import LazyInformer
from pykubelet.util.backoff import ExponentialDelay
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
POD_CERTIFICATE_REQUESTS = Resource(
    PodCertificateRequest,
    "PodCertificateRequest",
    "podcertificaterequests",
    "certificates.k8s.io",
    "v1beta1",
)
SYNC_SECONDS = 10.0
"""Seconds that a caller waits for the first list of PodCertificateRequests."""
ISSUE_SECONDS = 2.0
"""Seconds that a caller waits for the first certificate: most signers are fast."""
ASSUME_DELETED_SECONDS = 600.0
"""Seconds after which a created request that was never observed counts as deleted."""
OVERDUE_SECONDS = 600.0
"""Seconds after `beginRefreshAt` from which a certificate counts as overdue for refresh."""
JITTER_SECONDS = 300.0
"""Maximum random delay of a refresh, so that pods with the same certificate life do not refresh in step."""
RETRY_SECONDS = (1.0, 300.0)
"""First and longest back-off delay after a failed creation or a deleted request, until one is issued."""
MAX_CHAIN_BYTES = 100 * 1024
"""Maximum size of a certificate chain, as in the API."""
MAX_SOURCES_PER_POD = 64
MAX_CONCURRENT_KEYS = 2
"""Number of keys that are generated concurrently; RSA keys take seconds of processor time."""
_BEGIN, _END, _DASHES = "-----BEGIN ", "-----END ", "-----"
_NOT_ISSUED = "credential bundle is not issued yet"
State = Literal["not_yet_issued", "denied", "failed", "fresh", "overdue_for_refresh", "expired"]


@dataclass(frozen=True, slots=True)
class Issued:
    """An issued certificate; times are Unix times in seconds."""

    chain: str
    refresh_at: float
    not_after: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that the signer denied or failed, which is final."""

    state: Literal["denied", "failed"]
    reason: str
    message: str

    def error(self) -> str:
        """Return the error text for the pod's author."""
        return (
            f"PodCertificateRequest was permanently {self.state}: "
            f'reason="{self.reason}" message="{self.message}"'
        )


def outcome(request: PodCertificateRequest) -> Issued | Refused | None:
    """Return the result of a request; None while it is pending. Raises ValueError for an invalid one."""
    status = request.status
    for condition in status.conditions:
        if condition.type == DENIED:
            return Refused("denied", condition.reason, condition.message)
        if condition.type == FAILED:
            return Refused("failed", condition.reason, condition.message)
        if condition.type == ISSUED:
            if status.begin_refresh_at is None or status.not_after is None:
                raise ValueError("the issued certificate has no times")
            chain = clean_chain(status.certificate_chain)
            return Issued(chain, status.begin_refresh_at.timestamp(), status.not_after.timestamp())
    return None


def clean_chain(text: str) -> str:
    """Return the certificates of a chain in their order, without PEM headers and text between the blocks.

    Raises ValueError if there is none, or if the chain is too long.
    """
    if len(text) > MAX_CHAIN_BYTES:
        raise ValueError(f"the certificate chain is longer than {MAX_CHAIN_BYTES} bytes")
    found = []
    for body in _pem_bodies(text):
        try:
            found.append(base64.b64decode("".join(body.split()), validate=True))
        except ValueError:
            continue
    if not found:
        raise ValueError("the certificate chain contains no certificate")
    return "".join(map(ssl.DER_cert_to_PEM_cert, found))


def _pem_bodies(text: str) -> Iterator[str]:
    """Yield the base64 text of each complete PEM block; takes linear time."""
    label, body = "", list[str]()
    for line in text.split("\n"):
        _, begins, rest = line.partition(_BEGIN)
        if begins:
            label, body = rest.partition(_DASHES)[0], []
        elif label and line.startswith(f"{_END}{label}{_DASHES}"):
            yield "".join(body)
            label = ""
        elif ":" not in line:  # a line with a colon is a header
            body.append(line)


class _Key(NamedTuple):
    uid: str
    volume: str
    source: int
    """Index of the source in the projected volume."""


@dataclass(slots=True)
class _Pending:
    """A created request and the key that it is for."""

    name: str
    key: str = field(repr=False)
    abandon_at: float
    observed: bool = False


@dataclass(slots=True, eq=False)
class _Record:
    signer: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    draft: StubRequest | None = field(default=None, repr=False)
    """Key of the next request, until the API server has accepted the request."""
    pending: _Pending | None = None
    issued: Issued | None = field(default=None, repr=False)
    bundle: CredentialBundle | None = None
    refused: Refused | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the pending request has changed in the API server."""
    delay: ExponentialDelay = field(default_factory=lambda: ExponentialDelay(*RETRY_SECONDS))
    retry_at: float = 0.0
    """Event-loop time of the next creation: a step of the host's clock does not change the delay."""
    error: str = ""
    """Error of the last creation, while its back-off delay has not expired."""
    overdue_reported: bool = False
    expiry_reported: bool = False

    def state(self, now: float) -> State:
        """Return the state as in the metrics."""
        if self.refused is not None:
            return self.refused.state
        if self.issued is None:
            return "not_yet_issued"
        if now > self.issued.not_after:
            return "expired"
        return "overdue_for_refresh" if now > self.issued.refresh_at + OVERDUE_SECONDS else "fresh"

    def is_due(self, now: float, loop_time: float) -> bool:
        """Return whether the next `get` can make progress by the passage of time alone."""
        if self.refused is not None or loop_time < self.retry_at:
            return False
        if self.pending is not None:
            return not self.pending.observed and now > self.pending.abandon_at
        return self.issued is not None and now >= self.issued.refresh_at


class PodCertificates:
    """Certificates of pods on this node."""

    def __init__(
        self,
        client: ApiClient,
        scope: TaskScope,
        node_name: str,
        node_uid: Callable[[], str],
        notify: Callable[[str], None],
        *,
        record_event: RecordPodEvent,
        clock: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """Initialize; `notify` gets the uid of a pod whose `get` can make progress.

        `node_uid` returns the uid of the Node object, empty while it is unknown; `clock` returns Unix time.
        """
        self._client = client
        self._node_name = node_name
        self._node_uid = node_uid
        self._notify = notify
        self._record_event = record_event
        self._clock = clock
        self._rng = rng
        self._records: dict[_Key, _Record] = {}
        self._keys = asyncio.Semaphore(MAX_CONCURRENT_KEYS)
        self._informer = LazyInformer(
            client,
            POD_CERTIFICATE_REQUESTS,
            scope,
            self._on_update,
            field_selector=f"spec.nodeName={node_name}",
        )

    async def get(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection
    ) -> CredentialBundle:
        """Return the key and certificate chain of a source of a projected volume, by its index.

        Raises ObjectError while they are not issued, and CertificateRefused if they never will be.
        """
        key = _Key(pod.uid, volume, index)
        record = self._records.get(key)
        if record is None:
            if sum(known.uid == pod.uid for known in self._records) >= MAX_SOURCES_PER_POD:
                raise ObjectError(f"a pod may have at most {MAX_SOURCES_PER_POD} podCertificate sources")
            record = self._records[key] = _Record(source.signer_name)
        async with record.lock:
            await self._advance(pod, source, record)
            if record.issued is None and record.pending is not None and not record.pending.observed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(ISSUE_SECONDS):
                        while record.bundle is None and record.refused is None:
                            await record.changed.wait()
                            await self._advance(pod, source, record)
        if record.refused is not None:
            raise CertificateRefused(record.refused.error())
        if record.bundle is None:
            raise ObjectError(record.error or _NOT_ISSUED)
        return record.bundle

    def forget(self, uid: str) -> None:
        """Drop the certificates of a removed pod."""
        for key in [key for key in self._records if key.uid == uid]:
            del self._records[key]

    def notify_due(self) -> None:
        """Notify the pods whose certificates are due for refresh; called periodically."""
        now, loop_time = self._clock(), asyncio.get_running_loop().time()
        due = {key.uid for key, record in self._records.items() if record.is_due(now, loop_time)}
        for uid in sorted(due):
            self._notify(uid)

    def states(self) -> Mapping[tuple[str, State], int]:
        """Return the number of sources by signer name and state."""
        now = self._clock()
        return Counter((record.signer, record.state(now)) for record in self._records.values())

    async def _advance(self, pod: Pod, source: PodCertificateProjection, record: _Record) -> None:
        """Make the next step. Raises ObjectError unless the pod has a certificate already."""
        record.changed.clear()
        if record.refused is not None:
            return
        if record.pending is not None:
            await self._follow(pod, record, record.pending)
        elif record.issued is None or self._clock() >= record.issued.refresh_at:
            await self._request(pod, source, record)
        self._report_age(pod, record)

    async def _follow(self, pod: Pod, record: _Record, pending: _Pending) -> None:
        """Evaluate the pending request."""
        key = (pod.metadata.namespace, pending.name)
        request = (await self._requests()).get(key)
        if request is None:
            if pending.observed or self._clock() > pending.abandon_at:
                record.pending = None
                # A client that deletes every request must not make the kubelet generate keys incessantly.
                record.retry_at = asyncio.get_running_loop().time() + record.delay.next()
                log.warning("PodCertificateRequest was deleted", pod=pod.full_name, request="/".join(key))
            return
        pending.observed = True
        try:
            result = outcome(request)
        except ValueError as err:
            result = Refused("failed", "InvalidCertificate", str(err))
        if isinstance(result, Refused):
            record.refused, record.pending = result, None
            verb = "was denied" if result.state == "denied" else "failed"
            message = (
                f"PodCertificateRequest {'/'.join(key)} {verb}, "
                f'reason="{result.reason}", message="{result.message}"'
            )
            self._record_event(pod, "Warning", DENIED if result.state == "denied" else FAILED, message)
        elif result is not None:
            jitter = self._rng() * JITTER_SECONDS
            record.issued = Issued(result.chain, result.refresh_at + jitter, result.not_after)
            record.bundle = CredentialBundle(private_key=pending.key, certificate_chain=result.chain)
            record.pending = None
            record.overdue_reported = record.expiry_reported = False
            record.delay.reset()

    async def _request(self, pod: Pod, source: PodCertificateProjection, record: _Record) -> None:
        """Create a request, with back-off after failures and after deletions of the previous one."""
        clock = asyncio.get_running_loop().time
        if clock() < record.retry_at:
            return
        try:
            # Synchronized first: otherwise the new request could be missing from the store for long.
            await self._requests()
            record.pending = await self._create(pod, source, record)
        except ObjectError as err:
            record.error = str(err)
            record.retry_at = clock() + record.delay.next()
            log.error(err, "Failed to request pod certificate", pod=pod.full_name, podUID=pod.uid)
        else:
            record.error, record.retry_at, record.draft = "", 0.0, None

    async def _create(self, pod: Pod, source: PodCertificateProjection, record: _Record) -> _Pending:
        namespace, account = pod.metadata.namespace, pod.spec.service_account_name
        found = await fetch(self._client, SERVICE_ACCOUNTS, (namespace, account))
        if not (node_uid := self._node_uid()):
            raise ObjectError("the Node object of this node is not known yet")
        if record.draft is None:
            try:
                async with self._keys:
                    record.draft = await draft_stub_request(source.key_type)
            except KeyGenerationError as err:
                raise ObjectError(f"while generating keypair: {err}") from err
        draft = record.draft
        owner = OwnerReference(api_version="v1", kind="Pod", name=pod.metadata.name, uid=pod.uid)
        request = PodCertificateRequest(
            metadata=ObjectMeta(namespace=namespace, generate_name="req-", owner_references=[owner]),
            spec=PodCertificateRequestSpec(
                signer_name=source.signer_name,
                pod_name=pod.metadata.name,
                pod_uid=pod.uid,
                service_account_name=account,
                service_account_uid=found.metadata.uid,
                node_name=self._node_name,
                node_uid=node_uid,
                max_expiration_seconds=source.max_expiration_seconds,
                stub_pkcs10_request=draft.request,
                unverified_user_annotations=source.user_annotations,
            ),
        )
        try:
            created = await retry_until_observed(
                lambda: self._client.create(POD_CERTIFICATE_REQUESTS, request, namespace)
            )
        except KubeError as err:
            raise ObjectError(f"while creating PodCertificateRequest: {err_text(err)}") from err
        jitter = self._rng() * JITTER_SECONDS
        return _Pending(created.metadata.name, draft.key, self._clock() + ASSUME_DELETED_SECONDS + jitter)

    async def _requests(self) -> Mapping[tuple[str, str], PodCertificateRequest]:
        try:
            return await self._informer.objects(SYNC_SECONDS)
        except TimeoutError:
            raise ObjectError(
                "PodCertificateRequests cannot be listed: the API server must serve "
                f"{POD_CERTIFICATE_REQUESTS.api_version} and have the feature gate PodCertificateRequest"
            ) from None

    async def _on_update(self, update: StoreDelta[PodCertificateRequest]) -> None:
        changed = {(obj.spec.pod_uid, obj.metadata.name) for obj in (*update.changed, *update.removed)}
        uids = set()
        for key, record in self._records.items():
            if record.pending is not None and (key.uid, record.pending.name) in changed:
                record.changed.set()
                uids.add(key.uid)
        for uid in sorted(uids):
            self._notify(uid)

    def _report_age(self, pod: Pod, record: _Record) -> None:
        """Record an event, once per certificate, when its refresh is overdue and when it has expired."""
        state = record.state(self._clock())
        if state in ("overdue_for_refresh", "expired") and not record.overdue_reported:
            record.overdue_reported = True
            self._record_event(
                pod, "Warning", "CertificateOverdueForRefresh", "PodCertificate refresh overdue"
            )
        if state == "expired" and not record.expiry_reported:
            record.expiry_reported = True
            self._record_event(pod, "Warning", "CertificateExpired", "PodCertificate expired")


class PodCertificateCollector(Collector):
    """Metrics of the pod certificates, with upstream's names."""

    def __init__(self, certificates: PodCertificates) -> None:
        self._certificates = certificates

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the number of sources by signer and state."""
        gauge = GaugeMetricFamily(
            "kubelet_podcertificate_states",
            "Sources of projected volumes with a pod certificate, by signer and state.",
            labels=["signer_name", "state"],
        )
        for (signer, state), count in sorted(self._certificates.states().items()):
            gauge.add_metric([signer, state], count)
        yield gauge

"""TLS bootstrap: the first client certificate of a node, and CertificateSigningRequests in general.

With `--bootstrap-kubeconfig`, a kubeconfig that does not exist or whose certificate has expired is
replaced by one that refers to `kubelet-client-current.pem` in the certificate directory; the certificate is
requested with the bootstrap credentials. A valid kubeconfig is not changed.

Every step can be interrupted. The key is stored in `kubelet-client.key.tmp` while its request is pending, and
the name of the request is derived from the key (`request_name`): after a restart the kubelet waits for the
same request instead of creating another. Requests are watched, because the approval may take a controller a
second or an administrator hours.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from pykubelet.api.certificates import CLIENT_SIGNER, CertificateSigningRequest, CertificateSigningRequestSpec
from pykubelet.api.meta import ObjectMeta
from pykubelet.apiserver.certificates.key_generation import KeyGenerationError, SigningRequest, draft_request
from pykubelet.apiserver.certificates.store import (
    CertificateStore,
    StoredPair,
    StoreError,
    UnfitPair,
    utc_now,
    write_file,
)
from pykubelet.apiserver.certificates.x509 import Subject, certificates, lifetime, read_request
from pykubelet.apiserver.client import CERTIFICATE_REQUESTS, ApiClient, Limits
from pykubelet.apiserver.errors import AlreadyExists, KubeconfigError, KubeError
from pykubelet.apiserver.reflector import Reflector, StoreDelta
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.tls import check_identity
from pykubelet.apiserver.transport import Transport
from pykubelet.logs import get_logger
from pykubelet.util.backoff import Backoff, ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
REMIND_SECONDS = 600.0
"""Seconds between log messages about a pending request; the first one comes after half a minute."""
_FIRST_REMINDER_SECONDS = 30.0


class RequestRefused(KubeError):
    """The request cannot succeed: it was denied, failed, deleted, or differs from the expected one."""


class NotIssued(KubeError):
    """The request was neither approved nor denied before the deadline."""


def usages(signer: str, rsa: bool) -> list[str]:
    """Return the key usages of a certificate of this signer."""
    purpose = "client auth" if signer == CLIENT_SIGNER else "server auth"
    return ["digital signature", purpose, *(["key encipherment"] if rsa else [])]


def request_name(draft: SigningRequest, uses: Sequence[str]) -> str:
    """Return upstream's request name, a digest of public key, subject and usages."""
    subject, public_key = read_request(draft.request.encode())
    parts = [subject.common_name, *subject.organizations, *uses]
    digest = hashlib.new("sha512_256")
    for part in (public_key, *(text.encode() for text in parts)):
        digest.update(_base64(part) + b"|")
    return f"node-csr-{_base64(digest.digest()).decode()}"


def outcome(request: CertificateSigningRequest, uid: str) -> bytes | None:
    """Return the issued certificate; None while it is pending. Raises RequestRefused."""
    name = request.metadata.name
    if request.metadata.uid != uid:
        raise RequestRefused(f"certificate request {name} was replaced by another")
    conditions = {condition.type: condition for condition in request.status.conditions}
    for kind, what in (("Denied", "was denied"), ("Failed", "failed")):
        if (condition := conditions.get(kind)) is not None:
            why = ": ".join(filter(None, (condition.reason, condition.message))) or "no reason was given"
            raise RequestRefused(f"certificate request {name} {what}: {why}")
    return (request.status.certificate or None) if "Approved" in conditions else None


async def request_certificate(
    client: ApiClient, draft: SigningRequest, signer: str, now: datetime, *, seconds: float, name: str = ""
) -> bytes:
    """Request a certificate and return it in PEM. Raises KubeError, including RequestRefused.

    Raises NotIssued after `seconds`. Without a `name` the server generates one; with a name, an existing
    request of that name is used if it is the same.
    """
    uses = usages(signer, draft.rsa)
    csr = CertificateSigningRequest(
        metadata=ObjectMeta(name=name) if name else ObjectMeta(generate_name="csr-"),
        spec=CertificateSigningRequestSpec(request=draft.request.encode(), signer_name=signer, usages=uses),
    )
    try:
        created = await client.create(CERTIFICATE_REQUESTS, csr)
        log.v(2).info("Certificate signing request created", csr=created.metadata.name, signer=signer)
    except AlreadyExists:
        created = await client.get(CERTIFICATE_REQUESTS, name)
        if not _is_same(created, csr):
            raise RequestRefused(f"certificate request {name} exists and asks for something else") from None
        if created.status.certificate and _has_expired(created.status.certificate, now):
            raise RequestRefused(
                f"certificate request {name} exists and its certificate has expired"
            ) from None
        log.info("Certificate signing request already exists, waiting for it", csr=name)
    issued = outcome(created, created.metadata.uid) or await _issued(client, created, seconds)
    log.v(2).info("Certificate signing request is issued", csr=created.metadata.name)
    if not certificates(issued):
        raise RequestRefused(
            f"certificate request {created.metadata.name} was answered without a certificate"
        )
    return issued


async def _issued(client: ApiClient, request: CertificateSigningRequest, seconds: float) -> bytes:
    name, uid = request.metadata.name, request.metadata.uid
    done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def follow(update: StoreDelta[CertificateSigningRequest]) -> None:
        try:
            if any(csr.metadata.uid == uid for csr in update.removed):
                raise RequestRefused(f"certificate request {name} was deleted")
            for found in update.changed:
                if (issued := outcome(found, uid)) is not None and not done.done():
                    done.set_result(issued)
        except RequestRefused as err:
            if not done.done():
                done.set_exception(err)

    log.v(2).info("Waiting for certificate to be issued", csr=name)
    reflector = Reflector(client, CERTIFICATE_REQUESTS, follow, field_selector=f"metadata.name={name}")
    async with TaskScope() as scope:
        scope.start(reflector.run(), name=f"certificate request {name}")
        scope.start(_remind(name), name="reminder of a certificate request")
        await asyncio.wait([done], timeout=seconds)
    if not done.done():
        raise NotIssued(
            f"certificate request {name} was not issued within {seconds / 60:g} minutes: "
            "have such requests approved, by hand with `kubectl certificate approve`"
        )
    return done.result()


async def _remind(name: str) -> None:
    await asyncio.sleep(_FIRST_REMINDER_SECONDS)
    while True:
        log.info(
            "Still waiting for certificate, approve the request manually if no controller does",
            command=f"kubectl certificate approve {name}",
        )
        await asyncio.sleep(REMIND_SECONDS)


def _is_same(found: CertificateSigningRequest, expected: CertificateSigningRequest) -> bool:
    """Return whether both requests are for the same subject, key and signer."""
    try:
        same = read_request(found.spec.request) == read_request(expected.spec.request)
        return same and found.spec.signer_name == expected.spec.signer_name
    except ValueError:
        return False


def _has_expired(pem: bytes, now: datetime) -> bool:
    try:
        return any(now > lifetime(der).ends for der in certificates(pem))
    except ValueError:
        return True


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


CLIENT_PREFIX = "kubelet-client"
WAIT_SECONDS = 3600.0
_PENDING_KEY = "kubelet-client.key.tmp"
Load = Callable[[Path], RestConfig]
Clock = Callable[[], datetime]


def node_subject(node_name: str) -> Subject:
    """Return the subject of a node's client certificate."""
    return Subject(f"system:node:{node_name}", ("system:nodes",))


def kubeconfig_problem(path: Path, load: Load, now: datetime) -> str | None:
    """Return why the certificate of a kubeconfig is not usable; None if no bootstrap is needed.

    A kubeconfig without a certificate is unusable, as upstream: with bootstrap credentials, the bootstrap
    writes it.
    """
    if not path.exists():
        return "it does not exist"
    try:
        access = load(path)
        if access.certificate is None or access.key is None:
            return "it has no client certificate"
        certificate = material(access.certificate)
        check_identity(certificate + b"\n" + material(access.key))
        lives = [lifetime(der) for der in certificates(certificate)]
    except (KubeconfigError, ValueError) as err:
        return str(err)
    except OSError as err:
        return f"{err.filename} cannot be read: {err.strerror}"
    expired = [life.ends for life in lives if now > life.ends]
    return f"its client certificate expired at {expired[0]:%Y-%m-%dT%H:%M:%SZ}" if expired else None


async def ensure_client_config(
    kubeconfig: Path,
    bootstrap: Path | None,
    cert_dir: Path,
    node_name: str,
    load: Load,
    *,
    clock: Clock = utc_now,
) -> RestConfig:
    """Return the RestConfig to use, after a bootstrap if necessary, without a time limit.

    Raises KubeconfigError if a required file is not usable; all other failures are logged and retried. This
    is for kubelets without client certificate rotation; with it, the kubelet starts immediately and obtains
    its first certificate in the background (`rotation.py`).
    """
    if bootstrap is None:
        return load(kubeconfig)
    problem = kubeconfig_problem(kubeconfig, load, clock())
    if problem is None:
        log.v(2).info("Kubeconfig exists and is valid, skipping bootstrap", path=str(kubeconfig))
        return load(kubeconfig)
    log.info("Requesting client certificate with bootstrap credentials", reason=problem)
    store = CertificateStore(cert_dir, CLIENT_PREFIX, clock)
    load(bootstrap)
    backoff = Backoff(first=1.0, limit=16.0)
    error_log = ErrorLogLimiter(log, "Failed to get a client certificate", bootstrap=str(bootstrap))
    loop = asyncio.get_running_loop()
    while True:
        try:
            store.recover()
            if not is_good(store.current(), node_subject(node_name), clock()):
                await first_certificate(load(bootstrap), store, cert_dir, node_name, clock=clock)
            write_kubeconfig(kubeconfig, load(bootstrap), store.current_path)
        except (KubeError, KeyGenerationError, StoreError, OSError) as err:
            error_log.failed(err, loop.time())
            await asyncio.sleep(backoff.next(loop.time()))
        else:
            error_log.succeeded(loop.time())
            return load(kubeconfig)


async def first_certificate(
    access: RestConfig, store: CertificateStore, cert_dir: Path, node_name: str, *, clock: Clock = utc_now
) -> StoredPair:
    """Request a client certificate with the credentials of `access` and store it.

    Raises KubeError, KeyGenerationError, StoreError or OSError; the next call continues with the same
    request, or starts over with a new key if the request was refused.
    """
    pending = cert_dir / _PENDING_KEY
    try:
        known = pending.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    draft = await draft_request(node_subject(node_name), known)
    if draft.key != known:
        write_file(pending, draft.key.encode(), 0o600)
    name = request_name(draft, usages(CLIENT_SIGNER, draft.rsa))
    try:
        async with Transport(access) as transport:
            client = ApiClient(transport, Limits(0, 0).bucket())
            certificate = await request_certificate(
                client, draft, CLIENT_SIGNER, clock(), seconds=WAIT_SECONDS, name=name
            )
        pair = store.update(certificate, draft.key.encode())
    except (RequestRefused, UnfitPair):
        # A new key leads to a new request; this one cannot succeed.
        pending.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        pending.unlink(missing_ok=True)
    log.info("Obtained client certificate", path=str(store.current_path), expires=pair.life.ends.isoformat())
    return pair


def is_good(pair: StoredPair | None, subject: Subject, now: datetime) -> bool:
    """Return whether a stored pair has not expired and has the right subject."""
    return pair is not None and not pair.expired(now) and pair.subject.covers(subject)


def write_kubeconfig(path: Path, access: RestConfig, pair: Path) -> None:
    """Write a kubeconfig for the server of `access` that refers to a file with certificate and key."""
    cluster: dict[str, Any] = {"server": access.server}
    if isinstance(access.ca, Path):
        cluster["certificate-authority"] = str(access.ca.absolute())
    elif access.ca:
        cluster["certificate-authority-data"] = base64.b64encode(access.ca).decode()
    # Unlike upstream, which drops these connection settings.
    extra = {
        "insecure-skip-tls-verify": access.insecure,
        "tls-server-name": access.tls_server_name,
        "proxy-url": access.proxy,
        "disable-compression": not access.compression,
    }
    cluster |= {name: value for name, value in extra.items() if value}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "default-cluster", "cluster": cluster}],
        "contexts": [
            {
                "name": "default-context",
                "context": {"cluster": "default-cluster", "namespace": "default", "user": "default-auth"},
            }
        ],
        "current-context": "default-context",
        "users": [
            {"name": "default-auth", "user": {"client-certificate": str(pair), "client-key": str(pair)}}
        ],
    }
    write_file(path, yaml.safe_dump(document).encode(), 0o600)


def with_certificate(access: RestConfig, pair: Path) -> RestConfig:
    """Return the RestConfig with this certificate as its only credentials."""
    return dataclasses.replace(
        access,
        certificate=pair,
        key=pair,
        token="",
        token_file=None,
        username="",
        password="",
        impersonate=None,
        plugin=None,
    )


def material(part: bytes | Path) -> bytes:
    """Return the bytes that a kubeconfig contains or refers to. Raises OSError."""
    return part.read_bytes() if isinstance(part, Path) else part

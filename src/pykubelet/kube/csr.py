"""Asking the cluster for a certificate: a request is made, someone approves it, a signer issues it.

Approval may be a controller's within a second or a person's after lunch, so the request is watched.
A request can be given a name that is derived from its key (`request_name`): then an agent that was
stopped while it waited finds its own request again instead of making another.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime

from pykubelet.api.csr import CLIENT_SIGNER, CertificateSigningRequest, CertificateSigningRequestSpec
from pykubelet.api.meta import ObjectMeta
from pykubelet.kube.certificate_making import Draft
from pykubelet.kube.certificates import certificates, lifetime, read_request
from pykubelet.kube.client import ApiClient
from pykubelet.kube.errors import AlreadyExists, KubeError
from pykubelet.kube.object_copy import Update
from pykubelet.kube.reflector import Reflector
from pykubelet.kube.resources import CERTIFICATE_REQUESTS
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

REMIND_SECONDS = 600.0
"""While nobody decides about a request, a line says so after half a minute and then this often."""
_FIRST_REMINDER_SECONDS = 30.0


class RequestRefused(KubeError):
    """Nothing will come of this request: it was denied, failed, was deleted, or is another's."""


class NotIssued(KubeError):
    """Nobody decided about a request in time."""


def usages(signer: str, rsa: bool) -> list[str]:
    """Give what a certificate of this signer is used for."""
    purpose = "client auth" if signer == CLIENT_SIGNER else "server auth"
    return ["digital signature", purpose, *(["key encipherment"] if rsa else [])]


def request_name(draft: Draft, uses: Sequence[str]) -> str:
    """Give the name that the reference derives from a request's key, subject and usages."""
    subject, public_key = read_request(draft.request.encode())
    parts = [subject.common_name, *subject.organizations, *uses]
    digest = hashlib.new("sha512_256")
    for part in (public_key, *(text.encode() for text in parts)):
        digest.update(_base64(part) + b"|")
    return f"node-csr-{_base64(digest.digest()).decode()}"


def outcome(request: CertificateSigningRequest, uid: str) -> bytes | None:
    """Give the issued certificate; None while there is none yet. Raises RequestRefused."""
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
    client: ApiClient, draft: Draft, signer: str, now: datetime, *, seconds: float, name: str = ""
) -> bytes:
    """Have a certificate issued and give it in PEM; raises KubeError, among them RequestRefused.

    It is waited for at most so many `seconds`: then NotIssued. Without a `name` the server makes one
    up; with one, a request of that name that is already there is taken when it is the same.
    """
    uses = usages(signer, draft.rsa)
    wanted = CertificateSigningRequest(
        metadata=ObjectMeta(name=name) if name else ObjectMeta(generate_name="csr-"),
        spec=CertificateSigningRequestSpec(request=draft.request.encode(), signer_name=signer, usages=uses),
    )
    try:
        made = await client.create(CERTIFICATE_REQUESTS, wanted)
        log.v(2).info("Certificate signing request created", csr=made.metadata.name, signer=signer)
    except AlreadyExists:
        made = await client.get(CERTIFICATE_REQUESTS, name)
        if not _is_same(made, wanted):
            raise RequestRefused(f"certificate request {name} exists and asks for something else") from None
        if made.status.certificate and _has_expired(made.status.certificate, now):
            raise RequestRefused(
                f"certificate request {name} exists and its certificate has expired"
            ) from None
        log.info("Certificate signing request exists already, waiting for it", csr=name)
    issued = outcome(made, made.metadata.uid) or await _issued(client, made, seconds)
    log.v(2).info("Certificate signing request is issued", csr=made.metadata.name)
    if not certificates(issued):
        raise RequestRefused(f"certificate request {made.metadata.name} was answered without a certificate")
    return issued


async def _issued(client: ApiClient, request: CertificateSigningRequest, seconds: float) -> bytes:
    name, uid = request.metadata.name, request.metadata.uid
    done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def follow(update: Update[CertificateSigningRequest]) -> None:
        try:
            if any(gone.metadata.uid == uid for gone in update.removed):
                raise RequestRefused(f"certificate request {name} was deleted")
            for found in update.changed:
                if (issued := outcome(found, uid)) is not None and not done.done():
                    done.set_result(issued)
        except RequestRefused as err:
            if not done.done():
                done.set_exception(err)

    log.v(2).info("Waiting for a certificate to be issued", csr=name)
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
            "Still waiting for a certificate: if nothing approves requests here, do it by hand",
            command=f"kubectl certificate approve {name}",
        )
        await asyncio.sleep(REMIND_SECONDS)


def _is_same(found: CertificateSigningRequest, wanted: CertificateSigningRequest) -> bool:
    """Whether a request asks for the same certificate for the same key."""
    try:
        same = read_request(found.spec.request) == read_request(wanted.spec.request)
        return same and found.spec.signer_name == wanted.spec.signer_name
    except ValueError:
        return False


def _has_expired(pem: bytes, now: datetime) -> bool:
    try:
        return any(now > lifetime(der).ends for der in certificates(pem))
    except ValueError:
        return True


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")

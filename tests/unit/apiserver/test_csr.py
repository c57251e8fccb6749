"""Requests for certificates, decided by a scripted cluster that signs for real."""

import asyncio
import dataclasses
import json
import os
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from pykubelet.api.certificates import CLIENT_SIGNER, SERVING_SIGNER, CertificateSigningRequest
from pykubelet.api.meta import from_document
from pykubelet.apiserver.certificates import key_generation as certificate_making
from pykubelet.apiserver.certificates.bootstrap import (
    NotIssued,
    RequestRefused,
    outcome,
    request_certificate,
    request_name,
    usages,
)
from pykubelet.apiserver.certificates.key_generation import (
    KeyGenerationError,
    SigningRequest,
    draft_request,
    draft_stub_request,
    self_signed,
)
from pykubelet.apiserver.certificates.x509 import Subject, certificates, read_request, subject
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import Forbidden
from pykubelet.apiserver.tls import check_identity
from tests.support.api_server import Server, refuse, reset
from tests.support.certs import Authority
from tests.support.waiting import until
from tests.unit.apiserver.signing import Signing

NODE = Subject("system:node:one", ("system:nodes",))
KEY = """-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIAvtCayjeXfV71uqOiqNxruvRAry1NPaZtKN1DKbiQbgoAoGCCqGSM49
AwEHoUQDQgAEs9KNZBV/xO5j/8qFEicwkO0055ZRWD8zNCAdg+t2nXsUXYz83H8/
n+JulPLyGv3vQujAw4yb8mpi4D9P5bL7EA==
-----END EC PRIVATE KEY-----
"""
# Computed in Go, for this key, node `one` and the usages of an elliptic key.
NAME = "node-csr-6hHP7x8NYuB9NakagVX05y8y4FrYeixpZBOnDpAEz1Q"


@pytest.fixture
async def signing(server: Server, authority: Authority) -> Signing:
    return Signing(server, authority)


async def ask(client: ApiClient, draft: SigningRequest, **options: Any) -> bytes:
    options = {"seconds": 60, **options}
    return await request_certificate(client, draft, CLIENT_SIGNER, datetime.now(UTC), **options)


# Making keys.


async def test_draft_request_valid_key_is_reused_and_invalid_replaced() -> None:
    draft = await draft_request(NODE, KEY)
    assert draft.key == KEY
    assert not draft.rsa
    assert request_name(draft, usages(CLIENT_SIGNER, False)) == NAME
    other = await draft_request(NODE, "nonsense")
    assert other.key != KEY
    assert other.key.startswith("-----BEGIN EC PRIVATE KEY-----\n")
    assert KEY.splitlines()[1] not in repr(draft)
    assert read_request(other.request.encode())[0] == NODE
    assert read_request(other.request.encode())[1] != read_request(draft.request.encode())[1]


async def test_draft_request_rsa_key_is_reused() -> None:
    process = await asyncio.create_subprocess_exec(
        "openssl",
        "genrsa",
        "-traditional",
        "2048",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    key = (await process.communicate())[0].decode()
    draft = await draft_request(NODE, key)
    assert (draft.key, draft.rsa) == (key, True)
    assert usages(SERVING_SIGNER, draft.rsa) == ["digital signature", "server auth", "key encipherment"]


async def test_draft_request_long_name_accepted_and_invalid_dns_raises() -> None:
    long = dataclasses.replace(NODE, common_name="system:node:" + "n" * 250)
    assert read_request((await draft_request(long)).request.encode())[0] == long
    with pytest.raises(KeyGenerationError, match=r"no key could be made: .*A-label") as caught:
        await draft_request(dataclasses.replace(NODE, dns=("münchen",)))
    assert "\n" not in str(caught.value)


async def test_self_signed_returns_leaf_and_issuer_with_names() -> None:
    made = await self_signed("n" * 63, dns=["n" * 63], ips=["10.0.0.1", "fd00::1"])
    check_identity((made.certificate + made.key).encode())
    leaf, issuer = certificates(made.certificate.encode())
    assert subject(leaf).ips == ("10.0.0.1", "fd00::1")
    assert subject(leaf).dns == ("n" * 63,)
    assert subject(issuer).common_name.startswith("n" * 40 + "-ca@")


async def test_self_signed_does_not_import_cryptography() -> None:
    """It would cost the agent ten megabytes for good."""
    code = (
        "import asyncio, sys\n"
        "import pykubelet.apiserver.certificates.serving, pykubelet.apiserver.certificates.rotation\n"
        "from pykubelet.apiserver.certificates.key_generation import self_signed\n"
        "asyncio.run(self_signed('x', dns=['x']))\n"
        "print([name for name in sys.modules if name.startswith('cryptography')])\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0].decode().strip() == "[]"


@pytest.mark.parametrize(
    ("key_type", "kind", "bits"),
    [
        ("RSA3072", "RSAPrivateKey", 3072),
        ("ECDSAP256", "ECPrivateKey", 256),
        ("ECDSAP384", "ECPrivateKey", 384),
        ("ECDSAP521", "ECPrivateKey", 521),
        ("ED25519", "Ed25519PrivateKey", None),
    ],
)
async def test_draft_stub_request_key_has_type_and_signs_request(
    key_type: str, kind: str, bits: int | None
) -> None:
    draft = await draft_stub_request(key_type)
    assert draft.key.startswith("-----BEGIN PRIVATE KEY-----\n"), "PKCS#8"
    key: Any = serialization.load_pem_private_key(draft.key.encode(), None)
    assert (type(key).__name__, getattr(key, "key_size", None)) == (kind, bits)
    request = x509.load_der_x509_csr(draft.request)
    assert request.is_signature_valid
    assert request.public_key() == key.public_key()
    assert (list(request.subject), list(request.extensions)) == ([], [])
    assert draft.key not in repr(draft)


async def test_draft_stub_request_unknown_key_type_raises() -> None:
    with pytest.raises(KeyGenerationError, match='unknown key type "RSA512"; known are ECDSAP256, '):
        await draft_stub_request("RSA512")


async def test_draft_request_is_cancellable_and_times_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho $$ > $0.pid\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    making = asyncio.ensure_future(draft_request(NODE))
    pid = tmp_path / "python.pid"
    await until(lambda: pid.exists() and pid.read_text())
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    monkeypatch.setattr(certificate_making, "_SECONDS", 0.1)
    with pytest.raises(KeyGenerationError, match=r"within 0.1 s"):
        await draft_request(NODE)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(KeyGenerationError, match="cannot be run, No such file"):
        await draft_request(NODE)


# What became of a request.


def request_document(certificate: str = "", uid: str = "u", **conditions: str) -> CertificateSigningRequest:
    return from_document(
        CertificateSigningRequest,
        {
            "metadata": {"name": "csr-x", "uid": uid},
            "status": {
                "certificate": certificate,
                "conditions": [
                    {"type": kind, "status": "True", "reason": "R", "message": message}
                    for kind, message in conditions.items()
                ],
            },
        },
    )


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (request_document(), None),
        (request_document(Approved="ok"), None),
        (request_document("eA==", Approved="ok"), b"x"),
        (request_document("eA=="), None),
        (request_document(Denied="no"), "csr-x was denied: R: no"),
        (request_document("eA==", Approved="ok", Failed="broken"), "csr-x failed: R: broken"),
        (request_document("eA==", uid="other", Approved="ok"), "csr-x was replaced by another"),
    ],
)
def test_outcome_follows_csr_conditions(request_: CertificateSigningRequest, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(RequestRefused, match=expected):
            outcome(request_, "u")
    else:
        assert outcome(request_, "u") == expected


async def test_request_certificate_approved_returns_certificate(
    signing: Signing, client: ApiClient, server: Server
) -> None:
    draft = await draft_request(dataclasses.replace(NODE, ips=("10.0.0.1",)))
    issued = await ask(client, draft)
    check_identity(issued + draft.key.encode())
    assert subject(certificates(issued)[0]).ips == ("10.0.0.1",)
    ((name, request),) = signing.requests.items()
    assert name.startswith("csr-")
    spec = request["spec"]
    assert (spec["signerName"], spec["usages"]) == (CLIENT_SIGNER, ["digital signature", "client auth"])
    assert "expirationSeconds" not in spec
    assert server.seen[0].json["kind"] == "CertificateSigningRequest"


async def test_request_certificate_watch_broken_is_resumed(
    signing: Signing, client: ApiClient, server: Server
) -> None:
    signing.decide = lambda _: None
    draft = await draft_request(NODE, KEY)
    asking = asyncio.ensure_future(ask(client, draft, name=NAME))
    await until(lambda: any("watch" in seen.query for seen in server.seen))
    server.say(reset, refuse(500, "InternalError"))
    # The watch breaks with all connections; it is taken up again.
    await client.transport.close_all()
    signing.condition(signing.requests[NAME], "Approved")
    await until(lambda: len([seen for seen in server.seen if "watch" in seen.query]) >= 2)
    assert not asking.done()
    signing.issue(signing.requests[NAME])
    check_identity(await asking + KEY.encode())
    assert [seen.method for seen in server.seen].count("POST") == 1


@pytest.mark.parametrize("what", ["Denied", "Failed", "deleted"])
async def test_request_certificate_denied_failed_or_deleted_raises(
    signing: Signing, client: ApiClient, what: str
) -> None:
    def decide(request: dict[str, Any]) -> None:
        if what == "deleted":
            signing.remove(request["metadata"]["name"])
        else:
            signing.condition(request, what, "Because", "of this")

    signing.decide = decide
    words = {"Denied": "was denied: Because: of this", "Failed": "failed: Because", "deleted": "was deleted"}
    with pytest.raises(RequestRefused, match=words[what]):
        await ask(client, await draft_request(NODE))


async def test_request_certificate_not_approved_times_out(signing: Signing, client: ApiClient) -> None:
    signing.decide = lambda _: None
    with pytest.raises(NotIssued, match="kubectl certificate approve"):
        await ask(client, await draft_request(NODE), seconds=0.3)


async def test_request_certificate_forbidden_error_names_permission(
    server: Server, client: ApiClient
) -> None:
    server.default = refuse(403, "Forbidden", 'User "system:anonymous" cannot create resource "x"')
    with pytest.raises(Forbidden, match="permission to create certificatesigningrequests is missing"):
        await ask(client, await draft_request(NODE))


async def test_request_certificate_existing_csr_is_reused(signing: Signing, client: ApiClient) -> None:
    draft = await draft_request(NODE, KEY)
    first = await ask(client, draft, name=NAME)
    # Another signature over the same: still the same request.
    again = await draft_request(NODE, KEY)
    assert again.request != draft.request
    assert await ask(client, again, name=NAME) == first
    assert len(signing.requests) == 1


async def test_request_certificate_foreign_csr_of_same_name_raises(
    signing: Signing, client: ApiClient
) -> None:
    draft = await draft_request(NODE, KEY)
    await ask(client, draft, name=NAME)
    for strange in (
        await draft_request(NODE),
        await draft_request(dataclasses.replace(NODE, common_name="x"), KEY),
    ):
        with pytest.raises(RequestRefused, match="asks for something else"):
            await ask(client, strange, name=NAME)
    signing.requests[NAME]["spec"]["signerName"] = SERVING_SIGNER
    with pytest.raises(RequestRefused, match="asks for something else"):
        await ask(client, draft, name=NAME)


async def test_request_certificate_existing_csr_expired_raises(signing: Signing, client: ApiClient) -> None:
    signing.decide = lambda request: signing.issue(request, begins=-7200, ends=-3600)
    draft = await draft_request(NODE, KEY)
    await ask(client, draft, name=NAME)
    with pytest.raises(RequestRefused, match="its certificate has expired"):
        await ask(client, draft, name=NAME)


async def test_request_certificate_malformed_certificate_raises(signing: Signing, client: ApiClient) -> None:
    def decide(request: dict[str, Any]) -> None:
        request["status"] = {"certificate": "eA==", "conditions": [{"type": "Approved", "status": "True"}]}
        signing.changed("MODIFIED", json.loads(json.dumps(request)))

    signing.decide = decide
    with pytest.raises(RequestRefused, match="answered without a certificate"):
        await ask(client, await draft_request(NODE))

"""The secured server over real TLS: certificates that change, and who gets what."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.x509 import load_pem_x509_certificate
from prometheus_client import CollectorRegistry

from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.server.auth.identity import (
    _UID_IN_SUBJECT,
    ANONYMOUS_USER,
    BadCredentials,
    certificate_user,
)
from pykubelet.server.auth.request_auth import make_authenticator
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.tls import (
    NoCertificate,
    ServingTls,
    TlsProblem,
    TlsSettings,
    client_authorities,
    reloads_certificate,
    server_context,
)
from pykubelet.util.tasks import TaskScope
from tests.support.certs import Authority, Pair, encrypt
from tests.support.server_clients import ADMIN_TOKEN, VIEWER_TOKEN, client_context, subresources
from tests.unit.server import https_node
from tests.unit.server.https_node import Starter

authority, stranger, pairs, start = (
    https_node.authority,
    https_node.stranger,
    https_node.pairs,
    https_node.start,
)


async def test_https_credentials_and_rules_return_status(start: Starter, pairs: dict[str, Pair]) -> None:
    node = await start()
    node.people.rules = {
        ("viewer", "get", "pods"),
        ("token-viewer", "get", "stats"),
        ("viewer", "get", "proxy"),
    }
    forbidden = "Forbidden (user={}, verb={}, resource=nodes, subresource(s)=[{}])\n"
    table: list[tuple[str, str, dict[str, Any], tuple[int, str]]] = [
        ("/pods", "GET", {}, (401, "Unauthorized")),
        ("/nothing", "GET", {}, (401, "Unauthorized")),
        ("/pods", "GET", {"pair": pairs["foreign"]}, (401, "Unauthorized")),
        ("/pods", "GET", {"pair": pairs["expired"]}, (401, "Unauthorized")),
        ("/pods", "GET", {"token": "made-up"}, (401, "Unauthorized")),
        ("/pods", "GET", {"pair": pairs["admin"]}, (200, "admin")),
        ("/pods", "GET", {"token": ADMIN_TOKEN}, (200, "token-admin")),
        ("/pods", "GET", {"pair": pairs["foreign"], "token": ADMIN_TOKEN}, (200, "token-admin")),
        ("/pods", "GET", {"pair": pairs["viewer"], "token": ADMIN_TOKEN}, (200, "viewer")),
        ("/pods", "GET", {"pair": pairs["viewer"]}, (200, "viewer")),
        ("/healthz", "GET", {"pair": pairs["viewer"]}, (200, "viewer")),
        ("/stats/summary", "GET", {"token": VIEWER_TOKEN}, (200, "token-viewer")),
        (
            "/pods",
            "GET",
            {"token": VIEWER_TOKEN},
            (403, forbidden.format("token-viewer", "get", "pods proxy")),
        ),
        (
            "/stats/summary",
            "GET",
            {"pair": pairs["viewer"]},
            (403, forbidden.format("viewer", "get", "stats")),
        ),
        (
            "/run/a/b/c",
            "POST",
            {"pair": pairs["viewer"]},
            (403, forbidden.format("viewer", "create", "proxy")),
        ),
        ("/run/a/b/c", "POST", {"pair": pairs["admin"]}, (200, "admin")),
        ("/nothing", "GET", {"token": VIEWER_TOKEN}, (403, forbidden.format("token-viewer", "get", "proxy"))),
        ("/nothing", "GET", {"pair": pairs["admin"]}, (404, "404: Page Not Found")),
        ("/run/a/b/c", "GET", {"pair": pairs["admin"]}, (405, "405: Method Not Allowed")),
    ]
    for path, method, client, expected in table:
        assert await node.ask(path, method=method, **client) == expected, (path, method, client)
    specs = [review["spec"] for review in node.people.asked if review["kind"] == "SubjectAccessReview"]
    admin = next(spec for spec in specs if spec["user"] == "admin")
    assert admin["groups"] == ["system:masters", "system:authenticated"]
    [credential] = admin["extra"]["authentication.kubernetes.io/credential-id"]
    assert credential.startswith("X509SHA256=")
    assert node.metric('apiserver_delegated_authn_request_total{code="201"}') == 3
    assert node.metric('apiserver_delegated_authz_request_total{code="201"}') == len(specs)


async def test_https_anonymous_requires_authorization(start: Starter, pairs: dict[str, Pair]) -> None:
    node = await start(anonymous=True)
    assert (await node.ask("/pods"))[0] == 403
    node.people.rules = {("system:anonymous", "get", "healthz")}
    assert await node.ask("/healthz") == (200, ANONYMOUS_USER.name)
    # Whoever shows something false is not taken for nobody.
    assert (await node.ask("/healthz", pairs["foreign"]))[0] == 401
    assert (await node.ask("/healthz", token="made-up"))[0] == 401


@pytest.mark.parametrize(("code", "status"), [(403, 500), (401, 500)])
async def test_https_review_unavailable_access_denied(
    start: Starter, pairs: dict[str, Pair], code: int, status: int
) -> None:
    node = await start(anonymous=True)
    node.people.broken = code
    assert (await node.ask("/pods", pairs["admin"]))[0] == status
    assert (await node.ask("/pods", token=ADMIN_TOKEN))[0] == 401
    assert (await node.ask("/pods"))[0] == status
    node.people.broken = 0
    assert (await node.ask("/pods", pairs["admin"]))[0] == 200
    assert (await node.ask("/pods", token=ADMIN_TOKEN))[0] == 200


async def test_https_concurrent_requests_reviewed_once(start: Starter) -> None:
    node = await start()
    answers = await asyncio.gather(*(node.ask("/pods", token=ADMIN_TOKEN) for _ in range(50)))
    assert {status for status, _ in answers} == {200}
    assert node.people.kinds == {"TokenReview": 1, "SubjectAccessReview": 1}
    assert subresources(node.people.asked) == ["pods"]


async def test_https_client_ca_replaced_is_reloaded(
    start: Starter, pairs: dict[str, Pair], authority: Authority, stranger: Authority
) -> None:
    node = await start()
    connector = aiohttp.TCPConnector(ssl=client_context(authority, pairs["admin"]), limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def status() -> int:
            async with session.get(node.url + "/pods") as answer:
                await answer.read()
                return answer.status

        assert await status() == 200
        replace(node.folder / "ca.crt", stranger.certificate.read_bytes())
        # On the same connection: what counts is who is trusted now.
        assert await status() == 401
        assert (await node.ask("/pods", pairs["foreign"]))[0] == 200
        replace(node.folder / "ca.crt", b"half a fi")
        assert (await node.ask("/pods", pairs["foreign"]))[0] == 200
        (node.folder / "ca.crt").unlink()
        assert (await node.ask("/pods", pairs["foreign"]))[0] == 200
        replace(
            node.folder / "ca.crt", stranger.certificate.read_bytes() + authority.certificate.read_bytes()
        )
        assert await status() == 200


def replace(path: Path, contents: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(contents)
    new.replace(path)


def shown_certificate(port: int, authority: Authority) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
        with client_context(authority).wrap_socket(plain, server_hostname="localhost") as secure:
            subject: Any = (secure.getpeercert() or {})["subject"]
            return str(dict(part[0] for part in subject)["commonName"])


async def test_https_serving_certificate_replaced_open_connections_stay(
    start: Starter, pairs: dict[str, Pair], authority: Authority
) -> None:
    node = await start()

    async def shown() -> str:
        return await asyncio.to_thread(shown_certificate, node.port, authority)

    connector = aiohttp.TCPConnector(ssl=client_context(authority, pairs["admin"]), limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(node.url + "/pods") as answer:
            assert answer.status == 200
        assert await shown() == "node"
        replace(node.folder / "kubelet.crt", pairs["second"].certificate.read_bytes())
        # The key does not fit yet.
        assert await shown() == "node"
        replace(node.folder / "kubelet.key", pairs["second"].key.read_bytes())
        assert await shown() == "second"
        (node.folder / "kubelet.crt").unlink()
        assert await shown() == "second"
        async with session.get(node.url + "/pods") as answer:
            assert answer.status == 200
        assert len(connector._conns) == 1


@pytest.mark.parametrize("gate", [True, False])
async def test_serving_tls_replaced_files_used_only_with_gate(
    start: Starter, pairs: dict[str, Pair], gate: bool
) -> None:
    node = await start()
    files = node.folder / "kubelet.crt", node.folder / "kubelet.key"
    gates = FeatureGates().with_overrides({"ReloadKubeletServerCertificateFile": gate})
    config = KubeletConfiguration(tls_cert_file=str(files[0]), tls_private_key_file=str(files[1]))
    current = [files]
    tls = ServingTls(TlsSettings(), lambda: current[0], reloads=reloads_certificate(config, gates))
    first = tls.context()
    replace(files[1], pairs["second"].key.read_bytes())
    replace(files[0], pairs["second"].certificate.read_bytes())
    assert (tls.context() is first) != gate
    before = tls.context()
    current[0] = pairs["second"].certificate, pairs["second"].key
    assert tls.context() is not before, "a changed path of a reload is used"
    assert reloads_certificate(KubeletConfiguration(), gates), "the gate is for configured files"


def sent_in_handshake(context: ssl.SSLContext) -> bytes:
    """Return what the server sends in a handshake of TLS 1.2, which is readable."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    to_server, from_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    for end in (
        client.wrap_bio(ssl.MemoryBIO(), to_server),
        context.wrap_bio(to_server, from_server, server_side=True),
    ):
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
    return from_server.read()


def subject_of(authority: Authority) -> bytes:
    return load_pem_x509_certificate(authority.certificate.read_bytes()).subject.public_bytes()


@pytest.mark.parametrize("gate", [True, False])
async def test_serving_tls_names_of_client_cas_sent_and_reloaded_with_gate(
    pairs: dict[str, Pair], tmp_path: Path, gate: bool
) -> None:
    old, new = Authority(tmp_path, "old clients"), Authority(tmp_path, "new clients")
    bundle = tmp_path / "clients.crt"
    bundle.write_bytes(old.certificate.read_bytes())
    config = KubeletConfiguration()
    config.authentication.x509.client_ca_file = str(bundle)
    gates = FeatureGates().with_overrides({"ReloadKubeletClientCAFile": gate})
    pair = pairs["server"]
    tls = ServingTls(
        TlsSettings(request_certificates=True),
        lambda: (pair.certificate, pair.key),
        authorities=client_authorities(config, gates),
    )
    names = subject_of(old), subject_of(new)
    first = tls.context()
    assert [name in sent_in_handshake(first) for name in names] == [True, False]
    assert tls.context() is first
    replace(bundle, b"no certificate")
    assert [name in sent_in_handshake(tls.context()) for name in names] == [True, False]
    replace(bundle, old.certificate.read_bytes() + new.certificate.read_bytes() * 2)
    found = sent_in_handshake(tls.context())
    assert [found.count(name) for name in names] == [1, 1 if gate else 0]
    assert (tls.context() is first) != gate


def test_send_authorities_too_many_names_none_sent(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "clients")
    config = KubeletConfiguration()
    config.authentication.x509.client_ca_file = str(authority.certificate)
    pair, settings = pairs["server"], TlsSettings(request_certificates=True)
    monkeypatch.setattr("pykubelet.server.tls._MAX_AUTHORITIES_BYTES", 10)
    authorities = client_authorities(config, FeatureGates())
    tls = ServingTls(settings, lambda: (pair.certificate, pair.key), authorities=authorities)
    assert subject_of(authority) not in sent_in_handshake(tls.context())
    assert client_authorities(KubeletConfiguration(), FeatureGates()) is None


@pytest.mark.parametrize("gate", [True, False])
def test_certificate_user_uid_in_subject_only_with_gate(gate: bool) -> None:
    subject = [[("commonName", "ann")], [(_UID_IN_SUBJECT, "1"), (_UID_IN_SUBJECT, "2")]]
    if gate:
        with pytest.raises(BadCredentials, match="more than one uid"):
            certificate_user(subject, "", reads_uid=gate)
    del subject[1][1]
    user = certificate_user(subject, "", reads_uid=gate)
    assert user is not None
    assert user.uid == ("1" if gate else "")


@pytest.mark.parametrize("gate", [True, False])
async def test_client_certificates_replaced_file_used_with_and_without_gate(
    pairs: dict[str, Pair], authority: Authority, stranger: Authority, tmp_path: Path, gate: bool
) -> None:
    """Verify that a removed authority is not trusted: upstream's gate is for the handshake only."""
    path = tmp_path / "ca.crt"
    path.write_bytes(authority.certificate.read_bytes())
    config = KubeletConfiguration()
    config.authentication.webhook.enabled = False
    config.authentication.x509.client_ca_file = str(path)
    gates = FeatureGates().with_overrides({"ReloadKubeletClientCAFile": gate})
    async with TaskScope() as scope:
        authenticator = make_authenticator(config, gates, None, scope, ServerMetrics(CollectorRegistry()))
    certificates = authenticator._certificates
    assert certificates is not None
    chain = [ssl.PEM_cert_to_DER_cert(pairs["admin"].certificate.read_text())]
    assert certificates._current_authorities().problem(chain) is None
    replace(path, stranger.certificate.read_bytes())
    assert certificates._current_authorities().problem(chain) is not None


async def test_serving_tls_no_certificate_raises_until_available(
    start: Starter, pairs: dict[str, Pair]
) -> None:
    node = await start()
    hidden = node.folder / "kubelet.crt"
    files: list[tuple[Path, Path] | None] = [None]
    tls = ServingTls(TlsSettings(), lambda: files[0])
    with pytest.raises(NoCertificate):
        tls.context()
    files[0] = (hidden, node.folder / "kubelet.key")
    contents = hidden.read_bytes()
    hidden.unlink()
    with pytest.raises(NoCertificate, match="no serving certificate available"):
        tls.context()
    encrypt(node.folder / "kubelet.key", node.folder / "locked.key")
    hidden.write_bytes(contents)
    locked = ServingTls(TlsSettings(), lambda: (hidden, node.folder / "locked.key"))
    with pytest.raises(NoCertificate, match="no serving certificate available"):
        locked.context()
    first = tls.context()
    assert tls.context() is first
    files[0] = (pairs["second"].certificate, pairs["second"].key)
    assert tls.context() is not first
    files[0] = None
    assert tls.context() is not first


@pytest.mark.parametrize(
    ("settings", "client", "good"),
    [
        ({}, {"maximum": ssl.TLSVersion.TLSv1_2}, True),
        ({"min_version": ssl.TLSVersion.TLSv1_3}, {"maximum": ssl.TLSVersion.TLSv1_2}, False),
        ({"min_version": ssl.TLSVersion.TLSv1_3}, {}, True),
        (
            {"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"]},
            {"maximum": ssl.TLSVersion.TLSv1_2, "ciphers": "ECDHE-ECDSA-AES128-GCM-SHA256"},
            False,
        ),
        (
            {"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"]},
            {"maximum": ssl.TLSVersion.TLSv1_2, "ciphers": "ECDHE-ECDSA-AES256-GCM-SHA384"},
            True,
        ),
        ({"curves": ["P-384"]}, {"curve": "prime256v1"}, False),
        ({"curves": ["P-384", "P-256"]}, {"curve": "prime256v1"}, True),
    ],
)
async def test_https_tls_version_cipher_and_curve_settings_enforced(
    start: Starter, authority: Authority, settings: dict[str, Any], client: dict[str, Any], good: bool
) -> None:
    node = await start(**settings)
    context = client_context(authority)
    if "maximum" in client:
        context.maximum_version = client["maximum"]
    if "ciphers" in client:
        context.set_ciphers(client["ciphers"])
    if "curve" in client:
        context.set_ecdh_curve(client["curve"])
    try:
        _, writer = await asyncio.open_connection("localhost", node.port, ssl=context)
        writer.close()
        spoken = True
    except (ssl.SSLError, ConnectionError):
        spoken = False
    assert spoken == good


async def test_https_cipher_preference_selects_aes_128_gcm(start: Starter, authority: Authority) -> None:
    node = await start()
    context = client_context(authority)
    # The client's own first choice is another.
    assert context.get_ciphers()[0]["name"] == "TLS_AES_256_GCM_SHA384"
    _, writer = await asyncio.open_connection("localhost", node.port, ssl=context)
    chosen, _, _ = writer.get_extra_info("cipher")
    writer.close()
    assert chosen == "TLS_AES_128_GCM_SHA256"


def test_server_context_unsupported_ciphers_or_curves_raise() -> None:
    with pytest.raises(TlsProblem, match="knows none of TLS_RSA_WITH_RC4_128_SHA"):
        server_context(TlsSettings(cipher_suites=["TLS_RSA_WITH_RC4_128_SHA"]))
    with pytest.raises(TlsProblem, match="tlsCurvePreferences"):
        server_context(TlsSettings(curves=["P-1"]))


async def test_https_ipv4_and_ipv6_are_served(start: Starter, authority: Authority) -> None:
    node = await start(open_to_all=True, anonymous=True)
    context = client_context(authority)
    context.check_hostname = False
    for address in ("127.0.0.1", "::1"):
        if address == "::1" and not Path("/proc/net/if_inet6").exists():
            continue
        _, writer = await asyncio.open_connection(address, node.port, ssl=context)
        writer.close()


async def test_https_requests_counted_by_method_and_path(start: Starter) -> None:
    node = await start(open_to_all=True, anonymous=True)
    await node.ask("/pods")
    await node.ask("/made/up")
    await node.ask("/other/made/up", method="PATCH")
    labels = 'method="{}",path="{}",server_type="readwrite"'
    for method, path, count in [("GET", "pods", 1), ("GET", "other", 1), ("other", "other", 1)]:
        where = "{" + f'long_running="false",{labels.format(method, path)}' + "}"
        assert node.metric(f"kubelet_http_requests_total{where}") == count
        assert node.metric(f"kubelet_http_requests_duration_seconds_count{where}") == count
        assert node.metric(f"kubelet_http_inflight_requests{where}") == 0

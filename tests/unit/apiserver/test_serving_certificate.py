"""The certificate of the agent's own server: requested, given in files, or made here."""

import asyncio
import shutil
import ssl
import stat
import subprocess
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.certificates import SERVING_SIGNER
from pykubelet.api.node import NodeAddress
from pykubelet.apiserver.certificates import serving as certificate_serving
from pykubelet.apiserver.certificates.serving import (
    CertificateFiles,
    RequestedCertificate,
    ServingCertificate,
    self_signed_certificate,
    serving_subject,
)
from pykubelet.apiserver.certificates.store import StoredPair, StoreError, read_pair
from pykubelet.apiserver.certificates.x509 import Subject, read_request
from pykubelet.apiserver.client import ApiClient
from pykubelet.util.tasks import TaskScope
from tests.support.api_server import Server, answer, server_context, serving
from tests.support.certs import Authority, Pair
from tests.support.waiting import until
from tests.unit.apiserver.signing import Signing


def address(kind: str, value: str) -> NodeAddress:
    return NodeAddress(type=kind, address=value)


@pytest.mark.parametrize(
    ("addresses", "dns_only", "expected"),
    [
        ([], False, None),
        ([("Hostname", "one")], False, None),
        ([("Hostname", "one")], True, (("one",), ())),
        ([("InternalIP", "")], True, None),
        ([("InternalIP", "10.0.0.2"), ("InternalIP", "10.0.0.1")], False, ((), ("10.0.0.1", "10.0.0.2"))),
        ([("Hostname", "10.0.0.1"), ("InternalIP", "10.0.0.1")], False, ((), ("10.0.0.1",))),
        (
            [
                ("Hostname", "one"),
                ("InternalIP", "fd00::1"),
                ("ExternalIP", "1.2.3.4"),
                ("InternalDNS", "one.local"),
            ],
            False,
            (("one", "one.local"), ("1.2.3.4", "fd00::1")),
        ),
        ([("InternalIP", "not an address"), ("Weird", "10.0.0.1")], True, None),
        ([("InternalIP", "FD00:0::01")], False, ((), ("fd00::1",))),
    ],
)
def test_serving_subject_contains_dns_names_and_ips_of_node(
    addresses: list[tuple[str, str]], dns_only: bool, expected: Any
) -> None:
    found = serving_subject("one", [address(*one) for one in addresses], dns_only=dns_only)
    wanted = Subject("system:node:one", ("system:nodes",), *expected) if expected else None
    assert found == wanted


@pytest.fixture
async def signing(server: Server, authority: Authority) -> Signing:
    return Signing(server, authority)


async def test_requested_certificate_addresses_known_is_issued_and_stored(
    client: ApiClient, signing: Signing, tmp_path: Path, authority: Authority
) -> None:
    addresses: list[NodeAddress] = []
    told: list[Any] = []
    certificate = RequestedCertificate(client, tmp_path, "one", lambda: addresses)
    certificate.add_listener(lambda: told.append(certificate.current()))
    assert certificate.current() is None
    async with TaskScope() as scope:
        scope.start(certificate.run(), name="serving")
        await asyncio.sleep(0.2)
        assert signing.requests == {}
        addresses += [address("Hostname", "localhost"), address("InternalIP", "127.0.0.1")]
        await until(lambda: bool(told))
    current = tmp_path / "kubelet-server-current.pem"
    assert told == [(current, current)]
    ((_, request),) = signing.requests.items()
    assert request["spec"]["signerName"] == SERVING_SIGNER
    assert request["spec"]["usages"] == ["digital signature", "server auth"]
    assert current.readlink().name.startswith("kubelet-server-20")
    pair = read_pair(current, current)
    assert pair.subject == Subject("system:node:one", ("system:nodes",), ("localhost",), ("127.0.0.1",))
    # It serves.
    async with serving(server_context(authority, Pair(current, current))) as served:
        served.default = answer({})
        context = ssl.create_default_context(cafile=str(authority.certificate))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        writer.close()
    # The next start has it at once.
    assert RequestedCertificate(client, tmp_path, "one", lambda: addresses).current() == (current, current)


async def test_requested_certificate_addresses_changed_while_pending_requests_again(
    client: ApiClient, signing: Signing, tmp_path: Path
) -> None:
    addresses = [address("InternalIP", "10.0.0.1")]
    certificate = RequestedCertificate(client, tmp_path, "one", lambda: addresses)
    signing.decide = lambda _: None
    async with TaskScope() as scope:
        scope.start(certificate.run(), name="serving")
        await until(lambda: len(signing.requests) == 1)
        # Nobody has decided yet, and the answer would be of no use any more.
        signing.decide = signing.issue
        addresses.append(address("InternalIP", "10.0.0.2"))
        await until(lambda: certificate.current() is not None)
    first, second = (read_request(signing.text(name))[0] for name in signing.requests)
    assert first == second == Subject("system:node:one", ("system:nodes",))
    current = tmp_path / "kubelet-server-current.pem"
    assert read_pair(current, current).subject.ips == ("10.0.0.1", "10.0.0.2")


async def test_requested_certificate_expired_returns_fallback(
    client: ApiClient, signing: Signing, tmp_path: Path, node_pair: Pair
) -> None:
    now = [datetime.now(UTC)]
    addresses = [address("InternalIP", "10.0.0.1")]
    options: dict[str, Any] = {"clock": lambda: now[0]}
    certificate = RequestedCertificate(client, tmp_path, "one", lambda: addresses, **options)
    async with TaskScope() as scope:
        scope.start(certificate.run(), name="serving")
        await until(lambda: certificate.current() is not None)
    now[0] += timedelta(hours=2)
    assert certificate.current() is None
    given = (node_pair.certificate, node_pair.key)
    assert (
        RequestedCertificate(client, tmp_path, "one", lambda: addresses, fallback=given, **options).current()
        == given
    )


# Files.


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> tuple[Path, Path]:
    return give(authority.sign("/CN=first"), tmp_path / "tls.crt", tmp_path / "tls.key")


def give(pair: Pair, certificate: Path, key: Path) -> tuple[Path, Path]:
    shutil.copy(pair.certificate, certificate)
    shutil.copy(pair.key, key)
    return certificate, key


async def test_certificate_files_replaced_notifies_only_for_valid_pairs(
    files: tuple[Path, Path], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_serving, "CHECK_SECONDS", 0.02)
    certificate = CertificateFiles(*files)
    assert certificate.current() == files
    told: list[str] = []
    certificate.add_listener(lambda: told.append(read_pair(*files).subject.common_name))
    other = authority.sign("/CN=second")
    async with TaskScope() as scope:
        scope.start(certificate.run(), name="files")
        # Half-way, touched, gone and back: nothing that the server should use.
        shutil.copy(other.key, files[1])
        await asyncio.sleep(0.1)
        shutil.copy(other.certificate, files[0])
        await until(lambda: bool(told))
        files[0].unlink()
        await asyncio.sleep(0.1)
        shutil.copy(other.certificate, files[0])
        await asyncio.sleep(0.1)
        give(authority.sign("/CN=third"), *files)
        await until(lambda: len(told) == 2)
    assert told == ["second", "third"]


def test_certificate_files_missing_or_mismatched_raises_store_error(
    files: tuple[Path, Path], tmp_path: Path, node_pair: Pair
) -> None:
    with pytest.raises(StoreError, match="absent cannot be read"):
        CertificateFiles(tmp_path / "absent", files[1])
    with pytest.raises(StoreError, match="the key does not belong to the certificate"):
        CertificateFiles(files[0], node_pair.key)


# Self-signed.


async def test_self_signed_certificate_valid_pair_is_reused(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    made = await self_signed_certificate(folder, "node.example", ips=["10.0.0.1"])
    certificate, key = made.current()
    assert (certificate, key) == (folder / "kubelet.crt", folder / "kubelet.key")
    assert stat.S_IMODE(certificate.stat().st_mode) == 0o644
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    pair = read_pair(certificate, key)
    assert (pair.subject.dns, pair.subject.ips) == (("node.example",), ("10.0.0.1",))
    assert timedelta(days=364) < pair.life.ends - datetime.now(UTC) < timedelta(days=365)
    checked = subprocess.run(
        [
            "openssl",
            "verify",
            "-partial_chain",
            "-purpose",
            "sslserver",
            "-trusted",
            certificate,
            certificate,
        ],
        capture_output=True,
    )
    assert checked.returncode == 0, checked.stderr
    before = certificate.read_bytes()
    await self_signed_certificate(folder, "node.example")
    assert certificate.read_bytes() == before


Break = Callable[[Path, Path], object]


@pytest.mark.parametrize(
    "damage",
    [
        lambda certificate, key: key.unlink(),
        lambda certificate, key: certificate.unlink(),
        lambda certificate, key: certificate.write_bytes(b""),
        lambda certificate, key: key.write_text(key.read_text()[:50]),
    ],
)
async def test_self_signed_certificate_damaged_pair_is_regenerated(tmp_path: Path, damage: Break) -> None:
    certificate, key = (await self_signed_certificate(tmp_path, "10.0.0.7")).current()
    damage(certificate, key)
    await self_signed_certificate(tmp_path, "10.0.0.7")
    assert read_pair(certificate, key).subject.ips == ("10.0.0.7",)


async def test_self_signed_certificate_renews_own_but_not_foreign_certificate(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_serving, "CHECK_SECONDS", 0.05)
    now = [datetime.now(UTC)]
    certificate = await self_signed_certificate(tmp_path, "one", clock=lambda: now[0])
    told: list[None] = []
    certificate.add_listener(lambda: told.append(None))

    def served() -> Awaitable[float]:
        return until(lambda: bool(told))

    async with TaskScope() as scope:
        scope.start(certificate.run(), name="self-signed")
        await asyncio.sleep(0.2)
        assert told == []
        now[0] += timedelta(days=364)
        await served()
        now[0] -= timedelta(days=364)
    theirs = give(authority.sign("/CN=one", begins=-7200, ends=-3600), *certificate.current())
    before = theirs[0].read_bytes()
    await self_signed_certificate(tmp_path, "one")
    assert theirs[0].read_bytes() == before


async def test_self_signed_certificate_unchanged_is_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_serving, "CHECK_SECONDS", 0.01)
    certificate = await self_signed_certificate(tmp_path, "one")
    read, checks = 0, 0

    def counted(*files: Path) -> StoredPair:
        nonlocal read
        read += 1
        return read_pair(*files)

    def now() -> datetime:
        nonlocal checks
        checks += 1
        return datetime.now(UTC)

    certificate = await self_signed_certificate(tmp_path, "one", clock=now)
    monkeypatch.setattr(certificate_serving, "read_pair", counted)
    async with TaskScope() as scope:
        scope.start(certificate.run(), name="self-signed")
        await until(lambda: checks >= 6)
    assert read == 0


async def test_self_signed_certificate_disk_full_logs_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certificate_serving, "CHECK_SECONDS", 0.01)
    now, tries = [datetime.now(UTC)], 0

    async def full(*_: object, **__: object) -> Any:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    certificate = await self_signed_certificate(tmp_path, "one", clock=lambda: now[0])
    monkeypatch.setattr(certificate_serving, "self_signed", full)
    now[0] += timedelta(days=365)
    async with TaskScope() as scope:
        scope.start(certificate.run(), name="self-signed")
        await until(lambda: tries >= 5)
    assert [record.getMessage() for record in caplog.records] == [
        "Failed to renew the self-signed certificate"
    ]


async def test_self_signed_certificate_replacement_in_progress_is_not_overwritten(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate is there, its key is not yet: an agent that runs has no business with them."""
    monkeypatch.setattr(certificate_serving, "CHECK_SECONDS", 0.02)
    certificate = await self_signed_certificate(tmp_path, "one")
    told: list[str] = []
    files = certificate.current()
    certificate.add_listener(lambda: told.append(read_pair(*files).subject.common_name))
    theirs = authority.sign("/CN=theirs")
    async with TaskScope() as scope:
        scope.start(certificate.run(), name="self-signed")
        shutil.copy(theirs.certificate, files[0])
        await asyncio.sleep(0.5)
        assert files[0].read_bytes() == theirs.certificate.read_bytes()
        shutil.copy(theirs.key, files[1])
        await until(lambda: bool(told))
    assert told == ["theirs"]


def test_serving_certificate_implementations_satisfy_protocol(
    client: ApiClient, files: tuple[Path, Path], tmp_path: Path
) -> None:
    shapes: list[ServingCertificate] = [
        CertificateFiles(*files),
        RequestedCertificate(client, tmp_path, "one", list),
    ]
    assert [shape.current() for shape in shapes] == [files, None]

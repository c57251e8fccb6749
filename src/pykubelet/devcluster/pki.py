"""Keys and certificates of a control plane.

Authorities are made once and stay; everything that they sign is signed anew at each start, because
that takes milliseconds and a machine's address may have changed. Keys are on the curve P-256:
every client can use them, and they are made a hundred times faster than RSA ones.

`cryptography` is imported inside the functions: it takes 10 MB, and only these need it.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_AUTHORITY_LIFE = timedelta(days=3650)
_LIFE = timedelta(days=365)
_BEFORE = timedelta(days=1)
"""How far back validity begins: clocks differ."""


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs: a certificate and its key, in files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate is for, and what it may be used for."""

    name: str
    groups: tuple[str, ...] = ()
    server_names: tuple[str, ...] = ()
    """DNS names and IP addresses under which it serves; without any it is a client's."""
    both: bool = False
    """Whether a server's certificate is a client's, too."""


def ensure_authority(place: Authority, name: str) -> Authority:
    """Make an authority in these files unless they are there already."""
    if place.key.exists() and place.certificate.exists():
        return place
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _new_key()
    own = _name(Subject(name))
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(own, own, key, _AUTHORITY_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    builder = builder.add_extension(identifier, critical=False)
    _write_key(place.key, key)
    _write(place.certificate, _pem(builder.sign(key, hashes.SHA256())), 0o644)
    return place


def issue(
    authority: Authority, subject: Subject, certificate: Path, key: Path, life: timedelta = _LIFE
) -> None:
    """Sign a certificate for a new key and write both."""
    pem, own = issue_pem(authority, subject, life)
    _write(key, own, 0o600)
    _write(certificate, pem, 0o644)


def issue_pem(authority: Authority, subject: Subject, life: timedelta = _LIFE) -> tuple[bytes, bytes]:
    """Sign a certificate for a new key; gives the certificate and the key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signer = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    signing = load_pem_private_key(authority.key.read_bytes(), password=None)
    assert isinstance(signing, EllipticCurvePrivateKey)
    key = _new_key()
    builder = _builder(_name(subject), signer.subject, key, life)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH] if subject.server_names else []
    if subject.both or not uses:
        uses.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False
    )
    if subject.server_names:
        builder = builder.add_extension(_alternatives(subject.server_names), critical=False)
    return _pem(builder.sign(signing, hashes.SHA256())), _key_pem(key)


def ensure_key_pair(private: Path, public: Path) -> None:
    """Make the key that signs service accounts' tokens, unless it is there already."""
    if private.exists() and public.exists():
        return
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = _new_key()
    _write_key(private, key)
    told = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _write(public, told, 0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, life: timedelta
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + life)
    )


def _name(subject: Subject) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in subject.groups]
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, subject.name)])


def _alternatives(names: Sequence[str]) -> x509.SubjectAlternativeName:
    from cryptography import x509

    told: list[x509.GeneralName] = []
    for name in names:
        try:
            told.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            told.append(x509.DNSName(name))
    return x509.SubjectAlternativeName(told)


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=not signs,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())


def _write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    _write(path, _key_pem(key), 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    hidden = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
    hidden.rename(path)

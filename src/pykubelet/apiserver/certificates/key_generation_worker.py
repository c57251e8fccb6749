"""Subprocess that generates keys, certificate requests and self-signed certificates.

Run by `key_generation.py` as `python -m pykubelet.apiserver.certificates.key_generation_worker`: it reads
one order in JSON from stdin, writes one result in JSON to stdout, and exits. Importing the cryptography
library costs ten megabytes of memory permanently, and a node needs a new key a few times a year; so in
the kubelet only this module imports it, and no other module imports this one.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
_PUBLIC_EXPONENT = 65537
_CURVES: dict[str, tuple[ec.EllipticCurve, hashes.HashAlgorithm]] = {
    "ECDSAP256": (ec.SECP256R1(), hashes.SHA256()),
    "ECDSAP384": (ec.SECP384R1(), hashes.SHA384()),
    "ECDSAP521": (ec.SECP521R1(), hashes.SHA512()),
}
_EARLIER = timedelta(hours=1)
_LIFE = timedelta(days=365)

# Together with the timestamp within the length limit of a common name.
_LONGEST_HOST = 40


def execute(order: dict[str, Any]) -> dict[str, Any]:
    """Execute an order: `request`, `stub-request` (of a pod) or `self-signed`."""
    if order["make"] == "stub-request":
        return _stub_request(order["key"])
    return _request(order) if order["make"] == "request" else _self_signed(order)


def _stub_request(key_type: str) -> dict[str, Any]:
    """Generate a key of a type and a request without a subject, signed with the hash that suits the key."""
    key: Key | ed25519.Ed25519PrivateKey
    digest: hashes.HashAlgorithm | None = hashes.SHA256()
    if key_type in _CURVES:
        curve, digest = _CURVES[key_type]
        key = ec.generate_private_key(curve)
    elif key_type == "ED25519":
        key, digest = ed25519.Ed25519PrivateKey.generate(), None
    else:
        key = rsa.generate_private_key(_PUBLIC_EXPONENT, int(key_type.removeprefix("RSA")))
    request = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, digest)  # type: ignore[arg-type]
    return {
        "key": key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
        "request": base64.b64encode(request.public_bytes(serialization.Encoding.DER)).decode(),
    }


def _request(order: dict[str, Any]) -> dict[str, Any]:
    key = _read_key(order["key"]) or ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder(_name(order["common_name"], order["organizations"]))
    if order["dns"] or order["ips"]:
        builder = builder.add_extension(_alternatives(order), critical=False)
    request = builder.sign(key, hashes.SHA256())
    return {
        "key": _key_pem(key),
        "request": _pem(request),
        "rsa": isinstance(key, rsa.RSAPrivateKey),
    }


def _self_signed(order: dict[str, Any]) -> dict[str, Any]:
    """Sign with a CA whose key is discarded immediately, so that the certificate can sign no other."""
    now = datetime.now(UTC)
    host, stamp = order["common_name"][:_LONGEST_HOST], int(now.timestamp())
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name(f"{host}-ca@{stamp}", [])
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(authority_name, authority_name, authority_key, now, True).sign(
        authority_key, hashes.SHA256()
    )
    builder = _certificate(_name(f"{host}@{stamp}", []), authority_name, key, now, False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(_alternatives(order), critical=False)
    certificate = builder.sign(authority_key, hashes.SHA256())
    return {"key": _key_pem(key), "certificate": _pem(certificate) + _pem(authority)}


def _certificate(
    name: x509.Name, issuer: x509.Name, key: Key, now: datetime, signs: bool
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=True,
        key_encipherment=True,
        key_cert_sign=signs,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder(issuer, name, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now - _EARLIER + _LIFE)
        .add_extension(usage, critical=True)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=None), critical=True)
    )


def _name(common_name: str, organizations: list[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, name) for name in organizations]
    # The API server rejects names longer than the standard allows.
    own = x509.NameAttribute(NameOID.COMMON_NAME, common_name, _validate=False)
    return x509.Name([*parts, own])


def _alternatives(order: dict[str, Any]) -> x509.SubjectAlternativeName:
    names = [x509.DNSName(name) for name in order["dns"]]
    ips = [x509.IPAddress(ipaddress.ip_address(ip)) for ip in order["ips"]]
    return x509.SubjectAlternativeName([*names, *ips])


def _read_key(pem: str) -> Key | None:
    if not pem:
        return None
    try:
        key = serialization.load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) else None


def _key_pem(key: Key) -> str:
    """Encode a key in upstream's format: EC PRIVATE KEY."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    ).decode()


def _pem(document: x509.CertificateSigningRequest | x509.Certificate) -> str:
    return document.public_bytes(serialization.Encoding.PEM).decode()


if __name__ == "__main__":
    try:
        json.dump(execute(json.load(sys.stdin)), sys.stdout)
    except ValueError as err:
        # A name that a certificate cannot contain; no traceback needed.
        sys.exit(str(err))

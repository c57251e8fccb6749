"""Certificates, keys and kubeconfigs of a control plane.

Names, groups and CAs are those of kubeadm: one CA for the cluster, one for etcd, one for the front proxy,
and a key for service account tokens. CAs and that key are created once and kept; all other certificates are
issued again at each start, because that takes milliseconds and the host's address may have changed. Keys
use the curve P-256, which all clients support and which is a hundred times faster to generate than RSA.

`cryptography` is imported inside the functions: it takes 10 MB of memory, and only these need it.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pykubelet.devcluster.layout import CLUSTER_DOMAIN, SERVICE_IP, Layout, Settings
from pykubelet.util.files import write_atomically

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_AUTHORITY_LIFE = timedelta(days=3650)
_LIFE = timedelta(days=365)
_BEFORE = timedelta(days=1)
"""Time before the present at which validity begins, to allow for clock skew."""


@dataclass(frozen=True, slots=True)
class Authority:
    """Files of a CA: its certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a certificate, and its usage."""

    name: str
    groups: tuple[str, ...] = ()
    server_names: tuple[str, ...] = ()
    """DNS names and IP addresses of a serving certificate; empty for a client certificate."""
    both: bool = False
    """Whether a serving certificate is also valid for clients."""


def ensure_authority(authority: Authority, name: str) -> Authority:
    """Ensure that a CA exists in these files."""
    if authority.key.exists() and authority.certificate.exists():
        return authority
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _new_key()
    own = _name(Subject(name))
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(own, own, key, _AUTHORITY_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    builder = builder.add_extension(identifier, critical=False)
    _write_key(authority.key, key)
    _write(authority.certificate, _pem(builder.sign(key, hashes.SHA256())), 0o644)
    return authority


def issue(
    authority: Authority, subject: Subject, certificate: Path, key: Path, life: timedelta = _LIFE
) -> None:
    """Issue a certificate for a new key and write both files."""
    pem, own = issue_pem(authority, subject, life)
    _write(key, own, 0o600)
    _write(certificate, pem, 0o644)


def issue_pem(authority: Authority, subject: Subject, life: timedelta = _LIFE) -> tuple[bytes, bytes]:
    """Issue a certificate for a new key; return the certificate and the key as PEM."""
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
    """Ensure that the signing key of service account tokens exists."""
    if private.exists() and public.exists():
        return
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = _new_key()
    _write_key(private, key)
    public_pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _write(public, public_pem, 0o644)


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

    general_names: list[x509.GeneralName] = []
    for name in names:
        try:
            general_names.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            general_names.append(x509.DNSName(name))
    return x509.SubjectAlternativeName(general_names)


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
    write_atomically(path, data, mode, durable=False)


KUBELET_CLIENT = "kube-apiserver-kubelet-client"
LOOPBACK = "127.0.0.1"
_AUTHORITIES = {"ca": "kubernetes", "etcd-ca": "etcd-ca", "front-proxy-ca": "front-proxy-ca"}
_CLIENTS = {
    # file name: CA, user name, groups
    "apiserver-etcd-client": ("etcd-ca", "kube-apiserver-etcd-client", ()),
    "apiserver-kubelet-client": ("ca", KUBELET_CLIENT, ()),
    "front-proxy-client": ("front-proxy-ca", "front-proxy-client", ()),
    "admin": ("ca", "kubernetes-admin", ("system:masters",)),
}
_USERS = {
    # kubeconfig: user name, groups
    "controller-manager": ("system:kube-controller-manager", ()),
    "scheduler": ("system:kube-scheduler", ()),
}


def make_identities(layout: Layout, settings: Settings) -> None:
    """Create every key, certificate and kubeconfig of the control plane and its administrator."""
    layout.pki.mkdir(mode=0o700, exist_ok=True)
    for file, name in _AUTHORITIES.items():
        ensure_authority(_authority(layout, file), name)
    ensure_key_pair(layout.key("sa"), layout.pki / "sa.pub")
    for file, subject in servers(settings).items():
        signer = "etcd-ca" if file == "etcd" else "ca"
        issue(_authority(layout, signer), subject, layout.certificate(file), layout.key(file))
    for file, (signer, name, groups) in _CLIENTS.items():
        subject = Subject(name, groups)
        issue(_authority(layout, signer), subject, layout.certificate(file), layout.key(file))
    certificate, key = layout.certificate("admin").read_bytes(), layout.key("admin").read_bytes()
    write_private(layout.kubeconfig("admin"), client_kubeconfig(layout, settings, certificate, key))
    for file, (name, groups) in _USERS.items():
        user_kubeconfig(layout, settings, Subject(name, groups), layout.kubeconfig(file))
    write_private(layout.kubeconfig("bootstrap"), token_kubeconfig(layout, settings, settings.token))


def servers(settings: Settings) -> dict[str, Subject]:
    """Return the subjects of the serving certificates by file name."""
    host = socket.gethostname().lower()
    service = "kubernetes.default.svc"
    names = ("kubernetes", "kubernetes.default", service, f"{service}.{CLUSTER_DOMAIN}", "localhost", host)
    addresses = dict.fromkeys((SERVICE_IP, LOOPBACK, settings.address))
    return {
        "apiserver": Subject("kube-apiserver", server_names=(*names, *addresses)),
        "etcd": Subject("etcd", server_names=("localhost", LOOPBACK), both=True),
    }


def node_kubeconfig(
    layout: Layout, settings: Settings, node: str, path: Path, life: timedelta = timedelta(days=365)
) -> None:
    """Write the kubeconfig of a node, as after a TLS bootstrap."""
    user_kubeconfig(layout, settings, Subject(f"system:node:{node}", ("system:nodes",)), path, life)


def user_kubeconfig(
    layout: Layout,
    settings: Settings,
    subject: Subject,
    path: Path,
    life: timedelta = timedelta(days=365),
) -> None:
    """Write the kubeconfig of a user with a new client certificate."""
    certificate, key = issue_pem(_authority(layout, "ca"), subject, life)
    write_private(path, client_kubeconfig(layout, settings, certificate, key))


def client_kubeconfig(layout: Layout, settings: Settings, certificate: bytes, key: bytes) -> str:
    """Return a kubeconfig with an embedded client certificate."""
    user = {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}
    return _kubeconfig(layout, settings, user)


def token_kubeconfig(layout: Layout, settings: Settings, token: str) -> str:
    """Return a kubeconfig with a bearer token."""
    return _kubeconfig(layout, settings, {"token": token})


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner."""
    write_atomically(path, text.encode(), durable=False)


def _kubeconfig(layout: Layout, settings: Settings, user: dict[str, str]) -> str:
    # Loopback works on every network and is never sent through a proxy.
    cluster = {
        "server": f"https://{LOOPBACK}:{settings.port}",
        "certificate-authority-data": _base64(layout.authority.read_bytes()),
    }
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "dev", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "user"}}],
        "current-context": "dev",
    }
    return yaml.safe_dump(document, sort_keys=False)


def _authority(layout: Layout, name: str) -> Authority:
    return Authority(layout.certificate(name), layout.key(name))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()

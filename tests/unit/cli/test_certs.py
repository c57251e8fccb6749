"""`pykubelet certs`: states by lifetime, and files that cannot be read."""

import json
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pykubelet.cli.node.certs import lifetime_state, run_certs
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output
from pykubelet.server.node_info import NodeInfo, write_node_info

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = 86400.0


def certificate(days: float, *, name: str = "system:node:n1") -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=100))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("n1")]), False)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pki").mkdir()
    info = NodeInfo(
        node_name="n1",
        root_dir=str(tmp_path),
        cert_dir=str(tmp_path / "pki"),
        pod_logs_dir="/var/log/pods",
        container_runtime_endpoint="unix:///none.sock",
        client_ca_file=str(tmp_path / "ca.crt"),
        kubeconfig=str(tmp_path / "kubeconfig"),
    )
    write_node_info(tmp_path, info)
    (tmp_path / "ca.crt").write_bytes(certificate(100, name="ca-1") + certificate(200, name="ca-2"))
    return tmp_path


@pytest.mark.parametrize(
    ("ends", "rotated", "state"),
    [
        (40, False, "ok"),
        (20, False, "expires soon"),
        (20, True, "ok"),
        (5, True, "expires soon"),
        (0, True, "expired"),
    ],
)
def test_lifetime_state(ends: int, rotated: bool, state: str) -> None:
    begins, end = NOW + timedelta(days=ends - 100), NOW + timedelta(days=ends)
    assert lifetime_state(begins, end, NOW, 30 * DAY, rotated=rotated) == state


def test_lifetime_state_in_future_not_valid_yet() -> None:
    begins = NOW + timedelta(days=1)
    assert lifetime_state(begins, begins + timedelta(days=9), NOW, 0, rotated=True) == "not valid yet"


def test_run_certs_lists_leaf_and_all_authorities(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "pki" / "kubelet-client-current.pem").write_bytes(certificate(50) + certificate(1))
    assert run_certs(NodeSelection(root_dir=root), Output.JSON, 30 * DAY) == 0
    found = json.loads(capsys.readouterr().out)["certificates"]
    assert [(one["use"], one["subject"], one["state"]) for one in found] == [
        ("client", "CN=system:node:n1", "ok"),
        ("client CA", "CN=ca-1", "ok"),
        ("client CA", "CN=ca-2", "ok"),
    ]
    assert found[0]["names"] == ["n1"]


def test_run_certs_problems_exit_3(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "pki" / "kubelet-client-current.pem").symlink_to("gone.pem")
    (root / "pki" / "kubelet.crt").write_bytes(b"\x1b[31mno certificate")
    (root / "ca.crt").write_bytes(certificate(3))
    (root / "kubeconfig").write_text("{]")
    assert run_certs(NodeSelection(root_dir=root), Output.WIDE, 30 * DAY) == 3
    shown = capsys.readouterr()
    for text in ("cannot be read: No such file", "contains no certificate", "expires soon", "kubeconfig"):
        assert text in shown.out
    assert "4 of 4 need attention" in shown.err
    assert "\x1b" not in shown.out


def test_run_certs_node_without_certificates_exit_0(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = NodeInfo(
        node_name="n1",
        root_dir=str(root),
        cert_dir=str(root / "pki"),
        pod_logs_dir="",
        container_runtime_endpoint="",
    )
    write_node_info(root, info)
    assert run_certs(NodeSelection(root_dir=root), Output.TABLE, 0) == 0
    assert capsys.readouterr().err.startswith("No certificates")


def test_run_certs_repeated_extension_is_a_damaged_certificate(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = x509.load_pem_x509_certificate(certificate(100))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "n1")])
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1)
    builder = builder.not_valid_before(found.not_valid_before_utc).not_valid_after(found.not_valid_after_utc)
    for number in (4, 5):
        extension = x509.UnrecognizedExtension(x509.ObjectIdentifier(f"1.2.3.{number}"), b"x")
        builder = builder.add_extension(extension, critical=False)
    der = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    der = der.replace(b"\x06\x03\x2a\x03\x05", b"\x06\x03\x2a\x03\x04")
    (root / "pki" / "kubelet.crt").write_text(ssl.DER_cert_to_PEM_cert(der))
    assert run_certs(NodeSelection(root_dir=root), Output.JSON, 30 * DAY) == 3
    states = [one["state"] for one in json.loads(capsys.readouterr().out)["certificates"]]
    assert any(state.startswith("damaged: ") for state in states)

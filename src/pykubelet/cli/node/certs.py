"""`pykubelet certs`: the certificates of a node, with their remaining lifetime.

Listed are the serving certificate, the client certificate and the certificate authorities that the kubelet
uses. A certificate that the kubelet rotates is reported only when the rotation is overdue: when less than a
tenth of its life remains. Any other one is reported some time before its end (`--warn`). The files are read
directly, so that the command works while the kubelet is stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.cli.client import run_command
from pykubelet.cli.errors import EXIT_FINDING
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output, print_listing
from pykubelet.cli.printers import format_duration
from pykubelet.config.kubeconfig_file import load_kubeconfig

if TYPE_CHECKING:
    from cryptography import x509

    from pykubelet.server.node_info import NodeInfo

PROGRAM = "pykubelet certs"
HEADING = ("USE", "EXPIRES IN", "STATE", "ROTATION", "SUBJECT", "PATH")
WIDE_HEADING = (*HEADING, "NAMES", "ISSUER", "NOT BEFORE", "NOT AFTER")
MAX_BYTES = 1 << 20
"""Size of a certificate file that is read."""
MAX_CERTIFICATES = 200
"""Number of certificates of one file that are shown."""
_OVERDUE = 0.1
_BY_KUBELET = ("kubelet", "kubelet at its start")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or the data in a kubeconfig, that may contain certificates."""

    use: str
    path: str
    rotation: str
    """Who renews it."""
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """One certificate, or the reason why a file has none."""

    source: Source
    state: str
    """`ok`, `expires soon`, `expired`, `not valid yet`, or an error."""
    subject: str = ""
    names: tuple[str, ...] = ()
    issuer: str = ""
    begins: datetime | None = None
    ends: datetime | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing has to be done."""
        return self.state == "ok"

    def document(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "use": self.source.use,
            "path": self.source.path,
            "rotation": self.source.rotation,
            "state": self.state,
            "subject": self.subject,
            "names": list(self.names),
            "issuer": self.issuer,
            "notBefore": self.begins.isoformat() if self.begins else None,
            "notAfter": self.ends.isoformat() if self.ends else None,
        }


def run_certs(selection: NodeSelection, output: Output, warn_seconds: float) -> int:
    """Print the certificates; return the exit code."""

    def work() -> int:
        info, now = select_node(selection).info, datetime.now(UTC)
        found = [one for source in sources(info) for one in read(source, now, warn_seconds)]
        wide = output is Output.WIDE
        print_listing(
            output,
            document=lambda: {"certificates": [one.document() for one in found]},
            names=(one.source.path for one in found),
            heading=WIDE_HEADING if wide else HEADING,
            rows=[_row(one, now, wide) for one in found],
            empty="No certificates: the node serves no API and has no API server.",
        )
        bad = [one for one in found if not one.is_good]
        if bad:
            print(f"{PROGRAM}: {len(bad)} of {len(found)} need attention", file=sys.stderr)
        return EXIT_FINDING if bad else 0

    return run_command(PROGRAM, work, OSError)


def sources(info: NodeInfo) -> Iterator[Source]:
    """Yield the files that the kubelet's settings name and that exist, and those in its kubeconfig."""
    pki = Path(info.cert_dir)
    by_admin = "administrator"
    if info.tls_cert_file:
        yield Source("serving", info.tls_cert_file, by_admin)
    for use, path, rotation in (
        ("serving", pki / "kubelet-server-current.pem", "kubelet"),
        ("serving", pki / "kubelet.crt", "kubelet at its start"),
        ("client", pki / "kubelet-client-current.pem", "kubelet"),
    ):
        if path.exists() or path.is_symlink():
            yield Source(use, str(path), rotation)
    if info.client_ca_file:
        yield Source("client CA", info.client_ca_file, by_admin)
    for file in dict.fromkeys((info.kubeconfig, info.bootstrap_kubeconfig)):
        if file and Path(file).exists():
            yield from _of_kubeconfig(Path(file), pki)


def read(source: Source, now: datetime, warn_seconds: float) -> list[NodeCertificate]:
    """Return the certificates of a file; one with an error if it has none."""
    # Imported here: it takes 10 MB of memory, and only this command needs it.
    from cryptography import x509

    try:
        data = source.data if source.data is not None else _read_file(Path(source.path))
        loaded = x509.load_pem_x509_certificates(data)[:MAX_CERTIFICATES]
    except OSError as err:
        return [NodeCertificate(source, f"cannot be read: {err.strerror or err}")]
    except ValueError:
        return [NodeCertificate(source, "contains no certificate")]
    found = [_described(source, one, now, warn_seconds) for one in loaded]
    # The leaf is the first one of a pair; issuers behind it are not the kubelet's.
    return found if "CA" in source.use else found[:1]


def _described(
    source: Source, certificate: x509.Certificate, now: datetime, warn_seconds: float
) -> NodeCertificate:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        texts = tuple(str(name.value) for name in names)
        subject, issuer = certificate.subject.rfc4514_string(), certificate.issuer.rfc4514_string()
    except x509.ExtensionNotFound:
        texts = ()
        subject, issuer = certificate.subject.rfc4514_string(), certificate.issuer.rfc4514_string()
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as err:
        return NodeCertificate(source, f"damaged: {err}")
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    state = lifetime_state(begins, ends, now, warn_seconds, rotated=source.rotation in _BY_KUBELET)
    return NodeCertificate(source, state, subject, texts, issuer, begins, ends)


def lifetime_state(
    begins: datetime, ends: datetime, now: datetime, warn_seconds: float, *, rotated: bool
) -> str:
    """Return the state of a certificate by its lifetime."""
    if now >= ends:
        return "expired"
    if now < begins:
        return "not valid yet"
    margin = (ends - begins) * _OVERDUE if rotated else timedelta(seconds=warn_seconds)
    return "expires soon" if ends - now < margin else "ok"


def _of_kubeconfig(path: Path, pki: Path) -> Iterator[Source]:
    try:
        config = load_kubeconfig(path)
    except KubeconfigError as err:
        yield Source("kubeconfig", str(path), f"unreadable: {err}", b"")
        return
    for use, value in (("client", config.certificate), ("API server CA", config.ca)):
        if isinstance(value, bytes):
            yield Source(use, f"{path} (embedded)", "administrator", value)
        elif value is not None and value.parent != pki:
            yield Source(use, str(value), "administrator")


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES)


def _row(one: NodeCertificate, now: datetime, wide: bool) -> tuple[str, ...]:
    left = format_duration((one.ends - now).total_seconds()) if one.ends and one.ends > now else "-"
    row = (one.source.use, left, one.state, one.source.rotation, one.subject or "-", one.source.path)
    if not wide:
        return row
    moments = (f"{moment:%Y-%m-%d %H:%M}" if moment else "-" for moment in (one.begins, one.ends))
    return (*row, ", ".join(one.names) or "-", one.issuer or "-", *moments)

"""Certificates for the tests, made by the real `openssl`: an authority, and what it signs."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

NAMES = "IP:127.0.0.1,DNS:localhost,DNS:api.test"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path

    @property
    def pem(self) -> bytes:
        return self.certificate.read_bytes() + self.key.read_bytes()


class Authority:
    """Signs certificates; everything is in one directory."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._count = 0
        self.certificate = self._folder / "ca.crt"
        self._key = self._folder / "ca.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", self._key, "-out", self.certificate, "-days", "1", "-subj", f"/CN={name}"),
        )
        (self._folder / "index.txt").touch()
        (self._folder / "serial").write_text("01")
        self._config = self._folder / "ca.cnf"
        self._config.write_text(
            f"[ca]\ndefault_ca=x\n[x]\ndir={self._folder}\nnew_certs_dir={self._folder}\n"
            f"database={self._folder}/index.txt\nserial={self._folder}/serial\n"
            f"certificate={self.certificate}\nprivate_key={self._key}\ndefault_md=sha256\n"
            "policy=any\nunique_subject=no\ncopy_extensions=copy\n"
            "[any]\ncommonName=supplied\norganizationName=optional\n"
        )

    def sign(self, subject: str, names: str = "", *, begins: float = -3600, ends: float = 3600) -> Pair:
        """Sign a new certificate; its life begins and ends so many seconds from now."""
        self._count += 1
        pair = Pair(self._folder / f"{self._count}.crt", self._folder / f"{self._count}.key")
        request = self._folder / f"{self._count}.csr"
        extension = ("-addext", f"subjectAltName={names}") if names else ()
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", pair.key, "-out", request, "-subj", subject, *extension),
        )
        _openssl(
            *("ca", "-batch", "-config", self._config, "-in", request, "-out", pair.certificate, "-notext"),
            *("-startdate", _date(begins), "-enddate", _date(ends)),
        )
        return pair

    def sign_request(self, pem: bytes, *, begins: float = -300, ends: float = 3600) -> bytes:
        """Sign somebody's request and return the certificate in PEM."""
        self._count += 1
        request = self._folder / f"{self._count}.csr"
        request.write_bytes(pem)
        certificate = self._folder / f"{self._count}.crt"
        _openssl(
            *("ca", "-batch", "-config", self._config, "-in", request, "-out", certificate, "-notext"),
            *("-preserveDN", "-startdate", _date(begins), "-enddate", _date(ends)),
        )
        return certificate.read_bytes()


def encrypt(key: Path, to: Path) -> Path:
    """Write a key again, protected by a password."""
    _openssl("ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", to)
    return to


def _date(offset: float) -> str:
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + offset))


def _openssl(*args: str | Path) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, timeout=30)

"""A node's first certificate: from bootstrap credentials to a kubeconfig of its own.

With `--bootstrap-kubeconfig`, a kubeconfig that does not exist, or whose certificate has expired, is
replaced by one that refers to `kubelet-client-current.pem` in the certificate folder; the certificate
is requested with the bootstrap credentials. A kubeconfig that is still good is left alone.

Everything can be interrupted anywhere. The key is kept in `kubelet-client.key.tmp` while its request
is pending, and the request's name is derived from it: the next start goes on waiting for the same one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from pykubelet.api.csr import CLIENT_SIGNER
from pykubelet.kube.access import Access
from pykubelet.kube.certificate_making import MakingError, draft_request
from pykubelet.kube.certificate_store import (
    CertificateStore,
    StoredPair,
    StoreError,
    UnfitPair,
    utc_now,
    write_file,
)
from pykubelet.kube.certificates import Subject, certificates, lifetime
from pykubelet.kube.client import ApiClient
from pykubelet.kube.clients import Limits
from pykubelet.kube.csr import RequestRefused, request_certificate, request_name, usages
from pykubelet.kube.errors import KubeconfigError, KubeError
from pykubelet.kube.retrying import Complaints, Pauses
from pykubelet.kube.tls import check_identity
from pykubelet.kube.transport import Transport
from pykubelet.logs import get_logger

log = get_logger(__name__)

CLIENT_PREFIX = "kubelet-client"
WAIT_SECONDS = 3600.0
_PENDING_KEY = "kubelet-client.key.tmp"

Load = Callable[[Path], Access]
Clock = Callable[[], datetime]


def node_subject(node_name: str) -> Subject:
    """Whom a node's client certificate is for."""
    return Subject(f"system:node:{node_name}", ("system:nodes",))


def kubeconfig_problem(path: Path, load: Load, now: datetime) -> str | None:
    """Say why a kubeconfig's certificate cannot be used; None when it can, and a bootstrap is not needed.

    A kubeconfig without a certificate counts as unusable, as with the reference: beside bootstrap
    credentials it is the bootstrap's to write.
    """
    if not path.exists():
        return "it does not exist"
    try:
        access = load(path)
        if access.certificate is None or access.key is None:
            return "it has no client certificate"
        certificate = material(access.certificate)
        check_identity(certificate + b"\n" + material(access.key))
        lives = [lifetime(der) for der in certificates(certificate)]
    except (KubeconfigError, ValueError) as err:
        return str(err)
    except OSError as err:
        return f"{err.filename} cannot be read: {err.strerror}"
    expired = [life.ends for life in lives if now > life.ends]
    return f"its client certificate expired at {expired[0]:%Y-%m-%dT%H:%M:%SZ}" if expired else None


async def ensure_client_config(
    kubeconfig: Path,
    bootstrap: Path | None,
    cert_dir: Path,
    node_name: str,
    load: Load,
    *,
    clock: Clock = utc_now,
) -> Access:
    """Give the access to use, after a bootstrap if that is needed, however long it takes.

    Raises KubeconfigError when a file that must be there cannot be used; everything else is tried
    again, and said. This is for agents that do not renew their certificate; others start at once and
    get their first one on the way (`rotation_client.py`).
    """
    if bootstrap is None:
        return load(kubeconfig)
    problem = kubeconfig_problem(kubeconfig, load, clock())
    if problem is None:
        log.v(2).info("Kubeconfig exists and is valid, skipping bootstrap", path=str(kubeconfig))
        return load(kubeconfig)
    log.info("Requesting a client certificate with the bootstrap credentials", kubeconfig=problem)
    store = CertificateStore(cert_dir, CLIENT_PREFIX, clock)
    load(bootstrap)
    pauses = Pauses(first=1.0, limit=16.0)
    complaints = Complaints(log, "Failed to get a client certificate", bootstrap=str(bootstrap))
    loop = asyncio.get_running_loop()
    while True:
        try:
            store.recover()
            if not is_good(store.current(), node_subject(node_name), clock()):
                await first_certificate(load(bootstrap), store, cert_dir, node_name, clock=clock)
            write_kubeconfig(kubeconfig, load(bootstrap), store.current_path)
        except (KubeError, MakingError, StoreError, OSError) as err:
            complaints.failed(err, loop.time())
            await asyncio.sleep(pauses.next(loop.time()))
        else:
            complaints.succeeded(loop.time())
            return load(kubeconfig)


async def first_certificate(
    access: Access, store: CertificateStore, cert_dir: Path, node_name: str, *, clock: Clock = utc_now
) -> StoredPair:
    """Request a client certificate in the name of `access` and store it.

    Raises KubeError, MakingError, StoreError or OSError; what was begun is then gone on with by the
    next call, or begun anew when the request was refused.
    """
    pending = cert_dir / _PENDING_KEY
    try:
        known = pending.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    draft = await draft_request(node_subject(node_name), known)
    if draft.key != known:
        write_file(pending, draft.key.encode(), 0o600)
    name = request_name(draft, usages(CLIENT_SIGNER, draft.rsa))
    try:
        async with Transport(access) as transport:
            client = ApiClient(transport, Limits(0, 0).bucket())
            certificate = await request_certificate(
                client, draft, CLIENT_SIGNER, clock(), seconds=WAIT_SECONDS, name=name
            )
        pair = store.update(certificate, draft.key.encode())
    except (RequestRefused, UnfitPair):
        # Another key makes another request; this one leads nowhere.
        pending.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        pending.unlink(missing_ok=True)
    log.info("Got a client certificate", path=str(store.current_path), expires=pair.life.ends.isoformat())
    return pair


def is_good(pair: StoredPair | None, subject: Subject, now: datetime) -> bool:
    """Whether a stored pair is valid now and for the right name."""
    return pair is not None and not pair.expired(now) and pair.subject.covers(subject)


def write_kubeconfig(path: Path, access: Access, pair: Path) -> None:
    """Write a kubeconfig for the server of `access` that refers to a file with certificate and key."""
    cluster: dict[str, Any] = {"server": access.server}
    if isinstance(access.ca, Path):
        cluster["certificate-authority"] = str(access.ca.absolute())
    elif access.ca:
        cluster["certificate-authority-data"] = base64.b64encode(access.ca).decode()
    # Beyond the reference, which forgets how the server is reached.
    extra = {
        "insecure-skip-tls-verify": access.insecure,
        "tls-server-name": access.tls_server_name,
        "proxy-url": access.proxy,
        "disable-compression": not access.compression,
    }
    cluster |= {name: value for name, value in extra.items() if value}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "default-cluster", "cluster": cluster}],
        "contexts": [
            {
                "name": "default-context",
                "context": {"cluster": "default-cluster", "namespace": "default", "user": "default-auth"},
            }
        ],
        "current-context": "default-context",
        "users": [
            {"name": "default-auth", "user": {"client-certificate": str(pair), "client-key": str(pair)}}
        ],
    }
    write_file(path, yaml.safe_dump(document).encode(), 0o600)


def with_certificate(access: Access, pair: Path) -> Access:
    """Give the access to the same server with this certificate and nothing else to identify with."""
    return dataclasses.replace(
        access,
        certificate=pair,
        key=pair,
        token="",
        token_file=None,
        username="",
        password="",
        impersonate=None,
        plugin=None,
    )


def material(part: bytes | Path) -> bytes:
    """Give what a kubeconfig holds or refers to; raises OSError."""
    return part.read_bytes() if isinstance(part, Path) else part

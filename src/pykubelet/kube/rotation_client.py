"""The node's client certificate while the agent renews it itself (`rotateCertificates`).

The agent does not wait for its first certificate: static pods run, and requests to the API server fail
until the certificate is there. It is then renewed in its own name; once it has expired, or before there
is one, in the name of the bootstrap credentials, else of whatever the kubeconfig holds by now.

    rotation = ClientCertificateRotation(kubeconfig, bootstrap, cert_dir, node_name, load_kubeconfig)
    transport = Transport(rotation.prepare())
    scope.start(rotation.run(), name="client certificate")
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pykubelet.api.csr import CLIENT_SIGNER
from pykubelet.kube.access import Access
from pykubelet.kube.bootstrap import (
    CLIENT_PREFIX,
    Clock,
    Load,
    first_certificate,
    kubeconfig_problem,
    material,
    node_subject,
    with_certificate,
    write_kubeconfig,
)
from pykubelet.kube.certificate_making import draft_request
from pykubelet.kube.certificate_metrics import CertificateMetrics
from pykubelet.kube.certificate_store import CertificateStore, StoredPair, StoreError, utc_now
from pykubelet.kube.certificates import Subject
from pykubelet.kube.client import ApiClient
from pykubelet.kube.clients import Limits
from pykubelet.kube.csr import request_certificate
from pykubelet.kube.errors import KubeconfigError
from pykubelet.kube.rotation import Rotation
from pykubelet.kube.transport import Transport
from pykubelet.logs import get_logger

log = get_logger(__name__)

WAIT_SECONDS = 900.0
"""A request that nobody decides about is made anew after this time."""


class ClientCertificateRotation:
    """Gets and renews the certificate by which the node is known to the API server."""

    def __init__(
        self,
        kubeconfig: Path,
        bootstrap: Path | None,
        cert_dir: Path,
        node_name: str,
        load: Load,
        *,
        metrics: CertificateMetrics | None = None,
        clock: Clock = utc_now,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._bootstrap = bootstrap
        self._cert_dir = cert_dir
        self._node_name = node_name
        self._load = load
        self._metrics = metrics
        self._clock = clock
        self._chance = chance
        self._store = CertificateStore(cert_dir, CLIENT_PREFIX, clock)
        self._at_once = False

    def prepare(self) -> Access:
        """Bring kubeconfig and certificate folder in order and give the access to use from now on.

        Raises KubeconfigError when a file that must be there cannot be used.
        """
        try:
            self._store.recover()
            if self._bootstrap is not None:
                self._point_to_store(self._bootstrap)
            access = self._load(self._kubeconfig)
            self._adopt(access)
        except OSError as err:
            raise KubeconfigError(f"{err.filename} cannot be written: {err.strerror}") from None
        return with_certificate(access, self._store.current_path)

    async def run(self) -> NoReturn:
        """Renew the certificate until cancelled."""
        subject = node_subject(self._node_name)
        rotation = Rotation(
            "client",
            self._store.current,
            lambda: subject,
            self._obtain,
            metrics=self._metrics,
            clock=self._clock,
            chance=self._chance,
        )
        await rotation.run(at_once=self._at_once)

    def _point_to_store(self, bootstrap: Path) -> None:
        problem = kubeconfig_problem(self._kubeconfig, self._load, self._clock())
        if problem is not None:
            access = self._load(bootstrap)
            write_kubeconfig(self._kubeconfig, access, self._store.current_path)
            log.info("Bootstrapping in the background", kubeconfig=problem)

    def _adopt(self, access: Access) -> None:
        """Begin with the kubeconfig's own certificate when there is none of ours.

        One that is written in the kubeconfig itself may have more rights than a node should: it is
        replaced at once.
        """
        current = self._store.current()
        if current is not None and not current.expired(self._clock()):
            return
        if access.certificate is None or access.key is None or access.certificate == self._store.current_path:
            return
        try:
            pair = self._store.update(material(access.certificate), material(access.key))
        except (OSError, StoreError) as err:
            log.error(err, "Failed to use the kubeconfig's certificate", path=str(self._kubeconfig))
            return
        self._at_once = isinstance(access.certificate, bytes)
        log.info("Using the kubeconfig's certificate", expires=pair.life.ends.isoformat())

    async def _obtain(self, subject: Subject) -> StoredPair:
        current = self._store.current()
        if current is None or current.expired(self._clock()):
            requester = self._requester()
            return await first_certificate(
                requester, self._store, self._cert_dir, self._node_name, clock=self._clock
            )
        draft = await draft_request(subject)
        access = with_certificate(self._load(self._kubeconfig), self._store.current_path)
        async with Transport(access) as transport:
            client = ApiClient(transport, Limits(0, 0).bucket())
            certificate = await request_certificate(
                client, draft, CLIENT_SIGNER, self._clock(), seconds=WAIT_SECONDS
            )
        return self._store.update(certificate, draft.key.encode())

    def _requester(self) -> Access:
        if self._bootstrap is not None and self._bootstrap.exists():
            return self._load(self._bootstrap)
        return self._load(self._kubeconfig)

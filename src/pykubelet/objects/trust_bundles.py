"""Root certificates that the cluster gives out to pods: ClusterTrustBundles.

The API has them in one of several versions, or not at all; which, is found out when the first pod
wants some. Certificates are given once each, in an order that does not change by itself, so that a
file that holds them changes only when they do.
"""

from __future__ import annotations

import base64
import binascii
import re
import ssl
from collections.abc import Callable, Iterable

from pykubelet.api.core import ClusterTrustBundle
from pykubelet.api.selector import LabelSelector
from pykubelet.apiserver.client import ApiClient, Resource
from pykubelet.apiserver.errors import KubeError, NotFound
from pykubelet.apiserver.reflector import StoreDelta
from pykubelet.logs import get_logger
from pykubelet.objects.base import ObjectError, ObjectNotFound, err_text
from pykubelet.objects.watch_based import LazyInformer
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
VERSIONS = ("v1", "v1beta1", "v1alpha1")
SYNC_SECONDS = 10.0
_GROUP = "certificates.k8s.io"
_BLOCK = re.compile(r"-----BEGIN ([^-\n]++)-----\s([A-Za-z0-9+/=\s]*+)-----END \1-----")
"""A PEM block; takes linear time, because neither of its parts contains a dash."""


class TrustBundles:
    """The cluster's bundles; `on_change` hears when any of them has changed."""

    def __init__(self, client: ApiClient, scope: TaskScope, on_change: Callable[[], None]) -> None:
        self._client = client
        self._scope = scope
        self._on_change = on_change
        self._copy: LazyInformer[ClusterTrustBundle] | None = None

    async def by_name(self, name: str) -> str:
        """Give one bundle; raises ObjectError, ObjectMissing when there is none."""
        for bundle in await self._bundles():
            if bundle.metadata.name == name:
                return normalized([bundle.spec.trust_bundle])
        raise ObjectNotFound(
            f'while getting ClusterTrustBundle: clustertrustbundle.{_GROUP} "{name}" not found'
        )

    async def by_signer(self, signer: str, selector: LabelSelector | None) -> str:
        """Give all bundles of a signer that the selector chooses; raises ObjectError, ObjectMissing."""
        bundles = await self._bundles()
        try:
            chosen = [
                bundle.spec.trust_bundle
                for bundle in bundles
                if bundle.spec.signer_name == signer
                and selector is not None
                and selector.fits(bundle.metadata.labels)
            ]
        except ValueError as err:
            raise ObjectError(f"while parsing label selector: {err}") from None
        if not chosen:
            raise ObjectNotFound(
                "combination of signerName and labelSelector matched zero ClusterTrustBundles"
            )
        return normalized(chosen)

    async def _bundles(self) -> Iterable[ClusterTrustBundle]:
        if self._copy is None:
            resource = await self._resource()
            if self._copy is None:  # Somebody else may have been faster.
                self._copy = LazyInformer(self._client, resource, self._scope, self._heard)
        try:
            return (await self._copy.objects(SYNC_SECONDS)).values()
        except TimeoutError:
            raise ObjectError("ClusterTrustBundle informer has not yet synced") from None

    async def _resource(self) -> Resource[ClusterTrustBundle]:
        """Find the newest version that the API server has."""
        for version in VERSIONS:
            resource = Resource(
                ClusterTrustBundle, "ClusterTrustBundle", "clustertrustbundles", _GROUP, version, False
            )
            try:
                await self._client.list_page(resource, "", (("limit", "1"), ("resourceVersion", "0")))
            except NotFound:
                continue
            except KubeError as err:
                raise ObjectError(
                    f"failed to ensure informer manager for ClusterTrustBundles: {err_text(err)}"
                ) from err
            log.info("Mirroring ClusterTrustBundles", version=resource.api_version)
            return resource
        raise ObjectError(f"the API server has no ClusterTrustBundles: enable them in {_GROUP}")

    async def _heard(self, update: StoreDelta[ClusterTrustBundle]) -> None:
        self._on_change()


def normalized(bundles: Iterable[str]) -> str:
    """Give the certificates of some PEM texts, each once and without anything else."""
    found = set()
    for bundle in bundles:
        for block in _BLOCK.finditer(bundle):
            try:
                found.add(base64.b64decode("".join(block[2].split()), validate=True))
            except binascii.Error:
                continue
    return "".join(map(ssl.DER_cert_to_PEM_cert, sorted(found)))

"""ClusterTrustBundles: root certificates that the cluster distributes to pods.

The API serves them in one of several versions, or not at all; the version is detected at the first request.
Certificates are deduplicated and sorted, so that a projected file changes only when its certificates do.
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
from pykubelet.objects.base import ObjectError, ObjectNotFound
from pykubelet.objects.fetch import err_text
from pykubelet.objects.watch_based import LazyInformer
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
VERSIONS = ("v1", "v1beta1", "v1alpha1")
SYNC_SECONDS = 10.0
_GROUP = "certificates.k8s.io"
_BLOCK = re.compile(r"-----BEGIN ([^-\n]++)-----\s([A-Za-z0-9+/=\s]*+)-----END \1-----")
"""A PEM block; takes linear time, because neither of its parts contains a dash."""


class TrustBundles:
    """Informer of the ClusterTrustBundles; `on_change` is called after any change."""

    def __init__(self, client: ApiClient, scope: TaskScope, on_change: Callable[[], None]) -> None:
        self._client = client
        self._scope = scope
        self._on_change = on_change
        self._informer: LazyInformer[ClusterTrustBundle] | None = None

    async def by_name(self, name: str) -> str:
        """Return one bundle. Raises ObjectError, ObjectNotFound if it does not exist."""
        for bundle in await self._bundles():
            if bundle.metadata.name == name:
                return normalized([bundle.spec.trust_bundle])
        raise ObjectNotFound(
            f'while getting ClusterTrustBundle: clustertrustbundle.{_GROUP} "{name}" not found'
        )

    async def by_signer(self, signer: str, selector: LabelSelector | None) -> str:
        """Return all bundles of a signer that match the selector. Raises ObjectError, ObjectNotFound."""
        bundles = await self._bundles()
        try:
            selected = [
                bundle.spec.trust_bundle
                for bundle in bundles
                if bundle.spec.signer_name == signer
                and selector is not None
                and selector.fits(bundle.metadata.labels)
            ]
        except ValueError as err:
            raise ObjectError(f"while parsing label selector: {err}") from None
        if not selected:
            raise ObjectNotFound(
                "combination of signerName and labelSelector matched zero ClusterTrustBundles"
            )
        return normalized(selected)

    async def _bundles(self) -> Iterable[ClusterTrustBundle]:
        if self._informer is None:
            resource = await self._resource()
            if self._informer is None:  # A concurrent caller may have created it.
                self._informer = LazyInformer(self._client, resource, self._scope, self._on_update)
        try:
            return (await self._informer.objects(SYNC_SECONDS)).values()
        except TimeoutError:
            raise ObjectError("ClusterTrustBundle informer has not yet synced") from None

    async def _resource(self) -> Resource[ClusterTrustBundle]:
        """Return the resource in the newest version that the API server serves. Raises ObjectError."""
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
            log.info("Watching ClusterTrustBundles", version=resource.api_version)
            return resource
        raise ObjectError(f"the API server has no ClusterTrustBundles: enable them in {_GROUP}")

    async def _on_update(self, update: StoreDelta[ClusterTrustBundle]) -> None:
        self._on_change()


def normalized(bundles: Iterable[str]) -> str:
    """Return the certificates of PEM texts, deduplicated and without other content."""
    found = set()
    for bundle in bundles:
        for block in _BLOCK.finditer(bundle):
            try:
                found.add(base64.b64decode("".join(block[2].split()), validate=True))
            except binascii.Error:
                continue
    return "".join(map(ssl.DER_cert_to_PEM_cert, sorted(found)))

"""Interface through which pods access API objects, and its errors.

Volumes, environment variables and image pulls use `PodObjects`, independent of its implementation
(`cluster_objects.py`, or `NoObjects` without an API server).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NoReturn, Protocol

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import ObjectStruct
from pykubelet.api.pod import Pod
from pykubelet.api.selector import LabelSelector
from pykubelet.api.volume import PodCertificateProjection

RecordPodEvent = Callable[[Pod, Literal["Normal", "Warning"], str, str], None]
"""Records an event about a pod: its type, reason and message."""


class ObjectError(Exception):
    """An object is currently not available; the text is for users."""


class ObjectNotFound(ObjectError):
    """The object does not exist; callers for which it is optional continue."""


class CertificateRefused(ObjectError):
    """The signer denied or failed a pod's certificate request, which is final."""


class CredentialBundle(ObjectStruct):
    """A private key and its certificate chain, both PEM; the repr hides them."""

    private_key: str
    certificate_chain: str

    def __repr__(self) -> str:
        return "CredentialBundle(…)"


class PodObjects(Protocol):
    """Secrets, configMaps, tokens, certificates and trust bundles that pods on this node may use.

    A pod is registered while it may need objects; the objects that it refers to are cached for that long.
    Unregistered pods are served too, with one API request each time.
    """

    def register(self, pod: Pod) -> None:
        """Cache the objects of a pod from now on; a new version of the pod replaces the old one."""

    def unregister(self, uid: str) -> None:
        """Release the objects of a pod; a pod that is not registered is ignored."""

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Return a configMap of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Return a secret of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Return a token of the pod's service account, bound to the pod. Raises ObjectError.

        An empty `audience` means the API server; `seconds` is the requested lifetime. The same token is
        returned until its renewal is due, so callers request it for every use.
        """

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Return root certificates as PEM without duplicates: one bundle by name, or those of a signer.

        Without a selector no bundle of the signer matches, with an empty one all do. Raises ObjectError,
        ObjectNotFound if no bundle matches.
        """

    async def pod_certificate(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection
    ) -> CredentialBundle:
        """Return the key and certificate of a source of a projected volume, by its index. Raises ObjectError.

        The same ones are returned until their refresh, so callers request them for every use.
        """

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Add a listener, called with the UID of a pod when an object it uses changed; it must not block."""


class NoObjects:
    """PodObjects of a node without an API server: every request fails."""

    def register(self, pod: Pod) -> None:
        """Do nothing: there is no cache."""

    def unregister(self, uid: str) -> None:
        """Do nothing."""

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Raise ObjectError."""
        self._raise_unavailable(f"configMap {pod.metadata.namespace}/{name}")

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Raise ObjectError."""
        self._raise_unavailable(f"secret {pod.metadata.namespace}/{name}")

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Raise ObjectError."""
        self._raise_unavailable(
            f"a token of service account {pod.metadata.namespace}/{pod.spec.service_account_name}"
        )

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Raise ObjectError."""
        self._raise_unavailable(f"clusterTrustBundle {name or signer}")

    async def pod_certificate(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection
    ) -> CredentialBundle:
        """Raise ObjectError."""
        self._raise_unavailable(f"a certificate of {source.signer_name} for volume {volume}")

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Do nothing: no object ever changes."""

    def _raise_unavailable(self, what: str) -> NoReturn:
        raise ObjectError(f"couldn't get {what}: this node has no API server to ask")

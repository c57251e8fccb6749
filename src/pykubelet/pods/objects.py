"""What pods need from the API server, as those who need it see it: secrets, configMaps, tokens.

Volumes, environments and pulls ask through `PodObjects` and need not know how the objects are had
(`cluster_objects.py`), nor whether there is an API server at all (`NoObjects`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.pod import Pod
from pykubelet.api.selector import LabelSelector


class ObjectError(Exception):
    """An object cannot be had now; the text is for people."""


class ObjectMissing(ObjectError):
    """An object certainly does not exist; whoever calls it optional goes on."""


class PodObjects(Protocol):
    """Secrets, configMaps, tokens and trust bundles that pods on this node may use.

    A pod is registered for as long as it may need something: what it refers to is kept at hand for
    that long. Whoever is not registered can still ask; it takes a request each time.
    """

    def register(self, pod: Pod) -> None:
        """Keep what a pod refers to from now on; a new version of the pod replaces the old one."""

    def unregister(self, uid: str) -> None:
        """Let go of what a pod needed; one that is not registered is none of our business."""

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Give a configMap of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Give a secret of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Give a token of the pod's service account, bound to the pod; raises ObjectError.

        An empty `audience` is the API server itself; `seconds` is the life that is asked for. The
        same is given until a new one is due, so ask again every time.
        """

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Give root certificates as PEM, each once: one bundle by name, or those of a signer.

        No selector chooses none of the signer's bundles, an empty one all. Raises ObjectError,
        ObjectMissing when there is nothing to give.
        """

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a pod's uid when something that it uses has changed; it must not block."""


class NoObjects:
    """The objects of a node without an API server: there are none."""

    def register(self, pod: Pod) -> None:
        """Take no note: nothing is kept."""

    def unregister(self, uid: str) -> None:
        """Take no note."""

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Raise ObjectError."""
        self._refuse(f"configMap {pod.metadata.namespace}/{name}")

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Raise ObjectError."""
        self._refuse(f"secret {pod.metadata.namespace}/{name}")

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Raise ObjectError."""
        self._refuse(f"a token of service account {pod.metadata.namespace}/{pod.spec.service_account_name}")

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Raise ObjectError."""
        self._refuse(f"clusterTrustBundle {name or signer}")

    def listen(self, listener: Callable[[str], None]) -> None:
        """Take no note: nothing ever changes."""

    def _refuse(self, what: str) -> NoReturn:
        raise ObjectError(f"couldn't get {what}: this node has no API server to ask")

"""PodObjects of a cluster node, by the configured change detection strategy.

`configMapAndSecretChangeDetectionStrategy` selects how configMaps and secrets are obtained: `Watch` each
object (`watch_based.py`), `Cache` them with a TTL, or `Get` them every time (`cache_based.py`).
`ClusterObjects` records which pod refers to which object, so that pods share one copy and a change is
reported to exactly the pods that use the object. All state is in memory; pods register again after a
restart.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn

from pykubelet.api.core import ConfigMap, Secret, ServiceAccount
from pykubelet.api.pod import Pod
from pykubelet.api.selector import LabelSelector
from pykubelet.api.volume import PodCertificateProjection
from pykubelet.apiserver.client import CONFIG_MAPS, SECRETS, SERVICE_ACCOUNTS, ApiClient, Resource
from pykubelet.apiserver.reflector import Key
from pykubelet.objects.base import CredentialBundle, ObjectError, RecordPodEvent
from pykubelet.objects.cache_based import CacheBasedObjects, UncachedObjects
from pykubelet.objects.fetch import L, ObjectStore, fetch
from pykubelet.objects.pod_certificates import PodCertificates
from pykubelet.objects.references import config_map_names, secret_names, uses_trust_bundles
from pykubelet.objects.tokens import TokenCache
from pykubelet.objects.trust_bundles import TrustBundles
from pykubelet.objects.watch_based import WatchBasedObjects
from pykubelet.util.tasks import TaskScope

TTL_ANNOTATION = "node.alpha.kubernetes.io/ttl"
CLEANUP_SECONDS = 60.0
_Used = tuple[Literal["ConfigMap", "Secret"], Key]


def object_ttl(annotations: Mapping[str, str]) -> float | None:
    """Return the cache TTL in seconds of the node's annotations; None for the default."""
    try:
        return float(int(annotations.get(TTL_ANNOTATION, "")))
    except ValueError:
        return None


class ClusterObjects:
    """PodObjects of a cluster node.

    `strategy` is Watch, Cache or Get; `ttl` returns the seconds for Cache, None for the default; a watch ends
    after `idle_seconds` without a request for its object; `clock` returns Unix time in seconds. `node`: name
    and, from a function, uid of this node, to request pod certificates; None if they are not enabled.
    """

    def __init__(
        self,
        client: ApiClient,
        scope: TaskScope,
        *,
        strategy: str = "Watch",
        ttl: Callable[[], float | None] = lambda: None,
        idle_seconds: float = 300.0,
        node: tuple[str, Callable[[], str]] | None = None,
        trust_bundles: bool = True,
        clock: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._tokens = TokenCache(client, clock=clock, rng=rng)
        self._bundles = TrustBundles(client, scope, self._bundles_changed)
        self._serves_trust_bundles = trust_bundles
        self._bundle_users: set[str] = set()
        self._uses: dict[str, set[_Used]] = {}
        self._users: dict[_Used, set[str]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._event_listeners: list[RecordPodEvent] = []
        self.certificates: PodCertificates | None = None
        if node is not None:
            self.certificates = PodCertificates(
                client,
                scope,
                *node,
                lambda uid: self._notify({uid}),
                record_event=self._record_event,
                clock=clock,
                rng=rng,
            )

        def store(resource: Resource[L], on_change: Callable[[Key], None]) -> ObjectStore[L]:
            if strategy == "Cache":
                return CacheBasedObjects(client, resource, ttl, on_change)
            if strategy == "Get":
                return UncachedObjects(client, resource)
            return WatchBasedObjects(client, resource, scope, on_change, idle_seconds=idle_seconds)

        self._config_maps = store(CONFIG_MAPS, lambda key: self._changed(("ConfigMap", key)))
        self._secrets = store(SECRETS, lambda key: self._changed(("Secret", key)))
        scope.start(self._clean_up(), name="objects of pods")

    def set_idle_seconds(self, seconds: float) -> None:
        """Change the seconds without a request after which a watch ends."""
        for store in (self._config_maps, self._secrets):
            if isinstance(store, WatchBasedObjects):
                store.set_idle_seconds(seconds)

    def register(self, pod: Pod) -> None:
        """Cache the objects of a pod from now on; a new version of the pod replaces the old one."""
        namespace, uid = pod.metadata.namespace, pod.uid
        used: set[_Used] = {("ConfigMap", (namespace, name)) for name in config_map_names(pod)}
        used |= {("Secret", (namespace, name)) for name in secret_names(pod)}
        update = self._bundle_users.add if uses_trust_bundles(pod) else self._bundle_users.discard
        update(uid)
        before = self._uses.get(uid, set())
        self._uses[uid] = used
        for use in sorted(used - before):
            self._users.setdefault(use, set()).add(uid)
            self._store(use).register(use[1])
        for use in before - used:
            self._remove_user(use, uid)

    def unregister(self, uid: str) -> None:
        """Release the objects and tokens of a pod."""
        for use in self._uses.pop(uid, ()):
            self._remove_user(use, uid)
        self._bundle_users.discard(uid)
        self._tokens.forget(uid)
        if self.certificates is not None:
            self.certificates.forget(uid)

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Return a configMap of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""
        return await self._config_maps.get((pod.metadata.namespace, name))

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Return a secret of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""
        return await self._secrets.get((pod.metadata.namespace, name))

    async def token(self, pod: Pod, *, audience: str, seconds: int, account_uid: str = "") -> str:
        """Return a token of the pod's service account, bound to the pod. Raises ObjectError."""
        audiences = (audience,) if audience else ()
        return await self._tokens.get(pod, audiences=audiences, seconds=seconds, account_uid=account_uid)

    async def service_account(self, pod: Pod) -> ServiceAccount:
        """Get the pod's service account from the API server. Raises ObjectError, ObjectNotFound."""
        key = (pod.metadata.namespace, pod.spec.service_account_name)
        return await fetch(self._client, SERVICE_ACCOUNTS, key)

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Return root certificates as PEM: one bundle by name, or those of a signer. Raises ObjectError."""
        if not self._serves_trust_bundles:
            raise ObjectError(
                "clusterTrustBundle requires the feature gate ClusterTrustBundleProjection on this node: "
                "enable it"
            )
        return await (self._bundles.by_name(name) if name else self._bundles.by_signer(signer, selector))

    async def pod_certificate(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection
    ) -> CredentialBundle:
        """Return the key and certificate of a source of a projected volume. Raises ObjectError."""
        if self.certificates is None:
            raise ObjectError(
                "podCertificate requires the feature gate PodCertificateRequest on this node: enable it"
            )
        return await self.certificates.get(pod, volume, index, source)

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Add a listener, called with the UID of a pod when an object it uses changed; it must not block."""
        self._listeners.append(listener)

    def add_event_listener(self, record: RecordPodEvent) -> None:
        """Add a recorder of events about pods."""
        self._event_listeners.append(record)

    def _record_event(self, pod: Pod, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        for record in self._event_listeners:
            record(pod, kind, reason, message)

    def _store(self, use: _Used) -> ObjectStore[ConfigMap] | ObjectStore[Secret]:
        return self._config_maps if use[0] == "ConfigMap" else self._secrets

    def _remove_user(self, use: _Used, uid: str) -> None:
        users = self._users[use]
        users.discard(uid)
        if not users:
            del self._users[use]
            self._store(use).unregister(use[1])

    def _changed(self, use: _Used) -> None:
        self._notify(self._users.get(use, set()))

    def _bundles_changed(self) -> None:
        self._notify(self._bundle_users)

    def _notify(self, uids: set[str]) -> None:
        for uid in sorted(uids):
            for listener in self._listeners:
                listener(uid)

    async def _clean_up(self) -> NoReturn:
        while True:
            await asyncio.sleep(CLEANUP_SECONDS)
            self._tokens.drop_expired()
            if self.certificates is not None:
                self.certificates.notify_due()
            for store in (self._config_maps, self._secrets):
                if isinstance(store, WatchBasedObjects):
                    store.stop_idle()

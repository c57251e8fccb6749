"""What pods need from the API server, had by the strategy that the node's configuration names.

`configMapAndSecretChangeDetectionStrategy` says how configMaps and secrets are had: `Watch` them one
by one (`object_watches.py`), keep them for a while (`Cache`), or `Get` them every time
(`object_cache.py`). Here it is kept which pod refers to which object, so that each is had once for
all pods that share it, and so that a change is told to those whom it concerns.
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
from pykubelet.apiserver.client import CONFIG_MAPS, SECRETS, SERVICE_ACCOUNTS, ApiClient, Resource
from pykubelet.apiserver.reflector import Key
from pykubelet.objects.base import L, ObjectStore, fetch
from pykubelet.objects.cache_based import CacheBasedObjects, UncachedObjects
from pykubelet.objects.references import config_map_names, secret_names, uses_trust_bundles
from pykubelet.objects.tokens import TokenCache
from pykubelet.objects.trust_bundles import TrustBundles
from pykubelet.objects.watch_based import WatchBasedObjects
from pykubelet.util.tasks import TaskScope

TTL_ANNOTATION = "node.alpha.kubernetes.io/ttl"
TIDY_SECONDS = 60.0
_Used = tuple[Literal["ConfigMap", "Secret"], Key]


def object_ttl(annotations: Mapping[str, str]) -> float | None:
    """Give the seconds for which the node's annotations allow objects to be kept; None for the default."""
    try:
        return float(int(annotations.get(TTL_ANNOTATION, "")))
    except ValueError:
        return None


class ClusterObjects:
    """The `PodObjects` of a node of a cluster.

    `strategy` is Watch, Cache or Get; `ttl` gives the seconds for Cache, None for the default;
    a watch ends after `idle_seconds` without a question; `clock` gives seconds since 1970.
    """

    def __init__(
        self,
        client: ApiClient,
        scope: TaskScope,
        *,
        strategy: str = "Watch",
        ttl: Callable[[], float | None] = lambda: None,
        idle_seconds: float = 300.0,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._tokens = TokenCache(client, clock=clock, chance=chance)
        self._bundles = TrustBundles(client, scope, self._bundles_changed)
        self._bundle_users: set[str] = set()
        self._uses: dict[str, set[_Used]] = {}
        self._users: dict[_Used, set[str]] = {}
        self._listeners: list[Callable[[str], None]] = []

        def store(resource: Resource[L], on_change: Callable[[Key], None]) -> ObjectStore[L]:
            if strategy == "Cache":
                return CacheBasedObjects(client, resource, ttl, on_change)
            if strategy == "Get":
                return UncachedObjects(client, resource)
            return WatchBasedObjects(client, resource, scope, on_change, idle_seconds=idle_seconds)

        self._config_maps = store(CONFIG_MAPS, lambda key: self._changed(("ConfigMap", key)))
        self._secrets = store(SECRETS, lambda key: self._changed(("Secret", key)))
        scope.start(self._tidy(), name="objects of pods")

    def register(self, pod: Pod) -> None:
        """Keep what a pod refers to from now on; a new version of the pod replaces the old one."""
        namespace, uid = pod.metadata.namespace, pod.uid
        used: set[_Used] = {("ConfigMap", (namespace, name)) for name in config_map_names(pod)}
        used |= {("Secret", (namespace, name)) for name in secret_names(pod)}
        note = self._bundle_users.add if uses_trust_bundles(pod) else self._bundle_users.discard
        note(uid)
        before = self._uses.get(uid, set())
        self._uses[uid] = used
        for use in sorted(used - before):
            self._users.setdefault(use, set()).add(uid)
            self._store(use).hold(use[1])
        for use in before - used:
            self._leave(use, uid)

    def unregister(self, uid: str) -> None:
        """Let go of what a pod needed, its tokens included."""
        for use in self._uses.pop(uid, ()):
            self._leave(use, uid)
        self._bundle_users.discard(uid)
        self._tokens.forget(uid)

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Give a configMap of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""
        return await self._config_maps.get((pod.metadata.namespace, name))

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Give a secret of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""
        return await self._secrets.get((pod.metadata.namespace, name))

    async def token(self, pod: Pod, *, audience: str, seconds: int, account_uid: str = "") -> str:
        """Give a token of the pod's service account, bound to the pod; raises ObjectError."""
        audiences = (audience,) if audience else ()
        return await self._tokens.get(pod, audiences=audiences, seconds=seconds, account_uid=account_uid)

    async def service_account(self, pod: Pod) -> ServiceAccount:
        """Give the pod's service account as it is now; raises ObjectError, ObjectMissing."""
        key = (pod.metadata.namespace, pod.spec.service_account_name)
        return await fetch(self._client, SERVICE_ACCOUNTS, key)

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Give root certificates as PEM: one bundle by name, or those of a signer; raises ObjectError."""
        return await (self._bundles.by_name(name) if name else self._bundles.by_signer(signer, selector))

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a pod's uid when something that it uses has changed; it must not block."""
        self._listeners.append(listener)

    def _store(self, use: _Used) -> ObjectStore[ConfigMap] | ObjectStore[Secret]:
        return self._config_maps if use[0] == "ConfigMap" else self._secrets

    def _leave(self, use: _Used, uid: str) -> None:
        users = self._users[use]
        users.discard(uid)
        if not users:
            del self._users[use]
            self._store(use).drop(use[1])

    def _changed(self, use: _Used) -> None:
        self._tell(self._users.get(use, set()))

    def _bundles_changed(self) -> None:
        self._tell(self._bundle_users)

    def _tell(self, uids: set[str]) -> None:
        for uid in sorted(uids):
            for listener in self._listeners:
                listener(uid)

    async def _tidy(self) -> NoReturn:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            self._tokens.drop_expired()
            for store in (self._config_maps, self._secrets):
                if isinstance(store, WatchBasedObjects):
                    store.stop_idle()

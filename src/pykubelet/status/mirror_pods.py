"""Mirror pods: representations of static pods in the API server.

A mirror pod shows the status of its static pod to API clients. It is not a source of pods: if it is
deleted, the static pod keeps running and the mirror is created again. A mirror whose manifest changed is
replaced and one whose manifest was removed is deleted, but only after the old pod has terminated: until
then it shows that pod.

`plan` is a pure function that returns the mirrors to create and to delete. `MirrorPods` applies it after
each change and periodically, and retries with back-off while the API server is unreachable. It has no state
on disk; after a restart the mirrors are those of the watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import msgspec

from pykubelet.api.meta import ObjectMeta, OwnerReference
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.client import PODS, Resource
from pykubelet.apiserver.errors import AlreadyExists, Conflict, KubeError, NotFound, Unreachable
from pykubelet.logs import get_logger
from pykubelet.podconfig.mux import PodStore
from pykubelet.podconfig.static_pods import HASH_ANNOTATION, MIRROR_ANNOTATION
from pykubelet.util.backoff import Backoff, ErrorLogLimiter

log = get_logger(__name__)
PERIOD_SECONDS = 10.0
"""Seconds between reconciliations without a change."""
SEEN_SECONDS = 10.0
"""Seconds within which the watch must show a created mirror, before it counts as lost."""
NO_NODE_SECONDS = 1.0
"""Seconds between checks whether the node is registered, since a mirror needs it as its owner."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Static pods to create a mirror for, and mirrors to delete."""

    create: tuple[Pod, ...] = ()
    delete: tuple[Pod, ...] = ()


def plan(static: Iterable[Pod], mirrors: Iterable[Pod], keep: Collection[str] = ()) -> Plan:
    """Return the mirrors to create and to delete.

    `keep` has the names (`namespace/name`) of removed pods that are still terminating: their mirrors stay,
    also if another static pod of that name waits for their end. A mirror that must be replaced is only
    deleted; the next plan creates the new one.
    """
    static_pods = {pod.full_name: pod for pod in static}
    existing = {mirror.full_name: mirror for mirror in mirrors}
    free = {name: mirror for name, mirror in existing.items() if name not in keep}
    wrong = [
        mirror
        for name, mirror in free.items()
        if name in static_pods and not is_current(mirror, static_pods[name])
    ]
    orphans = [mirror for name, mirror in free.items() if name not in static_pods]
    missing = [pod for name, pod in static_pods.items() if name not in existing]
    return Plan(tuple(missing), (*wrong, *orphans))


def is_current(mirror: Pod, static: Pod) -> bool:
    """Return whether a mirror shows this version of the static pod and is not being deleted."""
    meta = mirror.metadata
    shown = meta.annotations.get(MIRROR_ANNOTATION)
    return meta.deletion_timestamp is None and shown == static.metadata.annotations.get(HASH_ANNOTATION)


def mirror_of(static: Pod, node_name: str, node_uid: str) -> Pod:
    """Return the mirror pod to create for a static pod, with the node as its owner."""
    meta = static.metadata
    annotations = {**meta.annotations, MIRROR_ANNOTATION: meta.annotations.get(HASH_ANNOTATION, "")}
    owner = OwnerReference(api_version="v1", kind="Node", name=node_name, uid=node_uid, controller=True)
    return msgspec.structs.replace(
        static,
        metadata=ObjectMeta(
            name=meta.name,
            namespace=meta.namespace,
            labels=meta.labels,
            annotations=annotations,
            owner_references=[owner],
        ),
        status=PodStatus(),
    )


class MirrorApi(Protocol):
    """Interface of the API client (`apiserver.client.ApiClient`)."""

    async def create(self, resource: Resource[Pod], obj: Pod, namespace: str = "") -> Pod:
        """Create a pod."""
        ...

    async def delete(
        self,
        resource: Resource[Pod],
        name: str,
        namespace: str = "",
        *,
        grace_period_seconds: int | None = None,
        uid: str = "",
    ) -> None:
        """Delete the pod with this uid."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait before a retry, or until the API server is reachable again."""
        ...


@dataclass(frozen=True, slots=True)
class DesiredMirrors:
    """Input of the plan."""

    static: list[Pod]
    terminating: Callable[[], set[str]]
    """Function that returns the names (`namespace/name`) of removed pods that are still terminating."""


class MirrorPods:
    """Reconciler of the mirror pods in the API server; `wake` must be called after a change.

    `desired` returns the static pods and the names of terminating ones, or None until all pod sources are
    ready; `node_uid` returns "" until the node is registered.
    """

    def __init__(
        self,
        api: MirrorApi,
        store: PodStore,
        node_name: str,
        *,
        desired: Callable[[], DesiredMirrors | None],
        node_uid: Callable[[], str],
    ) -> None:
        self._api = api
        self._store = store
        self._node_name = node_name
        self._desired = desired
        self._node_uid = node_uid
        self._created: dict[str, tuple[Pod, float]] = {}
        """Created mirrors that the watch has not shown yet, and the loop time until which to wait."""
        self._conflicting: set[str] = set()
        """Names whose creation failed with AlreadyExists, and of which the watch has not shown a mirror."""
        self._changed = asyncio.Event()
        self._backoff = Backoff()
        self._error_log = ErrorLogLimiter(log, "Failed to update a mirror pod")
        self._conflict_error_log = ErrorLogLimiter(
            log, "Failed to create a mirror pod, another pod has its name"
        )

    def wake(self) -> None:
        """Request a reconciliation: a static pod was added, changed or removed."""
        self._changed.set()

    def handle_mirror_update(self, mirror: Pod) -> None:
        """Handle a watch event of a mirror pod."""
        self._created.pop(mirror.full_name, None)
        self._conflicting.discard(mirror.full_name)
        self._changed.set()

    async def run(self) -> NoReturn:
        """Reconcile the mirrors until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            try:
                wait = await self._reconcile()
            except KubeError as err:
                self._error_log.failed(err, loop.time())
                wait = self._backoff.next(loop.time(), isinstance(err, Unreachable))
                if isinstance(err, Unreachable):
                    await self._api.pause(wait)
                    continue
                # A mirror that the API server rejects must not delay those of new pods.
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _reconcile(self) -> float:
        """Apply the plan; return the seconds until the next reconciliation. Raises the last KubeError."""
        desired, mirrors = self._desired(), self._mirrors()
        if desired is None:
            return PERIOD_SECONDS
        planned = plan(desired.static, mirrors, desired.terminating() if mirrors else ())
        failure: KubeError | None = None
        for mirror in planned.delete:
            try:
                await self._delete(mirror)
            except KubeError as err:
                failure = err
        node_uid = self._node_uid()
        for static in planned.create if node_uid else ():
            try:
                await self._create(static, node_uid)
            except KubeError as err:
                failure = err
        # Raised only now: one failure must not prevent the creation of the other mirrors.
        if failure is not None:
            raise failure
        self._error_log.succeeded(asyncio.get_running_loop().time())
        return NO_NODE_SECONDS if planned.create and not node_uid else PERIOD_SECONDS

    def _mirrors(self) -> list[Pod]:
        """Return the mirrors of the watch and those created within SEEN_SECONDS."""
        now, watched = asyncio.get_running_loop().time(), self._store.mirrors()
        names = {mirror.full_name for mirror in watched}
        self._created = {
            name: (mirror, until)
            for name, (mirror, until) in self._created.items()
            if name not in names and until > now
        }
        return [*watched, *(mirror for mirror, _ in self._created.values())]

    async def _create(self, static: Pod, node_uid: str) -> None:
        logger = log.v(4) if static.full_name in self._conflicting else log
        logger.info("Creating a mirror pod for static pod", pod=static.full_name)
        mirror = mirror_of(static, self._node_name, node_uid)
        try:
            created = await self._api.create(PODS, mirror, static.metadata.namespace)
        except AlreadyExists as err:
            # The first time the watch may only lag behind; the second time another pod has the name.
            if static.full_name in self._conflicting:
                self._conflict_error_log.failed(err, asyncio.get_running_loop().time())
            self._conflicting.add(static.full_name)
            return
        self._conflicting.discard(static.full_name)
        self._conflict_error_log.succeeded(asyncio.get_running_loop().time())
        self._created[created.full_name] = created, asyncio.get_running_loop().time() + SEEN_SECONDS

    async def _delete(self, mirror: Pod) -> None:
        log.info("Deleting a mirror pod", pod=mirror.full_name, podUID=mirror.uid)
        meta = mirror.metadata
        try:
            await self._api.delete(PODS, meta.name, meta.namespace, grace_period_seconds=0, uid=meta.uid)
        except (NotFound, Conflict):
            log.v(3).info("Mirror pod was already deleted", pod=mirror.full_name, podUID=mirror.uid)
        self._created.pop(mirror.full_name, None)

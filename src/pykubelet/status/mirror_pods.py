"""Mirror pods: the pictures of static pods in the API server, for everyone who looks there.

A mirror is made for each static pod and shows its status; it is none of the node's wishes, and
deleting it does nothing to the static pod: it is made again. One whose manifest has changed is
replaced, one whose manifest is gone is removed, but only when the old pod itself is gone: until then it
shows that pod, which is still running. Which ones to
make and to remove is decided by `plan`, a pure function; `MirrorPods` does it whenever something
changed and every now and then, and goes on trying while the API server is away.
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
"""How often to look although nobody said that something changed."""
SEEN_SECONDS = 10.0
"""How long a mirror that was made may take to be watched before it counts as lost."""
NO_NODE_SECONDS = 1.0
"""When to look again whether the node is registered: a mirror belongs to it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Static pods that need a mirror, and mirrors that must go."""

    create: tuple[Pod, ...] = ()
    delete: tuple[Pod, ...] = ()


def plan(static: Iterable[Pod], mirrors: Iterable[Pod], keep: Collection[str] = ()) -> Plan:
    """Say which mirrors to make and to remove.

    `keep` holds names (`namespace/name`) of pods that are no longer wanted and not gone yet: their
    mirrors stay, also when another static pod of that name waits for their end. A mirror that must
    be replaced only goes; the next plan makes the new one.
    """
    wanted = {pod.full_name: pod for pod in static}
    there = {mirror.full_name: mirror for mirror in mirrors}
    free = {name: mirror for name, mirror in there.items() if name not in keep}
    wrong = [mirror for name, mirror in free.items() if name in wanted and not fits(mirror, wanted[name])]
    orphans = [mirror for name, mirror in free.items() if name not in wanted]
    missing = [pod for name, pod in wanted.items() if name not in there]
    return Plan(tuple(missing), (*wrong, *orphans))


def fits(mirror: Pod, static: Pod) -> bool:
    """Whether a mirror shows this very static pod and may stay."""
    meta = mirror.metadata
    shown = meta.annotations.get(MIRROR_ANNOTATION)
    return meta.deletion_timestamp is None and shown == static.metadata.annotations.get(HASH_ANNOTATION)


def mirror_of(static: Pod, node_name: str, node_uid: str) -> Pod:
    """Make the mirror of a static pod, as it is sent; the node owns it, nobody else may have made it."""
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
    """What is asked of the API server's client (`kube.client.ApiClient`)."""

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
        """Delete this very pod."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, or until the server is back."""
        ...


@dataclass(frozen=True, slots=True)
class DesiredMirrors:
    """What mirrors are made from."""

    static: list[Pod]
    leaving: Callable[[], set[str]]
    """Gives the names (`namespace/name`) of pods that are no longer wanted and not gone yet."""


class MirrorPods:
    """Keeps the mirrors in the API server; `wake` it when something changed.

    `wishes` gives the static pods and the names of those that are going, or None as long as some
    source has not reported; `node_uid` is empty as long as the node is not registered.
    """

    def __init__(
        self,
        api: MirrorApi,
        store: PodStore,
        node_name: str,
        *,
        wishes: Callable[[], DesiredMirrors | None],
        node_uid: Callable[[], str],
    ) -> None:
        self._api = api
        self._store = store
        self._node_name = node_name
        self._wishes = wishes
        self._node_uid = node_uid
        self._made: dict[str, tuple[Pod, float]] = {}
        """Mirrors that the watch has not shown yet, and until when to wait for that."""
        self._taken: set[str] = set()
        """Names that were taken when their mirror was to be made, and of which the watch has shown none."""
        self._changed = asyncio.Event()
        self._pauses = Backoff()
        self._complaints = ErrorLogLimiter(log, "Failed to keep a mirror pod")
        self._clashes = ErrorLogLimiter(
            log, "A static pod has no mirror: another pod has its name, delete that"
        )

    def wake(self) -> None:
        """Look soon: a static pod came, changed or went."""
        self._changed.set()

    def seen(self, mirror: Pod) -> None:
        """Take note that the watch has shown a mirror that came, changed or went."""
        self._made.pop(mirror.full_name, None)
        self._taken.discard(mirror.full_name)
        self._changed.set()

    async def run(self) -> NoReturn:
        """Keep the mirrors for ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            try:
                wait = await self._reconcile()
            except KubeError as err:
                self._complaints.failed(err, loop.time())
                wait = self._pauses.next(loop.time(), isinstance(err, Unreachable))
                if isinstance(err, Unreachable):
                    await self._api.pause(wait)
                    continue
                # One that is refused, perhaps for ever, must not delay those of new pods.
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _reconcile(self) -> float:
        """Bring the mirrors nearer to what they should be; gives in how many seconds to look again."""
        wishes, mirrors = self._wishes(), self._mirrors()
        if wishes is None:
            return PERIOD_SECONDS
        todo = plan(wishes.static, mirrors, wishes.leaving() if mirrors else ())
        failure: KubeError | None = None
        for mirror in todo.delete:
            try:
                await self._delete(mirror)
            except KubeError as err:
                failure = err
        node_uid = self._node_uid()
        for static in todo.create if node_uid else ():
            try:
                await self._create(static, node_uid)
            except KubeError as err:
                failure = err
        # One mirror that is refused must not keep the others from being made.
        if failure is not None:
            raise failure
        self._complaints.succeeded(asyncio.get_running_loop().time())
        return NO_NODE_SECONDS if todo.create and not node_uid else PERIOD_SECONDS

    def _mirrors(self) -> list[Pod]:
        """All mirrors that are watched, or were made a moment ago."""
        now, watched = asyncio.get_running_loop().time(), self._store.mirrors()
        names = {mirror.full_name for mirror in watched}
        self._made = {
            name: (mirror, until)
            for name, (mirror, until) in self._made.items()
            if name not in names and until > now
        }
        return [*watched, *(mirror for mirror, _ in self._made.values())]

    async def _create(self, static: Pod, node_uid: str) -> None:
        speak = log.v(4) if static.full_name in self._taken else log
        speak.info("Creating a mirror pod for static pod", pod=static.full_name)
        mirror = mirror_of(static, self._node_name, node_uid)
        try:
            made = await self._api.create(PODS, mirror, static.metadata.namespace)
        except AlreadyExists as err:
            # At first the watch may only lag behind; then somebody has the name, and must give it back.
            if static.full_name in self._taken:
                self._clashes.failed(err, asyncio.get_running_loop().time())
            self._taken.add(static.full_name)
            return
        self._taken.discard(static.full_name)
        self._clashes.succeeded(asyncio.get_running_loop().time())
        self._made[made.full_name] = made, asyncio.get_running_loop().time() + SEEN_SECONDS

    async def _delete(self, mirror: Pod) -> None:
        log.info("Deleting a mirror pod", pod=mirror.full_name, podUID=mirror.uid)
        meta = mirror.metadata
        try:
            await self._api.delete(PODS, meta.name, meta.namespace, grace_period_seconds=0, uid=meta.uid)
        except (NotFound, Conflict):
            log.v(3).info("The mirror pod was gone already", pod=mirror.full_name, podUID=mirror.uid)
        self._made.pop(mirror.full_name, None)

"""Pod mux: merges the pod sets of all sources into a stream of changes; PodStore holds the desired pods.

A source (files, a URL, the API server) reports its full set of pods, and `PodMux` returns the differences to
the last one. It is pure: no clock of its own, no I/O, and it never modifies the pods passed to it.

Invariants, for any behavior and order of the sources:

- the changes, applied in order to an empty set, result in exactly the pods last reported by the sources;
- a source that has not reported yet removes nothing, and `all_reported` is true once all have: until then no
  running pod may be considered orphaned;
- an unchanged set results in no changes;
- a UID that two sources report belongs to the first one; when that source removes it, the pod is updated to
  the other's, not removed;
- a pod is new only once: `kubernetes.io/config.seen` keeps its first value.

Full sets are cheap: an identical object is not compared again. So callers must not modify pods after passing
them to the mux. A source that knows the difference (the API server's watch) reports only that (`update`), at
a cost independent of its number of pods.

`PodStore` indexes the desired pods. Only the sync loop writes to it, one change of the mux at a time. Mirror
pods are not desired pods: they are indexed separately and found through the static pod of the same name.

`SourceUpdates` is the entrance for the sources: it queues the differences for the main loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pykubelet.api.pod import Container, Pod
from pykubelet.apiserver.reflector import StoreDelta
from pykubelet.logs import get_logger
from pykubelet.podconfig.static_pods import (
    MIRROR_ANNOTATION,
    SEEN_ANNOTATION,
    SOURCE_ANNOTATION,
    is_mirror_pod,
    is_static_pod,
    seen_time,
)

log = get_logger(__name__)
Operation = Literal["REMOVE", "ADD", "UPDATE", "DELETE", "RECONCILE"]

# Order of changes: removals first, to free resources for additions.
_ORDER: tuple[Operation, ...] = ("REMOVE", "ADD", "UPDATE", "DELETE", "RECONCILE")
_OWN_ANNOTATIONS = frozenset((MIRROR_ANNOTATION, SEEN_ANNOTATION, SOURCE_ANNOTATION))


@dataclass(frozen=True, slots=True)
class PodChange:
    """An added, changed or removed pod.

    `UPDATE` is a changed spec or metadata, `DELETE` the same with a deletionTimestamp (graceful termination),
    `RECONCILE` a status that differs from the reported one, and `REMOVE` a pod that its source no longer has:
    `pod` is then its last version.
    """

    op: Operation
    pod: Pod
    source: str


@dataclass(frozen=True, slots=True)
class _StoredPod:
    """A stored pod, and the source's object that it was built from."""

    source_pod: Pod
    pod: Pod
    name: str


class PodMux:
    """The last reported set of each source; `set` returns the changes of a new one."""

    def __init__(
        self,
        clock: Callable[[], int],
        on_duplicate: Callable[[Pod, str], None] = lambda pod, source: None,
    ) -> None:
        """Initialize with a clock in nanoseconds since the epoch.

        `on_duplicate` receives each pod that is ignored because an earlier one of the same source has its
        name, and the source.
        """
        self._clock = clock
        self._on_duplicate = on_duplicate
        self._expected: set[str] = set()
        self._sources_reported: set[str] = set()
        self._reported: dict[str, dict[str, _StoredPod]] = {}
        self._names: dict[str, dict[str, str]] = {}
        """Per source: the uid of each pod in `_reported` by its full name."""
        self._ambiguous: set[str] = set()
        """Sources whose last full set had pods that were ignored because their name or uid was taken."""
        self._owners: dict[str, str] = {}
        self._ephemeral: dict[str, tuple[Container, ...]] = {}
        """By uid: containers that were added to a pod after its source reported it."""

    def expect(self, source: str) -> None:
        """Add an expected source: `all_reported` is False until it reports."""
        self._expected.add(source)

    @property
    def all_reported(self) -> bool:
        """Whether every expected source has reported at least once."""
        return self._expected <= self._sources_reported

    def has_reported(self, source: str) -> bool:
        """Return whether this source has reported at least once."""
        return source in self._sources_reported

    def pods(self) -> dict[str, Pod]:
        """Return all desired pods by UID."""
        return {uid: self._reported[source][uid].pod for uid, source in self._owners.items()}

    def get(self, uid: str) -> Pod | None:
        """Return the pod with this uid if some source has it now."""
        owner = self._owners.get(uid)
        return self._reported[owner][uid].pod if owner is not None else None

    def __contains__(self, uid: str) -> bool:
        """Return whether some source has this pod."""
        return uid in self._owners

    def set(self, source: str, pods: Iterable[Pod]) -> list[PodChange]:
        """Replace the full set of a source; return the changes, removals first."""
        self._sources_reported.add(source)
        return self._replace(source, pods)

    def update(
        self,
        source: str,
        changed: Sequence[Pod],
        removed: Sequence[Pod],
        list_all: Callable[[], Iterable[Pod]],
    ) -> list[PodChange]:
        """Apply a difference to a source's set; return the same changes as `set` with the full set.

        `list_all` returns the full set. It is called where the difference alone does not determine the
        result: before the source's first full set, and while two of its pods share a name or a uid.
        """
        if source not in self._sources_reported or self._is_ambiguous(source, changed, removed):
            return self.set(source, list_all())
        reported, names = self._reported[source], self._names[source]
        before: dict[str, _StoredPod | None] = {}
        for pod in removed:
            stored = reported.pop(pod.uid, None)
            if stored is not None:
                before[pod.uid] = stored
                del names[stored.name]
        for pod in changed:
            known = reported.get(pod.uid)
            if known is None or known.source_pod is not pod:
                before[pod.uid] = known
                stored = reported[pod.uid] = self._annotated(source, known, pod)
                names[stored.name] = pod.uid
        return self._changes(source, before)

    def offer(self, source: str, pods: Iterable[Pod]) -> list[PodChange]:
        """Set the pods of a source provisionally until it reports itself; return the changes.

        The source still counts as not reported, and its first own set replaces the provisional one.
        """
        return [] if source in self._sources_reported else self._replace(source, pods)

    def add_ephemeral_container(self, uid: str, container: Container) -> list[PodChange]:
        """Add a container to a pod until its source removes it; return the changes.

        Raises LookupError when no source has the pod.
        """
        if (owner := self._owners.get(uid)) is None:
            raise LookupError(f"no pod with uid {uid}")
        self._ephemeral[uid] = (*self._ephemeral.get(uid, ()), container)
        before = self._reported[owner][uid]
        self._reported[owner][uid] = self._annotated(owner, before, before.source_pod)
        return self._changes(owner, {uid: before})

    def _replace(self, source: str, pods: Iterable[Pod]) -> list[PodChange]:
        before = self._reported.get(source, {})
        after: dict[str, _StoredPod] = {}
        names: dict[str, str] = {}
        self._ambiguous.discard(source)
        for pod in pods:
            uid = pod.metadata.uid
            stored = before.get(uid)
            if stored is None or stored.source_pod is not pod:
                stored = self._annotated(source, stored, pod)
            if stored.name in names or uid in after:
                log.warning(
                    "Ignored pod with duplicate name or UID", pod=stored.name, podUID=uid, source=source
                )
                self._ambiguous.add(source)
                if stored.name in names:
                    self._on_duplicate(pod, source)
                continue
            names[stored.name] = uid
            after[uid] = stored
        self._reported[source], self._names[source] = after, names
        return self._changes(source, {uid: before.get(uid) for uid in (*before, *after)})

    def _changes(self, source: str, before: Mapping[str, _StoredPod | None]) -> list[PodChange]:
        """Return what became of some uids, now that `source` has reported; `before` is what it had."""
        after = self._reported[source]
        changes = [
            change
            for uid, stored in before.items()
            if stored is not after.get(uid)
            for change in self._owner_changes(uid, source, stored)
        ]
        changes.sort(key=_sort_key)
        return changes

    def _is_ambiguous(self, source: str, changed: Sequence[Pod], removed: Sequence[Pod]) -> bool:
        """Return whether two pods of a source share a name or a uid, before or after a difference."""
        if source in self._ambiguous:
            return True
        reported, names = self._reported[source], self._names[source]
        removed_uids, changed_uids = {pod.uid for pod in removed}, {pod.uid for pod in changed}
        if len(changed_uids) < len(changed) or len({pod.full_name for pod in changed}) < len(changed):
            return True
        if not removed_uids.isdisjoint(changed_uids):
            return True
        for pod in changed:
            owner_uid, known = names.get(pod.full_name), reported.get(pod.uid)
            if owner_uid is not None and owner_uid != pod.uid and owner_uid not in removed_uids:
                return True
            if known is not None and known.name != pod.full_name:
                return True
        return False

    def _owner_changes(self, uid: str, source: str, before: _StoredPod | None) -> list[PodChange]:
        """Return the changes of one UID, now that `source` has it or not."""
        owner = self._owners.get(uid)
        if owner is not None and owner != source:
            return []
        after = self._reported[source].get(uid)
        if after is not None:
            self._owners[uid] = source
            op = "ADD" if owner is None or before is None else difference(before.pod, after.pod)
            return [PodChange(op, after.pod, source)] if op is not None else []
        if owner is None or before is None:
            return []
        next_owner = next((name for name in sorted(self._reported) if uid in self._reported[name]), None)
        if next_owner is None:
            del self._owners[uid]
            self._ephemeral.pop(uid, None)
            return [PodChange("REMOVE", before.pod, source)]
        self._owners[uid] = next_owner
        return [PodChange("UPDATE", self._reported[next_owner][uid].pod, next_owner)]

    def _annotated(self, source: str, before: _StoredPod | None, pod: Pod) -> _StoredPod:
        """Return the pod with the kubelet's annotations, or the stored one if nothing differs."""
        original = pod.metadata.annotations
        if before is not None:
            seen = before.pod.metadata.annotations[SEEN_ANNOTATION]
        elif source != "api" and SEEN_ANNOTATION in original:
            seen = original[SEEN_ANNOTATION]
        else:
            seen = seen_time(self._clock())
        annotations = {**original, SOURCE_ANNOTATION: source, SEEN_ANNOTATION: seen}
        merged = msgspec.structs.replace(
            pod, metadata=msgspec.structs.replace(pod.metadata, annotations=annotations)
        )
        if added := self._ephemeral.get(pod.uid):
            containers = [*pod.spec.ephemeral_containers, *added]
            spec = msgspec.structs.replace(pod.spec, ephemeral_containers=containers)
            merged = msgspec.structs.replace(merged, spec=spec)
        same = before is not None and difference(before.pod, merged) is None
        return _StoredPod(pod, before.pod if same and before is not None else merged, pod.full_name)


def difference(before: Pod, after: Pod) -> Literal["UPDATE", "DELETE", "RECONCILE"] | None:
    """Return the kind of difference between two versions of a pod; None if no action is needed."""
    if before is after:
        return None
    if _desired_state(before) != _desired_state(after):
        return "DELETE" if after.metadata.deletion_timestamp is not None else "UPDATE"
    return "RECONCILE" if before.status != after.status else None


def _sort_key(change: PodChange) -> tuple[int, float]:
    """Return the sort key of a change: by operation, then oldest pod first, which has precedence."""
    created = change.pod.metadata.creation_timestamp
    return _ORDER.index(change.op), created.timestamp() if created is not None else 0.0


def _desired_state(pod: Pod) -> tuple[object, ...]:
    meta = pod.metadata
    annotations = {key: value for key, value in meta.annotations.items() if key not in _OWN_ANNOTATIONS}
    # The generation is included: it may change because of an unknown field, and is reported in the status.
    life = meta.generation, meta.deletion_timestamp, meta.deletion_grace_period_seconds
    return pod.spec, meta.labels, annotations, life


class PodStore:
    """Desired pods by UID and by full name (`namespace/name`)."""

    def __init__(self) -> None:
        self._pods = _Index()
        self._mirrors = _Index()
        self._static: dict[str, Pod] = {}
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Add a listener, called with the UID of each changed pod after the change; it must not block."""
        self._listeners.append(listener)

    def apply(self, change: PodChange) -> None:
        """Apply one change of the mux."""
        pod = change.pod
        index = self._mirrors if is_mirror_pod(pod) else self._pods
        if change.op == "REMOVE":
            index.remove(pod)
        else:
            index.put(pod)
        stored = self._pods.by_uid.get(pod.uid)
        if stored is not None and is_static_pod(stored):
            self._static[pod.uid] = stored
        else:
            self._static.pop(pod.uid, None)
        for listener in self._listeners:
            listener(pod.uid)

    def get(self, uid: str) -> Pod | None:
        """Return the desired pod with this UID."""
        return self._pods.by_uid.get(uid)

    def by_name(self, full_name: str) -> Pod | None:
        """Return the desired pod with this `namespace/name`: of several the latest."""
        return self._pods.named(full_name)

    def pods(self) -> list[Pod]:
        """Return all desired pods in order of arrival."""
        return list(self._pods.by_uid.values())

    def static_pods(self) -> list[Pod]:
        """Return all desired static pods."""
        return list(self._static.values())

    def mirror_of(self, pod: Pod) -> Pod | None:
        """Return the mirror pod of a static pod, if the API server has one."""
        return self._mirrors.named(pod.full_name)

    def mirrors(self) -> list[Pod]:
        """Return all mirror pods, including those without a static pod."""
        return list(self._mirrors.by_uid.values())

    def resolve(self, uid: str) -> str:
        """Return the UID of the running pod: a mirror pod's UID is mapped to its static pod's."""
        mirror = self._mirrors.by_uid.get(uid)
        pod = self._pods.named(mirror.full_name) if mirror is not None else None
        return pod.uid if pod is not None else uid


class _Index:
    """Pods by UID and by name; of several with the same name the latest counts."""

    def __init__(self) -> None:
        self.by_uid: dict[str, Pod] = {}
        self._by_name: dict[str, dict[str, Pod]] = {}

    def named(self, full_name: str) -> Pod | None:
        namesakes = self._by_name.get(full_name)
        return namesakes[next(reversed(namesakes))] if namesakes else None

    def put(self, pod: Pod) -> None:
        known = self.by_uid.get(pod.uid)
        if known is not None and known.full_name != pod.full_name:
            self.remove(known)
        self.by_uid[pod.uid] = pod
        self._by_name.setdefault(pod.full_name, {})[pod.uid] = pod

    def remove(self, pod: Pod) -> None:
        known = self.by_uid.pop(pod.uid, None)
        if known is not None:
            namesakes = self._by_name[known.full_name]
            del namesakes[known.uid]
            if not namesakes:
                del self._by_name[known.full_name]


class SourceUpdates:
    """Receiver of the pods of all sources: merges them, and queues the changes for the main loop."""

    def __init__(
        self,
        mux: PodMux,
        queue: Callable[[Sequence[PodChange]], None],
        after: Callable[[Callable[[], None]], None],
    ) -> None:
        """Initialize; `queue` queues changes, `after` a call that runs when they have been dispatched."""
        self._mux = mux
        self._queue_changes = queue
        self._after = after
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each changed pod before the change is dispatched."""
        self._listeners.append(listener)

    def replace(self, source: str, pods: Sequence[Pod], problems: Sequence[object]) -> None:
        """Replace the complete set of a source's pods; the source has logged its `problems`."""
        self._queue(self._mux.set(source, pods))

    def update(self, source: str, delta: StoreDelta[Pod], everything: Callable[[], list[Pod]]) -> None:
        """Apply the changes of a source's pods; `everything` returns its complete set."""
        self._queue(self._mux.update(source, delta.changed, delta.removed, everything))

    def offer(self, source: str, pods: Sequence[Pod]) -> None:
        """Add checkpointed pods of a source that has not reported yet."""
        self._queue(self._mux.offer(source, pods))

    def when_dispatched(self, call: Callable[[], None]) -> None:
        """Call `call` when all changes so far have been dispatched."""
        self._after(call)

    def _queue(self, changes: Sequence[PodChange]) -> None:
        for change in changes:
            for listener in self._listeners:
                listener(change.pod.uid)
        self._queue_changes(changes)

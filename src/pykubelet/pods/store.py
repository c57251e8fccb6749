"""The pods that are wanted on this node, where everyone looks them up.

Only the sync loop writes here, one change at a time as the mux gives them; everyone else reads.
Mirror pods, the pictures of static pods in the API server, are no wishes: they are kept apart and
found through the static pod of the same name.
"""

from __future__ import annotations

from collections.abc import Callable

from pykubelet.api.pod import Pod
from pykubelet.pods.mux import PodChange
from pykubelet.pods.static import is_mirror_pod, is_static_pod


class PodStore:
    """Wanted pods by uid and by full name (`namespace/name`)."""

    def __init__(self) -> None:
        self._pods = _Index()
        self._mirrors = _Index()
        self._static: dict[str, Pod] = {}
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod that changed, after the change; it must not block."""
        self._listeners.append(listener)

    def apply(self, change: PodChange) -> None:
        """Take one change of the mux."""
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
        """The wanted pod with this uid."""
        return self._pods.by_uid.get(uid)

    def by_name(self, full_name: str) -> Pod | None:
        """The wanted pod with this `namespace/name`: of several the one that came last."""
        return self._pods.named(full_name)

    def pods(self) -> list[Pod]:
        """All wanted pods, in the order in which they came."""
        return list(self._pods.by_uid.values())

    def static_pods(self) -> list[Pod]:
        """Return all desired static pods."""
        return list(self._static.values())

    def mirror_of(self, pod: Pod) -> Pod | None:
        """The mirror of a static pod, if the API server has one."""
        return self._mirrors.named(pod.full_name)

    def mirrors(self) -> list[Pod]:
        """All mirror pods, also those whose static pod is gone."""
        return list(self._mirrors.by_uid.values())

    def resolve(self, uid: str) -> str:
        """The uid of the pod that runs: a mirror's uid stands for its static pod, any other for itself."""
        mirror = self._mirrors.by_uid.get(uid)
        pod = self._pods.named(mirror.full_name) if mirror is not None else None
        return pod.uid if pod is not None else uid


class _Index:
    """Pods by uid and by name; of several with one name the last one counts."""

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

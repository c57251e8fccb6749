"""Resources of all admitted pods, summed up incrementally.

Admission compares what a pod requests with what all admitted pods have. Summing them up for each new pod
costs more the more pods there are, so the sum is kept: `mark` records that the share of a pod may have
changed, and the next `usage_without` reads only the marked pods again. Whether a pod counts, and with which
resources, is decided by `pods_of` alone; after a missed mark the sum would be wrong, so every component that
`pods_of` reads reports its changes here. The state is in memory only and is built again by a restarted
kubelet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from pykubelet.admission.fit import usage_of
from pykubelet.admission.link import Amounts, Usage
from pykubelet.api.pod import Pod

_NOTHING = Usage(0, {})


class AdmittedPods:
    """Sum of the resources of all admitted pods, by pod uid."""

    def __init__(
        self, pods_of: Callable[[str], Sequence[Pod]], requests_of: Callable[[Pod], Amounts]
    ) -> None:
        """Initialize with the function that returns the pods that count under a uid: none, or one.

        `requests_of` returns the resources of a pod.
        """
        self._pods_of = pods_of
        self._requests_of = requests_of
        self._shares: dict[str, Usage] = {}
        self._count = 0
        self._amounts: dict[str, int] = {}
        self._marked: set[str] = set()

    def mark(self, uid: str) -> None:
        """Record that the share of a pod may have changed."""
        self._marked.add(uid)

    def mark_all(self, uids: Iterable[str]) -> None:
        """Record that the shares of several pods may have changed."""
        self._marked.update(uids)

    def usage_without(self, uid: str) -> Usage:
        """Return the resources of all admitted pods but one."""
        marked, self._marked = self._marked, set()
        for changed in marked:
            self._replace(changed, usage_of(self._pods_of(changed), self._requests_of))
        own = self._shares.get(uid, _NOTHING)
        amounts = {name: amount - own.amounts.get(name, 0) for name, amount in self._amounts.items()}
        return Usage(self._count - own.pods, amounts)

    def _replace(self, uid: str, share: Usage) -> None:
        before = self._shares.pop(uid, _NOTHING)
        if share.pods:
            self._shares[uid] = share
        self._count += share.pods - before.pods
        for name in before.amounts.keys() | share.amounts.keys():
            amount = self._amounts.get(name, 0) + share.amounts.get(name, 0) - before.amounts.get(name, 0)
            if amount:
                self._amounts[name] = amount
            else:
                self._amounts.pop(name, None)


class LazyPods(Sequence[Pod]):
    """Pods that are listed when they are first read: most admission handlers need only their sum."""

    def __init__(self, find: Callable[[], list[Pod]]) -> None:
        self._find = find

    @cached_property
    def _pods(self) -> list[Pod]:
        return self._find()

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._pods[index]

    def __len__(self) -> int:
        return len(self._pods)

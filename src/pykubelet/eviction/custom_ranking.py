"""Ranking by third-party code: the entry point group `pykubelet.eviction`.

An entry point is a function that is called with the signal and the candidates in the built-in order, and
returns uids in the order in which the pods should be evicted:

    def rank(signal: str, candidates: Sequence[EvictionCandidate]) -> Iterable[str]: ...

Pods that it leaves out follow in the built-in order, and unknown uids are ignored. Pods that may not be
evicted (static and critical ones) are not among the candidates. The function runs in a thread of its own for
at most `TIMEOUT_SECONDS`. If it raises, returns something else, or takes longer, that is logged and the
built-in order is used: a node under pressure must be relieved in any case. While a call that took too long
still runs, the function is not called again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pykubelet.cm.qos import QOSClass, qos_class
from pykubelet.eviction.ranking import RankedPod
from pykubelet.logs import get_logger
from pykubelet.util.entry_points import EntryPoint, installed
from pykubelet.util.tasks import run_or_undo
from pykubelet.util.third_party import (
    BoundedFunction,
    CallFailed,
    TooManyCalls,
    load_entry_points,
    require_function,
)

log = get_logger(__name__)
GROUP = "pykubelet.eviction"
TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """A pod that may be evicted, with copies of what a ranking may depend on."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    priority: int
    qos_class: QOSClass
    resource: str
    """`memory`, `ephemeral-storage`, `inodes` or `pids`."""
    usage: int | None
    """Usage in bytes or counts; None if it was not measured."""
    request: int
    exceeds_request: bool


RankFunction = Callable[[str, Sequence[EvictionCandidate]], Iterable[str]]


class CustomRanking:
    """A ranking function with its limits."""

    def __init__(self, function: RankFunction, name: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self._function = function
        self._name = name
        self._timeout = timeout
        self._rank = BoundedFunction(self._call, "eviction-ranking", 1)
        self._lock = asyncio.Lock()
        """Serializes calls of a round and of reports: a second one would fail."""

    async def order(self, signal: str, ranked: Sequence[RankedPod]) -> list[RankedPod]:
        """Return the pods in the order of the function, or unchanged if it fails. Raises nothing."""
        by_uid = {found.pod.uid: found for found in ranked if found.is_evictable}
        candidates = tuple(_candidate(found) for found in by_uid.values())
        try:
            async with self._lock:
                # The thread of a cancelled report runs on, so the report waits for it.
                call = self._rank.call(self._timeout, signal, candidates)
                uids = await run_or_undo(call, lambda _: asyncio.sleep(0))
        except TooManyCalls:
            log.warning("Custom eviction ranking still runs, using the built-in order", ranking=self._name)
            return list(ranked)
        except TimeoutError:
            log.warning(
                "Custom eviction ranking timed out, using the built-in order",
                ranking=self._name,
                seconds=self._timeout,
            )
            return list(ranked)
        except CallFailed as err:
            log.error(err, "Custom eviction ranking failed, using the built-in order", ranking=self._name)
            return list(ranked)
        first = [by_uid[uid] for uid in dict.fromkeys(uids) if uid in by_uid]
        chosen = {found.pod.uid for found in first}
        return [*first, *(found for found in ranked if found.pod.uid not in chosen)]

    def _call(self, signal: str, candidates: Sequence[EvictionCandidate]) -> list[str]:
        # One more than valid, so that an endless iterator ends.
        uids = list(itertools.islice(self._function(signal, candidates), len(candidates) + 1))
        if not all(isinstance(uid, str) for uid in uids):
            raise TypeError(f"{self._name} must return uids of pods, not {uids[:3]!r}")
        return uids


def _candidate(ranked: RankedPod) -> EvictionCandidate:
    metadata = ranked.pod.metadata
    return EvictionCandidate(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        labels=dict(metadata.labels),
        annotations=dict(metadata.annotations),
        priority=ranked.priority,
        qos_class=qos_class(ranked.pod),
        resource=ranked.resource,
        usage=ranked.usage,
        request=ranked.request,
        exceeds_request=ranked.exceeds,
    )


def installed_ranking(found: Iterable[EntryPoint[RankFunction]] | None = None) -> CustomRanking | None:
    """Return the installed ranking, the first by name; None if there is none or it cannot be loaded."""
    entries = sorted(installed(GROUP) if found is None else found, key=lambda entry: entry.name)
    for entry in entries[1:]:
        log.warning("Ignored a second eviction ranking", name=entry.name, entryPoint=entry.value)
    for loaded in load_entry_points(GROUP, "eviction ranking", entries[:1], require_function):
        if loaded.result is not None:
            return CustomRanking(loaded.result, loaded.name)
    return None

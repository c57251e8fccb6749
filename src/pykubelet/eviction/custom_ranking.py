"""Ranking by third-party code: the entry point group `pykubelet.eviction`.

An entry point is a function that is called with the signal and the candidates in the built-in order, and
returns uids in the order in which the pods should be evicted:

    def rank(signal: str, candidates: Sequence[EvictionCandidate]) -> Iterable[str]: ...

Pods that it leaves out follow in the built-in order, and unknown uids are ignored. Pods that may not be
evicted (static and critical ones) are not among the candidates. The function runs in a thread of its own for
at most `TIMEOUT_SECONDS`. If it raises, returns something else, or takes longer, that is logged and the
built-in order is used: a node under pressure must be relieved in any case.

Reports (`pykubelet pressure`, the page) call it as well, one after the other, and wait for it for
`TIMEOUT_SECONDS` per report. An eviction does not wait for them, so that two threads may run the function at
the same time: one for an eviction and one for a report. While a call that took too long still runs, the
function is not called again for the same purpose."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pykubelet.cm.qos import QOSClass, qos_class
from pykubelet.eviction.ranking import PreviewedOrder, RankedPod
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
        self._preview = BoundedFunction(self._call, "ranking-report", 1)
        self._preview_lock = asyncio.Lock()
        """Serializes the calls of reports: a second one would fail."""

    async def order(self, signal: str, ranked: Sequence[RankedPod]) -> list[RankedPod]:
        """Return the pods in the order of the function, or unchanged if it fails. Raises nothing."""
        try:
            uids = await self._rank.call(self._timeout, signal, _candidates(ranked))
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
        return _ordered(ranked, uids)

    def report_deadline(self) -> float:
        """Return the time of the event loop until which a report that begins now waits for the function."""
        return asyncio.get_running_loop().time() + self._timeout

    async def preview(self, signal: str, ranked: Sequence[RankedPod], deadline: float) -> PreviewedOrder:
        """Return the order for a report, which waits until `deadline`. Raises nothing."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._preview_lock.acquire()
            try:
                timeout = deadline - asyncio.get_running_loop().time()
                if timeout <= 0:
                    raise TimeoutError
                # The thread of a cancelled report runs on, so the report waits for it.
                call = self._preview.call(timeout, signal, _candidates(ranked))
                uids = await run_or_undo(call, lambda _: asyncio.sleep(0))
            finally:
                self._preview_lock.release()
        except (TimeoutError, TooManyCalls):
            problem = f"is slow: it did not order the pods within the {self._timeout:g} s of this report"
        except CallFailed as err:
            problem = f"failed: {err}"
        else:
            return PreviewedOrder(_ordered(ranked, uids))
        return PreviewedOrder(list(ranked), f'custom ranking "{self._name}" {problem}')

    def _call(self, signal: str, candidates: Sequence[EvictionCandidate]) -> list[str]:
        # One more than valid, so that an endless iterator ends.
        uids = list(itertools.islice(self._function(signal, candidates), len(candidates) + 1))
        if not all(isinstance(uid, str) for uid in uids):
            raise TypeError(f"{self._name} must return uids of pods, not {uids[:3]!r}")
        return uids


def _candidates(ranked: Iterable[RankedPod]) -> tuple[EvictionCandidate, ...]:
    return tuple(_candidate(found) for found in ranked if found.is_evictable)


def _ordered(ranked: Sequence[RankedPod], uids: Iterable[str]) -> list[RankedPod]:
    by_uid = {found.pod.uid: found for found in ranked if found.is_evictable}
    first = [by_uid[uid] for uid in dict.fromkeys(uids) if uid in by_uid]
    chosen = {found.pod.uid for found in first}
    return [*first, *(found for found in ranked if found.pod.uid not in chosen)]


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

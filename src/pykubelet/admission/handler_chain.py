"""The links in their order: the first refusal is the last word, and the reason that people are told.

Adding a link is one file and one line here. Others' links come by entry points of the group
`pykubelet.admission`, whose objects are called with the `AdmitHandlerDeps` and give a `PodAdmitHandler`;
they are asked after ours, in the order of their names. A link that fails refuses the pod: what was installed
to keep pods away must not let them in because it is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pykubelet.admission.handler import (
    UNEXPECTED,
    AdmitHandlerDeps,
    AdmitRejection,
    Answer,
    DeferredResult,
    PodAdmitAttributes,
    PodAdmitHandler,
    Preempt,
)
from pykubelet.admission.node_support import (
    AppArmor,
    DeclaredFeatures,
    OperatingSystem,
    PodLevelResources,
    SupplementalGroups,
    Sysctls,
)
from pykubelet.admission.predicates import Predicates
from pykubelet.logs import get_logger
from pykubelet.util.entry_points import EntryPoint, installed

log = get_logger(__name__)
GROUP = "pykubelet.admission"
Maker = Callable[[AdmitHandlerDeps], PodAdmitHandler]


class AdmitHandlerChain:
    """Asks each link in turn."""

    def __init__(self, links: Sequence[PodAdmitHandler]) -> None:
        self.links = tuple(links)

    def admit(self, attempt: PodAdmitAttributes) -> Answer | DeferredResult:
        """Give the first refusal; else who makes room; None when the pod may run at once.

        Nobody has to make room for a pod that a later link refuses. `DeferredResult` when a link has to be
        waited for, before those behind it are asked.
        """
        found = self._ask(attempt, {})
        if not isinstance(found, _Stop):
            return found
        return DeferredResult(
            lambda: self._finish(attempt, found), apart=found.later.apart, why=found.later.why
        )

    def _ask(self, attempt: PodAdmitAttributes, known: Mapping[int, Answer]) -> Answer | _Stop:
        """Ask all links but those whose answers are known, by their places."""
        room: Preempt | None = None
        for place, link in enumerate(self.links):
            if attempt.running and not link.for_running:
                continue
            try:
                answer = known[place] if place in known else link.admit(attempt)
            except Exception as err:  # others' code, and pods must not come in by a bug of ours
                return _failed(link, attempt, err)
            match answer:
                case DeferredResult():
                    return _Stop(place, answer)
                case AdmitRejection():
                    return answer
            room = room or answer
        return room

    async def _finish(self, attempt: PodAdmitAttributes, stop: _Stop) -> Answer:
        known: dict[int, Answer] = {}
        found: Answer | _Stop = stop
        while isinstance(found, _Stop):
            try:
                answer = await found.later.answer()
            except Exception as err:  # as when it is asked
                return _failed(self.links[found.place], attempt, err)
            if not found.later.again:
                known[found.place] = answer
            elif attempt.renew is not None:
                attempt = attempt.renew()
            found = self._ask(attempt, known)
        return found


@dataclass(frozen=True, slots=True)
class _Stop:
    """A link that has to be waited for."""

    place: int
    later: DeferredResult


def _failed(link: PodAdmitHandler, attempt: PodAdmitAttributes, err: Exception) -> AdmitRejection:
    name, pod = type(link).__name__, attempt.pod
    log.exception(err, "A link of admission failed", link=name, pod=pod.full_name, podUID=pod.uid)
    return AdmitRejection(UNEXPECTED, f"{name} failed: {err}")


def make_chain(given: AdmitHandlerDeps) -> AdmitHandlerChain:
    """Give all links, ready to use."""
    ours: list[PodAdmitHandler | None] = [
        given.pressure,
        Sysctls(given),
        given.allocation,
        OperatingSystem(),
        SupplementalGroups(),
        Predicates(given),
        AppArmor(given),
        PodLevelResources(given),
        DeclaredFeatures(given),
        given.shutdown,
    ]
    return AdmitHandlerChain([*filter(None, ours), *others_links(given, installed(GROUP))])


def others_links(given: AdmitHandlerDeps, found: Iterable[EntryPoint[Maker]]) -> list[PodAdmitHandler]:
    """Give the links of others, in the order of their names.

    One that cannot be used keeps all new pods away, and says why: whoever installed it wants it to be asked.
    """
    links: list[PodAdmitHandler] = []
    for entry in sorted(found, key=lambda entry: entry.name):
        where = {"link": entry.name, "entryPoint": entry.value}
        try:
            link = entry.load()(given)
            if missing := [part for part in ("for_running", "admit") if not hasattr(link, part)]:
                raise TypeError(f"{entry.value} is no link: it has no {' and no '.join(missing)}")
        except Exception as err:  # anything may go wrong in others' code, and the agent has to go on
            log.error(
                err, "A link of admission that is installed cannot be used; no pod is admitted", **where
            )
            links.append(_Broken(f"the admission link {entry.name} ({entry.value}) cannot be used: {err}"))
            continue
        log.info("Using a link of admission that is installed", **where)
        links.append(link)
    return links


class _Broken:
    """Stands for a link that could not be made."""

    for_running = False

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection:
        return AdmitRejection(UNEXPECTED, self._problem)

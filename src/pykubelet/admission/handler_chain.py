"""The links in their order: the first refusal is the last word, and the reason that people are told.

Adding a link is one file and one line here. Others' links come by entry points of the group
`pykubelet.admission`, whose objects are called with the `Surroundings` and give a `Link`; they are asked
after ours, in the order of their names. A link that fails refuses the pod: what was installed to keep pods
away must not let them in because it is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pykubelet.admission.handler import (
    UNEXPECTED,
    Answer,
    Attempt,
    Later,
    Link,
    Preempt,
    Refusal,
    Surroundings,
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
Maker = Callable[[Surroundings], Link]


class Chain:
    """Asks each link in turn."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)

    def admit(self, attempt: Attempt) -> Answer | Later:
        """Give the first refusal; else who makes room; None when the pod may run at once.

        Nobody has to make room for a pod that a later link refuses. `Later` when a link has to be waited
        for, before those behind it are asked.
        """
        found = self._ask(attempt, {})
        if not isinstance(found, _Stop):
            return found
        return Later(lambda: self._finish(attempt, found), apart=found.later.apart, why=found.later.why)

    def _ask(self, attempt: Attempt, known: Mapping[int, Answer]) -> Answer | _Stop:
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
                case Later():
                    return _Stop(place, answer)
                case Refusal():
                    return answer
            room = room or answer
        return room

    async def _finish(self, attempt: Attempt, stop: _Stop) -> Answer:
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
    later: Later


def _failed(link: Link, attempt: Attempt, err: Exception) -> Refusal:
    name, pod = type(link).__name__, attempt.pod
    log.exception(err, "A link of admission failed", link=name, pod=pod.full_name, podUID=pod.uid)
    return Refusal(UNEXPECTED, f"{name} failed: {err}")


def make_chain(given: Surroundings) -> Chain:
    """Give all links, ready to use."""
    ours: list[Link | None] = [
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
    return Chain([*filter(None, ours), *others_links(given, installed(GROUP))])


def others_links(given: Surroundings, found: Iterable[EntryPoint[Maker]]) -> list[Link]:
    """Give the links of others, in the order of their names.

    One that cannot be used keeps all new pods away, and says why: whoever installed it wants it to be asked.
    """
    links: list[Link] = []
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

    def admit(self, attempt: Attempt) -> Refusal:
        return Refusal(UNEXPECTED, self._problem)

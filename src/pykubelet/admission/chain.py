"""The links in their order: the first refusal is the last word, and the reason that people are told.

Adding a link is one file and one line here. Others' links come by entry points of the group
`pykubelet.admission`, whose objects are called with the `Surroundings` and give a `Link`; they are asked
after ours, in the order of their names. A link that fails refuses the pod: what was installed to keep pods
away must not let them in because it is broken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from pykubelet.admission.apparmor import AppArmor
from pykubelet.admission.features import DeclaredFeatures, PodLevelResources
from pykubelet.admission.groups import SupplementalGroups
from pykubelet.admission.link import UNEXPECTED, Answer, Attempt, Link, Preempt, Refusal, Surroundings
from pykubelet.admission.predicates import Predicates
from pykubelet.admission.sysctls import Sysctls
from pykubelet.admission.system import OperatingSystem
from pykubelet.logs import get_logger

log = get_logger(__name__)

GROUP = "pykubelet.admission"


class EntryPoint(Protocol):
    """Where somebody else's link is."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def value(self) -> str:
        """The module and the object in it."""

    def load(self) -> Callable[[Surroundings], Link]:
        """Import it."""


class Chain:
    """Asks each link in turn."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)

    def admit(self, attempt: Attempt) -> Answer:
        """Give the first refusal; else who makes room; None when the pod may run at once.

        Nobody has to make room for a pod that a later link refuses.
        """
        room: Preempt | None = None
        for link in self.links:
            if attempt.running and not link.for_running:
                continue
            try:
                answer = link.admit(attempt)
            except Exception as err:  # others' code, and pods must not come in by a bug of ours
                name, pod = type(link).__name__, attempt.pod
                log.exception(err, "A link of admission failed", link=name, pod=pod.full_name, podUID=pod.uid)
                return Refusal(UNEXPECTED, f"{name} failed: {err}")
            if isinstance(answer, Refusal):
                return answer
            room = room or answer
        return room


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
    return Chain([*filter(None, ours), *others_links(given, installed_links())])


def installed_links() -> Iterable[EntryPoint]:
    """Give the entry points of what is installed beside the agent."""
    if not any(_mentions_us(Path(folder)) for folder in sys.path):
        return ()
    # Nearly always there are none, and then 0.8 MB are saved.
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def _mentions_us(folder: Path) -> bool:
    return any(
        f"[{GROUP}]" in offered.read_text(errors="replace")
        for info in ("dist-info", "egg-info")
        for offered in folder.glob(f"*.{info}/entry_points.txt")
    )


def others_links(given: Surroundings, found: Iterable[EntryPoint]) -> list[Link]:
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

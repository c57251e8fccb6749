"""What is held to be true of each container now, and who wants to hear when it changes.

The one place where verdicts live: the decision asks here whether a container failed, the sync loop
subscribes, the status is made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pykubelet.probes.kinds import KINDS, Kind, Verdict


@dataclass(frozen=True, slots=True)
class ProbeUpdate:
    """A verdict that changed."""

    pod_uid: str
    container_name: str
    container_id: str
    kind: Kind
    verdict: Verdict


Listener = Callable[[ProbeUpdate], None]


class Results:
    """Verdicts by container id and kind."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, Kind], Verdict] = {}
        self._listeners: list[Listener] = []

    def verdict(self, kind: Kind, container_id: str) -> Verdict | None:
        """What holds for a container, or None where nobody asks."""
        return self._verdicts.get((container_id, kind))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` at every change, in the loop; it must not wait. Returns how to stop that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def begin(self, kind: Kind, container_id: str, verdict: Verdict) -> None:
        """Set what holds before a container is asked; nobody is told, nothing has happened yet."""
        self._verdicts[container_id, kind] = verdict

    def publish(self, update: ProbeUpdate) -> None:
        """Set a new verdict and tell everyone."""
        self._verdicts[update.container_id, update.kind] = update.verdict
        for listener in tuple(self._listeners):
            listener(update)

    def forget(self, container_id: str, *kinds: Kind) -> None:
        """Drop what is known of a container, of all kinds unless some are named."""
        for kind in kinds or KINDS:
            self._verdicts.pop((container_id, kind), None)

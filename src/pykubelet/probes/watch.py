"""One probe of one container: which question, of whom, how it stands and when it is asked next."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pykubelet.api.pod import Container, Pod, Probe
from pykubelet.probes.kinds import KINDS, Kind, Terms, probe_of, terms_of
from pykubelet.probes.metrics import Labels
from pykubelet.probes.threshold import ProbeState, begin
from pykubelet.probes.timing import Beat, phase_of


@dataclass(slots=True, eq=False)
class Watch:
    """A probe and its progress with the container that runs now."""

    kind: Kind
    probe: Probe
    terms: Terms
    phase: float
    labels: Labels
    state: ProbeState
    beat: Beat | None = None
    """When it is due; None while there is nothing to ask."""
    task: asyncio.Task[None] | None = None
    """The look that is under way."""


@dataclass(slots=True, eq=False)
class Watched:
    """A container with its probes, as the runtime last showed it."""

    pod: Pod
    container: Container
    watches: dict[Kind, Watch]
    container_id: str = ""
    running: bool = False
    ip: str = ""
    began: float = 0.0
    """When it was started, in the loop's time."""
    older: bool = False
    """Whether it ran before the agent did."""


def watched(pod: Pod, container: Container, *, terminating: bool) -> Watched | None:
    """Make the probes of a container, None if it has none; readiness only when it is on its way out."""
    watches: dict[Kind, Watch] = {}
    for kind in KINDS:
        probe = probe_of(container, kind)
        if probe is not None and (kind == "readiness" or not terminating):
            labels = Labels(kind, container.name, pod.metadata.name, pod.metadata.namespace, pod.uid)
            phase = phase_of(pod.uid, container.name, kind)
            watches[kind] = Watch(kind, probe, terms_of(probe), phase, labels, begin(kind))
    return Watched(pod, container, watches) if watches else None

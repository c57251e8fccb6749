"""What goes, and in which order, when all containers of a pod begin anew in the sandbox that they have.

One container's end may restart all (`RestartAllContainers`). Then every trace of the pod's init and
ordinary containers is removed, so that the pod is initialized again as on its first day; the sandbox,
its addresses and the volumes stay, and so do ephemeral containers, which somebody looks through.

The containers whose end is the reason go last. An agent that dies in between thus still finds why it
all began, and its successor goes on, without having to be told.
"""

from __future__ import annotations

from collections.abc import Sequence

from pykubelet.api.pod import Container, Pod
from pykubelet.runtime.observed import ObservedContainer, ObservedPod
from pykubelet.runtime.restart import restarts_all

Waves = Sequence[Sequence[ObservedContainer]]
"""Containers to stop and remove, one wave after the other; those of a wave do not wait for each other."""


def reset_waves(pod: Pod, observed: ObservedPod) -> Waves:
    """Give all of the pod's containers in the order in which they go; the last wave are the reasons."""
    init, ordinary = pod.spec.init_containers, pod.spec.containers
    reasons = [c for spec in (*ordinary, *init) for c in _traces(observed, spec) if _is_reason(spec, c)]
    spared = {container.id for container in reasons}

    def others(spec: Container) -> list[ObservedContainer]:
        return [container for container in _traces(observed, spec) if container.id not in spared]

    # Sidecars serve the ordinary containers and those after them, as at the pod's end.
    waves = [[c for spec in ordinary for c in others(spec)], *(others(spec) for spec in reversed(init))]
    return [wave for wave in (*waves, reasons) if wave]


def reasons_of(pod: Pod, observed: ObservedPod) -> list[ObservedContainer]:
    """Give the containers whose end, as the newest of their name, asks for all to begin anew."""
    found = []
    for spec in (*pod.spec.init_containers, *pod.spec.containers):
        if spec.restart_policy_rules:
            last = observed.latest(spec.name)
            if last is not None and _is_reason(spec, last):
                found.append(last)
    return found


def is_reset(pod: Pod, observed: ObservedPod) -> bool:
    """Whether there is no trace of any init or ordinary container: nothing has begun, or nothing is left."""
    return not any(
        observed.latest(container.name) for container in (*pod.spec.init_containers, *pod.spec.containers)
    )


def _traces(observed: ObservedPod, spec: Container) -> list[ObservedContainer]:
    return [container for container in observed.containers if container.name == spec.name]


def _is_reason(spec: Container, container: ObservedContainer) -> bool:
    return container.phase == "exited" and restarts_all(spec, container.exit_code)

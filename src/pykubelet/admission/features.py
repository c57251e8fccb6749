"""Pods that need more than this node can do.

The scheduler sends such pods elsewhere, by what the node declares; one that was bound by hand, or by a
scheduler that does not know, is refused here instead of being run as something else. A user namespace on
the node's network is such a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pykubelet.admission.link import Attempt, Refusal, Surroundings
from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod, is_sidecar

POD_LEVEL_REASON = "PodLevelResourcesNotSupported"
DECLARED_REASON = "PodFeatureUnsupported"


class PodLevelResources:
    """Refuses amounts for a whole pod where the gate is off: nobody would enforce them."""

    for_running = False

    def __init__(self, given: Surroundings) -> None:
        self._enabled = given.gates.enabled("PodLevelResources")

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Look for amounts that are written for the whole pod."""
        whole = attempt.pod.spec.resources
        if self._enabled or whole is None or not (_counts(whole.requests) or _counts(whole.limits)):
            return None
        return Refusal(POD_LEVEL_REASON, "PodLevelResources feature gate is disabled")


class DeclaredFeatures:
    """Refuses pods that need a feature which the node does not declare."""

    for_running = False

    def __init__(self, given: Surroundings) -> None:
        self._enabled = given.gates.enabled("NodeDeclaredFeatures")

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Compare what the pod needs with what the node declares."""
        if not self._enabled:
            return None
        missing = needed_features(attempt.pod) - set(attempt.node.status.declared_features)
        if not missing:
            return None
        return Refusal(DECLARED_REASON, lacking(missing))


def lacking(features: Iterable[str]) -> str:
    """Say that a pod needs features that the node does not have."""
    return f"Pod requires node features that are not available: {', '.join(sorted(features))}"


def needed_features(pod: Pod) -> set[str]:
    """Give the features without which the pod would be something else than what its author wrote."""
    return {name for name, is_needed in _NEEDS.items() if is_needed(pod)}


def features_of_update(before: Pod, after: Pod) -> set[str]:
    """Give the features without which what has changed in a pod that runs would not be done."""
    found = set()
    if before.spec.resources != after.spec.resources:
        found.add("InPlacePodLevelResourcesVerticalScaling")
    old = {one.name: one.resources for one in before.spec.init_containers}
    if any(
        one.resources != old.get(one.name, one.resources)
        for one in after.spec.init_containers
        if not is_sidecar(one)
    ):
        found.add("InPlacePodVerticalScalingInitContainers")
    return found


def _restarts_all(pod: Pod) -> bool:
    containers = (*pod.spec.init_containers, *pod.spec.containers)
    return any(
        rule.action == "RestartAllContainers" for one in containers for rule in one.restart_policy_rules
    )


_NEEDS: Mapping[str, Callable[[Pod], bool]] = {
    "RestartAllContainersOnContainerExits": _restarts_all,
    "UserNamespacesHostNetworkSupport": lambda pod: pod.spec.host_network and pod.spec.host_users is False,
}


def _counts(amounts: Resources) -> bool:
    """Whether any of these may be written for a whole pod."""
    return any(name in ("cpu", "memory") or name.startswith("hugepages-") for name in amounts)

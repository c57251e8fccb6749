"""Whether a container that is not running should run again: the restart policies, purely."""

from __future__ import annotations

from pykubelet.api.pod import Container, Pod, PodSpec, RestartRule
from pykubelet.runtime.observed import ObservedContainer

RESTART_ALL = "RestartAllContainers"
"""The action of a rule by which one container's end restarts all of them in place."""


def restarts_after_failure(pod: Pod, container: Container) -> bool:
    """Whether a failure of a container that is still there (a probe) leads to a restart."""
    return (container.restart_policy or pod.spec.restart_policy) != "Never"


def should_restart(pod: Pod, container: Container, last: ObservedContainer | None) -> bool:
    """Whether the container shall be started, given its newest incarnation."""
    if pod.metadata.deletion_timestamp is not None:
        return False
    if last is None or last.phase in ("created", "unknown"):
        return True
    return last.phase == "exited" and restarts_after_exit(pod, container, last.exit_code)


def restarts_after_exit(pod: Pod, container: Container, exit_code: int) -> bool:
    """Whether the policies want a container that ended this way to run again."""
    if container.restart_policy_rules:
        rule = _rule_for(container, exit_code)
        if rule is not None and rule.action in ("Restart", RESTART_ALL):
            return True
    policy = container.restart_policy or pod.spec.restart_policy
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def always_restarts(pod: Pod) -> bool:
    """Return whether every ordinary container runs again however it ended."""
    return all(
        (container.restart_policy or pod.spec.restart_policy) == "Always" for container in pod.spec.containers
    )


def restarts_all(container: Container, exit_code: int) -> bool:
    """Whether all containers of the pod shall begin anew after this one ended this way."""
    rule = _rule_for(container, exit_code)
    return rule is not None and rule.action == RESTART_ALL


def may_restart_all(spec: PodSpec) -> bool:
    """Whether any container's end could restart all of them."""
    return any(
        rule.action == RESTART_ALL
        for containers in (spec.init_containers, spec.containers)
        for container in containers
        for rule in container.restart_policy_rules
    )


def _rule_for(container: Container, exit_code: int) -> RestartRule | None:
    """Give the rule that decides: the first one that fits, whatever the ones after it say."""
    return next((rule for rule in container.restart_policy_rules if _fits(rule, exit_code)), None)


def _fits(rule: RestartRule, exit_code: int) -> bool:
    codes = rule.exit_codes
    return codes is not None and (exit_code in codes.values) == (codes.operator == "In")

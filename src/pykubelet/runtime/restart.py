"""Whether a container that is not running should run again: the restart policies, purely."""

from __future__ import annotations

from pykubelet.api.pod import Container, Pod
from pykubelet.runtime.observed import ObservedContainer


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
    if any(_applies(codes, exit_code) for codes in _restart_codes(container)):
        return True
    policy = container.restart_policy or pod.spec.restart_policy
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def _restart_codes(container: Container) -> list[tuple[str, list[int]]]:
    return [
        (rule.exit_codes.operator, rule.exit_codes.values)
        for rule in container.restart_policy_rules
        if rule.action == "Restart" and rule.exit_codes is not None
    ]


def _applies(codes: tuple[str, list[int]], exit_code: int) -> bool:
    operator, values = codes
    return (exit_code in values) == (operator == "In")

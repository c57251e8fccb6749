"""Which pods make room for one that the node must have. Pure.

As few as possible and of as little importance: guaranteed pods only for what all others together cannot
give, burstable ones only for what best-effort ones cannot. Within a class, time and again the pod that
gives most of what is still missing; of equal ones the one that is promised less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pykubelet.admission.link import Amounts
from pykubelet.api.pod import Pod
from pykubelet.pods.static import is_critical_pod


class NoVictims(Exception):
    """No set of pods would make enough room; the text says of what."""


def may_preempt(pod: Pod, victim: Pod) -> bool:
    """Whether one pod may take the place of another."""
    if is_critical_pod(pod) and not is_critical_pod(victim):
        return True
    mine, theirs = pod.spec.priority, victim.spec.priority
    return mine is not None and theirs is not None and mine > theirs


def choose_victims(
    pod: Pod,
    others: Sequence[Pod],
    missing: Amounts,
    *,
    requests_of: Callable[[Pod], Amounts],
    class_of: Callable[[Pod], str],
) -> list[Pod]:
    """Give the pods whose end frees what is `missing` for the pod; raises NoVictims."""

    def given(victim: Pod) -> Amounts:
        return {**requests_of(victim), "pods": 1}

    preemptable = [other for other in others if may_preempt(pod, other)]
    by_class: dict[str, list[Pod]] = {"BestEffort": [], "Burstable": [], "Guaranteed": []}
    for other in preemptable:
        by_class[class_of(other)].append(other)
    best_effort, burstable, guaranteed = by_class.values()
    if rest := _without(missing, preemptable, given):
        raise NoVictims(_told(rest))
    first = _nearest(guaranteed, _without(missing, [*best_effort, *burstable], given), given)
    second = _nearest(burstable, _without(missing, [*best_effort, *first], given), given)
    third = _nearest(best_effort, _without(missing, [*second, *first], given), given)
    return [*third, *second, *first]


def _nearest(pods: Sequence[Pod], missing: Amounts, given: Callable[[Pod], Amounts]) -> list[Pod]:
    """Choose pods until nothing is missing; what all give together is known to be enough."""
    left, chosen = list(pods), []

    def rank(pod: Pod) -> tuple[float, int, int]:
        amounts = given(pod)
        return _distance(missing, amounts), amounts.get("memory", 0), amounts.get("cpu", 0)

    while missing:
        # Of equal ones the last: pods come in the order of their age.
        best = min(reversed(left), key=rank)
        left = [pod for pod in left if pod is not best]
        chosen.append(best)
        missing = _without(missing, [best], given)
    return chosen


def _distance(missing: Amounts, amounts: Amounts) -> float:
    """How far a pod is from giving all that is missing; each resource weighs the same."""
    return sum(
        (max(0, amount - amounts.get(name, 0)) / amount) ** 2 for name, amount in missing.items() if amount
    )


def _without(missing: Amounts, pods: Iterable[Pod], given: Callable[[Pod], Amounts]) -> Mapping[str, int]:
    left = dict(missing)
    for pod in pods:
        amounts = given(pod)
        left = {name: amount - amounts.get(name, 0) for name, amount in left.items()}
    return {name: amount for name, amount in left.items() if amount > 0}


def _told(missing: Amounts) -> str:
    """Write what is missing as the reference does, which leaves a comma at the end."""
    return f"[{''.join(f'(res: {name}, q: {amount}), ' for name, amount in missing.items())}]"

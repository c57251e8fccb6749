"""Room and place for the pod, as the scheduler would judge them; for a critical pod, room is made.

A critical pod (static, or of a system priority) is not refused for want of room: others go. If anything
else speaks against it, only that is told, and nobody has to go.
"""

from __future__ import annotations

from pykubelet.admission.fit import as_amounts, shortages, usage_of
from pykubelet.admission.link import UNEXPECTED, Answer, Attempt, Preempt, Refusal, Surroundings
from pykubelet.admission.place import NODE_AFFINITY, misplacements
from pykubelet.admission.victims import NoVictims, choose_victims
from pykubelet.pods.static import is_critical_pod


class Predicates:
    """Refuses pods that do not fit or do not belong here, or says who makes room."""

    for_running = False

    def __init__(self, given: Surroundings) -> None:
        self._given = given
        self._comparing = given.gates.enabled("TaintTolerationComparisonOperators")

    def admit(self, attempt: Attempt) -> Answer:
        """Tell the first of all that speaks against the pod."""
        given, pod, others = self._given, attempt.pod, attempt.others
        allocatable = as_amounts({**attempt.node.status.allocatable, **attempt.devices()})
        used = attempt.used if attempt.used is not None else usage_of(others, given.requests_of)
        short = shortages(pod, used, allocatable, given.requests_of)
        wrong = misplacements(pod, attempt.node, others, comparing=self._comparing)
        critical = is_critical_pod(pod)
        if short and not critical:
            return Refusal(short[0].reason, short[0].message)
        if wrong:
            stale = not short and wrong == [NODE_AFFINITY]
            return Refusal(wrong[0].reason, wrong[0].message, stale=stale)
        if not short:
            return None
        missing = {one.resource: one.missing for one in short}
        try:
            victims = choose_victims(
                pod, others, missing, requests_of=given.requests_of, class_of=given.class_of
            )
        except NoVictims as err:
            return Refusal(
                UNEXPECTED,
                "Unexpected error while attempting to recover from admission failure: preemption: error "
                f"finding a set of pods to preempt: no set of running pods found to reclaim resources: {err}",
            )
        return Preempt(victims, short[0].resource)

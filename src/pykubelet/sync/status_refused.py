"""The statuses of pods that the node turns away: refused before they began, or ended for a critical pod.

Clients match on these words. A refused pod's status says no more than that: the node never had it, so
there are no conditions and no containers. After a restart of the agent it is recognised by its message.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from pykubelet.admission.link import Refusal
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodCondition, PodStatus
from pykubelet.resources.qos import qos_class

PREEMPTING = "Preempting"
PREEMPTED = "Preempted in order to admit critical pod"

_REJECTED = "Pod was rejected: "


def refused_status(pod: Pod, refusal: Refusal, now: datetime) -> PodStatus:
    """Give the status of a pod that may not run here."""
    return PodStatus(
        observed_generation=pod.metadata.generation,
        phase="Failed",
        reason=refusal.reason,
        message=f"{_REJECTED}{refusal.message}",
        qos_class=qos_class(pod),
        start_time=pod.status.start_time or now,
    )


def preempted_status(pod: Pod, status: PodStatus, now: datetime) -> PodStatus:
    """Give the status of a pod that has to go for a critical one."""
    target = PodCondition(
        type="DisruptionTarget",
        status="True",
        observed_generation=pod.metadata.generation or msgspec.UNSET,
        last_transition_time=now,
        reason="TerminationByKubelet",
        message="Pod was preempted by Kubelet to accommodate a critical pod.",
    )
    return msgspec.structs.replace(
        status,
        phase="Failed",
        reason=PREEMPTING,
        message=PREEMPTED,
        conditions=[*(c for c in status.conditions if c.type != target.type), target],
    )


def was_refused(status: PodStatus) -> bool:
    """Whether this is the status of a pod that was refused."""
    return status.phase == "Failed" and status.message.startswith(_REJECTED)

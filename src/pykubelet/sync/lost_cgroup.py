"""Pods that have lost their cgroup: somebody removed it, and their processes run without limits.

A process cannot be brought back under a cgroup's limits as if nothing had happened (what it has used is
charged elsewhere), so the pod is stopped in order, and its next step starts it anew if its restart policy
wants that.
"""

from __future__ import annotations

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger
from pykubelet.pods.journal import Journal
from pykubelet.runtime.kill import Killer, KillError
from pykubelet.runtime.observed import ObservedPod
from pykubelet.sync.worker import StepError

log = get_logger(__name__)


async def stop_unbound(pod: Pod, observed: ObservedPod, killer: Killer, journal: Journal) -> None:
    """Stop everything of a pod that runs without its cgroup; raises StepError."""
    log.info("Stopping a pod that has lost its cgroup", pod=pod.full_name, podUID=pod.uid)
    journal.note(pod.uid, "cgroup", "it is gone: the pod is stopped, to run within its limits again")
    try:
        await killer.pod(pod, observed)
    except KillError as err:
        raise StepError(str(err)) from err

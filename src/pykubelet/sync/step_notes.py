"""What a step of a pod's life leaves in words, and what it compares with. Pure."""

from __future__ import annotations

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.runtime.actions import Actions
from pykubelet.runtime.observed import ObservedPod
from pykubelet.sync.status_containers import api_time


def ended(observed: ObservedPod) -> set[str]:
    """Give the containers that have ended, by id."""
    return {container.id for container in observed.containers if container.phase == "exited"}


def status_before(pod: Pod, observed: ObservedPod) -> PodStatus:
    """Give a pod's status as of an earlier agent: a pod that runs did not begin when this agent did."""
    began = min((sandbox.created_at for sandbox in observed.sandboxes), default=0)
    return msgspec.structs.replace(pod.status, start_time=pod.status.start_time or api_time(began))


def told(actions: Actions) -> str:
    """Say in a line what was decided."""
    parts = []
    if actions.create_sandbox:
        parts.append(f"new sandbox ({actions.why})")
    elif actions.kill_pod:
        parts.append("stop the pod: nothing of it shall run again")
    parts += [kill.message for kill in actions.kill]
    if resized := [resize.name for resize in actions.resize.containers.values()]:
        parts.append(f"resize {', '.join(resized)}")
    elif actions.resize:
        parts.append("resize the pod")
    starts = [*actions.start_ephemeral, *actions.start_init, *actions.start]
    if starts:
        parts.append(f"start {', '.join(starts)}")
    return "; ".join(parts)

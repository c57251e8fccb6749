"""Telling the runtime what a pod shall have as a whole, before its cgroup is set to it.

A runtime that puts pods into virtual machines has to make room there, and may refuse; most others do not
know the call and need not. What the runtime was told and then could not be set is taken back, so that it
does not count on resources that the pod never got.
"""

from __future__ import annotations

from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError, Unimplemented
from pykubelet.logs import get_logger
from pykubelet.resources.qos import milli_cpu_of_shares, quota_of, shares_of
from pykubelet.resources.resize_plan import PodLimits
from pykubelet.runtime.facts import NodeFacts
from pykubelet.runtime.linux_resources import overhead_resources

log = get_logger(__name__)

_NO_BOUND = 2**63 - 1
_NOTHING = Quantity.of(0)


class SandboxRefusal(Exception):
    """The runtime does not want the pod to have this; the text says why."""


class SandboxUpdates:
    """Tells the runtime about one pod's sandbox; without a sandbox it tells nobody."""

    def __init__(self, cri: Cri, node: NodeFacts, pod: Pod, sandbox_id: str) -> None:
        self._cri = cri
        self._node = node
        self._pod = pod
        self._sandbox_id = sandbox_id

    async def tell(self, limits: PodLimits, period: int) -> None:
        """Say what the pod's cgroup will be set to next, `period` in microseconds; raises SandboxRefusal."""
        if not self._sandbox_id:
            return
        try:
            await self._cri.runtime.update_pod_sandbox_resources(
                self._sandbox_id,
                overhead=overhead_resources(self._pod, self._node),
                resources=without_overhead(self._pod, limits, period),
            )
        except Unimplemented:
            return
        except CriError as err:
            if "not implemented" not in err.rpc_text:  # as containerd 2.2 says it
                raise SandboxRefusal(
                    f'updatePodSandboxResources failed for sandboxID "{self._sandbox_id}": {err.rpc_text}'
                ) from err

    async def take_back(self, limits: PodLimits, period: int) -> None:
        """Say what the pod's cgroup is set to after all; a failure is only told."""
        try:
            await self.tell(limits, period)
        except SandboxRefusal as err:
            pod = self._pod
            log.error(err, "Runtime was not told that a resize failed", pod=pod.full_name, podUID=pod.uid)


def without_overhead(pod: Pod, limits: PodLimits, period: int) -> pb.LinuxContainerResources:
    """Give what the containers have together: the pod's limits without what the runtime itself may use."""
    cpu, memory = pod.spec.overhead.get("cpu", _NOTHING).milli, int(pod.spec.overhead.get("memory", _NOTHING))
    quota, shares = limits.quota, limits.shares
    if cpu:
        quota = quota - quota_of(cpu, period) if quota > 0 else quota
        shares = shares_of(max(0, milli_cpu_of_shares(shares) - cpu))
    return pb.LinuxContainerResources(
        cpu_period=period,
        cpu_quota=quota,
        cpu_shares=shares,
        memory_limit_in_bytes=limits.memory - memory if limits.memory < _NO_BOUND else 0,
    )

"""Order in which pods are evicted for a signal. Pure.

| signal | order |
|---|---|
| memory | usage above the request first, then lower priority, then more usage above the request |
| file system | the same with the pod's files on that disk, as bytes or inodes |
| pid.available | lower priority, then more processes |

A pod without a measured usage comes first, as upstream: it has just started, and is the cheapest to evict.
Also as upstream, the request that is subtracted from inodes is that of `ephemeral-storage`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import pod_requests
from pykubelet.eviction.observations import DiskUsage, PodUsage
from pykubelet.eviction.signals import EPHEMERAL_STORAGE, INODES, MEMORY, PIDS, SIGNAL_RESOURCES, Disks
from pykubelet.podconfig.static_pods import is_critical_pod
from pykubelet.stats.storage.pod_storage import is_local_ephemeral

_ZERO = Quantity.from_units(0)


@dataclass(frozen=True, slots=True)
class RankedPod:
    """A pod with what decides its rank for one signal."""

    pod: Pod
    resource: str
    usage: int | None
    """Usage of the resource in bytes or counts; None if the pod was not measured."""
    request: int
    """Request of the pod in the unit of the usage; 0 for process IDs."""
    exceeds: bool
    """Whether the usage exceeds the request."""

    @property
    def priority(self) -> int:
        """Priority of the pod."""
        return self.pod.spec.priority or 0

    @property
    def is_evictable(self) -> bool:
        """Whether it may be evicted: static pods and critical ones are not."""
        return not is_critical_pod(self.pod)

    def explain(self) -> str:
        """Return the reasons for its rank in one line."""
        if self.usage is None:
            return f"its usage has not been measured; priority {self.priority}"
        if self.resource == PIDS:
            return f"priority {self.priority}, {self.usage} processes"
        usage, request = self._text(self.usage), self._text(self.request)
        if self.resource == INODES:
            return f"uses {usage} inodes, priority {self.priority}"
        relation = "more than" if self.exceeds else "within"
        return (
            f"uses {usage} of {self.resource}, {relation} its request of {request}, priority {self.priority}"
        )

    def _text(self, amount: int) -> str:
        return str(amount) if self.resource == INODES else str(Quantity.from_units(amount, "binary"))


class PreviewedOrder(NamedTuple):
    """Order of eviction for a report."""

    ranked: list[RankedPod]
    problem: str = ""
    """Reason why it is the built-in order although a custom ranking is installed; empty otherwise."""


def rank(
    signal: str,
    pods: Iterable[Pod],
    usages: Mapping[str, PodUsage],
    disks: Disks,
    *,
    pod_level: bool = True,
) -> list[RankedPod]:
    """Return the pods in the order in which they are evicted for a signal.

    `usages` are by pod uid; `pod_level`: whether pod-level resources count.
    """
    resource = SIGNAL_RESOURCES[signal]
    ranked = []
    for pod in pods:
        usage = usages.get(pod.uid)
        request = _request(pod, resource, pod_level=pod_level)
        amount = None if usage is None else _amount(signal, pod, usage, disks)
        # The request of inodes is always 0, other than what is subtracted when the usage is compared.
        limit = 0 if resource == INODES else request
        ranked.append(RankedPod(pod, resource, amount, request, amount is not None and amount > limit))
    ranked.sort(key=_pid_key if resource == PIDS else _request_key)
    return ranked


def _request_key(ranked: RankedPod) -> tuple[int, int, int]:
    if ranked.usage is None:
        return 0, ranked.priority, 0
    return 1 if ranked.exceeds else 2, ranked.priority, ranked.request - ranked.usage


def _pid_key(ranked: RankedPod) -> tuple[int, bool, int]:
    return ranked.priority, ranked.usage is not None, -(ranked.usage or 0)


def _request(pod: Pod, resource: str, *, pod_level: bool) -> int:
    if resource == PIDS:
        return 0
    name = EPHEMERAL_STORAGE if resource == INODES else resource
    request = int(pod_requests(pod, overhead=False, pod_level=pod_level).get(name, _ZERO))
    # Overhead counts only for pods that request the resource themselves.
    return request + int(pod.spec.overhead.get(name, _ZERO)) if request else 0


def _amount(signal: str, pod: Pod, usage: PodUsage, disks: Disks) -> int:
    resource = SIGNAL_RESOURCES[signal]
    if resource == MEMORY:
        return usage.memory or 0
    if resource == PIDS:
        return usage.processes or 0
    total = disk_usage(signal.partition(".")[0], pod, usage, disks)
    return total.used if resource == EPHEMERAL_STORAGE else total.inodes


def disk_usage(filesystem: str, pod: Pod, usage: PodUsage, disks: Disks) -> DiskUsage:
    """Return the usage of a pod on `nodefs`, `imagefs` or `containerfs`; each file counts once."""
    layers, files = True, True
    if disks.dedicated_imagefs and disks.split:
        # Logs, volumes and layers are on nodefs; images are shared by pods and belong to none.
        layers = files = filesystem != "imagefs"
    elif disks.dedicated_imagefs:
        layers, files = filesystem != "nodefs", filesystem == "nodefs"
    total = DiskUsage()
    for container in usage.containers:
        if layers and container.rootfs is not None:
            total += container.rootfs
        if files and container.logs is not None:
            total += container.logs
    if files:
        for volume in pod.spec.volumes:
            if (volume.host_path is not None or is_local_ephemeral(volume)) and volume.name in usage.volumes:
                total += usage.volumes[volume.name]
    return total

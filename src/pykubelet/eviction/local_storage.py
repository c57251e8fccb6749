"""Limits on the ephemeral storage of containers and pods, and on the size of emptyDir volumes. Pure.

A pod above one of them is evicted, whether or not the node is under pressure. The usage of a pod includes its
hosts file, which is a file of the node that a container can write to (CVE-2020-8557).
"""

from __future__ import annotations

from dataclasses import dataclass

from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import pod_limits
from pykubelet.eviction.messages import container_limit_message, empty_dir_message, pod_limit_message
from pykubelet.eviction.observations import PodUsage

EMPTY_DIR_SIGNAL = "emptydirfs.limit"
POD_SIGNAL = "ephemeralpodfs.limit"
CONTAINER_SIGNAL = "ephemeralcontainerfs.limit"
"""Label of `kubelet_evictions` for each limit."""
_ZERO = Quantity.from_units(0)


@dataclass(frozen=True, slots=True)
class ExceededLimit:
    """A limit that a pod exceeds."""

    signal: str
    message: str


def has_storage_limits(pod: Pod) -> bool:
    """Return whether a pod has any limit on its local storage; the others need not be measured."""
    return any(_size_limit(pod).values()) or any(
        "ephemeral-storage" in container.resources.limits
        for container in (*pod.spec.containers, *pod.spec.init_containers)
    )


def exceeded_limit(pod: Pod, usage: PodUsage, *, dedicated_imagefs: bool) -> ExceededLimit | None:
    """Return the first limit that a pod exceeds: of an emptyDir volume, of the pod, of a container.

    As upstream, writable layers count for the limit of a container only if they are on nodefs.
    """
    for name, size_limit in _size_limit(pod).items():
        volume = usage.volumes.get(name)
        if volume is not None and volume.used > int(size_limit):
            return ExceededLimit(EMPTY_DIR_SIGNAL, empty_dir_message(name, size_limit))
    pod_limit = pod_limits(pod).get("ephemeral-storage")
    if pod_limit is not None and (usage.ephemeral_storage or 0) > int(pod_limit):
        return ExceededLimit(POD_SIGNAL, pod_limit_message(pod_limit))
    limits = {
        container.name: limit
        for container in pod.spec.containers
        if (limit := container.resources.limits.get("ephemeral-storage", _ZERO)).nanos
    }
    for container in usage.containers:
        container_limit = limits.get(container.name)
        used = container.logs.used if container.logs is not None else 0
        if not dedicated_imagefs and container.rootfs is not None:
            used += container.rootfs.used
        if container_limit is not None and used > int(container_limit):
            return ExceededLimit(CONTAINER_SIGNAL, container_limit_message(container.name, container_limit))
    return None


def _size_limit(pod: Pod) -> dict[str, Quantity]:
    """Return the size limits of the pod's emptyDir volumes by name."""
    return {
        volume.name: volume.empty_dir.size_limit
        for volume in pod.spec.volumes
        if volume.empty_dir is not None
        and volume.empty_dir.size_limit is not None
        and volume.empty_dir.size_limit.nanos > 0
    }

"""Texts and statuses of evicted pods, as upstream writes them: users and tools match on them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodCondition, PodStatus
from pykubelet.api.quantity import Notation, Quantity
from pykubelet.cm.qos import has_pod_level_resources
from pykubelet.eviction.observations import ContainerUsage, Observations, PodUsage
from pykubelet.eviction.signals import EPHEMERAL_STORAGE, MEMORY, Threshold

EVICTED = "Evicted"
"""Reason of the status and of the event."""
_ZERO = Quantity.from_units(0)


def eviction_message(
    pod: Pod,
    usage: PodUsage | None,
    resource: str,
    acting: Iterable[Threshold],
    observations: Observations,
    *,
    pod_level: bool = True,
) -> tuple[str, dict[str, str]]:
    """Return the message of a pod that is evicted for a resource, and the annotations of its event."""
    message = f"The node was low on resource: {resource}. "
    for threshold in acting:
        observed = observations.get(threshold.signal)
        if threshold.resource == resource and observed is not None:
            quantity = threshold.value.amount(observed.capacity)
            available = Quantity.from_units(observed.available, _notation(resource))
            message += f"Threshold quantity: {quantity}, available: {available}. "
            break
    if usage is None:
        return message, {}
    annotations: dict[str, str] = {}
    if resource == MEMORY and pod_level and has_pod_level_resources(pod) and usage.memory is not None:
        request = pod.spec.resources.requests.get(resource) if pod.spec.resources is not None else None
        if request is not None:
            used = _bytes(usage.memory)
            message += _consumption("Pod", pod.metadata.name, used, request, resource)
            annotations |= {"offending_pod": pod.metadata.name, "offending_pod_usage": str(used)}
    names, usages = [], []
    # Ephemeral containers cannot have requests and would always be listed.
    requests = {
        container.name: container.resources.requests.get(resource, _ZERO)
        for container in (*pod.spec.init_containers, *pod.spec.containers)
    }
    for container in usage.containers:
        amount = _container_amount(container, resource)
        if container.name not in requests or amount is None or amount <= requests[container.name]:
            continue
        message += _consumption("Container", container.name, amount, requests[container.name], resource)
        names.append(container.name)
        usages.append(str(amount))
    annotations |= {
        "offending_containers": ",".join(names),
        "offending_containers_usage": ",".join(usages),
        "starved_resource": resource,
    }
    return message, annotations


def _consumption(kind: str, name: str, used: Quantity, request: Quantity, resource: str) -> str:
    return f"{kind} {name} was using {used}, request is {request}, has larger consumption of {resource}. "


def _container_amount(container: ContainerUsage, resource: str) -> Quantity | None:
    if resource == MEMORY and container.memory is not None:
        return _bytes(container.memory)
    if resource == EPHEMERAL_STORAGE and container.rootfs is not None and container.logs is not None:
        return _bytes(container.rootfs.used + container.logs.used)
    return None


def _bytes(amount: int) -> Quantity:
    return Quantity.from_units(amount, "binary")


def _notation(resource: str) -> Notation:
    return "binary" if resource in (MEMORY, EPHEMERAL_STORAGE) else "decimal"


def container_limit_message(container: str, limit: Quantity) -> str:
    """Return the message of a pod with a container above its limit on ephemeral storage."""
    return f'Container {container} exceeded its local ephemeral storage limit "{limit}". '


def pod_limit_message(limit: Quantity) -> str:
    """Return the message of a pod above the sum of its limits on ephemeral storage."""
    return f"Pod ephemeral local storage usage exceeds the total limit of containers {limit}. "


def empty_dir_message(volume: str, limit: Quantity) -> str:
    """Return the message of a pod with an emptyDir volume above its size limit."""
    return f'Usage of EmptyDir volume "{volume}" exceeds the limit "{limit}". '


def node_condition_message(conditions: Iterable[str]) -> str:
    """Return the message of a pod that is rejected because of node conditions."""
    return f"The node had condition: [{' '.join(conditions)}]. "


def evicted_status(pod: Pod, status: PodStatus, message: str, now: datetime, *, disrupted: bool) -> PodStatus:
    """Return the status of an evicted pod.

    `disrupted` adds the DisruptionTarget condition: the node was short of a resource. A pod above its own
    limits does not have it.
    """
    conditions = status.conditions
    if disrupted:
        before = next((known for known in conditions if known.type == "DisruptionTarget"), None)
        changed = before is None or before.status != "True" or before.last_transition_time is None
        target = PodCondition(
            type="DisruptionTarget",
            status="True",
            observed_generation=pod.metadata.generation or msgspec.UNSET,
            last_transition_time=now if changed or before is None else before.last_transition_time,
            reason="TerminationByKubelet",
            message=message,
        )
        conditions = [*(known for known in conditions if known.type != target.type), target]
    return msgspec.structs.replace(
        status, phase="Failed", reason=EVICTED, message=message, conditions=conditions
    )

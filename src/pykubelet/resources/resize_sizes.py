"""The pod as the node has promised it to be, and the sizes of its containers. Pure.

An author may wish for other resources while the pod runs; until the node has promised them, everybody here
works with a pod that has the old ones: the very object when there is no difference, so that what was
computed for it stays known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod, ResourceRequirements, is_sidecar
from pykubelet.api.quantity import Quantity
from pykubelet.resources.resize_book import PodResources

RESIZABLE = ("cpu", "memory")

_NOTHING = Quantity.of(0)
_NANOS_PER_MILLI = 10**6


class Scope(NamedTuple):
    """What may be resized beside containers and sidecars: gates of the same meaning."""

    whole: bool = True
    """Resources of whole pods (`InPlacePodLevelResourcesVerticalScaling`)."""
    init: bool = True
    """Init containers that end (`InPlacePodVerticalScalingInitContainers`)."""


class Sizes(NamedTuple):
    """What the kernel is told of a container: bytes and thousandths of cpus, 0 for nothing said."""

    memory_limit: int = 0
    memory_request: int = 0
    cpu_limit: int = 0
    cpu_request: int = 0


def resizable(pod: Pod, scope: Scope) -> Iterator[Container]:
    """Give the containers that can be resized."""
    for container in pod.spec.init_containers:
        if scope.init or is_sidecar(container):
            yield container
    yield from pod.spec.containers


def resources_of(pod: Pod, scope: Scope) -> PodResources:
    """Give what a pod's spec says, as the books keep it."""
    return PodResources(
        {container.name: container.resources for container in resizable(pod, scope)},
        pod.spec.resources if scope.whole else None,
    )


def with_resources(pod: Pod, resources: PodResources, scope: Scope) -> Pod:
    """Give the pod with these resources; the pod itself when it has them already."""

    def changed(containers: Iterable[Container]) -> list[Container] | None:
        found = [_with(container, resources.containers.get(container.name)) for container in containers]
        return found if any(new is not old for new, old in zip(found, containers, strict=True)) else None

    spec = pod.spec
    if (ordinary := changed(spec.containers)) is not None:
        spec = msgspec.structs.replace(spec, containers=ordinary)
    if (init := changed(spec.init_containers)) is not None:
        spec = msgspec.structs.replace(spec, init_containers=init)
    if scope.whole and spec.resources != resources.whole:
        spec = msgspec.structs.replace(spec, resources=resources.whole)
    return pod if spec is pod.spec else msgspec.structs.replace(pod, spec=spec)


def sizes_of(resources: ResourceRequirements, whole: ResourceRequirements | None) -> Sizes:
    """Give a container's sizes; the pod's own limits bound containers that have none."""
    limits = effective_limits(resources, whole)
    return Sizes(
        memory_limit=int(limits.get("memory", _NOTHING)),
        memory_request=int(resources.requests.get("memory", _NOTHING)),
        cpu_limit=limits.get("cpu", _NOTHING).milli,
        cpu_request=resources.requests.get("cpu", _NOTHING).milli,
    )


def with_sizes(container: Container, sizes: Sizes) -> Container:
    """Give a container of these sizes."""
    own = container.resources
    limits, requests = dict(own.limits), dict(own.requests)
    for amounts, name, size in (
        (limits, "memory", Quantity.of(sizes.memory_limit, "binary")),
        (limits, "cpu", Quantity(sizes.cpu_limit * _NANOS_PER_MILLI)),
        (requests, "memory", Quantity.of(sizes.memory_request, "binary")),
        (requests, "cpu", Quantity(sizes.cpu_request * _NANOS_PER_MILLI)),
    ):
        # A request of nothing stays: without it, the limit would count as one. An equal amount keeps the
        # words of its author.
        if (size.nanos or name in amounts) and amounts.get(name) != size:
            amounts[name] = size
    return msgspec.structs.replace(
        container, resources=msgspec.structs.replace(own, limits=limits, requests=requests)
    )


def effective_limits(resources: ResourceRequirements, whole: ResourceRequirements | None) -> Resources:
    """Give a container's limits as they are enforced."""
    limits = dict(resources.limits)
    for name in RESIZABLE:
        bound = whole.limits.get(name, _NOTHING) if whole is not None else _NOTHING
        if bound.nanos and not limits.get(name, _NOTHING).nanos:
            limits[name] = bound
    return limits


def in_effect(container: Container, pod: Pod, scope: Scope) -> ResourceRequirements:
    """Give what a container that is started now is set to, as the books keep it."""
    whole = pod.spec.resources if scope.whole else None
    if whole is None or not whole.limits:
        return container.resources
    return msgspec.structs.replace(container.resources, limits=effective_limits(container.resources, whole))


def at_most(pod: Pod, actual: PodResources, scope: Scope) -> Pod:
    """Give the pod with the larger of what it was promised and what it still has.

    What a pod is to give back is not free before it has done so.
    """

    def larger(one: ResourceRequirements, other: ResourceRequirements | None) -> ResourceRequirements:
        more = {
            name: other.requests[name]
            for name in RESIZABLE
            if other is not None and other.requests.get(name, _NOTHING) > one.requests.get(name, _NOTHING)
        }
        return msgspec.structs.replace(one, requests={**one.requests, **more}) if more else one

    had = PodResources(
        {one.name: larger(one.resources, actual.containers.get(one.name)) for one in resizable(pod, scope)},
        None if pod.spec.resources is None else larger(pod.spec.resources, actual.whole),
    )
    return with_resources(pod, had, scope)


def _with(container: Container, resources: ResourceRequirements | None) -> Container:
    if resources is None or resources == container.resources:
        return container
    return msgspec.structs.replace(container, resources=resources)

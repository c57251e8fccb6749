"""What has to be done so that running containers have what their pod was promised. Pure.

Containers that shrink come before those that grow, and the pod's own cgroup grows before its containers and
shrinks after them: at no moment do the containers have more than their pod, and none is refused its new
limit because another has not given back yet. Memory and cpu are two rounds, memory first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.resources.resize_book import PodResources
from pykubelet.resources.resize_sizes import Scope, Sizes, resizable, sizes_of

Resource = Literal["memory", "cpu"]
Part = Literal["memory", "quota", "shares"]
"""A setting of a pod's cgroup."""


@dataclass(frozen=True, slots=True)
class ContainerResize:
    """A running container that does not have what it was promised."""

    name: str
    wanted: Sizes
    current: Sizes | None = None
    """None when nobody knows: it is set anew, and never restarted for that."""
    restart: bool = False
    """Whether its author wants it restarted for this."""

    def change(self, resource: Resource) -> int:
        """Say whether it grows (positive) or shrinks (negative) in this resource; a limit counts first."""
        now = self.current or Sizes()
        if resource == "memory":
            return self.wanted.memory_limit - now.memory_limit or (
                self.wanted.memory_request - now.memory_request
            )
        return self.wanted.cpu_limit - now.cpu_limit or self.wanted.cpu_request - now.cpu_request

    def after(self, resource: Resource) -> Sizes:
        """Give its sizes after a round; that of memory leaves the cpus as they are."""
        now, new = self.current, self.wanted
        if now is None or resource == "cpu":
            return new
        return new._replace(cpu_limit=now.cpu_limit, cpu_request=now.cpu_request)


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """What differs between a pod's promise and what it was set to."""

    containers: Mapping[str, ContainerResize] = field(default_factory=dict)
    """By name; only those that run."""
    whole: bool = False
    """Whether what is written for the whole pod differs."""
    pod: bool = False
    """Whether the pod's own cgroup was last set to another promise: some of the containers may not run."""

    def __bool__(self) -> bool:
        return self.whole or self.pod or bool(self.containers)


NOTHING = ResizePlan()


class PodLimits(NamedTuple):
    """What a pod's cgroup is set to; larger is more, but -1 of quota is no bound at all."""

    memory: int
    quota: int
    shares: int


def plan_resize(
    pod: Pod, running: Collection[str], actuated: PodResources | None, scope: Scope
) -> ResizePlan:
    """Compare a pod, as it was promised, with what its running containers were set to."""
    known = actuated or PodResources()
    whole = pod.spec.resources if scope.whole else None
    found = {}
    for container in resizable(pod, scope):
        if container.name in running:
            has = known.containers.get(container.name)
            if has is container.resources and whole is None and known.whole is None:
                continue  # as of nearly all pods, and at every step
            current = sizes_of(has, known.whole if scope.whole else None) if has is not None else None
            wanted = sizes_of(container.resources, whole)
            if wanted != current:
                restart = current is not None and _restarts(container, current, wanted)
                found[container.name] = ContainerResize(container.name, wanted, current, restart)
    differs = _whole_sizes(whole) != _whole_sizes(known.whole) if scope.whole else False
    return ResizePlan(found, differs) if found or differs else NOTHING


def in_order(resizes: Sequence[ContainerResize], resource: Resource) -> list[ContainerResize]:
    """Give those that are set in the round of a resource, the shrinking ones first.

    Of one that was set to nobody knows what, all is set at once in the last round: the pod has room by then.
    """
    due = [one for one in resizes if (one.change(resource) if one.current is not None else resource == "cpu")]
    return sorted(due, key=lambda one: one.change(resource) > 0)


def pod_steps(current: PodLimits, wanted: PodLimits, resource: Resource) -> tuple[list[Part], list[Part]]:
    """Say what to set of the pod's cgroup before its containers are resized, and what after.

    Limits grow before requests and shrink after them: a request is never above its limit.
    """
    order: tuple[Part, ...] = ("memory",) if resource == "memory" else ("quota", "shares")
    now, new = ({**limits._asdict(), "quota": _bound(limits.quota)} for limits in (current, wanted))
    before = [part for part in order if new[part] > now[part]]
    after = [part for part in reversed(order) if new[part] < now[part]]
    return before, after


def shrink_problem(
    limit: int | None,
    now: int,
    usage: int | None,
    resizes: Sequence[ContainerResize],
    usages: Mapping[str, int],
) -> str:
    """Say why memory cannot shrink now; empty when it can.

    `limit` is what the pod's cgroup shall have, None for no change, `now` what it has, `usage` what it uses;
    `usages` are those of containers by name.
    """
    problems = []
    if limit is not None and limit < now:
        if usage is None:
            problems.append("missing pod memory usage")
        elif usage >= limit:
            problems.append(f"attempting to set pod memory limit ({limit}) below current usage ({usage})")
    for one in resizes:
        bound = one.wanted.memory_limit
        if not shrinks(one):
            continue
        if one.name not in usages:
            problems.append(f'missing container "{one.name}" memory usage')
        elif usages[one.name] >= bound:
            problems.append(
                f'attempting to set container "{one.name}" memory limit ({bound}) '
                f"below current usage ({usages[one.name]})"
            )
    if not problems:
        return ""
    told = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    return f"cannot decrease memory limits: {told}"


def shrinks(one: ContainerResize) -> bool:
    """Whether a container gets less memory than it could use until now."""
    if one.current is None or not one.wanted.memory_limit:
        return False
    return not one.current.memory_limit or one.wanted.memory_limit < one.current.memory_limit


def _restarts(container: Container, current: Sizes, wanted: Sizes) -> bool:
    changed = {
        "memory": (current.memory_limit, current.memory_request)
        != (wanted.memory_limit, wanted.memory_request),
        "cpu": (current.cpu_limit, current.cpu_request) != (wanted.cpu_limit, wanted.cpu_request),
    }
    policies = {policy.resource_name: policy.restart_policy for policy in reversed(container.resize_policy)}
    return any(changed[name] and policies.get(name) == "RestartContainer" for name in changed)


def _bound(quota: int) -> float:
    """Give a quota as it compares: a first bound takes something away, so it comes after the containers'."""
    return quota if quota >= 0 else math.inf


def _whole_sizes(whole: ResourceRequirements | None) -> Sizes:
    return sizes_of(whole, None) if whole is not None else Sizes()

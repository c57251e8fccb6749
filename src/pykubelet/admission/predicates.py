"""Scheduler predicates: resources, node affinity, node name, host ports and taints, and preemption.

They are checked as the scheduler does. Scheduled pods passed them already, but labels and taints may have
changed since; static pods and pods bound by hand never passed them. Except for `Predicates`, everything is a
pure function.

- Resources: requests against allocatable. A resource that the node does not know is ignored, because it may
  be managed at cluster level, unless the node reports it as allocatable.
- A critical pod (static, or with a system priority) is not rejected for insufficient resources: other pods
  are preempted. If another predicate fails, only that one is reported, and no pod is preempted.
- Victims are as few and as unimportant as possible: Guaranteed pods only for what all others together cannot
  free, Burstable pods only for what BestEffort pods cannot. Within a QoS class, repeatedly the pod that frees
  most of what is still missing; of equal ones the one with the smaller requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pykubelet.admission.handler import (
    UNEXPECTED,
    AdmitHandlerDeps,
    AdmitRejection,
    AdmitResult,
    Amounts,
    PodAdmitAttributes,
    Preempt,
    Usage,
)
from pykubelet.api.meta import Resources
from pykubelet.api.names import is_extended_resource
from pykubelet.api.node import Node, Taint
from pykubelet.api.pod import Pod, Toleration, is_sidecar
from pykubelet.api.selector import NodeSelectorTerm
from pykubelet.podconfig.static_pods import is_critical_pod, is_static_pod

_BASIC = ("cpu", "memory", "ephemeral-storage")


@dataclass(frozen=True, slots=True)
class InsufficientResource:
    """A resource of which the node does not have enough."""

    resource: str
    requested: int
    used: int
    capacity: int

    @property
    def missing(self) -> int:
        """Amount that has to be freed."""
        return self.requested - (self.capacity - self.used)

    @property
    def reason(self) -> str:
        """Reason: `OutOfcpu`, `OutOfmemory`, `OutOfpods`…"""
        return f"OutOf{self.resource}"

    @property
    def message(self) -> str:
        """Message with the requested, used and total amounts."""
        return (
            f"Node didn't have enough resource: {self.resource}, requested: {self.requested}, "
            f"used: {self.used}, capacity: {self.capacity}"
        )


def as_amounts(resources: Resources) -> dict[str, int]:
    """Return amounts as they are compared and reported: millicores of cpu, whole units of all else."""
    return {name: amount.milli if name == "cpu" else int(amount) for name, amount in resources.items()}


def usage_of(pods: Iterable[Pod], requests_of: Callable[[Pod], Amounts]) -> Usage:
    """Return the sum of the resources of some pods."""
    count, amounts = 0, dict[str, int]()
    for pod in pods:
        count += 1
        for name, amount in requests_of(pod).items():
            amounts[name] = amounts.get(name, 0) + amount
    return Usage(count, amounts)


def insufficient_resources(
    pod: Pod, used: Usage, allocatable: Amounts, requests_of: Callable[[Pod], Amounts]
) -> list[InsufficientResource]:
    """Return the insufficient resources for the pod, in the order in which they are reported.

    `used` is the usage of the other pods.
    """
    found = []
    limit = allocatable.get("pods", 0)
    if used.pods + 1 > limit:
        found.append(InsufficientResource("pods", 1, used.pods, limit))
    claimed = _claimed(pod)
    requests = {
        name: amount for name, amount in requests_of(pod).items() if amount > 0 and name not in claimed
    }
    scalars = sorted(name for name in requests if name not in _BASIC and _is_counted(name, allocatable))
    for name in (*(name for name in _BASIC if name in requests), *scalars):
        taken, capacity = used.amounts.get(name, 0), allocatable.get(name, 0)
        if requests[name] > capacity - taken:
            found.append(InsufficientResource(name, requests[name], taken, capacity))
    return found


def _claimed(pod: Pod) -> set[str]:
    """Return the extended resources that a DRA claim provides: they do not use the node's allocatable."""
    status = pod.status.extended_resource_claim_status
    return {mapping.resource_name for mapping in status.request_mappings} if status is not None else set()


def _is_counted(name: str, allocatable: Amounts) -> bool:
    if is_extended_resource(name):
        return name in allocatable
    return name.startswith(("hugepages-", "attachable-volumes-")) or "kubernetes.io/" in name


_EVERYWHERE = "0.0.0.0"
_Port = tuple[str, str, int]
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class PredicateFailure:
    """A failed predicate: the reason why the pod must not run on this node."""

    reason: str
    why: str

    @property
    def message(self) -> str:
        """Message for the pod's status."""
        return f"Predicate {self.reason} failed: {self.why}"


NODE_AFFINITY = PredicateFailure("NodeAffinity", "node(s) didn't match Pod's node affinity/selector")
NODE_NAME = PredicateFailure("NodeName", "node(s) didn't match the requested node name")
NODE_PORTS = PredicateFailure("NodePorts", "node(s) didn't have free ports for the requested pod ports")
TAINTS = PredicateFailure("TaintToleration", "node(s) had taints that the pod didn't tolerate")


def failed_predicates(
    pod: Pod, node: Node, other_pods: Sequence[Pod], *, comparing: bool = False
) -> list[PredicateFailure]:
    """Return the failed predicates other than resources, in the order in which they are reported.

    `comparing`: whether tolerations may compare numbers (feature gate `TaintTolerationComparisonOperators`).
    """
    found = []
    if not matches_node(pod, node):
        found.append(NODE_AFFINITY)
    if pod.spec.node_name not in ("", node.metadata.name):
        found.append(NODE_NAME)
    if (ports := list(_host_ports(pod))) and _conflict(ports, _taken(other_pods)):
        found.append(NODE_PORTS)
    # A static pod cannot run on any other node.
    if not is_static_pod(pod) and not all(
        any(tolerates(toleration, taint, comparing=comparing) for toleration in pod.spec.tolerations)
        for taint in node.spec.taints
        if taint.effect == "NoExecute"
    ):
        found.append(TAINTS)
    return found


def matches_node(pod: Pod, node: Node) -> bool:
    """Return whether the node matches the pod's node selector and required node affinity."""
    labels = node.metadata.labels
    if not all(labels.get(key) == value for key, value in pod.spec.node_selector.items()):
        return False
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity is not None else None
    required = affinity.required_during_scheduling_ignored_during_execution if affinity is not None else None
    return required is None or any(_fits(term, node) for term in required.node_selector_terms)


def tolerates(toleration: Toleration, taint: Taint, *, comparing: bool = False) -> bool:
    """Return whether a toleration tolerates this taint."""
    if toleration.effect not in ("", taint.effect) or toleration.key not in ("", taint.key):
        return False
    match toleration.operator:
        case "" | "Equal":
            return toleration.value == taint.value
        case "Exists":
            return True
        case "Lt" | "Gt" if comparing:
            return _compares(toleration, taint)
    return False


def _fits(term: NodeSelectorTerm, node: Node) -> bool:
    try:
        return term.fits(node.metadata.labels, node.metadata.name)
    except ValueError:
        # An invalid term matches no node; other terms still may.
        return False


def _compares(toleration: Toleration, taint: Taint) -> bool:
    numbers = []
    for text in (taint.value, toleration.value):
        digits = text.removeprefix("-")
        plain = digits.isascii() and digits.isdecimal() and (digits == "0" or not digits.startswith("0"))
        if not plain or text == "-0" or not -_INT64 <= int(text) < _INT64:
            return False
        numbers.append(int(text))
    found, bound = numbers
    return found < bound if toleration.operator == "Lt" else found > bound


def _host_ports(pod: Pod) -> Iterator[_Port]:
    """Yield the host ports that the pod uses for its whole lifetime."""
    for container in (*filter(is_sidecar, pod.spec.init_containers), *pod.spec.containers):
        for port in container.ports:
            if port.host_port > 0:
                yield port.host_ip or _EVERYWHERE, port.protocol or "TCP", port.host_port


def _taken(other_pods: Iterable[Pod]) -> Callable[[_Port], bool]:
    ports = {port for other in other_pods for port in _host_ports(other)}
    numbers = {port[1:] for port in ports}

    def is_taken(port: _Port) -> bool:
        address, *number = port
        if address == _EVERYWHERE:
            return tuple(number) in numbers
        return port in ports or (_EVERYWHERE, *number) in ports

    return is_taken


def _conflict(ports: Iterable[_Port], is_taken: Callable[[_Port], bool]) -> bool:
    return any(map(is_taken, ports))


class NoPreemptionVictims(Exception):
    """No set of pods to preempt would free enough; the text contains the missing resources."""


def may_preempt(pod: Pod, victim: Pod) -> bool:
    """Return whether one pod may preempt another."""
    if is_critical_pod(pod) and not is_critical_pod(victim):
        return True
    mine, theirs = pod.spec.priority, victim.spec.priority
    return mine is not None and theirs is not None and mine > theirs


def choose_victims(
    pod: Pod,
    other_pods: Sequence[Pod],
    missing: Amounts,
    *,
    requests_of: Callable[[Pod], Amounts],
    class_of: Callable[[Pod], str],
) -> list[Pod]:
    """Return the pods to preempt to free what is `missing` for the pod. Raises NoPreemptionVictims."""

    def freed_by(victim: Pod) -> Amounts:
        return {**requests_of(victim), "pods": 1}

    preemptable = [other for other in other_pods if may_preempt(pod, other)]
    by_class: dict[str, list[Pod]] = {"BestEffort": [], "Burstable": [], "Guaranteed": []}
    for other in preemptable:
        by_class[class_of(other)].append(other)
    best_effort, burstable, guaranteed = by_class.values()
    if rest := _without(missing, preemptable, freed_by):
        raise NoPreemptionVictims(_format_missing(rest))
    first = _choose_nearest(guaranteed, _without(missing, [*best_effort, *burstable], freed_by), freed_by)
    second = _choose_nearest(burstable, _without(missing, [*best_effort, *first], freed_by), freed_by)
    third = _choose_nearest(best_effort, _without(missing, [*second, *first], freed_by), freed_by)
    return [*third, *second, *first]


def _choose_nearest(pods: Sequence[Pod], missing: Amounts, freed_by: Callable[[Pod], Amounts]) -> list[Pod]:
    """Choose pods until nothing is missing; the caller ensures that all of them together suffice."""
    left, chosen = list(pods), []

    def rank(pod: Pod) -> tuple[float, int, int]:
        amounts = freed_by(pod)
        return _distance(missing, amounts), amounts.get("memory", 0), amounts.get("cpu", 0)

    while missing:
        # Of equal ones the last: pods are ordered by age.
        best = min(reversed(left), key=rank)
        left = [pod for pod in left if pod is not best]
        chosen.append(best)
        missing = _without(missing, [best], freed_by)
    return chosen


def _distance(missing: Amounts, amounts: Amounts) -> float:
    """Return how far a pod is from freeing all that is missing; each resource has the same weight."""
    return sum(
        (max(0, amount - amounts.get(name, 0)) / amount) ** 2 for name, amount in missing.items() if amount
    )


def _without(missing: Amounts, pods: Iterable[Pod], freed_by: Callable[[Pod], Amounts]) -> Mapping[str, int]:
    left = dict(missing)
    for pod in pods:
        amounts = freed_by(pod)
        left = {name: amount - amounts.get(name, 0) for name, amount in left.items()}
    return {name: amount for name, amount in left.items() if amount > 0}


def _format_missing(missing: Amounts) -> str:
    """Format the missing resources as upstream does, including the trailing comma."""
    return f"[{''.join(f'(res: {name}, q: {amount}), ' for name, amount in missing.items())}]"


class Predicates:
    """Rejects pods that fail a predicate, or returns the pods to preempt."""

    for_running = False

    def __init__(self, deps: AdmitHandlerDeps) -> None:
        self._deps = deps
        self._comparing = deps.gates.enabled("TaintTolerationComparisonOperators")

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult:
        """Return the first failed predicate, or the pods to preempt for a critical pod."""
        deps, pod, other_pods = self._deps, attempt.pod, attempt.other_pods
        allocatable = as_amounts({**attempt.node.status.allocatable, **attempt.devices()})
        used = attempt.used if attempt.used is not None else usage_of(other_pods, deps.requests_of)
        short = insufficient_resources(pod, used, allocatable, deps.requests_of)
        wrong = failed_predicates(pod, attempt.node, other_pods, comparing=self._comparing)
        critical = is_critical_pod(pod)
        if short and not critical:
            return AdmitRejection(short[0].reason, short[0].message)
        if wrong:
            stale = not short and wrong == [NODE_AFFINITY]
            return AdmitRejection(wrong[0].reason, wrong[0].message, stale=stale)
        if not short:
            return None
        missing = {shortage.resource: shortage.missing for shortage in short}
        try:
            victims = choose_victims(
                pod, other_pods, missing, requests_of=deps.requests_of, class_of=deps.class_of
            )
        except NoPreemptionVictims as err:
            return AdmitRejection(
                UNEXPECTED,
                "Unexpected error while attempting to recover from admission failure: preemption: error "
                f"finding a set of pods to preempt: no set of running pods found to reclaim resources: {err}",
            )
        return Preempt(victims, short[0].resource)

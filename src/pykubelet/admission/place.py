"""Whether this is a node that the pod wants, and that wants the pod: labels, name, ports, taints. Pure.

Pods that came by the scheduler passed these already; labels and taints may have changed since, and static
pods and pods bound by hand never did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pykubelet.api.node import Node, Taint
from pykubelet.api.node_selector import NodeSelectorTerm
from pykubelet.api.pod import Pod, Toleration, is_sidecar
from pykubelet.pods.static import is_static_pod

_EVERYWHERE = "0.0.0.0"
_Port = tuple[str, str, int]
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Misplacement:
    """Why a pod is at the wrong node."""

    reason: str
    why: str

    @property
    def message(self) -> str:
        """The sentence for people."""
        return f"Predicate {self.reason} failed: {self.why}"


NODE_AFFINITY = Misplacement("NodeAffinity", "node(s) didn't match Pod's node affinity/selector")
NODE_NAME = Misplacement("NodeName", "node(s) didn't match the requested node name")
NODE_PORTS = Misplacement("NodePorts", "node(s) didn't have free ports for the requested pod ports")
TAINTS = Misplacement("TaintToleration", "node(s) had taints that the pod didn't tolerate")


def misplacements(
    pod: Pod, node: Node, others: Sequence[Pod], *, comparing: bool = False
) -> list[Misplacement]:
    """Give all that is wrong with the pod's place, in the order in which it is told.

    `comparing`: whether tolerations may compare numbers (the gate `TaintTolerationComparisonOperators`).
    """
    found = []
    if not wants_node(pod, node):
        found.append(NODE_AFFINITY)
    if pod.spec.node_name not in ("", node.metadata.name):
        found.append(NODE_NAME)
    if (wanted := list(_host_ports(pod))) and _conflict(wanted, _taken(others)):
        found.append(NODE_PORTS)
    # Nobody else would run a static pod.
    if not is_static_pod(pod) and not all(
        any(tolerates(toleration, taint, comparing=comparing) for toleration in pod.spec.tolerations)
        for taint in node.spec.taints
        if taint.effect == "NoExecute"
    ):
        found.append(TAINTS)
    return found


def wants_node(pod: Pod, node: Node) -> bool:
    """Whether the node has the labels that the pod selects, and is one that it must have by affinity."""
    labels = node.metadata.labels
    if not all(labels.get(key) == value for key, value in pod.spec.node_selector.items()):
        return False
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity is not None else None
    required = affinity.required_during_scheduling_ignored_during_execution if affinity is not None else None
    return required is None or any(_fits(term, node) for term in required.node_selector_terms)


def tolerates(toleration: Toleration, taint: Taint, *, comparing: bool = False) -> bool:
    """Whether a toleration is for this taint."""
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
        # A term that cannot be understood chooses nothing; others still may.
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
    """Ports of the machine that the pod holds for all its life."""
    for container in (*filter(is_sidecar, pod.spec.init_containers), *pod.spec.containers):
        for port in container.ports:
            if port.host_port > 0:
                yield port.host_ip or _EVERYWHERE, port.protocol or "TCP", port.host_port


def _taken(others: Iterable[Pod]) -> Callable[[_Port], bool]:
    ports = {port for other in others for port in _host_ports(other)}
    numbers = {port[1:] for port in ports}

    def is_taken(port: _Port) -> bool:
        address, *number = port
        if address == _EVERYWHERE:
            return tuple(number) in numbers
        return port in ports or (_EVERYWHERE, *number) in ports

    return is_taken


def _conflict(wanted: Iterable[_Port], is_taken: Callable[[_Port], bool]) -> bool:
    return any(map(is_taken, wanted))

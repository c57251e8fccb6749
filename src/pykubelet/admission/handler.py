"""Interface of pod admission handlers: their input, their results and their dependencies.

A handler is one reason to reject a pod: a class with `admit`. It decides from the attributes and from its own
dependencies, without blocking. It may be called repeatedly for the same pod and must then decide as if it had
not been called before. A handler that has to wait for another process, such as a device plugin, returns a
`DeferredResult`; unless that is marked `apart`, the pods that arrive in the meantime wait as well, so most
pods must not need it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pykubelet.api.meta import Resources
from pykubelet.api.node import Node
from pykubelet.api.pod import Pod
from pykubelet.config.feature_gates import FeatureGates

Amounts = Mapping[str, int]
"""Amounts by resource name: millicores of cpu, bytes, or counts."""
UNEXPECTED = "UnexpectedAdmissionError"


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of pods and the sum of their resource requests."""

    pods: int
    amounts: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAdmitAttributes:
    """A pod to admit, and the state of the node that the decision depends on."""

    pod: Pod
    node: Node
    """This node: its name, labels and taints, and in its status the allocatable resources and features."""
    other_pods: Sequence[Pod] = ()
    """Pods that were admitted and have not terminated."""
    used: Usage | None = None
    """Sum of the requests of `other_pods`; None if it has not been computed."""
    running: bool = False
    """Whether a previous kubelet process admitted the pod, and it runs."""
    devices: Callable[[], Resources] = dict
    """Returns the allocatable devices by resource, at least those already allocated to the pod."""
    renew: Callable[[], PodAdmitAttributes] | None = None
    """Returns up-to-date attributes: the node and the other pods may change during a long wait."""


@dataclass(frozen=True, slots=True)
class AdmitRejection:
    """A rejection: a CamelCase reason and a message, which become the pod's status."""

    reason: str
    message: str
    stale: bool = False
    """Whether node affinity is the only failure: the cached labels of the node may be outdated."""


@dataclass(frozen=True, slots=True)
class Preempt:
    """The pod may run after these pods have been preempted."""

    victims: Sequence[Pod]
    resource: str
    """First resource that is insufficient."""


AdmitResult = AdmitRejection | Preempt | None
"""Result for a pod; None to admit it."""


@dataclass(frozen=True, slots=True)
class DeferredResult:
    """The result of a handler that cannot decide without waiting."""

    result: Callable[[], Awaitable[AdmitResult]]
    """Waits for the result; no work is done for the pod before this is called."""
    apart: bool = False
    """Whether other pods need not wait: resources allocated to them do not change this result."""
    again: bool = False
    """Whether `result` only waits, and the handler has to be called again after it."""
    why: str = ""
    """Condition waited for, shown to users because it may take minutes."""


class PodAdmitHandler(Protocol):
    """An admission handler: one reason to reject pods."""

    for_running: bool
    """Whether it is also called for running pods: an allocator must know which pods hold its resources."""

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult | DeferredResult:
        """Return the rejection or the pods to preempt, or None to admit the pod."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitHandlerDeps:
    """Dependencies of the admission handlers: properties and settings of this node."""

    requests_of: Callable[[Pod], Amounts]
    """Returns the total resource requests of a pod."""
    class_of: Callable[[Pod], str]
    """Returns the QoS class of a pod."""
    gates: FeatureGates = field(default_factory=FeatureGates)
    allowed_sysctls: Sequence[str] = ()
    """`allowedUnsafeSysctls`: names, or prefixes followed by `*`."""
    kernel: str = ""
    """Kernel release, such as `6.1.0-13-amd64`."""
    apparmor: bool = False
    """Whether the kernel enforces AppArmor profiles."""
    pressure: PodAdmitHandler | None = None
    """Rejects pods while the node is under resource pressure (`Evicted`)."""
    allocation: PodAdmitHandler | None = None
    """Allocates CPUs, memory and devices to the containers; rejects pods if that fails."""
    shutdown: PodAdmitHandler | None = None
    """Rejects pods while the node is shutting down (`NodeShutdown`)."""

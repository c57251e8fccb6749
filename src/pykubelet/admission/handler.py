"""What a link of the chain is asked, and what it may answer.

A link is one reason to refuse a pod: one small file, one class with `admit`. It decides from the attempt
alone (and from what it was made of), at once; it may be asked again about the same pod and must then answer
as if it had not been asked before. One that has to ask others first (a device's plugin, say) answers
`DeferredResult`, and is then waited for, with all pods that come meanwhile: most pods must not need that.
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
"""Amounts of resources: thousandths of cpus, bytes, or pieces."""
UNEXPECTED = "UnexpectedAdmissionError"


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a number of pods."""

    pods: int
    amounts: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAdmitAttributes:
    """A pod that wants to run here."""

    pod: Pod
    node: Node
    """This node: its name, labels, taints, and in its status what it has to give and can do."""
    others: Sequence[Pod] = ()
    """The pods that were admitted and have not ended."""
    used: Usage | None = None
    """The resources of `others`; None where they have not been summed up."""
    running: bool = False
    """Whether an earlier agent admitted the pod, and it runs."""
    devices: Callable[[], Resources] = dict
    """How many devices there are, and at least those that the pod was given by now."""
    renew: Callable[[], PodAdmitAttributes] | None = None
    """Returns the attempt as it is now: what the node has and who is there changes during a long wait."""


@dataclass(frozen=True, slots=True)
class AdmitRejection:
    """Why a pod may not run here: a word that people can look up, and a sentence."""

    reason: str
    message: str
    stale: bool = False
    """Whether only the node's labels speak against the pod, which may have changed just now."""


@dataclass(frozen=True, slots=True)
class Preempt:
    """The pod may run once these have made room."""

    victims: Sequence[Pod]
    resource: str
    """What there is too little of; of several the first."""


Answer = AdmitRejection | Preempt | None
"""What becomes of a pod; None when it may run at once."""


@dataclass(frozen=True, slots=True)
class DeferredResult:
    """The link cannot answer at once."""

    answer: Callable[[], Awaitable[Answer]]
    """Waits for the answer; nothing happens for the pod before that is called."""
    apart: bool = False
    """Whether others need not wait meanwhile: whatever they are given, the answer will be the same."""
    again: bool = False
    """Whether `answer` only waits, and the link is then asked again."""
    why: str = ""
    """What is waited for, where users should know: it may take minutes."""


class PodAdmitHandler(Protocol):
    """One reason to refuse pods."""

    for_running: bool
    """Whether it is asked about pods that already run, too: what runs is not stopped because rules changed,
    but whoever hands something out must know who has it."""

    def admit(self, attempt: PodAdmitAttributes) -> Answer | DeferredResult:
        """Say whether the pod may run; None when nothing speaks against it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitHandlerDeps:
    """What the links are made of: facts about this node and its settings."""

    requests_of: Callable[[Pod], Amounts]
    """What a pod is promised as a whole."""
    class_of: Callable[[Pod], str]
    """A pod's QoS class."""
    gates: FeatureGates = field(default_factory=FeatureGates)
    allowed_sysctls: Sequence[str] = ()
    """`allowedUnsafeSysctls`: names, or beginnings of names and `*`."""
    kernel: str = ""
    """The kernel's release, such as `6.1.0-13-amd64`."""
    apparmor: bool = False
    """Whether the kernel enforces AppArmor profiles."""
    pressure: PodAdmitHandler | None = None
    """Refuses pods while the node is short of something (`Evicted`)."""
    allocation: PodAdmitHandler | None = None
    """Gives cpus, memory and devices to the pod's containers; refuses what cannot be given."""
    shutdown: PodAdmitHandler | None = None
    """Refuses pods while the machine is shutting down (`NodeShutdown`)."""

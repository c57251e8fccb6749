"""Who decides on which NUMA nodes a pod's CPUs, memory and devices are taken, and refuses what does not fit.

It keeps nothing: what was given out is known to those who gave it, and they get the chosen nodes
with the order to give. A pod that is asked about again gets the same answer, because providers hint at
what a container already has.

How many pods asked for CPUs, memory and devices, how many were refused, and how long it took.

How often containers got everything from one place: a NUMA node, whole cores, one cache; how often not.

The CPU manager and the topology manager count into the same metrics, each what it was told to guarantee.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.api.pod import Container, Pod
from pykubelet.cm.memory.numa_nodes import MemoryNode
from pykubelet.cm.topology.hints import (
    ANYWHERE,
    AllocationError,
    HintProvider,
    NumaTopology,
    Policy,
    PolicyError,
    TopologyHint,
    admits,
    merge,
)
from pykubelet.config.validate_resources import FEWEST_NUMA_NODES
from pykubelet.logs import get_logger
from pykubelet.util.metrics import PlainCounter

log = get_logger(__name__)
Boundary = Literal["numa_node", "physical_cpu", "uncore_cache"]
_LABELS = ["scope", "boundary"]


class AlignmentMetrics:
    """The alignment on one node; without a registry nobody sees the numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._aligned = PlainCounter(
            "kubelet_container_aligned_compute_resources_count",
            "Containers that got what they asked for from within a boundary.",
            _LABELS,
            registry=registry,
        )
        self._failed = PlainCounter(
            "kubelet_container_aligned_compute_resources_failure_count",
            "Containers that could not get what they asked for from within a boundary.",
            _LABELS,
            registry=registry,
        )

    def expect(self, boundary: Boundary, scope: str = "container", *, failures: bool = True) -> None:
        """Show a boundary before anything is counted for it."""
        self._aligned.labels(scope, boundary)
        if failures:
            self._failed.labels(scope, boundary)

    def aligned(self, boundary: Boundary, scope: str = "container", count: int = 1) -> None:
        """Count containers that are within a boundary."""
        self._aligned.labels(scope, boundary).inc(count)

    def failed(self, boundary: Boundary, scope: str = "container") -> None:
        """Count one that could not be."""
        self._failed.labels(scope, boundary).inc()


_MILLISECONDS = tuple(0.05 * 2**step for step in range(15))


class TopologyMetrics:
    """The topology manager of one agent; without a registry nobody sees the numbers."""

    def __init__(
        self, registry: CollectorRegistry | None = None, alignment: AlignmentMetrics | None = None
    ) -> None:
        self.alignment = alignment or AlignmentMetrics()
        self._requests = Counter(
            "kubelet_topology_manager_admission_requests_total",
            "Pods whose CPUs, memory and devices had to be found.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_topology_manager_admission_errors_total",
            "Pods that were refused because theirs could not be given near to each other.",
            registry=registry,
        )
        self._duration = Histogram(
            "kubelet_topology_manager_admission_duration_ms",
            "How long finding them took, in milliseconds.",
            buckets=_MILLISECONDS,
            registry=registry,
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count a pod, and measure how long it takes to the end of the block."""
        self._requests.inc()
        began = perf_counter()
        try:
            yield
        finally:
            # Whole milliseconds, as the reference counts them.
            self._duration.observe(int((perf_counter() - began) * 1000))


Scope = Literal["container", "pod"]
UNEXPECTED = "UnexpectedAdmissionError"
TOPOLOGY_AFFINITY = "TopologyAffinityError"
_PREFER_CLOSEST = "prefer-closest-numa-nodes"
_MOST_NODES = "max-allowable-numa-nodes"
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_MISALIGNED = "Resources cannot be allocated with Topology locality"


@dataclass(frozen=True)
class TopologyRejection:
    """Why a pod may not run, in the words of its status."""

    reason: str
    message: str


class TopologyManager:
    """The topology policy of one node."""

    def __init__(
        self,
        policy: Policy,
        scope: Scope,
        options: Mapping[str, str],
        nodes: Sequence[MemoryNode],
        providers: Sequence[HintProvider],
        *,
        asking: HintProvider | None = None,
        metrics: TopologyMetrics | None = None,
    ) -> None:
        """Take checked configuration, the machine's NUMA nodes, and who gives out what.

        Providers allocate in their order, and before them `asking`: one who has to ask others for what it
        gives. Raises PolicyError when the machine is not one for the policy.
        """
        self.policy = policy
        self.scope = scope
        self._quick = tuple(providers)
        self._providers = self._quick if asking is None else (asking, *self._quick)
        self._metrics = metrics or TopologyMetrics()
        self._one_at_a_time = asyncio.Lock()
        self._machine = NumaTopology(frozenset())
        if policy != "none":
            self._machine = numa_of(nodes, options)
            for each in ("container", "pod"):
                self._metrics.alignment.expect("numa_node", each)

    @property
    def aligns(self) -> bool:
        """Whether a pod that is admitted certainly has everything from one NUMA node."""
        return self.policy == "single-numa-node"

    async def admit(self, pod: Pod) -> TopologyRejection | None:
        """Give each of the pod's containers what it asks for, or say why the pod may not run.

        It waits only where a provider does, and for pods that came before. After a refusal some
        containers may have something: the providers get it back when they next hear which pods there are.
        """
        # Hints are good only until somebody else is given something; without a policy there are none.
        async with self._one_at_a_time if self.policy != "none" else contextlib.nullcontext():
            with self._metrics.timed():
                try:
                    for container, chosen in self._places(pod, self._providers):
                        for provider in self._providers:
                            if (waiting := provider.allocate(pod, container, chosen)) is not None:
                                await waiting
                except AllocationError as err:
                    return self._refused(err)
        self._count_aligned(pod)
        return None

    def admit_at_once(self, pod: Pod) -> TopologyRejection | None:
        """Do the same for a pod that wants nothing of the provider who has to ask others."""
        with self._metrics.timed():
            try:
                for container, chosen in self._places(pod, self._quick):
                    for provider in self._quick:
                        provider.allocate(pod, container, chosen)
            except AllocationError as err:
                return self._refused(err)
        self._count_aligned(pod)
        return None

    def _places(
        self, pod: Pod, providers: Sequence[HintProvider]
    ) -> Iterator[tuple[Container, TopologyHint]]:
        """Choose the nodes for each container, when those before it have theirs; raises AllocationError."""
        together: TopologyHint | None = None
        if self.policy == "none":
            together = ANYWHERE
        elif self.scope == "pod":
            together = merge(self.policy, self._machine, [each.pod_hints(pod) for each in providers])
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            chosen = together
            if chosen is None:
                hints = [each.hints(pod, container) for each in providers]
                chosen = merge(self.policy, self._machine, hints)
            if self.policy != "none":
                log.v(4).info(
                    "Topology affinity", pod=pod.full_name, container=container.name, hint=_text(chosen)
                )
            if not admits(self.policy, chosen):
                raise AllocationError(_MISALIGNED, TOPOLOGY_AFFINITY)
            yield container, chosen

    def _refused(self, err: AllocationError) -> TopologyRejection:
        if self.policy != "none":
            self._metrics.errors.inc()
        if self.aligns and err.reason == TOPOLOGY_AFFINITY:
            self._metrics.alignment.failed("numa_node", self.scope)
        return refusal_of(err)

    def _count_aligned(self, pod: Pod) -> None:
        if self.aligns:
            containers = len(pod.spec.init_containers) + len(pod.spec.containers)
            self._metrics.alignment.aligned("numa_node", self.scope, 1 if self.scope == "pod" else containers)


def refusal_of(err: AllocationError) -> TopologyRejection:
    """Say it as the reference does, which wraps what it has no name for."""
    if err.reason is not None:
        return TopologyRejection(err.reason, str(err))
    return TopologyRejection(UNEXPECTED, f"Allocate failed due to {err}, which is unexpected")


def numa_of(nodes: Sequence[MemoryNode], options: Mapping[str, str]) -> NumaTopology:
    """Give what merging needs to know of the machine, under the policy's options; raises PolicyError."""
    most = int(options.get(_MOST_NODES, FEWEST_NUMA_NODES))
    if len(nodes) > most:
        raise PolicyError(
            f"this machine has {len(nodes)} NUMA nodes, more than topologyManagerPolicy can handle "
            f"({most}): raise {_MOST_NODES} in topologyManagerPolicyOptions, or set the policy to none"
        )
    names = frozenset(node.number for node in nodes)
    if options.get(_PREFER_CLOSEST) not in _TRUE:
        return NumaTopology(names)
    distances = {node.number: dict(node.distances) for node in nodes}
    if any(not names <= known.keys() for known in distances.values()):
        raise PolicyError(
            f"{_PREFER_CLOSEST} needs the distances between NUMA nodes, which this machine does not tell "
            "(/sys/devices/system/node/node*/distance): remove it from topologyManagerPolicyOptions"
        )
    return NumaTopology(names, distances)


def _text(hint: TopologyHint) -> str:
    if hint == ANYWHERE or hint.nodes is None:
        return "any"
    return f"{sorted(hint.nodes)}{' preferred' if hint.preferred else ''}"

"""Topology manager: selects the NUMA nodes of a pod's resources and rejects pods that do not fit.

Called at pod admission. It holds no allocations: the hint providers do, and get the chosen nodes with each
allocation. Admitting a pod again has the same result, because providers hint at existing allocations.

`AlignmentMetrics` counts containers whose resources are within one NUMA node, whole cores or one cache. The
CPU manager and the topology manager share them, and each counts what it is configured to guarantee.
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
from pykubelet.config.validation.validate_resources import FEWEST_NUMA_NODES
from pykubelet.logs import get_logger
from pykubelet.util.metrics import PlainCounter

log = get_logger(__name__)
Boundary = Literal["numa_node", "physical_cpu", "uncore_cache"]
_LABELS = ["scope", "boundary"]


class AlignmentMetrics:
    """Metrics of resource alignment, which are not exported without a registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._aligned = PlainCounter(
            "kubelet_container_aligned_compute_resources_count",
            "Containers whose resources were allocated within a boundary.",
            _LABELS,
            registry=registry,
        )
        self._failed = PlainCounter(
            "kubelet_container_aligned_compute_resources_failure_count",
            "Containers whose resources could not be allocated within a boundary.",
            _LABELS,
            registry=registry,
        )

    def expect(self, boundary: Boundary, scope: str = "container", *, failures: bool = True) -> None:
        """Export the counters of a boundary before anything is counted."""
        self._aligned.labels(scope, boundary)
        if failures:
            self._failed.labels(scope, boundary)

    def aligned(self, boundary: Boundary, scope: str = "container", count: int = 1) -> None:
        """Count containers that are aligned within a boundary."""
        self._aligned.labels(scope, boundary).inc(count)

    def failed(self, boundary: Boundary, scope: str = "container") -> None:
        """Count a container that could not be aligned within a boundary."""
        self._failed.labels(scope, boundary).inc()


_MILLISECONDS = tuple(0.05 * 2**step for step in range(15))


class TopologyMetrics:
    """Metrics of the topology manager, which are not exported without a registry."""

    def __init__(
        self, registry: CollectorRegistry | None = None, alignment: AlignmentMetrics | None = None
    ) -> None:
        self.alignment = alignment or AlignmentMetrics()
        self._requests = Counter(
            "kubelet_topology_manager_admission_requests_total",
            "Pods whose CPUs, memory and devices the topology manager had to align.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_topology_manager_admission_errors_total",
            "Pods that were rejected because their resources could not be aligned.",
            registry=registry,
        )
        self._duration = Histogram(
            "kubelet_topology_manager_admission_duration_ms",
            "Duration of the alignment of a pod's resources in milliseconds.",
            buckets=_MILLISECONDS,
            registry=registry,
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count a pod and observe the duration of the block."""
        self._requests.inc()
        started_at = perf_counter()
        try:
            yield
        finally:
            # Whole milliseconds, like upstream.
            self._duration.observe(int((perf_counter() - started_at) * 1000))


Scope = Literal["container", "pod"]
UNEXPECTED = "UnexpectedAdmissionError"
TOPOLOGY_AFFINITY = "TopologyAffinityError"
_PREFER_CLOSEST = "prefer-closest-numa-nodes"
_MOST_NODES = "max-allowable-numa-nodes"
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_MISALIGNED = "Resources cannot be allocated with Topology locality"


@dataclass(frozen=True)
class TopologyRejection:
    """Rejection of a pod, with reason and message for its status."""

    reason: str
    message: str


class TopologyManager:
    """Topology manager of a node."""

    def __init__(
        self,
        policy: Policy,
        scope: Scope,
        options: Mapping[str, str],
        nodes: Sequence[MemoryNode],
        providers: Sequence[HintProvider],
        *,
        plugin_provider: HintProvider | None = None,
        metrics: TopologyMetrics | None = None,
    ) -> None:
        """Initialize with validated configuration, the host's NUMA nodes and the hint providers.

        Providers allocate in order, after `plugin_provider`, the provider that calls plugins. Raises
        PolicyError when the host does not support the policy.
        """
        self.policy = policy
        self.scope = scope
        self._local_providers = tuple(providers)
        self._providers = (
            self._local_providers if plugin_provider is None else (plugin_provider, *self._local_providers)
        )
        self._metrics = metrics or TopologyMetrics()
        self._one_at_a_time = asyncio.Lock()
        self._machine = NumaTopology(frozenset())
        if policy != "none":
            self._machine = numa_topology(nodes, options)
            for alignment_scope in ("container", "pod"):
                self._metrics.alignment.expect("numa_node", alignment_scope)

    @property
    def aligns(self) -> bool:
        """Whether an admitted pod is guaranteed to have all resources from one NUMA node."""
        return self.policy == "single-numa-node"

    async def admit(self, pod: Pod) -> TopologyRejection | None:
        """Allocate the resources of the pod's containers; return a rejection if that fails.

        Waits only for providers that call plugins, and for pods that came before. After a rejection some
        containers may have resources: the providers release them when they next get the list of pods.
        """
        # Hints are valid only until the next allocation; without a policy there are no hints.
        async with self._one_at_a_time if self.policy != "none" else contextlib.nullcontext():
            with self._metrics.timed():
                try:
                    for container, chosen in self._placements(pod, self._providers):
                        for provider in self._providers:
                            if (waiting := provider.allocate(pod, container, chosen)) is not None:
                                await waiting
                except AllocationError as err:
                    return self._rejection(err)
        self._count_aligned(pod)
        return None

    def admit_nowait(self, pod: Pod) -> TopologyRejection | None:
        """Admit a pod without waiting, if it needs nothing from the provider that calls plugins."""
        with self._metrics.timed():
            try:
                for container, chosen in self._placements(pod, self._local_providers):
                    for provider in self._local_providers:
                        provider.allocate(pod, container, chosen)
            except AllocationError as err:
                return self._rejection(err)
        self._count_aligned(pod)
        return None

    def _placements(
        self, pod: Pod, providers: Sequence[HintProvider]
    ) -> Iterator[tuple[Container, TopologyHint]]:
        """Yield each container with its nodes, after those before it are served. Raises AllocationError."""
        together: TopologyHint | None = None
        if self.policy == "none":
            together = ANYWHERE
        elif self.scope == "pod":
            together = merge(self.policy, self._machine, [provider.pod_hints(pod) for provider in providers])
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            chosen = together
            if chosen is None:
                hints = [provider.hints(pod, container) for provider in providers]
                chosen = merge(self.policy, self._machine, hints)
            if self.policy != "none":
                log.v(4).info(
                    "Topology affinity", pod=pod.full_name, containerName=container.name, hint=_text(chosen)
                )
            if not admits(self.policy, chosen):
                raise AllocationError(_MISALIGNED, TOPOLOGY_AFFINITY)
            yield container, chosen

    def _rejection(self, err: AllocationError) -> TopologyRejection:
        if self.policy != "none":
            self._metrics.errors.inc()
        if self.aligns and err.reason == TOPOLOGY_AFFINITY:
            self._metrics.alignment.failed("numa_node", self.scope)
        return rejection_of(err)

    def _count_aligned(self, pod: Pod) -> None:
        if self.aligns:
            containers = len(pod.spec.init_containers) + len(pod.spec.containers)
            self._metrics.alignment.aligned("numa_node", self.scope, 1 if self.scope == "pod" else containers)


def rejection_of(err: AllocationError) -> TopologyRejection:
    """Return upstream's rejection for an error: one without a reason is wrapped as unexpected."""
    if err.reason is not None:
        return TopologyRejection(err.reason, str(err))
    return TopologyRejection(UNEXPECTED, f"Allocate failed due to {err}, which is unexpected")


def numa_topology(nodes: Sequence[MemoryNode], options: Mapping[str, str]) -> NumaTopology:
    """Return the NUMA topology for merging, under the policy's options. Raises PolicyError."""
    limit = int(options.get(_MOST_NODES, FEWEST_NUMA_NODES))
    if len(nodes) > limit:
        raise PolicyError(
            f"this machine has {len(nodes)} NUMA nodes, more than topologyManagerPolicy can handle "
            f"({limit}): raise {_MOST_NODES} in topologyManagerPolicyOptions, or set the policy to none"
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

"""How many CPUs are given to containers for themselves, from where, and how often that failed."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from pykubelet.resources.alignment_metrics import AlignmentMetrics
from pykubelet.resources.cpu_policy import StaticPolicy
from pykubelet.resources.cpu_state import CpuState


class CpuMetrics:
    """The CPUs of one agent."""

    def __init__(
        self, registry: CollectorRegistry | None = None, alignment: AlignmentMetrics | None = None
    ) -> None:
        """Without a registry nobody sees the numbers."""
        self._alignment = alignment or AlignmentMetrics()
        self.requests = Counter(
            "kubelet_cpu_manager_pinning_requests_total",
            "Containers that were to get CPUs for themselves.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_cpu_manager_pinning_errors_total",
            "Containers that could not get CPUs for themselves.",
            registry=registry,
        )
        self._shared = Gauge(
            "kubelet_cpu_manager_shared_pool_size_millicores",
            "CPUs that can still be given to containers for themselves, in millicores.",
            registry=registry,
        )
        self._exclusive = Gauge(
            "kubelet_cpu_manager_exclusive_cpu_allocation_count",
            "CPUs that containers have for themselves.",
            registry=registry,
        )
        self._per_node = Gauge(
            "kubelet_cpu_manager_allocation_per_numa",
            "CPUs that containers have for themselves, by NUMA node.",
            ["numa_node"],
            registry=registry,
        )

    def expect(self) -> None:
        """Show what a static policy counts, before it does."""
        self._alignment.expect("physical_cpu")
        self._alignment.expect("uncore_cache", failures=False)

    def given(self, policy: StaticPolicy, cpus: frozenset[int]) -> None:
        """Count a container that was to get CPUs and has them; `cpus` are those that are new to it."""
        self.requests.inc()
        if policy.options.whole_cores:
            self._alignment.aligned("physical_cpu")
        if len(policy.topology.groups("cache", cpus)) == 1:
            self._alignment.aligned("uncore_cache")

    def failed(self, policy: StaticPolicy) -> None:
        """Count a container that could not get its CPUs."""
        self.requests.inc()
        self.errors.inc()
        if policy.options.whole_cores:
            self._alignment.failed("physical_cpu")

    def show(self, policy: StaticPolicy, state: CpuState) -> None:
        """Tell of a new state."""
        self._shared.set(1000 * len(state.shared - policy.reserved))
        exclusive = state.exclusive
        self._exclusive.set(len(exclusive))
        given = policy.topology.groups("node", exclusive)
        for node in policy.topology.nodes:
            self._per_node.labels(str(node)).set(len(given.get(node, ())))

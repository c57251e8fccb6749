"""What the agent is, as metrics: its version, its features, its node, and how much memory it may have.

None of this changes while the agent runs, so it is written when somebody asks and costs nothing else.
"""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet import KUBERNETES_VERSION
from pykubelet.config.gates import FeatureGates, known_gates
from pykubelet.host.machine import architecture

_NO_LIMIT = float(2**64)
"""What Go's clients of Prometheus say when there is none."""


class AgentFacts(Collector):
    """The facts of one agent, for its registry."""

    def __init__(self, node_name: str, gates: FeatureGates) -> None:
        self._node_name = node_name
        self._gates = gates

    def describe(self) -> Iterable[Metric]:
        """Give no names in advance: they are the same as those that are collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Tell."""
        yield _family("kubelet_node_name", "The node's name.", {"node": self._node_name}, 1)
        yield _family("kubernetes_build_info", "What the agent is.", build_labels(), 1)
        features = GaugeMetricFamily(
            "kubernetes_feature_enabled", "Whether a feature gate is on.", labels=["name", "stage"]
        )
        for gate in known_gates().values():
            stage = "" if gate.stage == "GA" else gate.stage.upper()
            features.add_metric([gate.name, stage], self._gates.enabled(gate.name))
        yield features
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        yield GaugeMetricFamily(
            "process_virtual_memory_max_bytes",
            "Most virtual memory that the agent may have, in bytes.",
            value=_NO_LIMIT if limit == resource.RLIM_INFINITY else limit,
        )


def build_labels() -> dict[str, str]:
    """Give the labels that tools know a Kubernetes program by; what is Go's own is empty."""
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".", 2)
    return {
        "major": major,
        "minor": minor,
        "git_version": KUBERNETES_VERSION,
        "git_commit": "",
        "git_tree_state": "",
        "build_date": "",
        "go_version": "",
        "compiler": f"{sys.implementation.name} {platform.python_version()}",
        "platform": f"linux/{architecture()}",
    }


def _family(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family

"""How many pods were refused, and how many had to go for others."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from pykubelet.metrics import PlainCounter

_KNOWN = frozenset(
    {
        "AppArmor",
        "Evicted",
        "InitContainerRestartPolicyForbidden",
        "InvalidNodeInfo",
        "NodeShutdown",
        "OutOfcpu",
        "OutOfephemeral-storage",
        "OutOfmemory",
        "OutOfpods",
        "PodFeatureUnsupported",
        "PodLevelResourcesNotSupported",
        "PodOSNotSupported",
        "PodOSSelectorNodeLabelDoesNotMatch",
        "SupplementalGroupsPolicyNotSupported",
        "SysctlForbidden",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "UnexpectedPredicateFailureType",
        "UnknownReason",
        "VolumeAttachmentLimitExceeded",
    }
)
"""Reasons that are counted by name; others' may be any number."""


class AdmissionMetrics:
    """The admission of one agent; without a registry nobody sees the numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._refused = Counter(
            "kubelet_admission_rejections_total", "Pods that were refused.", ["reason"], registry=registry
        )
        self._preempted = PlainCounter(
            "kubelet_preemptions",
            "Pods that ended to make room for a critical one, by what there was too little of.",
            ["preemption_signal"],
            registry=registry,
        )

    def refused(self, reason: str) -> None:
        """Count a pod that was refused."""
        if reason not in _KNOWN:
            reason = "OutOfExtendedResources" if reason.startswith("OutOf") else "Other"
        self._refused.labels(reason).inc()

    def preempted(self, resource: str) -> None:
        """Count a pod that made room."""
        self._preempted.labels(resource).inc()

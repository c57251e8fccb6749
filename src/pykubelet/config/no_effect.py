"""Settings that are accepted for compatibility and have no effect, each with the reason.

The kubelet accepts every field of KubeletConfiguration and every flag of the upstream kubelet, so that
existing configuration files and command lines keep working. A setting that no code reads is listed
here, and start-up logs a warning when an operator sets it. `tests/unit/config/test_no_effect.py` enumerates
all fields, flags and the feature gates that the upstream kubelet reads (`tests/data/kubelet_gates.tsv`), and
fails for one that is neither read nor listed, and for an entry whose setting is read: implementing a setting
means deleting its entry.

Flags that upstream has removed or ignores itself carry their reason in the flag table (`status="ignored"`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pykubelet.config.feature_gates import FeatureGates, known_gates
from pykubelet.config.flags.flag import Flag
from pykubelet.config.flags.flag_table import field_path

_NO_MARKS = "the iptables chains use no packet marks; the upstream kubelet ignores it, too"
FIELDS: Mapping[str, str] = {
    "content_type": "objects are always JSON, decoded faster than protobuf (docs/packages/cluster.md)",
    "hairpin_mode": "the CNI plugins configure hairpin mode; the upstream kubelet ignores it, too",
    "iptables_drop_bit": _NO_MARKS,
    "iptables_masquerade_bit": _NO_MARKS,
}
"""Reason by path of Python names in KubeletConfiguration; an entry covers the fields below it."""
FLAG_ATTRIBUTES: Mapping[str, str] = {
    "pod_infra_container_image": "the container runtime configures the sandbox image; upstream removed it",
}
"""Reason by attribute of KubeletFlags, for flags without a field in the configuration file."""
CONSULTED_GATES: Collection[str] = frozenset(
    {
        "AllowDNSOnlyNodeCSR",
        "AllowParsingUserUIDFromCertAuth",
        "CPUManagerPolicyAlphaOptions",
        "CPUManagerPolicyBetaOptions",
        "CRIListStreaming",
        "CSIVolumeHealth",
        "ChangeContainerStatusOnKubeletRestart",
        "ClusterTrustBundleProjection",
        "ComponentFlagz",
        "ComponentStatusz",
        "ContainerCheckpoint",
        "ContainerRestartRules",
        "ContainerStopSignals",
        "CustomCPUCFSQuotaPeriod",
        "DRAExtendedResource",
        "DRANodeAllocatableResources",
        "DRAWorkloadResourceClaims",
        "DisableCPUQuotaWithExclusiveCPUs",
        "DynamicResourceAllocation",
        "EnvFiles",
        "EventedPLEG",
        "ExtendWebSocketsToKubelet",
        "GracefulNodeShutdown",
        "GracefulNodeShutdownBasedOnPodPriority",
        "HostnameOverride",
        "ImageVolumeWithDigest",
        "InPlacePodLevelResourcesVerticalScaling",
        "InPlacePodVerticalScalingExclusiveCPUs",
        "InPlacePodVerticalScalingExclusiveMemory",
        "InPlacePodVerticalScalingInitContainers",
        "KubeletCgroupDriverFromCRI",
        "KubeletCrashLoopBackOffMax",
        "KubeletEnsureSecretPulledImages",
        "KubeletInUserNamespace",
        "KubeletPSI",
        "KubeletPodResourcesListUseActivePods",
        "KubeletRegistrationGetOnExistsOnly",
        "KubeletSeparateDiskGC",
        "KubeletServiceAccountTokenForCredentialProviders",
        "LoggingAlphaOptions",
        "LoggingBetaOptions",
        "MatchLabelKeysInPodTopologySpread",
        "MatchLabelKeysInPodTopologySpreadSelectorMerge",
        "MemoryQoS",
        "NodeDeclaredFeatures",
        "NodeLogQuery",
        "NodeSwap",
        "PLEGOnDemandRelist",
        "PodAndContainerStatsFromCRI",
        "PodCertificateRequest",
        "PodDeletionCost",
        "PodLevelResources",
        "PodLogsQuerySplitStreams",
        "PodReadyToStartContainersCondition",
        "PodsAPI",
        "PreventStaticPodAPIReferences",
        "QOSReserved",
        "RecursiveReadOnlyMounts",
        "ReduceDefaultCrashLoopBackOffDecay",
        "ReloadKubeletClientCAFile",
        "ReloadKubeletServerCertificateFile",
        "ResourceHealthStatus",
        "ResourceHealthStatusMessage",
        "RestartAllContainersOnContainerExits",
        "RotateKubeletServerCertificate",
        "RuntimeClassInImageCriApi",
        "SELinuxMount",
        "StrictIPCIDRValidation",
        "SupplementalGroupsPolicy",
        "TaintTolerationComparisonOperators",
        "UserNamespacesHostNetworkSupport",
        "UserNamespacesSupport",
        "WatchListClient",
    }
)
"""Feature gates that some code reads."""
_TOPOLOGY_OPTIONS = "no option of the topology manager is in this stage; the upstream kubelet has none, too"
_CBOR = "requests and responses are JSON, as with contentType (docs/packages/cluster.md)"
UNREAD_GATES: Mapping[str, str] = {
    "ClientsAllowCBOR": _CBOR,
    "ClientsPreferCBOR": _CBOR,
    "GenericWorkload": (
        "only handlers of the API server read it, to drop a field of pods; "
        "the upstream kubelet ignores it, too"
    ),
    "LocalStorageCapacityIsolationFSQuotaMonitoring": (
        "differs from upstream: no project quotas are set for emptyDir volumes of pods in user namespaces, "
        "whose usage is measured by reading the directories"
    ),
    "PodLevelResourceManagers": (
        "differs from upstream: pods with pod-level resources get no exclusive CPUs and memory; "
        "set resources of containers instead"
    ),
    "TopologyManagerPolicyAlphaOptions": _TOPOLOGY_OPTIONS,
    "TopologyManagerPolicyBetaOptions": _TOPOLOGY_OPTIONS,
}
"""Reason by feature gate that the upstream kubelet reads and no code here does."""


def no_effect_warnings(
    set_fields: Iterable[str], set_flags: Iterable[Flag], gates: FeatureGates
) -> list[str]:
    """Return a warning for each setting of the operator that has no effect.

    `set_fields` are the fields that the configuration files set, as dotted paths of JSON names.
    """
    by_path = {field_path(path): reason for path, reason in FIELDS.items()}
    warnings = [
        f"{path} is set but has no effect: {reason}"
        for path, reason in by_path.items()
        if any(name == path or name.startswith(f"{path}.") for name in set_fields)
    ]
    for flag in set_flags:
        if reason := flag_reason(flag):
            warnings.append(f"--{flag.name} is set but has no effect: {reason}")
    unread = _unread_gates(gates)
    warnings += [
        f"feature gate {name} is set but has no effect: {UNREAD_GATES[name]}"
        for name in unread
        if name in UNREAD_GATES
    ]
    if unread := [name for name in unread if name not in UNREAD_GATES]:
        warnings.append(
            f"feature gates {', '.join(unread)} are set but have no effect: no kubelet reads them"
        )
    return warnings


def flag_reason(flag: Flag) -> str:
    """Return the reason why a flag has no effect, "" for one that has an effect."""
    if flag.status == "ignored":
        return flag.note
    return FIELDS.get(flag.field) or FLAG_ATTRIBUTES.get(flag.attribute) or ""


def _unread_gates(gates: FeatureGates) -> list[str]:
    """Return the gates that are set to another value than their default and that no code reads."""
    known = known_gates()
    return sorted(
        name
        for name, value in gates.overrides.items()
        if value != known[name].default and name not in CONSULTED_GATES and not name.startswith("All")
    )

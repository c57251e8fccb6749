"""Live configuration, the pure part: fields that can change at run time, differences of configurations.

`RELOADABLE` and `RESTART` classify every field of KubeletConfiguration by its JSON path; a test fails for a
field that is in neither. A reloadable field names the consumers that apply it (`agent/live_consumers.py`), a
field that requires a restart has the reason. `restart_reason` adds the cases that depend on the running
configuration: resources that a manager has already divided among NUMA nodes and CPUs cannot change under it.

Values are shown to operators in logs, events and the command line, so `FieldChange` has them as bounded text
with secrets masked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import msgspec

from pykubelet.api.meta import wire_name
from pykubelet.config.codec import to_plain
from pykubelet.config.types import ConfigStruct, KubeletConfiguration
from pykubelet.logs.mask import MASK, mask_value

S = TypeVar("S", bound=ConfigStruct)
MAX_VALUE_CHARACTERS = 200
"""Length of a value in a log line or a report; longer ones are cut."""
SENSITIVE = frozenset({"staticPodURLHeader"})
"""Fields whose values are never shown."""
_NOT_SETTINGS = ("kind", "api_version")

_ALLOCATABLE, _API_CLIENT, _DNS, _EVICTION = "allocatable", "apiClient", "dns", "eviction"
_IMAGE_GC, _IMAGE_PULLS, _LOGGING, _LOG_ROTATION = "imageGC", "imagePulls", "logging", "logRotation"
_MOUNTER_DNS = "mounterDNS"
_NODE_STATUS, _POD_SYNC, _SYSCTLS, _TLS = "nodeStatus", "podSync", "sysctls", "tls"
_POD_SOURCES = "podSources"
CONSUMERS: Mapping[str, str] = MappingProxyType(
    {
        _ALLOCATABLE: "limits of all pods and reserved cgroups, node status, pod admission, downward API",
        _API_CLIENT: "requests to the API server, also those in progress",
        _DNS: "new pod sandboxes",
        _EVICTION: "eviction manager, with a round immediately",
        _IMAGE_GC: "image garbage collection, at the next round",
        _IMAGE_PULLS: "image pulls that start afterwards",
        _LOGGING: "the kubelet's own log, immediately",
        _LOG_ROTATION: "container log rotation, at the next check",
        _MOUNTER_DNS: "resolv.conf of `--experimental-mounter-path`",
        _NODE_STATUS: "node status and lease, with a report immediately",
        _POD_SOURCES: "static pod sources, with a check immediately",
        _POD_SYNC: "pod workers: each pod is synced once and then with the new period",
        _SYSCTLS: "admission of new pods",
        _TLS: "new connections to the kubelet API",
    }
)
"""Consumers of reloadable fields, and what a change takes effect on."""
RELOADABLE: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "allowedUnsafeSysctls": (_SYSCTLS,),
        "clusterDNS": (_DNS, _MOUNTER_DNS),
        "clusterDomain": (_DNS,),
        "containerLogMaxFiles": (_LOG_ROTATION,),
        "containerLogMaxSize": (_LOG_ROTATION,),
        "containerLogMaxWorkers": (_LOG_ROTATION,),
        "containerLogMonitorInterval": (_LOG_ROTATION,),
        "eventBurst": (_API_CLIENT,),
        "eventRecordQPS": (_API_CLIENT,),
        "evictionHard": (_EVICTION, _ALLOCATABLE),
        "evictionMaxPodGracePeriod": (_EVICTION,),
        "evictionMinimumReclaim": (_EVICTION,),
        "evictionPressureTransitionPeriod": (_EVICTION,),
        "evictionSoft": (_EVICTION,),
        "evictionSoftGracePeriod": (_EVICTION,),
        "fileCheckFrequency": (_POD_SOURCES,),
        "httpCheckFrequency": (_POD_SOURCES,),
        "imageGCHighThresholdPercent": (_IMAGE_GC,),
        "imageGCLowThresholdPercent": (_IMAGE_GC,),
        "imageMaximumGCAge": (_IMAGE_GC,),
        "imageMinimumGCAge": (_IMAGE_GC,),
        "kubeAPIBurst": (_API_CLIENT,),
        "kubeAPIQPS": (_API_CLIENT,),
        "kubeReserved": (_ALLOCATABLE,),
        "logging.verbosity": (_LOGGING,),
        "logging.vmodule": (_LOGGING,),
        "maxParallelImagePulls": (_IMAGE_PULLS,),
        "maxPods": (_ALLOCATABLE,),
        "mergeDefaultEvictionSettings": (_EVICTION, _ALLOCATABLE),
        "nodeLeaseDurationSeconds": (_NODE_STATUS, _API_CLIENT),
        "nodeStatusMaxImages": (_NODE_STATUS,),
        "nodeStatusReportFrequency": (_NODE_STATUS,),
        "nodeStatusUpdateFrequency": (_NODE_STATUS, _API_CLIENT),
        "podsPerCore": (_ALLOCATABLE,),
        "registryBurst": (_IMAGE_PULLS,),
        "registryPullQPS": (_IMAGE_PULLS,),
        "serializeImagePulls": (_IMAGE_PULLS,),
        "syncFrequency": (_POD_SYNC,),
        "systemReserved": (_ALLOCATABLE,),
        "tlsCertFile": (_TLS,),
        "tlsCipherSuites": (_TLS,),
        "tlsCurvePreferences": (_TLS,),
        "tlsMinVersion": (_TLS,),
        "tlsPrivateKeyFile": (_TLS,),
    }
)
"""Consumers by JSON path of the field."""

_ACCESS = "clients of the kubelet API are authenticated and authorized as at the start"
_CGROUPS = "it determines the cgroups of running pods"
_HOST = "the host is checked and set up at the start"
_LISTENERS = "servers listen and routes are built at the start"
_MANAGERS = "running containers have CPUs, memory and devices by it"
_NODE = "the node registers with it"
_NO_EFFECT = "it has no effect"
_OUTPUT = "log files and formats are opened at the start"
_PODS = "running pods were started with it"
_RUNTIME = "the runtime is connected at the start"
_SHUTDOWN = "the inhibitor lock is acquired for it at the start"
_SOURCES = "pod sources start with the kubelet"
RESTART: Mapping[str, str] = MappingProxyType(
    {
        "address": _LISTENERS,
        "authentication.anonymous.enabled": _ACCESS,
        "authentication.webhook.cacheTTL": _ACCESS,
        "authentication.webhook.enabled": _ACCESS,
        "authentication.x509.clientCAFile": _ACCESS,
        "authorization.mode": _ACCESS,
        "authorization.webhook.cacheAuthorizedTTL": _ACCESS,
        "authorization.webhook.cacheUnauthorizedTTL": _ACCESS,
        "cgroupDriver": _CGROUPS,
        "cgroupRoot": _CGROUPS,
        "cgroupsPerQOS": _CGROUPS,
        "configMapAndSecretChangeDetectionStrategy": "objects of running pods are watched or cached by it",
        "containerRuntimeEndpoint": _RUNTIME,
        "contentType": "the API server is connected at the start",
        "cpuCFSQuota": _PODS,
        "cpuCFSQuotaPeriod": _PODS,
        "cpuManagerPolicy": _MANAGERS,
        "cpuManagerPolicyOptions": _MANAGERS,
        "cpuManagerReconcilePeriod": _MANAGERS,
        "crashLoopBackOff.maxContainerRestartPeriod": "back-off delays of running pods are based on it",
        "enableContentionProfiling": _LISTENERS,
        "enableControllerAttachDetach": _NODE,
        "enableDebugFlagsHandler": _LISTENERS,
        "enableDebuggingHandlers": _LISTENERS,
        "enableProfilingHandler": _LISTENERS,
        "enableServer": _LISTENERS,
        "enableSystemLogHandler": _LISTENERS,
        "enableSystemLogQuery": _LISTENERS,
        "enforceNodeAllocatable": _CGROUPS,
        "failCgroupV1": _HOST,
        "failSwapOn": _HOST,
        "featureGates": "feature gates are read when components are built",
        "hairpinMode": _NO_EFFECT,
        "healthzBindAddress": _LISTENERS,
        "healthzPort": _LISTENERS,
        "imagePullCredentialsVerificationPolicy": "records of pulled images are read at the start",
        "imageServiceEndpoint": _RUNTIME,
        "iptablesDropBit": _NO_EFFECT,
        "iptablesMasqueradeBit": _NO_EFFECT,
        "kernelMemcgNotification": "notifications are registered with the kernel at the start",
        "kubeReservedCgroup": _CGROUPS,
        "kubeletCgroups": _HOST,
        "localStorageCapacityIsolation": _NODE,
        "logging.flushFrequency": _OUTPUT,
        "logging.format": _OUTPUT,
        "logging.options.json.infoBufferSize": _OUTPUT,
        "logging.options.json.splitStream": _OUTPUT,
        "logging.options.text.infoBufferSize": _OUTPUT,
        "logging.options.text.splitStream": _OUTPUT,
        "makeIPTablesUtilChains": _HOST,
        "maxOpenFiles": _HOST,
        "memoryManagerPolicy": _MANAGERS,
        "memoryReservationPolicy": _PODS,
        "memorySwap.swapBehavior": _PODS,
        "memoryThrottlingFactor": _PODS,
        "oomScoreAdj": _HOST,
        "podCIDR": _RUNTIME,
        "podLogsDir": _PODS,
        "podPidsLimit": _PODS,
        "port": _LISTENERS,
        "preloadedImagesVerificationAllowlist": "records of pulled images are read at the start",
        "protectKernelDefaults": _HOST,
        "providerID": _NODE,
        "qosReserved": _CGROUPS,
        "readOnlyPort": _LISTENERS,
        "registerNode": _NODE,
        "registerWithTaints": _NODE,
        "reservedMemory": _MANAGERS,
        "reservedSystemCPUs": _MANAGERS,
        "resolvConf": _PODS,
        "rotateCertificates": "the node's identity is obtained at the start",
        "runOnce": _SOURCES,
        "runtimeRequestTimeout": _RUNTIME,
        "seccompDefault": _PODS,
        "serverTLSBootstrap": "the serving certificate is requested from the start on",
        "showHiddenMetricsForVersion": _LISTENERS,
        "shutdownGracePeriod": _SHUTDOWN,
        "shutdownGracePeriodByPodPriority": _SHUTDOWN,
        "shutdownGracePeriodCriticalPods": _SHUTDOWN,
        "singleProcessOOMKill": _PODS,
        "staticPodPath": _SOURCES,
        "staticPodURL": _SOURCES,
        "staticPodURLHeader": _SOURCES,
        "streamingConnectionIdleTimeout": _LISTENERS,
        "systemCgroups": _HOST,
        "systemReservedCgroup": _CGROUPS,
        "topologyManagerPolicy": _MANAGERS,
        "topologyManagerPolicyOptions": _MANAGERS,
        "topologyManagerScope": _MANAGERS,
        "tracing": "exporters are built at the start",
        "userNamespaces": _PODS,
        "volumePluginDir": "volume plugins are loaded at the start",
        "volumeStatsAggPeriod": "measurements are scheduled from the start on",
    }
)
"""Reason by JSON path of the field."""
_STATIC_RESERVATIONS = ("kubeReserved", "systemReserved")
_STATIC_THRESHOLDS = ("evictionHard", "mergeDefaultEvictionSettings")


class FieldChange(msgspec.Struct, frozen=True, rename="camel"):
    """A field that differs between two configurations."""

    path: str
    """JSON path."""
    before: str
    """Value as bounded JSON text, masked if it is secret; so is `after`."""
    after: str
    restart_reason: str = ""
    """Reason why the change requires a restart; empty if it can take effect now."""

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


Outcome = Literal["success", "unchanged", "failed"]


class ReloadReport(msgspec.Struct, frozen=True, rename="camel"):
    """Result of a reload, as the control socket returns it."""

    outcome: Outcome
    applied: list[FieldChange] = []
    restart_required: list[FieldChange] = []
    """All fields in which the files differ from the running kubelet, also of earlier reloads."""
    other: list[str] = []
    """Applied changes that are not fields, such as credential providers."""
    problems: list[str] = []
    """Reasons of a failure; nothing has changed then."""
    unused: list[FieldChange] = []
    """Changed fields that no component of this node uses, such as those of a server that is off."""


@functools.cache
def field_paths() -> tuple[tuple[str, str], ...]:
    """Return JSON path and path of Python names of every field, sorted; a list or map is one field."""
    return tuple(sorted(_paths(KubeletConfiguration())))


def consumer_fields(consumer: str) -> frozenset[str]:
    """Return the JSON paths of the fields that a consumer applies."""
    return frozenset(path for path, consumers in RELOADABLE.items() if consumer in consumers)


def restart_reason(path: str, running: KubeletConfiguration) -> str:
    """Return the reason why a change of a field requires a restart; empty if it can take effect now."""
    if reason := RESTART.get(path, ""):
        return reason
    if path in _STATIC_RESERVATIONS and running.cpu_manager_policy == "static":
        return "cpuManagerPolicy is static: containers have exclusive CPUs by it"
    if path in (*_STATIC_RESERVATIONS, *_STATIC_THRESHOLDS) and running.memory_manager_policy == "Static":
        return "memoryManagerPolicy is Static: containers have memory of NUMA nodes by it"
    return ""


def differences(before: KubeletConfiguration, after: KubeletConfiguration) -> list[FieldChange]:
    """Return the fields that differ, by path; `before` is the running configuration."""
    return [
        FieldChange(path, _text(path, old), _text(path, new), restart_reason(path, before))
        for path, name in field_paths()
        if (old := _get(before, name)) != (new := _get(after, name))
    ]


def with_fields(
    config: KubeletConfiguration, source: KubeletConfiguration, paths: Iterable[str]
) -> KubeletConfiguration:
    """Return a configuration with some fields of another one; the arguments are not changed."""
    names = dict(field_paths())
    for path in paths:
        config = _replaced(config, names[path].split("."), _get(source, names[path]))
    return config


def markdown_table() -> str:
    """Return the documentation's tables of all fields."""
    lines = ["| field | takes effect on |", "|---|---|"]
    lines += [
        f"| `{path}` | {'; '.join(CONSUMERS[name] for name in consumers)} |"
        for path, consumers in sorted(RELOADABLE.items())
    ]
    lines += ["", "| field | requires a restart because |", "|---|---|"]
    lines += [f"| `{path}` | {reason} |" for path, reason in sorted(RESTART.items())]
    return "\n".join(lines)


def _paths(struct: ConfigStruct, wire: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    for info in msgspec.structs.fields(struct):
        if not name and info.name in _NOT_SETTINGS:
            continue
        value = getattr(struct, info.name)
        paths = f"{wire}{wire_name(info.name)}", f"{name}{info.name}"
        # A struct that may be absent is one field.
        if isinstance(value, ConfigStruct):
            yield from _paths(value, f"{paths[0]}.", f"{paths[1]}.")
        else:
            yield paths


def _get(config: KubeletConfiguration, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _replaced(struct: S, names: Sequence[str], value: Any) -> S:
    first, *rest = names
    inner = _replaced(getattr(struct, first), rest, value) if rest else value
    return msgspec.structs.replace(struct, **{first: inner})


def _text(path: str, value: Any) -> str:
    if path in SENSITIVE:
        return MASK if value else "{}"
    text = msgspec.json.encode(mask_value("", to_plain(value))).decode()
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "…"

"""Validation of the configuration: all checks of upstream, before any component starts.

Also checked is what upstream finds only when a component starts, such as a malformed threshold. Checks
behind gates that are locked on in v1.36 are left out. One rule is deliberately not applied: `runOnce` may
be true.

`validate` needs only the configuration and runs all checks: those of `validate_serving` and
`validate_resources`, and those of this module on pods, images, shutdown and taints. `validate_machine`
needs the host, and is separate because a configuration may be validated on another host than the one that
uses it.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from pykubelet.api import cpuset
from pykubelet.api.duration import Duration
from pykubelet.api.names import (
    image_repository_problem,
    label_value_problem,
    qualified_name_problem,
    sysctl_pattern_problem,
)
from pykubelet.api.quantity import Quantity
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import LONGEST_RESTART_PAUSE, KubeletConfiguration
from pykubelet.config.validation.validate_resources import eviction_problems as eviction_problems
from pykubelet.config.validation.validate_resources import manager_problems as manager_problems
from pykubelet.config.validation.validate_resources import reserved_problems as reserved_problems
from pykubelet.config.validation.validate_rules import (
    Gates,
    between,
    check,
    one_of,
    positive,
    readable,
    shaped,
)
from pykubelet.config.validation.validate_serving import serving_problems as serving_problems
from pykubelet.config.validation.validate_serving import tls_problems as tls_problems
from pykubelet.util.text import quoted

SHORTEST_SHUTDOWN = Duration.parse("1s")
SHORTEST_RESTART_PAUSE = Duration.parse("1s")
TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
PULL_POLICIES = ("NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages", "AlwaysVerify")


def pod_problems(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    """Yield the problems of the fields on pods, images, logs, shutdown and taints."""
    yield from check(_RULES, config)
    yield from _images(config)
    yield from _pull_policy(config, gates)
    yield from _shutdown(config, gates)
    yield from _taints(config)
    yield from _logs_dir(config.pod_logs_dir)
    yield from _back_off(config.crash_loop_back_off.max_container_restart_period, gates)


def _log_size(text: str) -> None:
    if not Quantity.parse(text).is_integer:
        raise ValueError(f"must be a whole number of bytes, such as 10Mi, not {quoted(text)}")


_RULES = (
    between("max_pods", 0),
    between("pods_per_core", 0),
    between("max_open_files", 0),
    between("node_status_max_images", -1),
    between("node_lease_duration_seconds", 1),
    between("registry_burst", 0),
    between("registry_pull_qps", 0),
    between("max_parallel_image_pulls", 1),
    between("image_gc_high_threshold_percent", 0, 100),
    between("image_gc_low_threshold_percent", 0, 100),
    between("image_minimum_gc_age", Duration(0)),
    between("image_maximum_gc_age", Duration(0)),
    between("iptables_masquerade_bit", 0, 31),
    between("iptables_drop_bit", 0, 31),
    between("container_log_max_files", 2),
    between("container_log_max_workers", 1),
    between("container_log_monitor_interval", Duration.parse("3s")),
    positive("sync_frequency"),
    positive("node_status_update_frequency"),
    positive("node_status_report_frequency"),
    one_of("config_map_and_secret_change_detection_strategy", "Get", "Cache", "Watch"),
    readable("container_log_max_size", _log_size),
    shaped("allowed_unsafe_sysctls", sysctl_pattern_problem),
)


def _images(config: KubeletConfiguration) -> Iterator[Problem]:
    low, high = config.image_gc_low_threshold_percent, config.image_gc_high_threshold_percent
    if low >= high:
        yield Problem(
            "imageGCLowThresholdPercent", f"must be below imageGCHighThresholdPercent ({high}), not {low}"
        )
    youngest, oldest = config.image_minimum_gc_age, config.image_maximum_gc_age
    if 0 < oldest <= youngest:
        yield Problem(
            "imageMaximumGCAge", f"must be longer than imageMinimumGCAge ({youngest}), not {oldest}"
        )
    if config.serialize_image_pulls and (config.max_parallel_image_pulls or 1) > 1:
        yield Problem("maxParallelImagePulls", "can be more than 1 only with serializeImagePulls: false")


def _pull_policy(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    policy, patterns = (
        config.image_pull_credentials_verification_policy,
        config.preloaded_images_verification_allowlist,
    )
    if not gates("KubeletEnsureSecretPulledImages"):
        needs = "needs the feature gate KubeletEnsureSecretPulledImages"
        if policy:
            yield Problem("imagePullCredentialsVerificationPolicy", needs)
        if patterns:
            yield Problem("preloadedImagesVerificationAllowlist", needs)
        return
    yield from check([one_of("image_pull_credentials_verification_policy", *PULL_POLICIES)], config)
    if patterns and policy != "NeverVerifyAllowlistedImages":
        yield Problem(
            "preloadedImagesVerificationAllowlist",
            "needs imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages",
        )
    for index, pattern in enumerate(patterns):
        if message := _image_pattern_problem(pattern):
            yield Problem(
                key_path("preloadedImagesVerificationAllowlist", index), f"{message}, not {quoted(pattern)}"
            )


def _image_pattern_problem(pattern: str) -> str | None:
    if pattern.endswith("/*"):
        stem = pattern.removesuffix("/*")
        if not stem or "*" in stem or stem != stem.strip():
            return (
                "must be a registry and perhaps a path before the '/*', such as registry.example.com/team/*"
            )
        return None
    return image_repository_problem(pattern)


def _shutdown(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    total, critical = config.shutdown_grace_period, config.shutdown_grace_period_critical_pods
    by_priority = config.shutdown_grace_period_by_pod_priority
    if gates("GracefulNodeShutdown"):
        if critical > total:
            yield Problem(
                "shutdownGracePeriodCriticalPods",
                f"must be at most shutdownGracePeriod ({total}), not {critical}",
            )
        for field, span in (("shutdownGracePeriod", total), ("shutdownGracePeriodCriticalPods", critical)):
            if span and span < SHORTEST_SHUTDOWN:
                yield Problem(field, f"must be zero, or 1s or more, not {span}")
    elif total > 0 or critical > 0:
        yield Problem("shutdownGracePeriod", "needs the feature gate GracefulNodeShutdown")
    if not by_priority:
        return
    if not gates("GracefulNodeShutdownBasedOnPodPriority"):
        yield Problem(
            "shutdownGracePeriodByPodPriority",
            "needs the feature gate GracefulNodeShutdownBasedOnPodPriority",
        )
    elif total > 0 or critical > 0:
        yield Problem("shutdownGracePeriodByPodPriority", "cannot be used together with shutdownGracePeriod")
    for index, entry in enumerate(by_priority):
        if (seconds := entry.shutdown_grace_period_seconds) < 0:
            path = f"{key_path('shutdownGracePeriodByPodPriority', index)}.shutdownGracePeriodSeconds"
            yield Problem(path, f"must be 0 or more, not {seconds}")


def _taints(config: KubeletConfiguration) -> Iterator[Problem]:
    seen: set[tuple[str, str]] = set()
    for index, taint in enumerate(config.register_with_taints):
        path = key_path("registerWithTaints", index)
        if message := qualified_name_problem(taint.key):
            yield Problem(f"{path}.key", f"{message}, not {quoted(taint.key)}")
        if message := label_value_problem(taint.value):
            yield Problem(f"{path}.value", f"{message}, not {quoted(taint.value)}")
        if taint.effect and taint.effect not in TAINT_EFFECTS:
            yield Problem(
                f"{path}.effect", f"must be one of {', '.join(TAINT_EFFECTS)}, not {quoted(taint.effect)}"
            )
        if taint.time_added is not None:
            yield Problem(f"{path}.timeAdded", "cannot be set: the control plane sets it")
        if (taint.key, taint.effect) in seen:
            yield Problem(path, f"{quoted(taint.key)} is given twice with the same effect: give it once")
        seen.add((taint.key, taint.effect))


def _logs_dir(path: str) -> Iterator[Problem]:
    if not path.startswith("/"):
        yield Problem("podLogsDir", f"must be an absolute path, not {quoted(path)}")
    elif path != os.path.normpath(path) or path.startswith("//"):
        yield Problem(
            "podLogsDir", f"must be a plain path without //, /./, /../ or a / at the end, not {quoted(path)}"
        )
    if not path.isascii():
        # The path is used in metrics, as upstream.
        yield Problem("podLogsDir", f"must be ASCII text, not {quoted(path)}")


def _back_off(longest: Duration | None, gates: Gates) -> Iterator[Problem]:
    path = "crashLoopBackOff.maxContainerRestartPeriod"
    if not gates("KubeletCrashLoopBackOffMax"):
        if longest is not None:
            yield Problem(path, "needs the feature gate KubeletCrashLoopBackOffMax")
    elif longest is None:
        yield Problem(path, "is missing: write one between 1s and 5m")
    elif not SHORTEST_RESTART_PAUSE <= longest <= LONGEST_RESTART_PAUSE:
        yield Problem(path, f"must be between 1s and 5m, not {longest}")


_CHECKS = (
    serving_problems,
    tls_problems,
    pod_problems,
    manager_problems,
    reserved_problems,
    eviction_problems,
)


def validate(config: KubeletConfiguration, gate_enabled: Gates) -> list[Problem]:
    """Return all problems of a configuration; empty if the kubelet can run with it."""
    return [problem for check in _CHECKS for problem in check(config, gate_enabled)]


def validate_machine(
    config: KubeletConfiguration, *, cgroup_v2: bool, online_cpus: frozenset[int]
) -> list[Problem]:
    """Return the problems of a valid configuration on this host."""
    problems = []
    if config.fail_cgroup_v1 and not cgroup_v2:
        problems.append(
            Problem(
                "failCgroupV1",
                "is true and this machine has cgroup v1: boot with cgroup v2 or set it to false",
            )
        )
    if config.single_process_oom_kill is False and not cgroup_v2:
        problems.append(Problem("singleProcessOOMKill", "cannot be false with cgroup v1: remove it"))
    if config.memory_swap.swap_behavior == "LimitedSwap" and not cgroup_v2:
        problems.append(Problem("memorySwap.swapBehavior", "LimitedSwap needs cgroup v2: use NoSwap"))
    if missing := cpuset.parse(config.reserved_system_cpus) - online_cpus:
        text = f"CPU {cpuset.format(missing)} is not there: this machine has {cpuset.format(online_cpus)}"
        problems.append(Problem("reservedSystemCPUs", text))
    return problems

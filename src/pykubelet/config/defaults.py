"""The defaults that depend on other fields, on gates, or on there being a file at all.

All other defaults are in `types.py`, next to their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from pykubelet.api.duration import Duration
from pykubelet.config.types import KubeletConfiguration

DEFAULT_EVICTION_HARD: Mapping[str, str] = {
    "memory.available": "100Mi",
    "nodefs.available": "10%",
    "nodefs.inodesFree": "5%",
    "imagefs.available": "15%",
    "imagefs.inodesFree": "5%",
}

LONGEST_RESTART_PAUSE = Duration.parse("5m")

GATED_FIELDS = ("crashLoopBackOff", "imagePullCredentialsVerificationPolicy")
"""Fields whose default exists only while a gate is on."""


def complete(
    config: KubeletConfiguration, explicit: Container[str], gate_enabled: Callable[[str], bool]
) -> None:
    """Fill in what follows from the rest; `explicit` has the JSON names of the fields that were set.

    A field that was set is left alone, with one exception: any negative `podPidsLimit` means -1.
    """
    if "nodeStatusReportFrequency" not in explicit and "nodeStatusUpdateFrequency" in explicit:
        # Whoever chose how often the status is computed wants it reported as often.
        config.node_status_report_frequency = config.node_status_update_frequency
    if "serializeImagePulls" not in explicit:
        config.serialize_image_pulls = (config.max_parallel_image_pulls or 1) < 2
    if config.pod_pids_limit < 0:
        config.pod_pids_limit = -1
    if "evictionHard" not in explicit:
        config.eviction_hard = dict(DEFAULT_EVICTION_HARD)
    elif config.merge_default_eviction_settings:
        config.eviction_hard = {**DEFAULT_EVICTION_HARD, **config.eviction_hard}
    back_off = config.crash_loop_back_off
    if back_off.max_container_restart_period is None and gate_enabled("KubeletCrashLoopBackOffMax"):
        back_off.max_container_restart_period = LONGEST_RESTART_PAUSE
    policy_set = "imagePullCredentialsVerificationPolicy" in explicit
    if not policy_set and not gate_enabled("KubeletEnsureSecretPulledImages"):
        config.image_pull_credentials_verification_policy = ""


def legacy_defaults() -> KubeletConfiguration:
    """Give what a node that has no configuration file starts from.

    The reference keeps the old, open defaults there, because command lines from before the file
    existed rely on them.
    """
    config = KubeletConfiguration(read_only_port=10255)
    config.authentication.anonymous.enabled = True
    config.authentication.webhook.enabled = False
    config.authorization.mode = "AlwaysAllow"
    return config

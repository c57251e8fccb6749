"""The defaults that depend on other fields, on gates, or on there being a file at all.

All other defaults are in `types.py`, next to their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pykubelet.api.duration import Duration
from pykubelet.config.types import CrashLoopBackOff, KubeletConfiguration

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
    config: KubeletConfiguration, explicit: Mapping[str, Any], gate_enabled: Callable[[str], bool]
) -> None:
    """Fill in what follows from the rest; `explicit` is the document that was decoded.

    A field that was set is left alone, with one exception: any negative `podPidsLimit` means -1.
    """
    if not _is_set(explicit, "nodeStatusReportFrequency") and _is_set(explicit, "nodeStatusUpdateFrequency"):
        # Whoever chose how often the status is computed wants it reported as often.
        config.node_status_report_frequency = config.node_status_update_frequency
    if explicit.get("serializeImagePulls") is None:
        config.serialize_image_pulls = (config.max_parallel_image_pulls or 1) < 2
    if config.pod_pids_limit < 0:
        config.pod_pids_limit = -1
    if explicit.get("evictionHard") is None:
        config.eviction_hard = dict(DEFAULT_EVICTION_HARD)
    elif config.merge_default_eviction_settings:
        config.eviction_hard = {**DEFAULT_EVICTION_HARD, **config.eviction_hard}
    if gate_enabled("KubeletCrashLoopBackOffMax") and config.crash_loop_back_off == CrashLoopBackOff():
        config.crash_loop_back_off.max_container_restart_period = LONGEST_RESTART_PAUSE
    if not gate_enabled("KubeletEnsureSecretPulledImages") and not explicit.get(
        "imagePullCredentialsVerificationPolicy"
    ):
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


def _is_set(explicit: Mapping[str, Any], field: str) -> bool:
    """Whether a duration was given; zero is the same as nothing."""
    given = explicit.get(field)
    return given is not None and Duration.parse(given) != 0

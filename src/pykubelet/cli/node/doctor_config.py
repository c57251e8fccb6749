"""The kubelet's settings for which `doctor` checks a host, and where they come from.

The same host may be fine for one configuration and useless for another: with `failSwapOn` a kubelet does not
start while swap is on. The settings are those of a running kubelet (`/configz`, which contains its flags), of
a configuration file, or the defaults of `pykubelet up`. A file that cannot be used is a problem of the
settings, not an exception.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pykubelet.cli.client import NodeClient, NodeError
from pykubelet.cli.node.up_defaults import UP_DEFAULTS

if TYPE_CHECKING:
    from pykubelet.cli.node_access import Node
    from pykubelet.config.types import KubeletConfiguration

Port = tuple[int, str, bool]
"""A port, its purpose, and whether the kubelet of the configuration listens on it."""
PORTS: tuple[Port, ...] = (
    (10248, "health", True),
    (10250, "the API", True),
    (10255, "the read-only API", False),
    (4194, "old cAdvisor", False),
)
"""Ports of the default configuration."""
REQUEST_SECONDS = 3.0
"""Time in which a running kubelet has to return its configuration."""


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """Settings that decide whether a property of the host is a problem."""

    source: str
    """Where the settings come from, for users."""
    fail_swap_on: bool = True
    protect_kernel_defaults: bool = False
    fail_cgroup_v1: bool = False
    shutdown_seconds: int = 0
    """Sum of the configured shutdown grace periods; 0 if none are."""
    ports: tuple[Port, ...] = PORTS
    problem: str = ""
    """Why the configuration cannot be used; the other settings are then the defaults."""


STRICT = DoctorConfig("every requirement of a configuration", protect_kernel_defaults=True)
"""Settings with which nothing is overlooked; the page leaves out what the running node does not require."""


def config_of_up() -> DoctorConfig:
    """Return the settings of a node of `pykubelet up` without flags."""
    # Imported here, as below: only some checks need the configuration.
    from pykubelet.config.codec import decode
    from pykubelet.config.feature_gates import FeatureGates
    from pykubelet.config.types import KubeletConfiguration

    config, _ = decode(KubeletConfiguration, UP_DEFAULTS)
    return _config("defaults of `pykubelet up`", config, FeatureGates().enabled)


def config_of_file(path: Path) -> DoctorConfig:
    """Return the settings of a configuration file."""
    return _loaded(str(path), [f"--config={path}"])


def config_of_flags(config_file: str, config_dir: str, title: str) -> DoctorConfig:
    """Return the settings with which the kubelet of `title` last ran, as far as they were in files."""
    flags = [f"--config={config_file}"] if config_file else []
    flags += [f"--config-dir={config_dir}"] if config_dir else []
    what = config_file or "defaults of `kubelet`"
    return _loaded(f"{what}, as the kubelet of {title} last ran, without its flags", flags)


def config_of_running(node: Node) -> DoctorConfig | None:
    """Return the settings of a running kubelet, or None if it does not report them."""
    from pykubelet.config.codec import decode
    from pykubelet.config.feature_gates import FeatureGates
    from pykubelet.config.types import KubeletConfiguration

    try:
        status, body = NodeClient(node, REQUEST_SECONDS).document("/configz")
        document = json.loads(body)["kubeletconfig"] if status == 200 else None
    except (NodeError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(document, dict):
        return None
    config, _ = decode(KubeletConfiguration, document)
    gates = FeatureGates().with_overrides(config.feature_gates)
    return _config(f"of the running kubelet of {node.title}", config, gates.enabled)


def _loaded(source: str, flags: Sequence[str]) -> DoctorConfig:
    from pykubelet.config.errors import ConfigError
    from pykubelet.config.load import load

    try:
        loaded = load(flags)
    except ConfigError as err:
        more = f" (and {len(err.problems) - 1} more)" if len(err.problems) > 1 else ""
        return DoctorConfig(source, problem=f"not valid: {err.problems[0]}{more}")
    return _config(source, loaded.config, loaded.gates.enabled)


def _config(source: str, config: KubeletConfiguration, is_enabled: Callable[[str], bool]) -> DoctorConfig:
    from pykubelet.node.shutdown_groups import shutdown_periods, total_seconds

    return DoctorConfig(
        source,
        fail_swap_on=bool(config.fail_swap_on),
        protect_kernel_defaults=config.protect_kernel_defaults,
        fail_cgroup_v1=bool(config.fail_cgroup_v1),
        shutdown_seconds=total_seconds(shutdown_periods(config, is_enabled)),
        ports=_ports(config),
    )


def _ports(config: KubeletConfiguration) -> tuple[Port, ...]:
    """Return the ports of a configuration; without a read-only port those of the defaults are optional."""
    read_only: Port = (
        (config.read_only_port, "the read-only API", True) if config.read_only_port else PORTS[2]
    )
    health = (config.healthz_port or 0, "health", True)
    ports: tuple[Port, ...] = (health, (config.port, "the API", True), read_only, PORTS[3])
    return tuple(port for port in ports if port[0])

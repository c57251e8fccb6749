"""Consumers of the live configuration: which component applies which reloadable fields.

Each function prepares the change of one consumer of `config.live.RELOADABLE`: it computes the new settings
from the configuration that will be in effect, checks what validation cannot, and returns the call that
passes them to the component. The TLS consumer is in `agent/servers.py`, because its parts exist only while
the API is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pykubelet.agent.cluster import AgentSettings, Cluster
from pykubelet.agent.eviction import eviction_settings
from pykubelet.agent.host_setup import StartupError, find_id_space
from pykubelet.agent.images import image_gc_policy, pull_limits
from pykubelet.agent.live_config import Apply, Consumer, ReloadError
from pykubelet.agent.mounter_dns import MounterDns
from pykubelet.agent.pod_engine import EngineSettings
from pykubelet.agent.volumes import VolumeNode
from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import pod_capacity
from pykubelet.cm.cgroups.driver import CgroupWriteError
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.config.errors import ConfigError
from pykubelet.config.flags.kubelet_flags import log_options
from pykubelet.config.types import KubeletConfiguration
from pykubelet.eviction.manager import EvictionManager
from pykubelet.images.credential_provider import TOKEN_GATE, ProviderPlugins, load_providers
from pykubelet.images.image_gc import ImageGC
from pykubelet.images.image_manager import ImageManager
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions, with_settings
from pykubelet.kuberuntime.log_rotation.manager import ContainerLogManager
from pykubelet.kuberuntime.log_rotation.plan import RotationPolicy
from pykubelet.logs.setup import set_levels
from pykubelet.node.reporter import NodeReporter
from pykubelet.node.settings import node_settings
from pykubelet.util.tasks import TaskScope, finish_in_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveComponents:
    """Components of a node whose settings can change at run time."""

    settings: AgentSettings
    options: RuntimeNodeOptions
    capacity: Resources
    """Capacity of the node at the start (`cm.capacity.node_capacity`)."""
    engine: EngineSettings
    cgroups: PodCgroups
    volume_node: VolumeNode
    images: ImageManager
    image_gc: ImageGC
    eviction: EvictionManager
    log_manager: ContainerLogManager
    tasks: TaskScope
    cluster: Cluster | None = None
    reporter: NodeReporter | None = None


def rotation_policy(config: KubeletConfiguration) -> RotationPolicy:
    """Return the limits of container logs."""
    return RotationPolicy(int(Quantity.parse(config.container_log_max_size)), config.container_log_max_files)


def build_consumers(parts: LiveComponents) -> Iterator[Consumer]:
    """Yield the consumers of a node; those of the API server only if it has one."""
    yield Consumer("logging", partial(prepare_logging, parts.settings))
    yield Consumer("eviction", partial(prepare_eviction, parts.settings, parts.eviction))
    yield Consumer("imageGC", partial(prepare_image_gc, parts.image_gc))
    yield Consumer("logRotation", partial(prepare_log_rotation, parts.log_manager))
    yield Consumer("imagePulls", partial(prepare_image_pulls, parts.images))
    yield Consumer("sysctls", partial(prepare_sysctls, parts.engine))
    yield Consumer("podSources", partial(prepare_pod_sources, parts.engine))
    yield Consumer("podSync", partial(prepare_pod_sync, parts.engine, parts.cluster))
    yield Consumer("dns", partial(prepare_node, parts, with_reservations=False))
    if parts.settings.flags.experimental_mounter_path:
        yield Consumer("mounterDNS", partial(prepare_mounter_dns, MounterDns(parts.settings), parts.tasks))
    yield Consumer("allocatable", partial(prepare_node, parts, with_reservations=True))
    if parts.cluster is not None:
        yield Consumer("apiClient", partial(prepare_api_client, parts.cluster))
    if parts.reporter is not None:
        yield Consumer("nodeStatus", partial(prepare_node_status, parts, parts.reporter))
    if parts.images.plugins is not None:
        yield Consumer(
            "credentialProviders",
            partial(prepare_credential_providers, parts.settings, parts.images.plugins),
            extra="credential providers",
        )


async def prepare_logging(settings: AgentSettings, config: KubeletConfiguration) -> Apply:
    """Prepare the verbosity of the kubelet's own log."""
    options = log_options(settings.flags, config)
    return partial(set_levels, options.verbosity, options.vmodule)


async def prepare_eviction(
    settings: AgentSettings, manager: EvictionManager, config: KubeletConfiguration
) -> Apply:
    """Prepare the thresholds and periods of the eviction manager. Raises ReloadError."""
    try:
        return partial(manager.set_settings, eviction_settings(config, settings.gates))
    except ValueError as err:
        raise ReloadError(f"evictionHard, evictionSoft: {err}") from err


async def prepare_image_gc(image_gc: ImageGC, config: KubeletConfiguration) -> Apply:
    """Prepare thresholds and ages of image garbage collection."""
    return partial(image_gc.set_policy, image_gc_policy(config))


async def prepare_log_rotation(manager: ContainerLogManager, config: KubeletConfiguration) -> Apply:
    """Prepare the limits of container logs."""
    return partial(
        manager.set_policy,
        rotation_policy(config),
        workers=config.container_log_max_workers,
        interval=config.container_log_monitor_interval.seconds,
    )


async def prepare_image_pulls(images: ImageManager, config: KubeletConfiguration) -> Apply:
    """Prepare rate and number of image pulls."""
    return partial(images.set_pull_limits, **pull_limits(config))


async def prepare_sysctls(engine: EngineSettings, config: KubeletConfiguration) -> Apply:
    """Prepare the sysctls that pods may set."""
    return partial(engine.admission.set_allowed_sysctls, tuple(config.allowed_unsafe_sysctls))


async def prepare_pod_sources(engine: EngineSettings, config: KubeletConfiguration) -> Apply:
    """Prepare the periods of static pod sources."""
    return partial(
        engine.sources.set_periods, file=config.file_check_frequency, url=config.http_check_frequency
    )


async def prepare_pod_sync(
    engine: EngineSettings, cluster: Cluster | None, config: KubeletConfiguration
) -> Apply:
    """Prepare the resync period of pods."""

    def apply() -> None:
        engine.set_sync_frequency(config.sync_frequency)
        if cluster is not None:
            cluster.set_sync_frequency(config.sync_frequency.seconds)

    return apply


async def prepare_api_client(cluster: Cluster, config: KubeletConfiguration) -> Apply:
    """Prepare the rate limits of requests to the API server."""
    return partial(cluster.set_rates, config)


async def prepare_node_status(
    parts: LiveComponents, reporter: NodeReporter, config: KubeletConfiguration
) -> Apply:
    """Prepare the periods, reservations and capacity of node status and lease."""
    settings = parts.settings
    new = node_settings(settings.flags, config, settings.gates, settings.node_name)
    return partial(reporter.set_settings, new, _capacity(parts, config))


async def prepare_node(
    parts: LiveComponents, config: KubeletConfiguration, *, with_reservations: bool
) -> Apply:
    """Prepare the node as pods see it: cluster DNS, and `with_reservations` allocatable resources.

    Raises ReloadError if more is reserved than the node has, or if it cannot have so many pods.
    """
    settings = parts.settings
    if with_reservations:
        await _check_node(parts, config)
    options = with_settings(
        parts.options,
        config,
        _capacity(parts, config),
        ignore_eviction=settings.flags.experimental_allocatable_ignore_eviction,
    )
    applied: list[Apply] = [partial(parts.engine.set_node, options)]
    if with_reservations:
        applied.append(partial(parts.volume_node.set_options, options))
        applied.append(partial(parts.cgroups.set_reservations, config))
        if parts.reporter is not None:
            applied.append(await prepare_node_status(parts, parts.reporter, config))

    def apply() -> None:
        for step in applied:
            step()

    return apply


async def prepare_mounter_dns(dns: MounterDns, tasks: TaskScope, config: KubeletConfiguration) -> Apply:
    """Prepare the name servers of `--experimental-mounter-path`; they are written after the change."""
    servers = tuple(config.cluster_dns)

    def apply() -> None:
        tasks.start(dns.write(servers), name="mounter-dns")

    return apply


async def prepare_credential_providers(
    settings: AgentSettings, plugins: ProviderPlugins, config: KubeletConfiguration
) -> Apply | None:
    """Prepare the credential providers of `--image-credential-provider-config`. Raises ReloadError."""
    flags = settings.flags
    try:
        found = await finish_in_thread(
            partial(
                load_providers,
                Path(flags.image_credential_provider_config),
                Path(flags.image_credential_provider_bin_dir),
                service_account_tokens=settings.gates.enabled(TOKEN_GATE),
            )
        )
    except ConfigError as err:
        problems = "; ".join(map(str, err.problems))
        raise ReloadError(f"--image-credential-provider-config: {problems}") from err
    return None if found == list(plugins.providers) else partial(plugins.set_providers, found)


async def _check_node(parts: LiveComponents, config: KubeletConfiguration) -> None:
    try:
        parts.cgroups.check_reservations(config)
        await finish_in_thread(partial(find_id_space, config))
    except (CgroupWriteError, StartupError) as err:
        raise ReloadError(str(err)) from err


def _capacity(parts: LiveComponents, config: KubeletConfiguration) -> Resources:
    return {**parts.capacity, **pod_capacity(int(parts.capacity["cpu"]), config)}

"""Builds the image manager: pulls, credentials of the node and of providers, records of pulled images."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.host_setup import StartupError
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.images.credential_provider import ProviderPlugins, load_providers
from pykubelet.images.credentials import NodeCredentials
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.metrics import ImageMetrics, PullRecordMetrics
from pykubelet.images.pull_manager import PullManager, verification_policy
from pykubelet.images.pull_records import PullRecordFiles, PullRecords
from pykubelet.images.puller import PullLimits
from pykubelet.objects.cluster_objects import ClusterObjects
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.util.tasks import TaskScope

MAX_CACHED_INTENTS = 1024
MAX_CACHED_RECORDS = 2000


async def build_image_manager(
    settings: AgentSettings,
    cri: RuntimeConnection,
    history: PodHistory,
    accounts: ClusterObjects | None,
    registry: CollectorRegistry,
    scope: TaskScope,
) -> ImageManager:
    """Return the image manager. Raises StartupError.

    Without `accounts` credential providers get no service account token.
    """
    config, flags = settings.config, settings.flags
    metrics = ImageMetrics(registry)
    provider_dir = Path(flags.image_credential_provider_bin_dir)
    providers = (
        load_providers(Path(flags.image_credential_provider_config), provider_dir)
        if flags.image_credential_provider_config
        else ()
    )
    limits = PullLimits(
        serialize=config.serialize_image_pulls,
        max_parallel=config.max_parallel_image_pulls,
        qps=config.registry_pull_qps,
        burst=config.registry_burst,
    )
    root = Path(flags.root_dir)
    return ImageManager(
        cri.images,
        history,
        scope,
        limits=limits,
        metrics=metrics,
        node_credentials=NodeCredentials(root, Path.cwd(), _home()).load,
        plugins=ProviderPlugins(providers, provider_dir, scope, metrics, accounts) if providers else None,
        pull_manager=await _open_pull_manager(settings, cri, registry, scope),
    )


async def _open_pull_manager(
    settings: AgentSettings, cri: RuntimeConnection, registry: CollectorRegistry, scope: TaskScope
) -> PullManager | None:
    """Return the pull manager, started, or None when its feature gate is off. Raises StartupError."""
    config, root = settings.config, Path(settings.flags.root_dir)
    metrics = PullRecordMetrics(registry)
    if not settings.gates.enabled("KubeletEnsureSecretPulledImages"):
        return None
    parallel = config.max_parallel_image_pulls or 0
    try:
        records = PullRecords(
            PullRecordFiles(root),
            metrics,
            intents_size=min(max(2 * config.max_pods, 2 * parallel), MAX_CACHED_INTENTS),
            pulled_size=min(5 * config.max_pods, MAX_CACHED_RECORDS),
        )
        policy = verification_policy(
            config.image_pull_credentials_verification_policy, config.preloaded_images_verification_allowlist
        )
        manager = PullManager(records, policy, cri.images, scope, metrics)
        await manager.start()
    except OSError as err:
        raise StartupError(
            f"cannot use the records of pulled images in {root / 'image_manager'}: {err}; "
            "make the directory readable and writable for the kubelet"
        ) from err
    return manager


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None

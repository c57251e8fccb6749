"""The image puller, put together from the configuration and the machine's credentials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.config.gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.connect import Cri
from pykubelet.images.credentials import NodeCredentials
from pykubelet.images.images import ImagePuller
from pykubelet.images.metrics import ImageMetrics, PullRecordMetrics
from pykubelet.images.provider_accounts import PodAccounts
from pykubelet.images.provider_config import CredentialProvider
from pykubelet.images.provider_plugins import ProviderPlugins
from pykubelet.images.pull_limits import PullLimits
from pykubelet.images.pull_manager import PullManager, verification_policy
from pykubelet.images.pull_records import PullRecordFiles, PullRecords
from pykubelet.pods.journal import Journal
from pykubelet.tasks import TaskScope

MAX_CACHED_INTENTS = 1024
MAX_CACHED_RECORDS = 2000


def make_puller(
    cri: Cri,
    config: KubeletConfiguration,
    journal: Journal,
    scope: TaskScope,
    registry: CollectorRegistry,
    *,
    root_dir: Path,
    providers: Sequence[CredentialProvider],
    provider_dir: Path,
    accounts: PodAccounts | None,
    pull_manager: PullManager | None,
) -> ImagePuller:
    """Make the puller of a node; without `accounts` credential providers are asked in nobody's name."""
    metrics = ImageMetrics(registry)
    plugins = ProviderPlugins(providers, provider_dir, scope, metrics, accounts) if providers else None
    limits = PullLimits(
        serialize=config.serialize_image_pulls,
        max_parallel=config.max_parallel_image_pulls,
        qps=config.registry_pull_qps,
        burst=config.registry_burst,
    )
    return ImagePuller(
        cri.images,
        journal,
        scope,
        limits=limits,
        metrics=metrics,
        node_credentials=NodeCredentials(root_dir, Path.cwd(), _home()).load,
        plugins=plugins,
        pull_manager=pull_manager,
    )


async def open_pull_manager(
    cri: Cri,
    config: KubeletConfiguration,
    gates: FeatureGates,
    scope: TaskScope,
    registry: CollectorRegistry,
    root_dir: Path,
) -> PullManager | None:
    """Return the pull manager of a node, started, or None when its feature gate is off; raises OSError."""
    metrics = PullRecordMetrics(registry)
    if not gates.enabled("KubeletEnsureSecretPulledImages"):
        return None
    parallel = config.max_parallel_image_pulls or 0
    records = PullRecords(
        PullRecordFiles(root_dir),
        metrics,
        intents_size=min(max(2 * config.max_pods, 2 * parallel), MAX_CACHED_INTENTS),
        pulled_size=min(5 * config.max_pods, MAX_CACHED_RECORDS),
    )
    policy = verification_policy(
        config.image_pull_credentials_verification_policy, config.preloaded_images_verification_allowlist
    )
    manager = PullManager(records, policy, cri.images, scope, metrics)
    await manager.start()
    return manager


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None

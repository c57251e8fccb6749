"""The image puller, put together from the configuration and the machine's credentials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.connect import Cri
from pykubelet.images.credentials import NodeCredentials
from pykubelet.images.images import ImagePuller
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.provider_accounts import PodAccounts
from pykubelet.images.provider_config import CredentialProvider
from pykubelet.images.provider_plugins import ProviderPlugins
from pykubelet.images.pull_limits import PullLimits
from pykubelet.pods.journal import Journal
from pykubelet.tasks import TaskScope


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
    )


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None

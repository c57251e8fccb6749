"""Builds the image manager (pulls, credentials, records of pulled images) and image garbage collection."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.host_setup import StartupError
from pykubelet.cm.cgroups.node_cgroups import Record
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.client import info_field
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.containerd_store import ContainerdStore
from pykubelet.images.archive_directory import ArchivedImages, ArchiveDirectory
from pykubelet.images.containerd_progress import ContainerdProgress
from pykubelet.images.credential_provider import TOKEN_GATE, ProviderPlugins, load_providers
from pykubelet.images.credentials import NodeCredentials
from pykubelet.images.image_gc import DiskUsage, ImageGC, ImageGCError, ImageGCPolicy
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.image_reference import InvalidImageName, parse_image_name
from pykubelet.images.importer import ArchiveImporter
from pykubelet.images.metrics import ImageGCMetrics, ImageMetrics, PullRecordMetrics
from pykubelet.images.pins import PinError, PinRecord
from pykubelet.images.pull_manager import PullManager, verification_policy
from pykubelet.images.pull_records import PullRecordFiles, PullRecords
from pykubelet.images.pull_tracker import PullTracker
from pykubelet.images.puller import PullLimits
from pykubelet.images.python_providers import installed_providers
from pykubelet.logs import get_logger
from pykubelet.objects.cluster_objects import ClusterObjects
from pykubelet.podconfig.file_source import IMAGES_DIRECTORY
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE, PAUSE_IMAGE
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
MAX_CACHED_INTENTS = 1024
MAX_CACHED_RECORDS = 2000


async def build_image_manager(
    settings: AgentSettings,
    cri: RuntimeConnection,
    history: PodHistory,
    accounts: ClusterObjects | None,
    registry: CollectorRegistry,
    scope: TaskScope,
    archives: ArchiveDirectory | None = None,
) -> ImageManager:
    """Return the image manager. Raises StartupError.

    Without `accounts` credential providers get no service account token.
    """
    config, flags = settings.config, settings.flags
    metrics = ImageMetrics(registry)
    provider_dir = Path(flags.image_credential_provider_bin_dir)
    providers = (
        load_providers(
            Path(flags.image_credential_provider_config),
            provider_dir,
            service_account_tokens=settings.gates.enabled(TOKEN_GATE),
        )
        if flags.image_credential_provider_config
        else ()
    )
    root = Path(flags.root_dir)
    further = installed_providers(scope)
    plugins = (
        ProviderPlugins(providers, provider_dir, scope, metrics, accounts, further)
        if providers or further
        else None
    )
    return ImageManager(
        ArchivedImages(cri.images, archives) if archives is not None else cri.images,
        history,
        scope,
        limits=PullLimits(**pull_limits(config)),
        metrics=metrics,
        node_credentials=NodeCredentials(root, Path.cwd(), _home()).load,
        plugins=plugins,
        pull_manager=await _open_pull_manager(settings, cri, registry, scope),
        tracker=build_pull_tracker(cri, scope),
    )


def build_archive_directory(settings: AgentSettings, cri: RuntimeConnection) -> ArchiveDirectory | None:
    """Return the archives of the manifest directory, not started; None without such a directory."""
    path, root = Path(settings.config.static_pod_path), Path(settings.flags.root_dir)
    if not settings.config.static_pod_path or path.is_file():
        return None
    return ArchiveDirectory(path / IMAGES_DIRECTORY, root, ArchiveImporter(cri, PinRecord(root)))


def build_pull_tracker(cri: RuntimeConnection, scope: TaskScope) -> PullTracker:
    """Return the tracker of pulls, which measures them if the runtime is containerd."""
    is_containerd = cri.version.runtime_name == "containerd"
    source = ContainerdProgress(ContainerdStore(cri.image_channel)) if is_containerd else None
    return PullTracker(source, scope)


class PullLimitSettings(TypedDict):
    """Arguments of `PullLimits`."""

    serialize: bool
    max_parallel: int | None
    qps: float
    burst: int


def pull_limits(config: KubeletConfiguration) -> PullLimitSettings:
    """Return the limits of image pulls."""
    return {
        "serialize": config.serialize_image_pulls,
        "max_parallel": config.max_parallel_image_pulls,
        "qps": config.registry_pull_qps,
        "burst": config.registry_burst,
    }


def image_gc_policy(config: KubeletConfiguration) -> ImageGCPolicy:
    """Return thresholds and ages of image garbage collection."""
    return ImageGCPolicy(
        high_percent=config.image_gc_high_threshold_percent,
        low_percent=config.image_gc_low_threshold_percent,
        min_age=config.image_minimum_gc_age,
        max_age=config.image_maximum_gc_age,
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


def build_image_gc(
    settings: AgentSettings,
    cri: RuntimeConnection,
    images: ImageManager,
    filesystems: Filesystems,
    record_event: Record,
    registry: CollectorRegistry,
) -> ImageGC:
    """Return image garbage collection, not started; `record_event` records events about the node."""

    async def measure(path: Path) -> DiskUsage | None:
        found = await filesystems.of_directory(path, max_age=0)
        return DiskUsage(found.capacity, found.available) if found is not None else None

    return ImageGC(
        cri.images,
        cri.runtime,
        images,
        measure,
        image_gc_policy(settings.config),
        record_event,
        ImageGCMetrics(registry),
        kept_names=KeptImages(cri, PinRecord(Path(settings.flags.root_dir))).names,
        by_handler=settings.gates.enabled("RuntimeClassInImageCriApi"),
        tracer=settings.tracer,
    )


class KeptImages:
    """Images that garbage collection keeps although the runtime may not report them as pinned.

    These are the images of the record of pins, the sandbox image, which containerd pins since version 1.7,
    and the seed images of the private runtime, which no registry has.
    """

    def __init__(self, cri: RuntimeConnection, pins: PinRecord | None = None) -> None:
        self._cri = cri
        self._pins = pins
        self._sandbox_image = ""

    async def names(self) -> set[str]:
        """Return the names; of the sandbox image the last known one when the runtime does not respond.

        Raises CriError when the runtime has never responded, and ImageGCError when the pins cannot be read.
        """
        pinned: frozenset[str] = frozenset()
        if self._pins is not None:
            try:
                pinned = await asyncio.to_thread(self._pins.names)
            except PinError as err:
                # Without the record no image is known to be removable.
                raise ImageGCError(str(err)) from err
        try:
            self._sandbox_image = await self.find_sandbox_image() or self._sandbox_image
        except CriError as err:
            if not self._sandbox_image:
                raise
            log.v(2).info("Failed to find the sandbox image", err=err)
        return {PAUSE_IMAGE, BUSYBOX_IMAGE, *pinned, *_spellings(self._sandbox_image)}

    async def find_sandbox_image(self) -> str:
        """Return the sandbox image of the runtime's configuration, or of a sandbox; empty if unknown.

        Raises CriError.
        """
        runtime = self._cri.runtime
        status = await runtime.status(verbose=True)
        if found := info_field(status, "config", "sandboxImage"):
            return found
        sandboxes = await runtime.list_pod_sandbox()
        newest = max(sandboxes, key=lambda sandbox: sandbox.created_at, default=None)
        if newest is None:
            return ""
        try:
            details = await runtime.pod_sandbox_status(newest.id, verbose=True)
        except NotFound:
            return ""
        return info_field(details, "info", "image")


def _spellings(image: str) -> Collection[str]:
    """Return the names or the id under which a runtime may list an image; empty without an image."""
    if not image:
        return ()
    try:
        return {image, *parse_image_name(image).listed_names}
    except InvalidImageName:
        return (image,)


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None

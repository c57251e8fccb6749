"""Inputs of the node status: their sources and how often each is refreshed; pod CIDR of the runtime.

Facts that cannot change while the kubelet runs are read once. The runtime status is cached by
`conditions.RuntimeHealth`. Images and runtime version (every 30 s) and the node's own address (every 60 s)
are refreshed periodically, because each costs a call and changes rarely.

`PodCidr` sends the node's `podCIDRs` to the runtime (UpdateRuntimeConfig), which some runtimes need for their
network configuration. The call is retried in each status round until it succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.meta import Resources
from pykubelet.api.node import ContainerImage
from pykubelet.cm.capacity import node_capacity
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.linux import HostError
from pykubelet.linux.host_info import Machine, read_machine
from pykubelet.linux.network import IPAddress
from pykubelet.logs import get_logger
from pykubelet.node.addresses import check_named_ips, find_own_address, needs_own_address
from pykubelet.node.conditions import NodePressure, RuntimeHealth
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import DeviceCapacity, Facts, image_list, plain_version
from pykubelet.transport.errors import CriError
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
RUNTIME_TIMEOUT_SECONDS = 5.0
"""Timeout in seconds of runtime calls for the node status, which a hanging runtime must not delay; calls for
pods have longer timeouts."""
UpdateRuntimeConfig = Callable[[pb.RuntimeConfig], Awaitable[None]]


class PodCidr:
    """The pod CIDRs last accepted by the runtime."""

    def __init__(self, update_runtime_config: UpdateRuntimeConfig) -> None:
        self._update_runtime_config = update_runtime_config
        self._error_log = ErrorLogLimiter(log, "Failed to send the pod CIDR to the runtime")
        self.current = ""

    async def update(self, networks: Sequence[str]) -> None:
        """Send the node's `podCIDRs` to the runtime if they have changed; a failure is only logged."""
        pod_cidr = ",".join(networks)
        if not pod_cidr or pod_cidr == self.current:
            return
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(RUNTIME_TIMEOUT_SECONDS):
                await self._update_runtime_config(
                    pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr=pod_cidr))
                )
        except (CriError, TimeoutError) as err:
            self._error_log.failed(err, clock())
            return
        self._error_log.succeeded(clock())
        log.info("Updating Pod CIDR", originalPodCIDR=self.current, newPodCIDR=pod_cidr)
        self.current = pod_cidr


IMAGES_SECONDS = 30.0
IMAGES_RETRY_SECONDS = 10.0
"""Seconds until images and version are requested again after a failure."""
ADDRESS_SECONDS = 60.0
_DEVICE_CHECKPOINT = "kubelet_internal_checkpoint"


def _no_devices() -> DeviceCapacity:
    return DeviceCapacity()


def _no_volumes() -> list[str] | None:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSource:
    """Cached health of the container runtime, and the CRI calls for the node status."""

    health: RuntimeHealth
    refresh: Callable[[], Awaitable[object]]
    """Polls the runtime status immediately; used after startup, when the regular interval is too long."""
    list_images: Callable[[], Awaitable[Sequence[pb.Image]]]
    version: Callable[[], Awaitable[pb.VersionResponse]]
    update_runtime_config: UpdateRuntimeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSources:
    """Sources of the node status; synchronous callables are called in each round and must not block."""

    machine: Machine
    capacity: Resources
    """Capacity of the host: `cm.capacity.node_capacity`."""
    runtime: RuntimeSource
    pressures: Callable[[], NodePressure] = NodePressure
    devices: Callable[[], DeviceCapacity] = _no_devices
    reset_extended: Callable[[], bool] = lambda: False
    """Returns whether the device manager has no checkpoint of a previous kubelet process."""
    volumes_in_use: Callable[[], list[str] | None] = _no_volumes
    """Returns the attachable volumes in use; None while they are unknown."""
    volumes_reported: Callable[[list[str]], None] = lambda names: None
    """Called with the `volumesInUse` that the API server has: only these volumes may be mounted."""
    problems: Callable[[], Sequence[str]] = list
    """Returns reasons other than the runtime why the node is not ready: storage, node shutdown."""
    warning: Callable[[], str] = str


def node_sources(
    cri: RuntimeConnection,
    flags: KubeletFlags,
    config: KubeletConfiguration,
    health: RuntimeHealth,
    refresh: Callable[[], Awaitable[object]],
) -> NodeSources:
    """Return the sources of this host and its runtime. Raises OSError if host information is unreadable.

    The other fields have defaults; callers set them with `dataclasses.replace`.
    """
    root, plugin_dir = Path(flags.root_dir), Path(flags.device_plugin_dir)
    return NodeSources(
        machine=read_machine(flags.machine_id_file, flags.boot_id_file),
        capacity=node_capacity(config, root),
        runtime=RuntimeSource(
            health=health,
            refresh=refresh,
            list_images=cri.images.list_images,
            version=cri.runtime.version,
            update_runtime_config=cri.runtime.update_runtime_config,
        ),
        reset_extended=lambda: not (plugin_dir / _DEVICE_CHECKPOINT).exists(),
    )


class NodeStatusCollector:
    """Collector of `Facts` that caches the expensive ones."""

    def __init__(self, sources: NodeSources, settings: NodeSettings) -> None:
        self._sources = sources
        self._settings = settings
        self._capacity = sources.capacity
        self._images: list[ContainerImage] | None = None
        self._version: str | None = None
        self._address: IPAddress | None = None
        self._images_due = self._address_due = 0.0
        self._address_error_log = ErrorLogLimiter(
            log, "Failed to find the node's address", node=settings.name
        )

    def set_settings(self, settings: NodeSettings, capacity: Resources) -> None:
        """Replace settings and capacity; images are listed again in the next round."""
        self._settings = settings
        self._capacity = capacity
        self._images_due = 0.0

    def problems(self) -> list[str]:
        """Return the reasons why the node is not ready, from cached state only."""
        return [*self._sources.runtime.health.problems(), *self._sources.problems()]

    async def refresh(self) -> None:
        """Poll the runtime status immediately; a timeout is only logged."""
        try:
            async with asyncio.timeout(RUNTIME_TIMEOUT_SECONDS):
                await self._sources.runtime.refresh()
        except TimeoutError:
            log.v(2).info("Timed out polling the runtime status")

    async def facts(self) -> Facts:
        """Collect all inputs of the node status."""
        sources = self._sources
        await self._query_runtime()
        valid = await self._find_address()
        return Facts(
            machine=sources.machine,
            capacity=self._capacity,
            runtime_version=self._version,
            runtime_status=sources.runtime.health.last,
            images=self._images,
            own_address=self._address,
            addresses_valid=valid,
            volumes_in_use=sources.volumes_in_use(),
            devices=sources.devices(),
            pressures=sources.pressures(),
            problems=self.problems(),
            warning=sources.warning(),
        )

    async def _query_runtime(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._images_due:
            return
        self._images_due = now + IMAGES_RETRY_SECONDS
        try:
            async with asyncio.timeout(RUNTIME_TIMEOUT_SECONDS):
                version = await self._sources.runtime.version()
                images = await self._sources.runtime.list_images()
        except (CriError, TimeoutError) as err:
            # The Ready condition reports the problem; the node keeps its last known images.
            log.v(2).info("Failed to get the runtime version and images", err=err)
            return
        self._version = f"{version.runtime_name}://{plain_version(version.runtime_version)}"
        self._images = image_list(images, self._settings.max_images)
        self._images_due = now + IMAGES_SECONDS

    async def _find_address(self) -> bool:
        now = asyncio.get_running_loop().time()
        try:
            check_named_ips(self._settings)
            if needs_own_address(self._settings) and now >= self._address_due:
                self._address = await find_own_address(self._settings)
                self._address_due = now + ADDRESS_SECONDS
        except (HostError, OSError) as err:
            self._address_error_log.failed(err, now)
            return False
        self._address_error_log.succeeded(now)
        return True

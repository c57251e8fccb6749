"""Where the facts about the node come from, and how often each is asked for.

What cannot change while the agent runs is read once; the runtime's status comes by itself (see
`runtime_health.py`); images, the runtime's version and the node's own address are asked for now and
then, because each costs a question and changes rarely.

Telling the runtime which addresses the cluster gave to this node's pods.

Some runtimes write their network configuration from it. It is told again until the runtime took it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.meta import Resources
from pykubelet.api.node import ContainerImage, NodeAddress
from pykubelet.cm.capacity import machine_amounts
from pykubelet.config.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.linux import HostError
from pykubelet.linux.host_info import Machine, read_machine
from pykubelet.linux.network import IPAddress
from pykubelet.logs import get_logger
from pykubelet.node.addresses import check_named, find_own_address, needs_own_address
from pykubelet.node.conditions import NodePressure, RuntimeHealth
from pykubelet.node.settings import NodeSettings
from pykubelet.node.status import DeviceCapacity, Facts, image_list, plain_version
from pykubelet.transport.errors import CriError
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
PATIENCE_SECONDS = 5.0
"""The node's status does not wait longer for a runtime that hangs."""
Tell = Callable[[pb.RuntimeConfig], Awaitable[None]]


class PodCidr:
    """The pod networks that the runtime knows of."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._complaints = ErrorLogLimiter(log, "Failed to tell the runtime the pod CIDR")
        self.current = ""

    async def follow(self, networks: Sequence[str]) -> None:
        """Tell the runtime when the node's `podCIDRs` are others than before; a failure is only logged."""
        wanted = ",".join(networks)
        if not wanted or wanted == self.current:
            return
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._tell(pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr=wanted)))
        except (CriError, TimeoutError) as err:
            self._complaints.failed(err, clock())
            return
        self._complaints.succeeded(clock())
        log.info("Updating Pod CIDR", originalPodCIDR=self.current, newPodCIDR=wanted)
        self.current = wanted


IMAGES_SECONDS = 30.0
AGAIN_SECONDS = 10.0
"""When to ask again what was not answered."""
PATIENCE_SECONDS = 5.0
"""How long the node's status waits for a runtime that hangs; requests about pods wait longer."""
ADDRESS_SECONDS = 60.0
_DEVICE_CHECKPOINT = "kubelet_internal_checkpoint"


def _no_devices() -> DeviceCapacity:
    return DeviceCapacity()


def _no_volumes() -> list[str] | None:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSources:
    """What the node's status is made of; callables are asked at each round and must be quick."""

    machine: Machine
    capacity: Resources
    """Of the machine: `capacity.machine_amounts`."""
    health: RuntimeHealth
    refresh: Callable[[], Awaitable[object]]
    """Poll the runtime's status now; for the first seconds, when waiting for the next poll is too slow."""
    list_images: Callable[[], Awaitable[Sequence[pb.Image]]]
    version: Callable[[], Awaitable[pb.VersionResponse]]
    tell_pod_cidr: Tell
    pressures: Callable[[], NodePressure] = NodePressure
    devices: Callable[[], DeviceCapacity] = _no_devices
    reset_extended: Callable[[], bool] = lambda: False
    """Whether nothing is known of devices that earlier agents offered."""
    volumes_in_use: Callable[[], list[str] | None] = _no_volumes
    """Attachable volumes in use, None while that is not known yet."""
    volumes_reported: Callable[[list[str]], None] = lambda names: None
    """Told which of these the API server knows to be in use: only those may be used."""
    addressed: Callable[[list[NodeAddress]], None] = lambda addresses: None
    """Told the node's addresses, as its status has them."""
    problems: Callable[[], Sequence[str]] = list
    """Reasons beside the runtime's why the node is not ready: storage, shutting down."""
    warning: Callable[[], str] = str


def node_sources(
    cri: RuntimeConnection,
    flags: KubeletFlags,
    config: KubeletConfiguration,
    health: RuntimeHealth,
    refresh: Callable[[], Awaitable[object]],
) -> NodeSources:
    """Take the facts of this machine and its runtime; raises OSError when the machine cannot be read.

    The rest has defaults that `dataclasses.replace` changes.
    """
    root, plugin_dir = Path(flags.root_dir), Path(flags.device_plugin_dir)
    return NodeSources(
        machine=read_machine(flags.machine_id_file, flags.boot_id_file),
        capacity=machine_amounts(config, root),
        health=health,
        refresh=refresh,
        list_images=cri.images.list_images,
        version=cri.runtime.version,
        tell_pod_cidr=cri.runtime.update_runtime_config,
        reset_extended=lambda: not (plugin_dir / _DEVICE_CHECKPOINT).exists(),
    )


class NodeStatusCollector:
    """Gathers the facts of one moment, asking for the costly ones only now and then."""

    def __init__(self, sources: NodeSources, settings: NodeSettings) -> None:
        self._sources = sources
        self._settings = settings
        self._images: list[ContainerImage] | None = None
        self._version: str | None = None
        self._address: IPAddress | None = None
        self._images_due = self._address_due = 0.0
        self._addressing = ErrorLogLimiter(log, "Failed to find the node's address", node=settings.name)

    def problems(self) -> list[str]:
        """Reasons why the node is not ready; asks nobody."""
        return [*self._sources.health.problems(), *self._sources.problems()]

    async def refresh(self) -> None:
        """Have the runtime's status polled now, unless that takes too long."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._sources.refresh()
        except TimeoutError:
            log.v(2).info("The runtime does not answer")

    async def facts(self) -> Facts:
        """Gather everything."""
        sources = self._sources
        await self._ask_runtime()
        valid = await self._find_address()
        return Facts(
            machine=sources.machine,
            capacity=sources.capacity,
            runtime_version=self._version,
            runtime_status=sources.health.last,
            images=self._images,
            own_address=self._address,
            addresses_valid=valid,
            volumes_in_use=sources.volumes_in_use(),
            devices=sources.devices(),
            pressures=sources.pressures(),
            problems=self.problems(),
            warning=sources.warning(),
        )

    async def _ask_runtime(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._images_due:
            return
        self._images_due = now + AGAIN_SECONDS
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await self._sources.version()
                images = await self._sources.list_images()
        except (CriError, TimeoutError) as err:
            # The Ready condition tells people; the node keeps its last known images.
            log.v(2).info("The runtime was not asked for its images", err=err)
            return
        self._version = f"{answer.runtime_name}://{plain_version(answer.runtime_version)}"
        self._images = image_list(images, self._settings.max_images)
        self._images_due = now + IMAGES_SECONDS

    async def _find_address(self) -> bool:
        now = asyncio.get_running_loop().time()
        try:
            check_named(self._settings)
            if needs_own_address(self._settings) and now >= self._address_due:
                self._address = await find_own_address(self._settings)
                self._address_due = now + ADDRESS_SECONDS
        except (HostError, OSError) as err:
            self._addressing.failed(err, now)
            return False
        self._addressing.succeeded(now)
        return True

"""Who gives out CPUs, memory and devices, put together: from the configuration, the gates and the machine.

`make_allotment` before the engine, which admits pods and makes containers through it; `start_allotment` when
the engine is there to be asked. Devices come first, as in the reference: who has to take what is there
decides where the others, who can choose, give from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from prometheus_client import CollectorRegistry

from pykubelet.cluster import AgentSettings
from pykubelet.cri.connect import Cri
from pykubelet.preparing import StartError
from pykubelet.resources.alignment_metrics import AlignmentMetrics
from pykubelet.resources.capacity import read_capacity, reserved_amounts
from pykubelet.resources.cpu_manager import CpuManager, RunningContainer, open_cpu_manager
from pykubelet.resources.cpu_metrics import CpuMetrics
from pykubelet.resources.hints import PolicyError
from pykubelet.resources.hints_merge import Policy
from pykubelet.resources.memory_manager import STATE_FILE, MemoryManager
from pykubelet.resources.memory_metrics import MemoryMetrics
from pykubelet.resources.memory_nodes import MemoryNode, read_memory_nodes
from pykubelet.resources.topology_manager import Scope, TopologyManager
from pykubelet.resources.topology_metrics import TopologyMetrics
from pykubelet.sync.allotment import Allotment
from pykubelet.sync.engine import PodEngine
from pykubelet.sync.worker import State
from pykubelet.tasks import TaskScope

if TYPE_CHECKING:
    # What it needs is imported by those who have devices.
    from pykubelet.resources.device_manager import DeviceManager


def make_allotment(
    settings: AgentSettings, registry: CollectorRegistry, devices: DeviceManager | None = None
) -> Allotment:
    """Give who gives out CPUs, memory and devices; raises StartError.

    The devices' manager must be serving before the first pod is admitted.
    """
    config = settings.config
    alignment = AlignmentMetrics(registry)
    try:
        nodes = read_memory_nodes()
        cpus = _cpus(settings, registry, alignment)
        memory = _memory(settings, registry, nodes)
        topology = TopologyManager(
            cast(Policy, config.topology_manager_policy),
            cast(Scope, config.topology_manager_scope),
            config.topology_manager_policy_options,
            nodes,
            (cpus, memory),
            asking=devices,
            metrics=TopologyMetrics(registry, alignment),
        )
    except PolicyError as err:
        raise StartError(str(err)) from err
    except OSError as err:
        raise StartError(f"the machine does not tell of its NUMA nodes: {err}") from err
    return Allotment(cpus, memory, topology, devices)


def start_allotment(
    allotment: Allotment, settings: AgentSettings, cri: Cri, engine: PodEngine, tasks: TaskScope
) -> None:
    """Begin to tell running containers of their CPUs."""

    def is_leaving(uid: str) -> bool:
        worker = engine.workers.get(uid)
        if worker is None:
            return not engine.is_desired(uid) and engine.store.get(uid) is None
        return worker.state is not State.SYNCING

    def running() -> Iterator[RunningContainer]:
        for worker in engine.workers.all():
            observed = engine.life.observed(worker.uid)
            for container in observed.running if observed is not None else ():
                yield RunningContainer(worker.uid, container.name, container.id)

    allotment.listen_to(is_leaving)
    period = settings.config.cpu_manager_reconcile_period.seconds
    tasks.start(allotment.run(cri.runtime.update_container_resources, running, period), name="cpus")


def _cpus(settings: AgentSettings, registry: CollectorRegistry, alignment: AlignmentMetrics) -> CpuManager:
    return open_cpu_manager(
        settings.config,
        Path(settings.flags.root_dir),
        pod_level=settings.gates.enabled("PodLevelResources"),
        metrics=CpuMetrics(registry, alignment),
    )


def _memory(settings: AgentSettings, registry: CollectorRegistry, nodes: list[MemoryNode]) -> MemoryManager:
    config = settings.config
    file = Path(settings.flags.root_dir) / STATE_FILE
    try:
        return MemoryManager(
            cast(Literal["None", "Static"], config.memory_manager_policy),
            file,
            nodes,
            config.reserved_memory,
            reserved_amounts(read_capacity(), config),
            pod_level=settings.gates.enabled("PodLevelResources"),
            metrics=MemoryMetrics(registry),
        )
    except OSError as err:
        raise StartError(
            f"{file}: {err.strerror or err}: the memory manager must be able to keep its state there"
        ) from err

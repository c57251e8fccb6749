"""Resource claims on a node of a cluster, put together: who knows them, who serves them, what runs for them.

`make_claims` before the engine, which makes claims ready through it; `start_claims` when the engine is there
to be asked and woken. A standalone node has none of it: claims are objects of an API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from pykubelet.cluster import AgentSettings, Cluster
from pykubelet.cri.connect import Cri
from pykubelet.host.plugin_registration import PluginHandler
from pykubelet.logs import get_logger
from pykubelet.pods.second_tries import until_seen
from pykubelet.preparing import StartError
from pykubelet.resources.hints import PolicyError
from pykubelet.runtime.runtime_skills import knows_cdi
from pykubelet.sync.engine import PodEngine
from pykubelet.tasks import TaskScope

if TYPE_CHECKING:
    from pykubelet.api.resource_claim import ResourceClaim
    from pykubelet.resources.dra_manager import Active, DynamicResources

log = get_logger(__name__)


def make_claims(
    settings: AgentSettings, registry: CollectorRegistry, cluster: Cluster | None, tasks: TaskScope
) -> DynamicResources | None:
    """Give who makes claims ready; None where there are no claims. Raises StartError."""
    gates = settings.gates
    if cluster is None or not gates.enabled("DynamicResourceAllocation"):
        return None
    # Here and not above: a standalone node does without their memory.
    from pykubelet.resources.dra_health import HealthBook
    from pykubelet.resources.dra_manager import RESOURCE_CLAIMS, DynamicResources
    from pykubelet.resources.dra_metrics import DraMetrics
    from pykubelet.resources.dra_plugins import Drivers
    from pykubelet.resources.dra_slices import Slices

    root, api, metrics = Path(settings.flags.root_dir), cluster.clients.objects, DraMetrics(registry)
    health = None
    if gates.enabled("ResourceHealthStatus"):
        health = HealthBook(root, tasks, messages=gates.enabled("ResourceHealthStatusMessage"))
    drivers = Drivers(tasks, metrics, health)
    slices = Slices(api, settings.node_name, tasks, cluster.reporter.informer.synced)
    drivers.listen(slices.driver_changed)
    slices.start()

    async def fetch(namespace: str, name: str) -> ResourceClaim:
        return await until_seen(lambda: api.get(RESOURCE_CLAIMS, name, namespace))

    extended = gates.enabled("DRAExtendedResource")
    try:
        return DynamicResources(root, fetch, drivers, extended=extended, metrics=metrics, health=health)
    except PolicyError as err:
        raise StartError(str(err)) from err


def start_claims(
    claims: DynamicResources, cri: Cri, engine: PodEngine, active: Active, tasks: TaskScope
) -> None:
    """Begin to give back what pods have left, and to wake pods whose drivers have news."""
    claims.listen(engine.workers.wake, engine.workers.wake_all)
    runtime, warned = cri.version, set[str]()

    def warn(driver: str, usable: bool) -> None:
        if usable and driver not in warned:
            warned.add(driver)
            log.warning(
                "The runtime does not know CDI, so devices of claims do not reach containers: update it",
                driver=driver,
                runtime=f"{runtime.runtime_name} {runtime.runtime_version}",
            )

    if not knows_cdi(runtime.runtime_name, runtime.runtime_version):
        claims.drivers.listen(warn)
    tasks.start(claims.run(active), name="claims")


def claim_plugins(claims: DynamicResources | None) -> Mapping[str, PluginHandler]:
    """Give who takes plugins that register as drivers of claims."""
    return {"DRAPlugin": claims.drivers} if claims is not None else {}

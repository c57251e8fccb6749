"""A node's desk where pods come in, with real workers and stores."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from pykubelet.api.node import Node
from pykubelet.api.pod import Pod
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.kuberuntime.observed import ObservedPod, ObservedSandbox
from pykubelet.podconfig.mux import Operation, PodChange, PodMux, PodStore
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import KillPodOptions, Outcome, Remnants
from pykubelet.podworkers.pod_admission import AdmissionMetrics, AdmissionNode, PodAdmission
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodChurn, PodWorkers
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.compute import StatusStore
from pykubelet.util.tasks import TaskScope
from tests.support.admission import node


@dataclass
class Life:
    """A life in which pods run until they are told to end, which takes as long as it takes."""

    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    is_tidy: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless the volumes of pods cannot be unmounted."""
    statuses: StatusStore = field(default_factory=StatusStore)

    def __post_init__(self) -> None:
        self.is_tidy.set()

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        if pod.uid not in self.started:
            self.started.append(pod.uid)
        return False, None

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        if pod is not None and options.pod_status is not None:
            self.statuses.set(pod, options.pod_status(self.statuses.get(uid) or pod.status))
        await self.may_end.wait()
        self.ended.append(uid)

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        await self.is_tidy.wait()
        return None

    async def remove(self, remnants: Remnants) -> None:
        raise AssertionError("no pod leaves remnants here")


class ScriptedMux(PodMux):
    """A mux whose desired pods are set by the test."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self.desired: dict[str, Pod] = {}

    def get(self, uid: str) -> Pod | None:
        return self.desired.get(uid)


class Here:
    """A node's desk, with real workers and stores; `known` and `newest` are the API server's node."""

    def __init__(
        self,
        scope: TaskScope,
        *,
        own: Node | None = None,
        newest: Callable[[], Node] | None = None,
        resizing: AllocationManager | None = None,
        gates: FeatureGates | None = None,
        **links: Any,
    ) -> None:
        self.store, self.statuses, self.journal = PodStore(), StatusStore(), PodHistory()
        self.mux = ScriptedMux()
        self.life = Life(statuses=self.statuses)
        self.churn = PodChurn()
        self.workers = PodWorkers(scope, 60.0, self.churn)
        self.workers.start(self.life)
        self.registry = CollectorRegistry()
        self.in_runtime: dict[str, ObservedPod] = {}
        self.fetched = 0

        async def fetch() -> Node:
            self.fetched += 1
            await asyncio.sleep(1)
            assert newest is not None
            return newest()

        resizing = resizing or AllocationManager(self.journal)
        self.desk = PodAdmission(
            AdmissionNode(
                own=own or node(),
                fetch=fetch if newest is not None else None,
                gates=gates or FeatureGates(),
                **links,
            ),
            PodRecords(self.mux, self.store, self.statuses, self.journal),
            self.workers,
            resizing,
            in_runtime=lambda: self.in_runtime,
            start=self.workers.sync,
            scope=scope,
            metrics=AdmissionMetrics(self.registry),
        )

    def come(self, one: Pod, op: Operation = "ADD") -> bool:
        """Hand a pod on as the engine does."""
        self.store.apply(PodChange(op, one, "api"))
        may = self.desk.may_start(one)
        if may:
            self.workers.sync(one)
        return may

    def run_since_before(self, one: Pod) -> None:
        """Have a pod in the runtime that an earlier agent started."""
        box = ObservedSandbox(id=one.uid, ready=True, created_at=1, attempt=0)
        self.in_runtime = {**self.in_runtime, one.uid: ObservedPod(uid=one.uid, sandboxes=(box,))}
        self.mux.desired[one.uid] = one

    def phase(self, uid: str) -> tuple[str, str] | None:
        status = self.statuses.get(uid)
        return (status.phase, status.reason) if status is not None else None

    def events(self, uid: str) -> list[tuple[str, str, str]]:
        return [(event.kind, event.reason, event.message) for event in self.journal.events(uid)]

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0


@asynccontextmanager
async def here(**facts: Any) -> AsyncIterator[Here]:
    """Open the desk, and close it with all who wait there."""
    async with TaskScope() as scope:
        yield Here(scope, **facts)


async def settle() -> None:
    """Let everybody do what needs no time."""
    for _ in range(10):
        await asyncio.sleep(0)

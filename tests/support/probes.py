"""Pods, containers and a prober to ask them, for the tests of this room."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, ContainerPort, ExecAction, Pod, PodSpec, Probe
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.probes.prober import Prober
from pykubelet.probes.results import ProbeUpdate
from pykubelet.probes.runner import Checker, ExecSlots, PreparedProbe
from pykubelet.probes.types import ProbeResult, Target
from pykubelet.util.tasks import TaskScope

SECOND = 1_000_000_000
EPOCH = 1_700_000_000 * SECOND


def target(*ports: ContainerPort, ip: str = "127.0.0.1") -> Target:
    return Target(Container(name="app", ports=list(ports)), "c1", ip)


async def no_exec(container_id: str, command: list[str], timeout: int) -> NoReturn:
    raise AssertionError("this probe runs no command")


async def run_probe(probe: Probe, whom: Target) -> ProbeResult:
    """Run a probe once as the prober does."""
    outcome: asyncio.Future[ProbeResult] = asyncio.get_running_loop().create_future()
    checker = Checker(no_exec, ExecSlots(1))
    try:
        PreparedProbe(probe, whom, checker).start(asyncio.ensure_future, outcome.set_result)
        return await outcome
    finally:
        checker.exchanges.close()


def exec_probe(command: str, **numbers: Any) -> Probe:
    return Probe(exec=ExecAction(command=[command]), **numbers)


def pod(*containers: Container, uid: str = "u1", init: tuple[Container, ...] = (), **spec: Any) -> Pod:
    return Pod(
        metadata=ObjectMeta(name=f"pod-{uid}", namespace="ns", uid=uid),
        spec=PodSpec(containers=list(containers), init_containers=list(init), **spec),
    )


def running(name: str, id: str, started_at: int) -> ObservedContainer:
    return ObservedContainer(id=id, name=name, phase="running", started_at=started_at)


def exited(name: str, id: str, exit_code: int = 0) -> ObservedContainer:
    return ObservedContainer(id=id, name=name, phase="exited", exit_code=exit_code)


def observed(*containers: ObservedContainer, uid: str = "u1", ip: str = "10.0.0.1") -> ObservedPod:
    sandbox = ObservedSandbox(id="s", ready=True, created_at=0, ips=(ip,))
    return ObservedPod(uid=uid, sandboxes=(sandbox,), containers=containers)


class Scene:
    """A prober whose commands are answered from a table, in looptime; wall clock and loop agree."""

    def __init__(self, exec_slots: int | None = None, *, restores: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.time: Callable[[], float] = loop.time
        self._zero = loop.time()
        self.clock_error = 0
        self.answers: dict[str, Any] = defaultdict(lambda: 0)
        """Exit code, exception or function of the time, by command."""
        self.asked: dict[str, list[float]] = defaultdict(list)
        self.asked_ids: list[str] = []
        self.events: list[tuple[str, str, str]] = []
        self.updates: list[ProbeUpdate] = []
        self.registry = CollectorRegistry()
        self.seconds_per_answer = 0.0
        self.prober = Prober(
            self._exec,
            lambda pod, container, reason, message: self.events.append((container, reason, message)),
            self.registry,
            host_ip=lambda: "192.0.2.1",
            clock=self.clock,
            exec_slots=exec_slots,
            restores=restores,
        )
        self.prober.results.subscribe(self.updates.append)

    @property
    def now(self) -> float:
        return round(self.time() - self._zero, 6)

    def clock(self) -> int:
        return EPOCH + int(self.now * SECOND) + self.clock_error

    async def _exec(self, container_id: str, command: list[str], timeout_seconds: int) -> tuple[int, bytes]:
        self.asked[command[0]].append(self.now)
        self.asked_ids.append(container_id)
        answer = self.answers[command[0]]
        if self.seconds_per_answer:
            await asyncio.sleep(self.seconds_per_answer)
        if callable(answer):
            answer = answer(self.now)
        if isinstance(answer, Exception):
            raise answer
        return answer, b"output"

    def verdicts(self) -> list[tuple[str, str]]:
        return [(update.kind, update.result) for update in self.updates]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@asynccontextmanager
async def scene(exec_slots: int | None = None, *, restores: bool = True) -> AsyncIterator[Scene]:
    made = Scene(exec_slots, restores=restores)
    async with TaskScope() as scope:
        scope.start(made.prober.run(), name="prober")
        yield made


def start(here: Scene, asked: Pod, id: str = "c1", age: float = 0) -> None:
    here.prober.add_pod(asked)
    name = (asked.spec.containers or asked.spec.init_containers)[0].name
    here.prober.observe(asked, observed(running(name, id, here.clock() - int(age * SECOND)), uid=asked.uid))


def ready(here: Scene, asked: Pod, id: str = "c1") -> tuple[bool, bool]:
    seen = observed(running("app", id, here.clock()), uid=asked.uid)
    return here.prober.update_status(asked, seen)["app"]


def full_pod(uid: str = "u1") -> Pod:
    def probe(name: str) -> Probe:
        return exec_probe(name, period_seconds=1)

    return pod(
        Container(
            name="app", startup_probe=probe("s"), readiness_probe=probe("r"), liveness_probe=probe("l")
        ),
        uid=uid,
    )

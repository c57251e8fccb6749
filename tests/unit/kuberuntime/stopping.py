"""A runtime in which containers take their time to stop, and the killer that works with it."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pykubelet.api.pod import Container, ExecAction, Lifecycle, LifecycleHandler
from pykubelet.kuberuntime.kill import ContainerKiller, HookRunner
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.transport.errors import CriError
from tests.support.containers import make_container

STILL_RUNNING = 137
"""Exit code of a process that ends because its container does."""


@dataclass
class StoppingRuntime:
    """The calls that stop containers, with the loop time of each; containers are named by their ids."""

    stop_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that a container takes after the stop signal; 0 for those not listed."""
    exec_seconds: float = 0.0
    exit_code: int = 0
    """Of every command that ends by itself."""
    failures: dict[str, CriError] = field(default_factory=dict)
    """What StopContainer raises, by container."""
    calls: list[tuple[float, str]] = field(default_factory=list)
    signalled: list[str] = field(default_factory=list)
    """Containers in the order in which they got the stop signal; as in containerd, each gets it once."""
    _ended: dict[str, asyncio.Event] = field(default_factory=dict)

    async def stop_container(self, container_id: str, timeout: int) -> None:
        self._note(f"stop {container_id} {timeout}")
        if container_id in self.failures:
            raise self.failures[container_id]
        if container_id not in self.signalled:
            self.signalled.append(container_id)
            self._stop_time(container_id)
        try:
            async with asyncio.timeout(timeout):
                await self._end_of(container_id).wait()
        except TimeoutError:
            self._end_of(container_id).set()
        self._note(f"{container_id} ended")

    async def stop_pod_sandbox(self, sandbox_id: str) -> None:
        self._note(f"stop sandbox {sandbox_id}")

    async def exec_sync(self, container_id: str, command: list[str], timeout: int) -> Any:
        self._note(f"exec {container_id} {' '.join(command)}")
        code = self.exit_code
        try:
            async with asyncio.timeout(self.exec_seconds):
                await self._end_of(container_id).wait()
                code = STILL_RUNNING
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self._note(f"exec {container_id} cancelled")
            raise
        self._note(f"exec {container_id} exit {code}")
        return SimpleNamespace(exit_code=code, stdout=b"", stderr=b"no such file")

    def _note(self, call: str) -> None:
        self.calls.append((round(asyncio.get_running_loop().time() - self._start, 3), call))

    def __post_init__(self) -> None:
        self._start = asyncio.get_running_loop().time()

    def _end_of(self, container_id: str) -> asyncio.Event:
        return self._ended.setdefault(container_id, asyncio.Event())

    def _stop_time(self, container_id: str) -> None:
        seconds = self.stop_seconds.get(container_id, 0.0)
        asyncio.get_running_loop().call_later(seconds, self._end_of(container_id).set)


def make_killer(runtime: StoppingRuntime, journal: PodHistory | None = None) -> ContainerKiller:
    """Build a killer whose hooks run in the same runtime; httpGet hooks are not served."""
    cri: Any = SimpleNamespace(runtime=runtime)

    async def no_get(*_: object) -> str | None:
        return "connection refused"

    return ContainerKiller(cri, HookRunner(cri, no_get, lambda uid: "10.0.0.2"), journal or PodHistory())


def hooked(name: str = "main", **fields: Any) -> Container:
    """Return a container with a preStop hook."""
    hook = LifecycleHandler(exec=ExecAction(command=["save"]))
    return make_container(name, lifecycle=Lifecycle(pre_stop=hook), **fields)


def running(*names: str) -> ObservedPod:
    """Return a pod whose containers run; the id of each is its name."""
    return ObservedPod(
        uid="u-1",
        name="web",
        namespace="shop",
        sandboxes=(ObservedSandbox(id="box", ready=True, created_at=1),),
        containers=tuple(ObservedContainer(id=name, name=name, phase="running") for name in names),
    )

"""The floor: the same pods by bare CRI calls, without any agent. Nothing can be faster than this."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import Cri, connect
from pykubelet.cri.metrics import CriMetrics
from pykubelet.embedded.instance import Instance

AT_ONCE = 4
COMMAND = ["sh", "-c", "trap 'exit 0' TERM; while true; do sleep 3600 & wait $!; done"]


@dataclass(frozen=True, slots=True)
class Times:
    """How long a number of pods took, in seconds."""

    all_running: float
    median_start: float
    all_deleted: float

    def mean(self, other: Times) -> Times:
        """The middle of two measurements."""
        return Times(
            (self.all_running + other.all_running) / 2,
            (self.median_start + other.median_start) / 2,
            (self.all_deleted + other.all_deleted) / 2,
        )


async def connected(endpoint: str) -> Cri:
    """Connect to a node's runtime."""
    return await connect(endpoint, timeout=Duration.of(120), metrics=CriMetrics(CollectorRegistry()))


async def measure_floor(instance: Instance, image: str, pods: int) -> Times:
    """Start pods `AT_ONCE` at a time, then stop and remove them the same way."""
    turn, began, started, sandboxes = asyncio.Semaphore(AT_ONCE), time.monotonic(), [], []
    async with await connected(instance.endpoint) as cri:
        logs = Path(instance.data_dir) / "floor-logs"

        async def start(number: int) -> None:
            config = _sandbox(instance, logs, number)
            async with turn:
                sandbox = await cri.runtime.run_pod_sandbox(config)
                sandboxes.append(sandbox)
                container = await cri.runtime.create_container(sandbox, _container(image), config)
                await cri.runtime.start_container(container)
                started.append(time.monotonic() - began)

        async def stop(sandbox: str) -> None:
            async with turn:
                for container in await cri.runtime.list_containers(
                    pb.ContainerFilter(pod_sandbox_id=sandbox)
                ):
                    await cri.runtime.stop_container(container.id, 2)
                await cri.runtime.stop_pod_sandbox(sandbox)
                await cri.runtime.remove_pod_sandbox(sandbox)

        await asyncio.gather(*(start(number) for number in range(pods)))
        all_running = time.monotonic() - began
        ending = time.monotonic()
        await asyncio.gather(*map(stop, sandboxes))
        return Times(all_running, statistics.median(started), time.monotonic() - ending)


def _sandbox(instance: Instance, logs: Path, number: int) -> pb.PodSandboxConfig:
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=f"floor-{number}", namespace="bench", uid=f"floor-{number}"),
        hostname=f"floor-{number}",
        log_directory=str(logs / str(number)),
        linux=pb.LinuxPodSandboxConfig(cgroup_parent=f"{instance.cgroup_root}/floor/{number}"),
    )


def _container(image: str) -> pb.ContainerConfig:
    return pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="main"),
        image=pb.ImageSpec(image=image),
        command=COMMAND,
        log_path="main/0.log",
        linux=pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(cpu_shares=2)),
    )

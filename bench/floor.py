"""The floor: the same pods by bare CRI calls, without any agent. Nothing can be faster than this.

The requests are those that the agent makes for such a pod (and so does every kubelet): hidden paths, a hosts
file, a termination log, capabilities, labels. They are made before the clock runs. What the least that a
runtime takes would need instead is told, too (`plain`): about a tenth less time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.cri_configs import make_container_config, make_sandbox_config
from pykubelet.kuberuntime.configuration.options import (
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
)
from pykubelet.podconfig.static_pods import static_pods
from pykubelet.standalone.instance import Instance

AT_ONCE = 4
_Requests = tuple[pb.PodSandboxConfig, pb.ContainerConfig]
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

    def over(self, floor: Times) -> Times:
        """These times as multiples of others'."""
        return Times(
            self.all_running / floor.all_running,
            self.median_start / floor.median_start,
            self.all_deleted / floor.all_deleted,
        )


async def connected(endpoint: str) -> RuntimeConnection:
    """Connect to a node's runtime."""
    return await connect(
        endpoint, timeout=Duration.from_seconds(120), metrics=CriMetrics(CollectorRegistry())
    )


async def measure_floor(instance: Instance, image: str, pods: int, *, plain: bool = False) -> Times:
    """Start pods `AT_ONCE` at a time, then stop and remove them the same way."""
    make = _plain_requests if plain else _requests
    with tempfile.TemporaryDirectory(prefix="pykb-", dir="/tmp") as files:
        requests = [make(instance, image, number, Path(files)) for number in range(pods)]
        return await _measure(instance, requests)


async def _measure(instance: Instance, requests: list[_Requests]) -> Times:
    turn, sandboxes = asyncio.Semaphore(AT_ONCE), list[str]()
    async with await connected(instance.endpoint) as cri:
        began, started = time.monotonic(), list[float]()

        async def start(config: pb.PodSandboxConfig, wish: pb.ContainerConfig) -> None:
            async with turn:
                sandbox = await cri.runtime.run_pod_sandbox(config)
                sandboxes.append(sandbox)
                container = await cri.runtime.create_container(sandbox, wish, config)
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

        await asyncio.gather(*(start(*one) for one in requests))
        all_running = time.monotonic() - began
        ending = time.monotonic()
        await asyncio.gather(*map(stop, sandboxes))
        return Times(all_running, statistics.median(started), time.monotonic() - ending)


def _requests(instance: Instance, image: str, number: int, files: Path) -> _Requests:
    """Give what the agent asks the runtime for."""
    name = f"floor-{number}"
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 2,
            "containers": [
                {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent", "command": COMMAND}
            ],
        },
    }
    data = json.dumps(document).encode()
    (pod,) = static_pods(data, source="file", origin=name, node_name="bench", now=0)
    node = RuntimeNodeOptions(pod_logs_dir=str(instance.data_dir / "floor-logs"), memory_capacity=16 << 30)
    parent = f"{instance.cgroup_root}/kubepods/besteffort/pod{pod.uid}"
    own = {kind: files / f"{number}-{kind}" for kind in ("hosts", "termination")}
    for file in own.values():
        file.touch()
    facts = RunContainerOptions(
        node=node,
        image=PresentImage(image, 0, ""),
        pod_ips=("10.0.0.2",),
        hosts_file=str(own["hosts"]),
        termination_log=str(own["termination"]),
    )
    sandbox = make_sandbox_config(pod, RunSandboxOptions(node=node, cgroup_parent=parent))
    return sandbox, make_container_config(pod, pod.spec.containers[0], facts)


def _plain_requests(instance: Instance, image: str, number: int, files: Path) -> _Requests:
    """Give the least that a runtime takes."""
    name = f"floor-{number}"
    sandbox = pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=name, namespace="bench", uid=name),
        hostname=name,
        log_directory=str(instance.data_dir / "floor-logs" / str(number)),
        linux=pb.LinuxPodSandboxConfig(cgroup_parent=f"{instance.cgroup_root}/floor/{number}"),
    )
    container = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="main"),
        image=pb.ImageSpec(image=image),
        command=COMMAND,
        log_path="main/0.log",
        linux=pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(cpu_shares=2)),
    )
    return sandbox, container

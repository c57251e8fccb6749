"""A pod made by hand, through CRI alone."""

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.standalone.instance import Instance


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with one container that runs."""

    sandbox: str
    container: str


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[RuntimeConnection]:
    """Yield a connection for the time of a block."""
    async with await connect(
        endpoint, timeout=Duration.from_seconds(60), metrics=CriMetrics(CollectorRegistry())
    ) as cri:
        yield cri


async def start_pod(
    cri: RuntimeConnection,
    instance: Instance,
    image: str,
    *command: str,
    host_port: int | None = None,
    shared_pids: bool = False,
) -> Pod:
    """Start a pod whose container runs `command`; its port 80 is the machine's `host_port`."""
    uid = str(uuid.uuid4())
    pids = pb.POD if shared_pids else pb.CONTAINER
    namespaces = pb.NamespaceOption(network=pb.POD, pid=pids, ipc=pb.POD)
    sandbox_config = pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=f"p-{uid[:8]}", uid=uid, namespace="test"),
        log_directory=str(instance.pod_logs / f"test_p_{uid}"),
        linux=pb.LinuxPodSandboxConfig(
            cgroup_parent=f"{instance.cgroup_root}/pod{uid}",
            security_context=pb.LinuxSandboxSecurityContext(namespace_options=namespaces),
        ),
    )
    if host_port is not None:
        sandbox_config.port_mappings.append(pb.PortMapping(container_port=80, host_port=host_port))
    sandbox = await cri.runtime.run_pod_sandbox(sandbox_config)
    config = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="c"),
        image=pb.ImageSpec(image=image),
        command=command,
        log_path="c/0.log",
        linux=pb.LinuxContainerConfig(
            security_context=pb.LinuxContainerSecurityContext(namespace_options=namespaces)
        ),
    )
    container = await cri.runtime.create_container(sandbox, config, sandbox_config)
    await cri.runtime.start_container(container)
    return Pod(sandbox, container)


async def is_running(cri: RuntimeConnection, pod: Pod) -> bool:
    """Whether the pod's container runs."""
    status = await cri.runtime.container_status(pod.container)
    return status.status.state == pb.CONTAINER_RUNNING


async def container_pid(cri: RuntimeConnection, pod: Pod) -> int:
    """Return the pid of the container's first process."""
    answer = await cri.runtime.container_status(pod.container, verbose=True)
    return int(json.loads(answer.info["info"])["pid"])


async def shell(cri: RuntimeConnection, pod: Pod, script: str) -> str:
    """Run a script in the container and return what it wrote."""
    answer = await cri.runtime.exec_sync(pod.container, ["sh", "-c", script], 45)
    assert answer.exit_code == 0, (answer.stdout, answer.stderr)
    return answer.stdout.decode()

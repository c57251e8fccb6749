"""Pods of a node whose kubelet is stopped, as the container runtime reports them.

The runtime knows names, images, states and addresses, but neither the specs nor readiness: a running
container counts as ready. `node_pods` prints one line when the pods come from the runtime.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pykubelet.api.duration import Duration
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.api.pod_status import (
    AddressStatus,
    ContainerState,
    ContainerStateRunning,
    ContainerStateTerminated,
    ContainerStateWaiting,
    ContainerStatus,
    PodStatus,
)
from pykubelet.cli.client import KubeletNotRunning
from pykubelet.kuberuntime.labels import CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID, RESTART_COUNT
from pykubelet.podconfig.static_pods import SOURCE_ANNOTATION
from pykubelet.server.pods import NodePods
from pykubelet.transport.errors import CriError, EndpointError

if TYPE_CHECKING:
    from pykubelet.cli.node_access import Node
    from pykubelet.cri import runtime_pb2 as pb
    from pykubelet.cri.client import RuntimeClient

_CONCURRENT_CALLS = 8
_MAX_MESSAGE_CHARACTERS = 4096
CALL_TIMEOUT = Duration.from_seconds(30)
"""Timeout of a call to the runtime."""


def node_pods(node: Node, program: str) -> NodePods:
    """Return the pods of a node, from its runtime while the kubelet is stopped. Raises NodeError."""
    try:
        return node.client.pods()
    except KubeletNotRunning as err:
        found = runtime_pods(node, err)
        print(
            f"{program}: the kubelet does not run ({node.start_hint}); "
            "these are the containers of the runtime, their readiness is unknown",
            file=sys.stderr,
        )
        return found


def runtime_pods(node: Node, reason: KubeletNotRunning) -> NodePods:
    """Return the pods in the runtime. Raises `reason` when the runtime does not run, either."""
    endpoint = node.endpoint
    try:
        pods = asyncio.run(_query(endpoint))
    except (CriError, EndpointError, OSError):
        raise KubeletNotRunning(f"{reason}; its container runtime does not run, either") from reason
    return NodePods(pods=pods, states={pod.uid: "syncing" for pod in pods})


async def _query(endpoint: str) -> list[Pod]:
    from prometheus_client import CollectorRegistry

    from pykubelet.cri.channel import CriMetrics
    from pykubelet.cri.connect import connect

    metrics = CriMetrics(CollectorRegistry())
    async with await connect(endpoint, timeout=CALL_TIMEOUT, metrics=metrics) as cri:
        return await _pods(cri.runtime)


async def _pods(runtime: RuntimeClient) -> list[Pod]:
    sandboxes = _newest_sandboxes(await runtime.list_pod_sandbox())
    containers = _newest_containers(await runtime.list_containers(), sandboxes)
    limit = asyncio.Semaphore(_CONCURRENT_CALLS)

    async def container_status(container: pb.Container) -> ContainerStatus:
        async with limit:
            try:
                status = (await runtime.container_status(container.id)).status
            except CriError:
                status = None  # removed since it was listed
        return _status(container, status)

    async def addresses(sandbox: pb.PodSandbox) -> list[str]:
        async with limit:
            try:
                network = (await runtime.pod_sandbox_status(sandbox.id)).status.network
            except CriError:
                return []
        return [ip for ip in (network.ip, *(more.ip for more in network.additional_ips)) if ip]

    async def pod(uid: str, sandbox: pb.PodSandbox) -> Pod:
        of_pod = containers.get(uid, [])
        statuses = await asyncio.gather(*map(container_status, of_pod))
        ips = await addresses(sandbox)
        return _pod(sandbox, of_pod, statuses, ips)

    return list(await asyncio.gather(*(pod(uid, sandbox) for uid, sandbox in sandboxes.items())))


def _newest_sandboxes(sandboxes: Iterable[pb.PodSandbox]) -> dict[str, pb.PodSandbox]:
    found: dict[str, pb.PodSandbox] = {}
    for sandbox in sorted(sandboxes, key=lambda one: one.created_at):
        if uid := sandbox.labels.get(POD_UID, ""):
            found[uid] = sandbox
    return found


def _newest_containers(
    containers: Iterable[pb.Container], sandboxes: Mapping[str, pb.PodSandbox]
) -> dict[str, list[pb.Container]]:
    found: dict[str, dict[str, pb.Container]] = {}
    for container in sorted(containers, key=lambda one: one.created_at):
        uid, name = container.labels.get(POD_UID, ""), container.labels.get(CONTAINER_NAME, "")
        if uid in sandboxes and name:
            found.setdefault(uid, {})[name] = container
    return {uid: list(by_name.values()) for uid, by_name in found.items()}


def _pod(
    sandbox: pb.PodSandbox,
    containers: Sequence[pb.Container],
    statuses: Sequence[ContainerStatus],
    ips: Sequence[str],
) -> Pod:
    labels = sandbox.labels
    running = any(status.state.running is not None for status in statuses)
    ends = [status.state.terminated for status in statuses if status.state.terminated is not None]
    failed = any(end.exit_code for end in ends)
    return Pod(
        metadata=ObjectMeta(
            name=labels.get(POD_NAME, ""),
            namespace=labels.get(POD_NAMESPACE, ""),
            uid=labels.get(POD_UID, ""),
            creation_timestamp=_time(sandbox.created_at),
            annotations={
                key: value for key, value in sandbox.annotations.items() if key == SOURCE_ANNOTATION
            },
        ),
        spec=PodSpec(
            containers=[
                Container(
                    name=one.labels[CONTAINER_NAME],
                    image=one.image.user_specified_image or one.image.image,
                )
                for one in containers
            ]
        ),
        status=PodStatus(
            phase="Running" if running or not statuses else "Failed" if failed else "Succeeded",
            pod_ip=ips[0] if ips else "",
            pod_ips=[AddressStatus(ip=ip) for ip in ips],
            start_time=_time(sandbox.created_at),
            container_statuses=list(statuses),
        ),
    )


def _status(container: pb.Container, status: pb.ContainerStatus | None) -> ContainerStatus:
    from pykubelet.cri import runtime_pb2 as pb

    state = ContainerState(waiting=ContainerStateWaiting(reason="ContainerCreating"))
    if status is not None and status.state == pb.CONTAINER_RUNNING:
        state = ContainerState(running=ContainerStateRunning(started_at=_time(status.started_at)))
    elif status is not None and status.state == pb.CONTAINER_EXITED:
        state = ContainerState(
            terminated=ContainerStateTerminated(
                exit_code=status.exit_code,
                reason=status.reason,
                message=status.message[:_MAX_MESSAGE_CHARACTERS],
                started_at=_time(status.started_at),
                finished_at=_time(status.finished_at),
            )
        )
    count = container.annotations.get(RESTART_COUNT, "")
    running = state.running is not None
    return ContainerStatus(
        name=container.labels[CONTAINER_NAME],
        image=container.image.user_specified_image or container.image.image,
        image_id=container.image_ref,
        container_id=f"cri://{container.id}",
        restart_count=int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0,
        ready=running,
        started=running,
        state=state,
    )


def _time(nanoseconds: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC) if nanoseconds > 0 else None
    except (OverflowError, ValueError, OSError):
        return None

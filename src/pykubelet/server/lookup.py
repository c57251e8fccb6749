"""Lookup of the pod and the container that a request names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from pykubelet.api.pod import Container, Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.labels import CONTAINER_NAME, POD_UID
from pykubelet.server.identity import HttpError
from pykubelet.server.pods import PodsView
from pykubelet.transport.errors import CriError, NotFound, ResourceExhausted

_RECENT_SECONDS = 0.5


class StreamingRuntime(Protocol):
    """Runtime methods that the API uses, as in `cri.client.RuntimeClient`; all raise CriError."""

    async def list_containers(self, filter: pb.ContainerFilter | None = None) -> list[pb.Container]:
        """List containers."""
        ...

    async def list_pod_sandbox(self, filter: pb.PodSandboxFilter | None = None) -> list[pb.PodSandbox]:
        """List sandboxes."""
        ...

    async def container_status(
        self, container_id: str, *, verbose: bool = False
    ) -> pb.ContainerStatusResponse:
        """Return a container's status."""
        ...

    async def exec(self, request: pb.ExecRequest) -> str:
        """Prepare an exec session and return the URL of its stream."""
        ...

    async def attach(self, request: pb.AttachRequest) -> str:
        """Prepare an attach session and return the URL of its stream."""
        ...

    async def port_forward(self, request: pb.PortForwardRequest) -> str:
        """Prepare a port-forward session and return the URL of its stream."""
        ...

    async def exec_sync(
        self, container_id: str, command: Sequence[str], timeout_seconds: int = 0
    ) -> pb.ExecSyncResponse:
        """Run a command and return its output."""
        ...

    async def checkpoint_container(self, container_id: str, location: str, timeout_seconds: int = 0) -> None:
        """Write a container's checkpoint."""
        ...


class PodLookup:
    """Lookup of pods and containers; `resolve` translates the UID of a mirror pod to its static pod's."""

    def __init__(self, view: PodsView, runtime: StreamingRuntime, resolve: Callable[[str], str]) -> None:
        self.view = view
        self.runtime = runtime
        self._resolve = resolve
        self._recent: dict[str, Pod] = {}
        self._recent_at = -_RECENT_SECONDS

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return the pod of this name, or None; a desired pod takes precedence over a terminating one."""
        found = (pod for pod in self.view.pods() if pod.metadata.name == name)
        return next((pod for pod in found if pod.metadata.namespace == namespace), None)

    def recent_pod(self, uid: str) -> Pod | None:
        """Return the pod with this UID, from a snapshot at most `_RECENT_SECONDS` old."""
        now = asyncio.get_running_loop().time()
        if now - self._recent_at >= _RECENT_SECONDS:
            self._recent = {pod.uid: pod for pod in self.view.pods()}
            self._recent_at = now
        return self._recent.get(uid)

    def matches_uid(self, pod: Pod, uid: str) -> bool:
        """Return whether `uid` is empty, this pod's UID or that of its mirror pod."""
        return not uid or self._resolve(uid) == pod.uid

    async def running_container(self, pod: Pod, container: str) -> str | None:
        """Return the ID of the newest running container of this name, or None. Raises CriError."""
        running = pb.ContainerStateValue(state=pb.CONTAINER_RUNNING)
        container_filter = pb.ContainerFilter(
            state=running, label_selector={POD_UID: pod.uid, CONTAINER_NAME: container}
        )
        found = await self.runtime.list_containers(container_filter)
        return max(found, key=lambda each: each.created_at).id if found else None

    async def ready_sandbox(self, pod: Pod) -> str | None:
        """Return the ID of the pod's newest ready sandbox, or None. Raises CriError."""
        ready = pb.PodSandboxStateValue(state=pb.SANDBOX_READY)
        found = await self.runtime.list_pod_sandbox(
            pb.PodSandboxFilter(state=ready, label_selector={POD_UID: pod.uid})
        )
        return max(found, key=lambda each: each.created_at).id if found else None


def find_container(pod: Pod, name: str) -> Container | None:
    """Return the regular, init or ephemeral container of this name in the pod spec, or None."""
    spec = pod.spec
    containers = (*spec.containers, *spec.init_containers, *spec.ephemeral_containers)
    return next((container for container in containers if container.name == name), None)


def runtime_http_error(err: CriError) -> HttpError:
    """Return the HTTP error for a failed CRI call."""
    if isinstance(err, NotFound):
        return HttpError(404, err.rpc_text)
    if isinstance(err, ResourceExhausted):
        return HttpError(429, err.rpc_text, {"Retry-After": "60"})
    return HttpError(500, err.rpc_text)

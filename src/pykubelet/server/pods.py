"""The pods as others see them: what a server may ask of the engine, and how it is written.

`PodsView` is the one narrow door between the servers and the engine; whoever runs pods implements it.
The documents below are what goes over the wire, shared by the servers and the command line, so
that the two cannot disagree.

Finding what a request names: a pod of this node, and its container as the runtime has it now.

What a request says is never trusted to be an id of the runtime: pods are found by namespace and name among
those of this node, containers by the labels that the agent gave them. A container that is about to be
used must run; whether it does is asked of the runtime, not remembered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Container, Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.labels import CONTAINER_NAME, POD_UID
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.server.identity import HttpError
from pykubelet.transport.errors import CriError, NotFound, ResourceExhausted

SOCKET_NAME = "pykubelet.sock"
"""The control socket's name in the agent's root directory."""


class PodsView(Protocol):
    """What the engine tells about its pods, and the one thing that it can be asked to do."""

    def pods(self) -> list[Pod]:
        """All pods of this node, each with its current status; nobody changes them."""
        ...

    def journal(self, uid: str) -> tuple[list[Event], list[TimelineEntry]]:
        """A pod's events and its timeline, oldest first."""
        ...

    def restart(self, uid: str, container: str | None) -> list[str]:
        """Restart one container of a pod, or all that run, in place; gives their names.

        Raises LookupError when there is no such pod or no such container that runs.
        """
        ...

    def state(self, uid: str) -> str:
        """Where the pod is in its life: `syncing`, `terminating` or `terminated`."""
        ...


class NodePods(msgspec.Struct, kw_only=True):
    """Some pods, and by uid where each is in its life."""

    pods: list[Pod] = []
    states: dict[str, str] = {}


class PodJournal(msgspec.Struct, kw_only=True):
    """What happened to a pod; times are seconds since the epoch."""

    events: list[Event] = []
    timeline: list[TimelineEntry] = []


class Restarted(msgspec.Struct, kw_only=True):
    """The containers that were asked to restart."""

    containers: list[str] = []


class Refusal(msgspec.Struct, kw_only=True):
    """Why a request could not be answered, in one line."""

    message: str


class _ListMeta(msgspec.Struct):
    """A list that no API server made has no version."""


class _PodList(msgspec.Struct, kw_only=True, rename="camel"):
    """A PodList that says what it is; its items, as everywhere in the API, do not."""

    kind: str = "PodList"
    api_version: str = "v1"
    metadata: _ListMeta
    items: list[Pod]


def pod_list_json(pods: Iterable[Pod]) -> bytes:
    """Write a v1 PodList."""
    return to_json(_PodList(metadata=_ListMeta(), items=list(pods)))


_RECENT_SECONDS = 0.5


class StreamingRuntime(Protocol):
    """What the API needs of the runtime (`cri.runtime.RuntimeClient` has it); all raise CriError."""

    async def list_containers(self, filter: pb.ContainerFilter | None = None) -> list[pb.Container]:
        """List containers."""
        ...

    async def list_pod_sandbox(self, filter: pb.PodSandboxFilter | None = None) -> list[pb.PodSandbox]:
        """List sandboxes."""
        ...

    async def container_status(
        self, container_id: str, *, verbose: bool = False
    ) -> pb.ContainerStatusResponse:
        """Ask for a container's state."""
        ...

    async def exec(self, request: pb.ExecRequest) -> str:
        """Prepare a command; gives the address of its streams."""
        ...

    async def attach(self, request: pb.AttachRequest) -> str:
        """Prepare a connection to a container; gives the address of its streams."""
        ...

    async def port_forward(self, request: pb.PortForwardRequest) -> str:
        """Prepare connections to a sandbox's ports; gives their address."""
        ...

    async def exec_sync(
        self, container_id: str, command: Sequence[str], timeout_seconds: int = 0
    ) -> pb.ExecSyncResponse:
        """Run a command and give its output."""
        ...

    async def checkpoint_container(self, container_id: str, location: str, timeout_seconds: int = 0) -> None:
        """Write a container's checkpoint."""
        ...


class PodLookup:
    """Pods and containers of this node; `resolve` turns the uid of a mirror pod into its static pod's."""

    def __init__(self, view: PodsView, runtime: StreamingRuntime, resolve: Callable[[str], str]) -> None:
        self.view = view
        self.runtime = runtime
        self._resolve = resolve
        self._recent: dict[str, Pod] = {}
        self._recent_at = -_RECENT_SECONDS

    def pod(self, namespace: str, name: str) -> Pod | None:
        """The pod of this name: of several the one that is wanted, not one that is leaving."""
        found = (pod for pod in self.view.pods() if pod.metadata.name == name)
        return next((pod for pod in found if pod.metadata.namespace == namespace), None)

    def recent(self, uid: str) -> Pod | None:
        """The pod with this uid as it was within the last second; cheap to ask often."""
        now = asyncio.get_running_loop().time()
        if now - self._recent_at >= _RECENT_SECONDS:
            self._recent = {pod.uid: pod for pod in self.view.pods()}
            self._recent_at = now
        return self._recent.get(uid)

    def is_meant(self, pod: Pod, uid: str) -> bool:
        """Whether a uid, where one is given, is this pod's or that of its mirror."""
        return not uid or self._resolve(uid) == pod.uid

    async def running_container(self, pod: Pod, container: str) -> str | None:
        """The runtime's id of a pod's container that runs; None when none does. Raises CriError."""
        running = pb.ContainerStateValue(state=pb.CONTAINER_RUNNING)
        wanted = pb.ContainerFilter(
            state=running, label_selector={POD_UID: pod.uid, CONTAINER_NAME: container}
        )
        found = await self.runtime.list_containers(wanted)
        return max(found, key=lambda each: each.created_at).id if found else None

    async def ready_sandbox(self, pod: Pod) -> str | None:
        """The runtime's id of a pod's sandbox that is ready; None when none is. Raises CriError."""
        ready = pb.PodSandboxStateValue(state=pb.SANDBOX_READY)
        found = await self.runtime.list_pod_sandbox(
            pb.PodSandboxFilter(state=ready, label_selector={POD_UID: pod.uid})
        )
        return max(found, key=lambda each: each.created_at).id if found else None


def container_of(pod: Pod, name: str) -> Container | None:
    """A container of a pod's spec, of whichever kind."""
    spec = pod.spec
    every = (*spec.containers, *spec.init_containers, *spec.ephemeral_containers)
    return next((container for container in every if container.name == name), None)


def runtime_refusal(err: CriError) -> HttpError:
    """What a client is told when the runtime could not do it."""
    if isinstance(err, NotFound):
        return HttpError(404, err.rpc_text)
    if isinstance(err, ResourceExhausted):
        return HttpError(429, err.rpc_text, {"Retry-After": "60"})
    return HttpError(500, err.rpc_text)

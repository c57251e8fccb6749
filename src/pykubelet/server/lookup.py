"""Lookup of the pod and the container that a request names.

`PodLookup` never uses a value of a request as a runtime ID: pods are found by namespace and name among the
pods of this node, containers and sandboxes by the labels that the kubelet set. Whether a container is running
is queried from the runtime each time, not cached.

The servers use four methods of the pod engine: `pods`, `journal`, `restart` and `state`. They must not modify
the pods that it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pykubelet.api.pod import Container, Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.client import RuntimeClient
from pykubelet.kuberuntime.labels import CONTAINER_NAME, POD_UID
from pykubelet.podworkers.engine import PodEngine
from pykubelet.server.auth.identity import HttpError
from pykubelet.transport.errors import CriError, NotFound, ResourceExhausted

_RECENT_SECONDS = 0.5


class PodLookup:
    """Lookup of pods and containers; `resolve` translates the UID of a mirror pod to its static pod's."""

    def __init__(self, engine: PodEngine, runtime: RuntimeClient, resolve: Callable[[str], str]) -> None:
        self.engine = engine
        self.runtime = runtime
        self._resolve = resolve
        self._recent: dict[str, Pod] = {}
        self._recent_at = -_RECENT_SECONDS

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return the pod of this name, or None; a desired pod takes precedence over a terminating one."""
        found = (pod for pod in self.engine.pods() if pod.metadata.name == name)
        return next((pod for pod in found if pod.metadata.namespace == namespace), None)

    def recent_pod(self, uid: str) -> Pod | None:
        """Return the pod with this UID, from a snapshot at most `_RECENT_SECONDS` old."""
        now = asyncio.get_running_loop().time()
        if now - self._recent_at >= _RECENT_SECONDS:
            self._recent = {pod.uid: pod for pod in self.engine.pods()}
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

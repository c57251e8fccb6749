"""Interfaces of the servers to pods and runtime, response documents, and lookup of pods and containers.

`PodsView` is the only interface between the servers and the pod engine, which implements it. The msgspec
documents are shared by the servers and the command line, so that the two always agree.

`PodLookup` never uses a value of a request as a runtime ID: pods are found by namespace and name among the
pods of this node, containers and sandboxes by the labels that the kubelet set. Whether a container is running
is queried from the runtime each time, not cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.podconfig.pod_history import Event, TimelineEntry

SOCKET_NAME = "pykubelet.sock"
"""File name of the control socket in the kubelet's root directory."""


class PodsView(Protocol):
    """The pod engine as the servers see it."""

    def pods(self) -> list[Pod]:
        """Return all pods with their current status, desired pods first; callers must not modify them."""
        ...

    def journal(self, uid: str) -> tuple[list[Event], list[TimelineEntry]]:
        """Return a pod's events and its timeline, oldest first."""
        ...

    def restart(self, uid: str, container: str | None) -> list[str]:
        """Restart one container of a pod, or all running ones, in place, and return their names.

        Raises LookupError if the pod or a running container of that name does not exist.
        """
        ...

    def state(self, uid: str) -> str:
        """Return the state of the pod worker: `syncing`, `terminating` or `terminated`."""
        ...


class NodePods(msgspec.Struct, kw_only=True):
    """Pods, and their pod worker states by UID."""

    pods: list[Pod] = []
    states: dict[str, str] = {}


class PodJournal(msgspec.Struct, kw_only=True):
    """Events and timeline of a pod; times in seconds since the Unix epoch."""

    events: list[Event] = []
    timeline: list[TimelineEntry] = []


class Restarted(msgspec.Struct, kw_only=True):
    """Names of the containers whose restart was requested."""

    containers: list[str] = []


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Error response: one line."""

    message: str


class _ListMeta(msgspec.Struct):
    """Empty list metadata: only the API server sets a resourceVersion."""


class _PodList(msgspec.Struct, kw_only=True, rename="camel"):
    """A v1 PodList with kind and apiVersion; its items have neither, as in the API."""

    kind: str = "PodList"
    api_version: str = "v1"
    metadata: _ListMeta
    items: list[Pod]


def pod_list_json(pods: Iterable[Pod]) -> bytes:
    """Return a v1 PodList as JSON."""
    return to_json(_PodList(metadata=_ListMeta(), items=list(pods)))

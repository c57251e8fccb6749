"""Response documents on pods, shared by the servers and the command line, so that the two always agree."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.podconfig.pod_history import Event, TimelineEntry

SOCKET_NAME = "pykubelet.sock"
"""File name of the control socket in the kubelet's root directory."""


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

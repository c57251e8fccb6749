"""The pods as others see them: what a server may ask of the engine, and how it is written.

`PodsView` is the one narrow door between the servers and the engine; whoever runs pods implements it.
The documents below are what goes over the wire, shared by the servers and the command line, so
that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.pods.journal import Event, Note

SOCKET_NAME = "pykubelet.sock"
"""The control socket's name in the agent's root directory."""


class PodsView(Protocol):
    """What the engine tells about its pods, and the one thing that it can be asked to do."""

    def pods(self) -> list[Pod]:
        """All pods of this node, each with its current status; nobody changes them."""
        ...

    def journal(self, uid: str) -> tuple[list[Event], list[Note]]:
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
    timeline: list[Note] = []


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

"""Pods as a script says, for tests of what is shown of them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ContainerState, ContainerStatus
from pykubelet.podconfig.ephemeral_containers import completed_ephemeral_container
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.podworkers.engine import PodEngine

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def pod_of(name: str, uid: str, *, node: str = "node1", namespace: str = "default", **fields: Any) -> Pod:
    """Make a static pod with one container; `spec` and `status` are documents that are laid over it."""
    document = {
        "metadata": {
            "name": f"{name}-{node}" if node else name,
            "namespace": namespace,
            "uid": uid,
            "annotations": {"kubernetes.io/config.source": "file"},
        },
        "spec": {"nodeName": node, "restartPolicy": "Always", "containers": [{"name": "main", "image": "i"}]}
        | fields.get("spec", {}),
        "status": {"phase": "Running", "startTime": "2026-01-02T03:04:05Z"} | fields.get("status", {}),
    }
    document["metadata"] |= fields.get("metadata", {})
    return from_document(Pod, document)


@dataclass
class ScriptedView(PodEngine):
    """A `PodEngine` that says what it is told, and remembers what it was asked."""

    listed: list[Pod] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)
    notes: dict[str, list[TimelineEntry]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    debugger_state: ContainerState = field(default_factory=ContainerState)
    """What ephemeral containers become."""
    restarts: list[tuple[str, str | None]] = field(default_factory=list)

    def pods(self) -> list[Pod]:
        return self.listed

    def journal(self, uid: str) -> tuple[list[Event], list[TimelineEntry]]:
        return self.events.get(uid, []), self.notes.get(uid, [])

    def restart(self, uid: str, container: str | None) -> list[str]:
        names = [
            c.name
            for pod in self.listed
            if pod.uid == uid
            for c in pod.spec.containers
            if container in (None, c.name)
        ]
        if not names:
            raise LookupError(f"pod has no running container {container!r}")
        self.restarts.append((uid, container))
        return names

    def add_ephemeral_container(self, uid: str, container: Container) -> None:
        pod = next(pod for pod in self.listed if pod.uid == uid)
        pod.spec.ephemeral_containers.append(completed_ephemeral_container(pod, container))
        status = ContainerStatus(name=container.name, state=self.debugger_state)
        pod.status.ephemeral_container_statuses.append(status)

    def state(self, uid: str) -> str:
        return self.states.get(uid, "syncing")

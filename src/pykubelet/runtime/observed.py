"""What the runtime has of a pod, as facts that decisions are made from.

Plain values, newest first, taken from CRI once and then shared: the decision, the status and the
garbage collectors all read the same picture.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ContainerPhase = Literal["created", "running", "exited", "unknown"]


class ObservedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A pod's sandbox: its network and namespaces."""

    id: str
    ready: bool
    created_at: int
    """Nanoseconds since the epoch, as all times here."""
    attempt: int = 0
    ips: tuple[str, ...] = ()
    host_network: bool = False
    runtime_handler: str = ""


class ActualResources(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime says that a container has: thousandths of cpus and bytes, 0 where it says nothing."""

    cpu_request: int = 0
    cpu_limit: int = 0
    memory_limit: int = 0


class ObservedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One container that exists or existed; `attempt` counts its restarts."""

    id: str
    name: str
    phase: ContainerPhase
    sandbox_id: str = ""
    attempt: int = 0
    created_at: int = 0
    started_at: int = 0
    finished_at: int = 0
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    image: str = ""
    image_id: str = ""
    """The runtime's own reference of the image (`image_ref`)."""
    hash: str = ""
    """`io.kubernetes.container.hash`: differs when the spec that made it differs."""
    restart_count: int = 0
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    log_path: str = ""
    user: tuple[int, int, tuple[int, ...]] | None = None
    """uid, gid and supplemental groups of the first process, where the runtime tells."""
    resources: ActualResources | None = None
    """What it is set to, where the runtime tells."""


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    """All that the runtime has of one pod."""

    uid: str
    name: str = ""
    namespace: str = ""
    sandboxes: tuple[ObservedSandbox, ...] = ()
    """Newest first."""
    containers: tuple[ObservedContainer, ...] = ()
    """Newest first."""

    @property
    def full_name(self) -> str:
        """`namespace/name`; empty when the runtime does not tell."""
        return f"{self.namespace}/{self.name}" if self.name else ""

    def latest(self, name: str) -> ObservedContainer | None:
        """The newest container of this name."""
        return next((container for container in self.containers if container.name == name), None)

    def phase_of(self, id: str) -> ContainerPhase | None:
        """What a container, or a sandbox, by its id is up to; None when it is not known."""
        for sandbox in self.sandboxes:
            if sandbox.id == id:
                return "running" if sandbox.ready else "exited"
        return next((container.phase for container in self.containers if container.id == id), None)

    @property
    def running(self) -> tuple[ObservedContainer, ...]:
        """The containers that run now."""
        return tuple(container for container in self.containers if container.phase == "running")

    @property
    def is_alive(self) -> bool:
        """Whether anything of the pod runs, be it only its sandbox."""
        return any(sandbox.ready for sandbox in self.sandboxes) or bool(self.running)

    @property
    def ips(self) -> tuple[str, ...]:
        """Addresses of the newest sandbox, if it is ready."""
        return self.sandboxes[0].ips if self.sandboxes and self.sandboxes[0].ready else ()

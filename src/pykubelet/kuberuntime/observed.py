"""State of a pod in the runtime, as plain types from which decisions are computed."""

from __future__ import annotations

from typing import Literal

import msgspec

ContainerPhase = Literal["created", "running", "exited", "unknown"]


class ObservedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A pod sandbox: its network and namespaces."""

    id: str
    ready: bool
    created_at: int
    """Creation time in nanoseconds since the epoch, as all times here."""
    attempt: int = 0
    ips: tuple[str, ...] = ()
    host_network: bool = False
    runtime_handler: str = ""


class ActualResources(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of a container as reported by the runtime: millicores and bytes, 0 for unknown."""

    cpu_request: int = 0
    cpu_limit: int = 0
    memory_limit: int = 0


class ObservedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a container, in any phase; `attempt` counts its restarts."""

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
    """The runtime's reference of the image (`image_ref`)."""
    hash: str = ""
    """`io.kubernetes.container.hash`: differs when the spec has changed since."""
    restart_count: int = 0
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    log_path: str = ""
    user: tuple[int, int, tuple[int, ...]] | None = None
    """UID, GID and supplemental groups of the first process, if the runtime reports them."""
    resources: ActualResources | None = None
    """Actual resources, if the runtime reports them."""
    image_mounts: tuple[tuple[str, str], ...] = ()
    """Paths of mounted images in the container, and the runtime's references of the images."""


PodStates = tuple[tuple[str, str], ...]


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    """State of one pod in the runtime."""

    uid: str
    name: str = ""
    namespace: str = ""
    sandboxes: tuple[ObservedSandbox, ...] = ()
    """Newest first."""
    containers: tuple[ObservedContainer, ...] = ()
    """Newest first."""

    @property
    def full_name(self) -> str:
        """`namespace/name`; empty when unknown."""
        return f"{self.namespace}/{self.name}" if self.name else ""

    @property
    def states(self) -> PodStates:
        """The ids and states of sandboxes and containers, by which two observations are compared."""
        sandboxes = tuple((sandbox.id, "ready" if sandbox.ready else "stopped") for sandbox in self.sandboxes)
        return sandboxes + tuple((container.id, container.phase) for container in self.containers)

    def latest(self, name: str) -> ObservedContainer | None:
        """Return the newest container with this name."""
        return next((container for container in self.containers if container.name == name), None)

    def phase_of(self, id: str) -> ContainerPhase | None:
        """Return the phase of a container or sandbox by its ID; None when it is unknown."""
        for sandbox in self.sandboxes:
            if sandbox.id == id:
                return "running" if sandbox.ready else "exited"
        return next((container.phase for container in self.containers if container.id == id), None)

    @property
    def running(self) -> tuple[ObservedContainer, ...]:
        """Running containers."""
        return tuple(container for container in self.containers if container.phase == "running")

    @property
    def is_alive(self) -> bool:
        """Whether a container runs or a sandbox is ready."""
        return any(sandbox.ready for sandbox in self.sandboxes) or bool(self.running)

    @property
    def ips(self) -> tuple[str, ...]:
        """IP addresses of the newest sandbox, if it is ready."""
        return self.sandboxes[0].ips if self.sandboxes and self.sandboxes[0].ready else ()

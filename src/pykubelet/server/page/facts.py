"""Facts that the views show, and the source that provides them.

`agent/page.py` implements `PageSource`; the views are pure functions of these values. Values of environment
variables, of secrets and of HTTP headers are not among the facts that a view shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pykubelet.api.pod import Pod
from pykubelet.eviction.report import PressureReport
from pykubelet.images.image_gc import ImageGCPolicy, ImageRecord
from pykubelet.images.pull_progress import PullProgress
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.probes.types import ProbeHistory
from pykubelet.server.page.history import History
from pykubelet.stats.samples import NetworkInterface, Usage
from pykubelet.status.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """Constants of the page."""

    node_name: str
    version: str
    started: float
    """Start of the kubelet, in seconds since the epoch."""
    data_dir: str = ""
    """Argument of `--data-dir` in the commands that are shown; empty for the default."""

    def command(self, command: str) -> str:
        """Return a command of the command line for this node."""
        return f"pykubelet {command}" + (f" --data-dir {self.data_dir}" if self.data_dir else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """A file system of the node."""

    name: str
    """What it is used for: `nodefs`, `imagefs`."""
    path: str
    capacity: int
    available: int
    inodes: int | None = None
    inodes_free: int | None = None


@dataclass(frozen=True, slots=True)
class HostFinding:
    """What `doctor` finds wrong with the host."""

    area: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """State of the node."""

    cores: float
    memory: int
    cpu: float | None
    """Used processors."""
    usage: Usage | None
    reserved_cores: float
    """Kept from pods by kubeReserved and systemReserved."""
    reserved_memory: int
    max_pods: int
    disks: Sequence[DiskFacts]
    interfaces: Sequence[NetworkInterface]
    link_speed: int | None = None
    """Bits per second of the fastest interface; None if it is not known."""
    pressure: PressureReport | None
    checks: Mapping[str, str | None]
    """Reason of each failing health check, None for those that pass."""
    certificates: Mapping[str, float]
    """Seconds until each certificate expires."""
    host_problems: Sequence[HostFinding] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """A pod in the list."""

    pod: Pod
    state: str
    diagnosis: Diagnosis
    cpu: float | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """Last lines of the log of a container."""

    container: str
    lines: Sequence[str]
    note: str = ""
    """Why there are no lines, or that earlier ones are left out."""
    previous: bool = False
    """Whether the container has run again since (`logs -p`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeFacts:
    """Disk usage of something of a pod."""

    pod: str
    name: str
    used: int
    capacity: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDetails:
    """A pod with everything that its page shows."""

    facts: PodFacts
    events: Sequence[Event]
    timeline: Sequence[TimelineEntry]
    logs: Sequence[LogTail]
    failed_log: LogTail | None = None
    """End of the log of the run that failed; None if no container is the reason."""
    probes: Sequence[ProbeHistory] = ()
    volumes: Sequence[VolumeFacts] = ()
    pulls: Sequence[PullProgress] = ()
    oom_kills: Mapping[str, int] = field(default_factory=dict)
    """OOM kills by container since the kubelet has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesFacts:
    """Images and other users of the disk."""

    images: Sequence[ImageRecord]
    problem: str = ""
    """Why the images could not be listed now; those shown are the last ones that were listed."""
    waits_for: str = ""
    """What the images cannot be listed during; those shown are the last ones that were listed."""
    listed_at: float | None = None
    """Time of the event loop at which they were listed."""
    policy: ImageGCPolicy
    disk: DiskFacts | None
    loop_time: float
    """Time of the event loop, which the ages of images refer to."""
    pulls: Sequence[PullProgress]
    logs: Sequence[VolumeFacts]
    volumes: Sequence[VolumeFacts]
    layers: Sequence[VolumeFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one operation."""

    operation: str
    count: int
    errors: int | None
    seconds: float
    """Total duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """State of the kubelet itself."""

    pid: int
    rss: int
    pss: int | None
    cpu_seconds: float
    open_files: int
    threads: int
    loop_lag: float | None
    """Longest lag of the event loop in the last seconds."""
    cri: Sequence[Calls]
    api_server: Sequence[Calls]
    tasks: Mapping[str, int]
    """Number of asyncio tasks by name."""
    clients: int
    """Connected clients of the page."""
    runtime: str
    """Name and version of the container runtime."""


class PageSource(Protocol):
    """Provider of the facts."""

    @property
    def settings(self) -> PageSettings:
        """Constants of the page."""

    @property
    def history(self) -> History:
        """Charts of the last half hour."""

    def pods(self) -> list[PodFacts]:
        """Return all pods."""

    def find_pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod without its diagnosis; None if the node has no such pod."""

    async def node(self) -> NodeFacts:
        """Return the state of the node."""

    async def pod(self, namespace: str, name: str) -> PodDetails | None:
        """Return a pod; None if the node has no such pod."""

    async def images(self) -> ImagesFacts:
        """Return images and disk usage."""

    async def agent(self) -> AgentFacts:
        """Return the state of the kubelet."""

    async def sample(self) -> None:
        """Sample the node and all pods now, for connected clients."""

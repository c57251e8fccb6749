"""Types of probes, their parameters, targets and results.

- *startup*: whether the container has started. The other two do not run before.
- *readiness*: whether the container may receive traffic. Runs as long as the container runs.
- *liveness*: whether the container still works. A container that fails is killed and, by its restart policy,
  started again.

Ordinary containers and sidecars (init containers with restartPolicy Always) are probed, no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pykubelet.api.meta import IntOrString
from pykubelet.api.pod import Container, Pod, Probe, is_sidecar

Kind = Literal["startup", "readiness", "liveness"]
KINDS: tuple[Kind, ...] = ("startup", "readiness", "liveness")
Result = Literal["success", "failure", "unknown"]
"""Result of a container after thresholds, as opposed to the result of a single probe."""
Report = Callable[[Pod, str, Literal["Unhealthy", "ProbeWarning"], str], None]
"""Records an event: pod, container name, reason, message."""


class Health(NamedTuple):
    """Health of a container, as in its status."""

    started: bool
    ready: bool


class RuntimeContainer(Protocol):
    """A container in the runtime, as far as probes need it; times are nanoseconds since the epoch."""

    @property
    def id(self) -> str:
        """Container ID, without the scheme."""

    @property
    def phase(self) -> str:
        """Phase; probes distinguish `running`, `exited` and all others."""

    @property
    def started_at(self) -> int:
        """Start time."""

    @property
    def exit_code(self) -> int:
        """Exit code, if it has exited."""


class RuntimePod(Protocol):
    """A pod in the runtime, as far as probes need it; implemented by `kuberuntime.observe.ObservedPod`.

    A protocol, because `kuberuntime` is in a higher import layer.
    """

    @property
    def ips(self) -> tuple[str, ...]:
        """IP addresses of the pod, empty with hostNetwork."""

    def latest(self, name: str) -> RuntimeContainer | None:
        """Return the newest container with this name."""


@dataclass(frozen=True, slots=True)
class ProbeParameters:
    """Parameters of a probe (seconds and counts), with the API defaults."""

    delay: int
    period: int
    timeout: int
    successes: int
    failures: int


def probe_parameters(probe: Probe) -> ProbeParameters:
    """Return the parameters of a probe."""
    return ProbeParameters(
        delay=probe.initial_delay_seconds,
        period=probe.period_seconds or 10,
        timeout=probe.timeout_seconds or 1,
        successes=probe.success_threshold or 1,
        failures=probe.failure_threshold or 3,
    )


def probe_of(container: Container, kind: Kind) -> Probe | None:
    """Return the container's probe of a kind, or None."""
    match kind:
        case "startup":
            return container.startup_probe
        case "readiness":
            return container.readiness_probe
        case "liveness":
            return container.liveness_probe


def probed_containers(pod: Pod) -> Iterator[Container]:
    """Yield the containers of a pod that may have probes."""
    yield from pod.spec.containers
    yield from (container for container in pod.spec.init_containers if is_sidecar(container))


OUTPUT_LIMIT = 10 * 1024
"""Maximum bytes of a probe's output, which goes into events and logs."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of one probe. An *errored* one is no evidence about the container and is retried."""

    result: Literal["success", "warning", "failure", "unknown"]
    output: str = ""
    errored: bool = False

    @property
    def passed(self) -> bool:
        """Whether the probe succeeded; a warning counts as success."""
        return self.result in ("success", "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHistory:
    """Last results of one probe."""

    container: str
    kind: Kind
    passed: tuple[bool, ...]
    """Whether each of the last runs passed, oldest first; also those that do not count yet."""
    last_run: float
    """End of the last run, in seconds since the epoch."""
    seconds: float
    """Duration of the last run."""
    failure: str
    """Output of the last run that failed, shortened; empty if none did."""


@dataclass(frozen=True, slots=True)
class SelectedHandler:
    """The third-party handler that a pod's annotation selects for a probe (`probes/custom.py`)."""

    handler: str
    pod: Pod
    kind: Kind


@dataclass(frozen=True, slots=True)
class Target:
    """The container to probe, and the IP address of its pod."""

    container: Container
    container_id: str
    ip: str
    """IP address of the pod, or of the host with hostNetwork."""
    custom: SelectedHandler | None = None
    """Third-party handler that replaces the exec handler; None for the probe's own."""


class BadTarget(Exception):
    """The probe cannot run: unknown port or no IP address. The text is one line."""


def resolve_host(host: str, target: Target) -> str:
    """Return the host to connect to: that of the spec, or the pod's IP address.

    Raises BadTarget while the pod has no IP address.
    """
    if host or target.ip:
        return host or target.ip
    raise BadTarget("the pod has no IP address yet")


def resolve_port(port: IntOrString, container: Container) -> int:
    """Return a port number, resolving a name among the container's ports.

    Raises BadTarget for an unknown or invalid port.
    """
    number = port
    if isinstance(port, str):
        named = (entry.container_port for entry in container.ports if entry.name == port)
        try:
            number = next(named, None) or int(port)
        except ValueError:
            raise BadTarget(f"port {port} not found") from None
    assert isinstance(number, int)
    if not 0 < number < 65536:
        raise BadTarget(f"invalid port number: {number}")
    return number


def join_host_port(host: str, port: int) -> str:
    """Format an address as in URLs: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

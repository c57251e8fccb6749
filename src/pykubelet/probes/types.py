"""The three questions that are asked of a container, and the words for their answers.

- *startup*: is it up at all? Until it is, the other two are not asked.
- *readiness*: may it get traffic? Asked as long as the container runs.
- *liveness*: is it beyond help? A container that fails is killed and, by its policy, started again.

Ordinary containers and sidecars (init containers that restart always) are asked, no others.

What one look at a container gives, and whom to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pykubelet.api.meta import IntOrString
from pykubelet.api.pod import Container, Pod, Probe, is_sidecar

Kind = Literal["startup", "readiness", "liveness"]
KINDS: tuple[Kind, ...] = ("startup", "readiness", "liveness")
Verdict = Literal["success", "failure", "unknown"]
"""What is held to be true of a container after thresholds, as opposed to a single outcome."""
Report = Callable[[Pod, str, Literal["Unhealthy", "ProbeWarning"], str], None]
"""Takes an event for people: pod, container name, reason, message."""


class Health(NamedTuple):
    """What probes say of a container, as its status shows it."""

    started: bool
    ready: bool


class RuntimeContainer(Protocol):
    """What must be known of a container in the runtime; times are nanoseconds since the epoch."""

    @property
    def id(self) -> str:
        """The runtime's id, without its scheme."""

    @property
    def phase(self) -> str:
        """`running` and `exited` are the ones that matter here."""

    @property
    def started_at(self) -> int:
        """When it was started."""

    @property
    def exit_code(self) -> int:
        """How it ended, if it did."""


class RuntimePod(Protocol):
    """What must be known of a pod in the runtime; `runtime.observed.ObservedPod` is one.

    A protocol, because that room lies above this one.
    """

    @property
    def ips(self) -> tuple[str, ...]:
        """The pod's own addresses, none when it uses the host's network."""

    def latest(self, name: str) -> RuntimeContainer | None:
        """The newest container of this name."""


@dataclass(frozen=True, slots=True)
class ProbeParameters:
    """A probe's numbers (seconds and counts), with the API's defaults where the author gave none."""

    delay: int
    period: int
    timeout: int
    successes: int
    failures: int


def terms_of(probe: Probe) -> ProbeParameters:
    """Give a probe's numbers."""
    return ProbeParameters(
        delay=probe.initial_delay_seconds,
        period=probe.period_seconds or 10,
        timeout=probe.timeout_seconds or 1,
        successes=probe.success_threshold or 1,
        failures=probe.failure_threshold or 3,
    )


def probe_of(container: Container, kind: Kind) -> Probe | None:
    """Give the probe of a kind, if the container has one."""
    match kind:
        case "startup":
            return container.startup_probe
        case "readiness":
            return container.readiness_probe
        case "liveness":
            return container.liveness_probe


def probed_containers(pod: Pod) -> Iterator[Container]:
    """Give the containers that may be asked."""
    yield from pod.spec.containers
    yield from (container for container in pod.spec.init_containers if is_sidecar(container))


OUTPUT_LIMIT = 10 * 1024
"""How much of an answer is kept, in bytes; it ends up in events and logs."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One answer. An *errored* one says nothing about the container and is asked again."""

    result: Literal["success", "warning", "failure", "unknown"]
    output: str = ""
    errored: bool = False

    @property
    def passed(self) -> bool:
        """Whether the container did well; a warning is for people only."""
        return self.result in ("success", "warning")


@dataclass(frozen=True, slots=True)
class Target:
    """The container that is asked, and where its pod can be reached."""

    container: Container
    container_id: str
    ip: str
    """The pod's address, or the host's for a pod in its network."""


class BadTarget(Exception):
    """The probe cannot be sent: no such port, no address. The text is one line."""


def resolve_host(host: str, target: Target) -> str:
    """Give the address to connect to: the author's, or the pod's.

    Raises BadTarget while the pod has none.
    """
    if host or target.ip:
        return host or target.ip
    raise BadTarget("the pod has no IP address yet")


def resolve_port(port: IntOrString, container: Container) -> int:
    """Give a port's number; names are those of the container's ports.

    Raises BadTarget when there is no such port.
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
    """Write an address as URLs and messages do: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

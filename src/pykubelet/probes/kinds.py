"""The three questions that are asked of a container, and the words for their answers.

- *startup*: is it up at all? Until it is, the other two are not asked.
- *readiness*: may it get traffic? Asked as long as the container runs.
- *liveness*: is it beyond help? A container that fails is killed and, by its policy, started again.

Ordinary containers and sidecars (init containers that restart always) are asked, no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

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


class SeenContainer(Protocol):
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


class SeenPod(Protocol):
    """What must be known of a pod in the runtime; `runtime.observed.ObservedPod` is one.

    A protocol, because that room lies above this one.
    """

    @property
    def ips(self) -> tuple[str, ...]:
        """The pod's own addresses, none when it uses the host's network."""

    def latest(self, name: str) -> SeenContainer | None:
        """The newest container of this name."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A probe's numbers (seconds and counts), with the API's defaults where the author gave none."""

    delay: int
    period: int
    timeout: int
    successes: int
    failures: int


def terms_of(probe: Probe) -> Terms:
    """Give a probe's numbers."""
    return Terms(
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

"""The engine's prober: probes run in containers through the runtime, and failures are pods' events."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.cri.connect import Cri
from pykubelet.pods.journal import Journal, field_of
from pykubelet.probes.prober import Prober

_LOOPBACK = "127.0.0.1"


def make_prober(cri: Cri, journal: Journal, registry: CollectorRegistry, host_ips: Sequence[str]) -> Prober:
    """Give a prober; pods in the host's network are probed at the first of `host_ips`.

    While the host has none they are probed at its loopback, where nearly all of them answer, too.
    """

    async def run(container_id: str, command: Sequence[str], timeout_seconds: int) -> tuple[int, bytes]:
        answer = await cri.runtime.exec_sync(container_id, list(command), timeout_seconds)
        return answer.exit_code, answer.stdout + answer.stderr

    def tell(pod: Pod, container: str, reason: str, message: str) -> None:
        journal.event(pod, "Warning", reason, message, field_of(pod, container))

    return Prober(run, tell, registry, host_ip=lambda: next(iter(host_ips), _LOOPBACK))

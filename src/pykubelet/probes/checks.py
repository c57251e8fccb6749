"""One look at a container, by whichever of the four means its probe names.

A look that says nothing about the container (the runtime did not answer, a port has no such name)
is tried three times. Time and memory are bounded by the probe's timeout and 10 KiB of output.
"""

from __future__ import annotations

from pykubelet.api.pod import Probe
from pykubelet.probes.exec_check import ExecSlots, ExecSync, exec_check
from pykubelet.probes.grpc_check import grpc_check
from pykubelet.probes.http_check import http_check, user_agent
from pykubelet.probes.http_client import unverified_tls
from pykubelet.probes.kinds import terms_of
from pykubelet.probes.outcome import BadTarget, Outcome, Target
from pykubelet.probes.tcp_check import tcp_check

ATTEMPTS = 3


class Checker:
    """Looks at containers; holds what all looks share."""

    def __init__(self, exec_sync: ExecSync, slots: ExecSlots) -> None:
        self._exec_sync = exec_sync
        self._slots = slots
        self._tls = unverified_tls()

    async def check(self, probe: Probe, target: Target) -> Outcome:
        """Look, again if the look itself goes wrong."""
        outcome = Outcome("unknown", errored=True)
        for _ in range(ATTEMPTS):
            try:
                outcome = await self._look(probe, target)
            except BadTarget as err:
                outcome = Outcome("unknown", str(err), errored=True)
            if not outcome.errored:
                break
        return outcome

    async def _look(self, probe: Probe, target: Target) -> Outcome:
        timeout = terms_of(probe).timeout
        if probe.exec is not None:
            return await exec_check(probe.exec, target, timeout, self._exec_sync, self._slots)
        if probe.http_get is not None:
            return await http_check(probe.http_get, target, timeout, self._tls)
        if probe.tcp_socket is not None:
            return await tcp_check(probe.tcp_socket, target, timeout)
        if probe.grpc is not None:
            return await grpc_check(probe.grpc, target, timeout, user_agent("probe"))
        raise BadTarget(f"missing probe handler for {target.container.name}")

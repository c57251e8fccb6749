"""Telling the runtime which addresses the cluster gave to this node's pods.

Some runtimes write their network configuration from it. It is told again until the runtime took it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.errors import CriError
from pykubelet.kube.retrying import Complaints
from pykubelet.logs import get_logger

log = get_logger(__name__)

PATIENCE_SECONDS = 5.0
"""The node's status does not wait longer for a runtime that hangs."""

Tell = Callable[[pb.RuntimeConfig], Awaitable[None]]


class PodCidr:
    """The pod networks that the runtime knows of."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._complaints = Complaints(log, "Failed to tell the runtime the pod CIDR")
        self.current = ""

    async def follow(self, networks: Sequence[str]) -> None:
        """Tell the runtime when the node's `podCIDRs` are others than before; a failure is only logged."""
        wanted = ",".join(networks)
        if not wanted or wanted == self.current:
            return
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._tell(pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr=wanted)))
        except (CriError, TimeoutError) as err:
            self._complaints.failed(err, clock())
            return
        self._complaints.succeeded(clock())
        log.info("Updating Pod CIDR", originalPodCIDR=self.current, newPodCIDR=wanted)
        self.current = wanted

"""How long it took this node to become one: from the boot of the machine to the first Ready.

Measured only for a node that is new to its cluster, as the reference does: an agent that takes over an
existing node says nothing about how long nodes take to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from pykubelet.host.clock import boot_time


class NodeStartup:
    """The moments of one node's beginning; each counts once."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        started: float | None = None,
        boot: Callable[[], float] = boot_time,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take when the agent started, and clocks that give seconds since 1970."""
        self._clock = clock
        self._boot = boot
        self._started = clock() if started is None else started
        self._attempted: float | None = None
        self._registered: float | None = None
        self._ready = False

        def gauge(part: str, text: str) -> Gauge:
            return Gauge(f"kubelet_node_startup_{part}duration_seconds", text, registry=registry)

        self._pre_kubelet = gauge("pre_kubelet_", "From the machine's boot to the agent's start.")
        self._pre_registration = gauge("pre_registration_", "From the agent's start to its registering.")
        self._registration = gauge("registration_", "How long the registration took.")
        self._post_registration = gauge("post_registration_", "From the registration to the first Ready.")
        self._total = gauge("", "From the machine's boot to the node's first Ready.")

    def attempted(self) -> None:
        """Take note that the agent begins to register the node."""
        if self._attempted is None:
            self._attempted = self._clock()

    def registered(self) -> None:
        """Take note that the API server has the node, which is new."""
        if self._attempted is None or self._registered is not None:
            return
        self._registered = self._clock()
        self._pre_kubelet.set(self._started - self._boot())
        self._pre_registration.set(self._attempted - self._started)
        self._registration.set(self._registered - self._attempted)

    def ready(self) -> None:
        """Take note that the API server was told that the node is ready."""
        if self._registered is None or self._ready:
            return
        self._ready = True
        now = self._clock()
        self._post_registration.set(now - self._registered)
        self._total.set(now - self._boot())

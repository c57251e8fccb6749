"""Stage of the pod's sandbox: created when it is missing or does not match the pod any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.configuration.config_builder import PodStartContext
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.start import ContainerStarter
from pykubelet.objects.base import ObjectError
from pykubelet.objects.runtime_classes import HandlerLookup
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.stages.base import PodStart
from pykubelet.tracing.span import child_span
from pykubelet.transport.errors import CriError

NETWORK_SECONDS = 10.0
"""Seconds until a missing pod network is reported again; pods are woken when it is ready."""


@dataclass(frozen=True, slots=True)
class RunningSandbox:
    """Sandbox in which containers are started."""

    id: str
    ips: tuple[str, ...]
    config: pb.PodSandboxConfig
    context: PodStartContext


class SandboxStage:
    """Sandbox of a pod; the killer stops it, and the worker removes it with the pod's other remnants."""

    def __init__(
        self,
        starter: ContainerStarter,
        handler_of: HandlerLookup,
        network_errors: Callable[[], Sequence[str]],
        history: PodHistory,
        metrics: StartMetrics,
    ) -> None:
        self._starter = starter
        self._handler_of = handler_of
        self._network_errors = network_errors
        self._history = history
        self._metrics = metrics

    def check_network(self, pod: Pod) -> None:
        """Raise SyncError while the pod network is not ready: the sandbox could not be created."""
        if pod.spec.host_network:
            return
        if problems := self._network_errors():
            why = "; ".join(problems)
            message = f"network is not ready: container runtime network not ready: {why}"
            self._history.event(pod, "Warning", "NetworkNotReady", message)
            raise SyncError(message, NETWORK_SECONDS)

    def config(self, start: PodStart, context: PodStartContext) -> pb.PodSandboxConfig:
        """Return the sandbox's CRI configuration. Raises SyncError."""
        try:
            return self._starter.sandbox_config(start.pod, start.actions.attempt, context)
        except (ContainerConfigError, OSError) as err:
            self._failed(start.pod, err)
            raise SyncError(str(err)) from err

    async def ensure(
        self, start: PodStart, config: pb.PodSandboxConfig, context: PodStartContext
    ) -> RunningSandbox:
        """Return the pod's sandbox, created if necessary. Raises SyncError."""
        pod, actions = start.pod, start.actions
        if not actions.create_sandbox:
            return RunningSandbox(actions.sandbox_id, start.observed.ips, config, context)
        self._history.note(pod.uid, "sandbox", "create")
        with child_span("createPodSandbox"), self._metrics.measure_sandbox_start(pod):
            sandbox_id, ips = await self._create(pod, config)
        where = ", ".join(ips) or "the host's network"
        self._history.note(pod.uid, "sandbox", f"running as {sandbox_id[:13]} with {where}")
        return RunningSandbox(sandbox_id, ips, config, context)

    async def _create(self, pod: Pod, config: pb.PodSandboxConfig) -> tuple[str, tuple[str, ...]]:
        try:
            handler = await self._handler_of(pod)
        except ObjectError as err:
            self._failed(pod, err)
            raise SyncError(str(err)) from err
        try:
            return await self._starter.run_sandbox(pod, config, handler)
        except CriError as err:
            raise SyncError(str(err)) from err

    def _failed(self, pod: Pod, err: Exception) -> None:
        self._history.event(pod, "Warning", "FailedCreatePodSandBox", f"Failed to create pod sandbox: {err}")

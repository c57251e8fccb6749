"""Start of pod sandboxes and containers, from the image to the postStart hook.

The pod syncer's stages call `ContainerStarter`. Each failure becomes a `StartError` with upstream's waiting
reason; the events are recorded here. No state is kept: after a restart of the kubelet, a container that was
created and never started is removed, and its attempt number is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pykubelet.api.pod import Container, Pod
from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.cm.devices.run_options import NO_DEVICE_OPTIONS, DeviceRunOptions
from pykubelet.cm.topology.hints import AllocationError
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.config_builder import ConfigBuilder, PodStartContext
from pykubelet.kuberuntime.configuration.container_images import ContainerImages
from pykubelet.kuberuntime.configuration.options import (
    CpusetAssigner,
    UnrestrictedAssigner,
    mounted_image_volumes,
)
from pykubelet.kuberuntime.errors import ContainerConfigError, ServicesNotSynced, StartError
from pykubelet.kuberuntime.kill import ContainerKiller, HookError, HookRunner
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observe import Observer, observed_container
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.pod_logs import PodLogs
from pykubelet.kuberuntime.removal import is_starting, remove_container
from pykubelet.logs import get_logger
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.transport.errors import CriError
from pykubelet.volumes.errors import VolumeError

log = get_logger(__name__)
STARTING_SECONDS = 0.5
"""Seconds until the retry while a start by a previous kubelet is still in progress."""
SERVICES_SECONDS = 1.0
"""Seconds until the retry while the cluster's services are not synced."""

IMAGE_VOLUME_MOUNT_FAILED = "ImageVolumeMountFailed"
"""Start of the runtime's message if it cannot mount an image volume (CRI)."""


class OnCreated(Protocol):
    """Callback for every sandbox and container as soon as it exists."""

    def __call__(self, uid: str, *ids: str) -> None:
        """Record the new IDs of a pod."""
        ...


class PostStartHooks:
    """Runs the postStart hooks of containers."""

    def __init__(self, hooks: HookRunner, killer: ContainerKiller, history: PodHistory) -> None:
        self._hooks = hooks
        self._killer = killer
        self._history = history

    async def run(self, pod: Pod, container: Container, container_id: str) -> None:
        """Run a container's postStart hook, if any; kill the container and raise StartError if it fails."""
        if container.lifecycle is None or container.lifecycle.post_start is None:
            return
        try:
            await self._hooks.run(pod, container, container_id, container.lifecycle.post_start)
        except HookError as err:
            log.error(
                err, "PostStart hook failed", pod=pod.full_name, podUID=pod.uid, containerName=container.name
            )
            where = field_of(pod, container.name)
            self._history.event(pod, "Warning", "FailedPostStartHook", "PostStartHook failed", where)
            target = ObservedContainer(id=container_id, name=container.name, phase="running")
            try:
                await self._killer.kill_container(pod, target, "FailedPostStartHook")
            except CriError as kill_err:
                log.error(kill_err, "Failed to kill container", pod=pod.full_name, containerID=container_id)
            raise StartError("PostStartHookError", str(err)) from err


@dataclass(frozen=True, slots=True)
class StartRecords:
    """Where starts are recorded: events of the pod and of the node, and metrics."""

    history: PodHistory
    node_event: Record = no_record
    metrics: StartMetrics = field(default_factory=StartMetrics)


class ContainerStarter:
    """Starts sandboxes and containers."""

    def __init__(
        self,
        cri: RuntimeConnection,
        observer: Observer,
        configs: ConfigBuilder,
        images: ContainerImages,
        logs: PodLogs,
        post_start: PostStartHooks,
        records: StartRecords,
        on_created: OnCreated,
        *,
        cpusets: CpusetAssigner | None = None,
    ) -> None:
        self._cri = cri
        self._observer = observer
        self._configs = configs
        self._images = images
        self._logs = logs
        self._post_start = post_start
        self._history = records.history
        self._node_event = records.node_event
        self._metrics = records.metrics
        self._on_created = on_created
        self._cpusets = cpusets or UnrestrictedAssigner()

    def sandbox_config(self, pod: Pod, attempt: int, context: PodStartContext) -> pb.PodSandboxConfig:
        """Return the config of the pod's sandbox. Raises ContainerConfigError and OSError."""
        return self._configs.sandbox_config(pod, attempt, context)

    async def run_sandbox(
        self, pod: Pod, config: pb.PodSandboxConfig, handler: str = ""
    ) -> tuple[str, tuple[str, ...]]:
        """Run the sandbox and return its ID and IP addresses. Raises CriError after recording an event."""
        for warning in self._configs.dns_warnings(pod):
            # A standalone node has no cluster DNS: static pods get no event for that.
            if not (warning.reason == "MissingClusterDNS" and is_static_pod(pod)):
                self._history.event(pod, "Warning", warning.reason, warning.message)
                if warning.node_message:
                    self._node_event("Warning", warning.reason, warning.node_message)
        self._logs.make_dir(pod)
        try:
            sandbox_id = await self._cri.runtime.run_pod_sandbox(config, handler)
        except CriError as err:
            message = f"Failed to create pod sandbox: {err.rpc_text}"
            self._history.event(pod, "Warning", "FailedCreatePodSandBox", message)
            raise
        self._on_created(pod.uid, sandbox_id)
        try:
            return sandbox_id, (await self._observer.observe_sandbox(sandbox_id)).ips
        except CriError as err:
            message = f"Unable to get pod sandbox status: {err.rpc_text}"
            self._history.event(pod, "Warning", "FailedPodSandBoxStatus", message)
            raise

    async def ensure_image(
        self, pod: Pod, container: Container, sandbox: pb.PodSandboxConfig
    ) -> PresentImage:
        """Ensure that the container's image is present. Raises StartError after recording an event."""
        return await self._images.ensure(pod, container, sandbox)

    async def prepare_devices(self, pod: Pod, container: Container) -> DeviceRunOptions:
        """Prepare a container's devices for its start. Raises StartError after recording an event."""
        try:
            return await self._configs.prepare_devices(pod, container)
        except AllocationError as err:
            self._failed(pod, container, str(err))
            raise StartError("CreateContainerConfigError", str(err)) from err

    async def start_container(
        self,
        pod: Pod,
        container: Container,
        image: PresentImage,
        sandbox_id: str,
        sandbox: pb.PodSandboxConfig,
        context: PodStartContext,
        ips: Sequence[str],
        observed: ObservedPod,
        device_options: DeviceRunOptions = NO_DEVICE_OPTIONS,
    ) -> str:
        """Create and start one container and return its ID. Raises StartError."""
        attempt = await self._attempt(pod, container, observed.latest(container.name))
        handler = self._observer.handler_of(sandbox_id)
        try:
            config = await self._configs.container_config(
                pod, container, image, attempt, context, ips, observed, sandbox, device_options, handler
            )
        except (ContainerConfigError, VolumeError, OSError) as err:
            self._failed(pod, container, str(err))
            wait = SERVICES_SECONDS if isinstance(err, ServicesNotSynced) else None
            raise StartError("CreateContainerConfigError", str(err), wait) from err
        image_volumes = mounted_image_volumes(pod, container, context.volumes)
        try:
            container_id = await self._cri.runtime.create_container(sandbox_id, config, sandbox)
        except CriError as err:
            failed = err.message.startswith(IMAGE_VOLUME_MOUNT_FAILED)
            self._metrics.record_image_volumes(container, image_volumes, failed=failed)
            self._failed(pod, container, err.rpc_text)
            raise StartError("CreateContainerError", err.rpc_text) from err
        self._metrics.record_image_volumes(container, image_volumes, failed=False)
        self._on_created(pod.uid, container_id)
        self._cpusets.on_container_created(pod, container, container_id, config.linux.resources.cpuset_cpus)
        where = field_of(pod, container.name)
        self._history.event(pod, "Normal", "Created", "Container created", where)
        try:
            await self._cri.runtime.start_container(container_id)
        except CriError as err:
            self._failed(pod, container, err.rpc_text)
            raise StartError("RunContainerError", err.rpc_text) from err
        self._history.event(pod, "Normal", "Started", "Container started", where)
        self._logs.link(pod, container, container_id, config.log_path)
        return container_id

    async def run_post_start_hook(self, pod: Pod, container: Container, container_id: str) -> None:
        """Run a container's postStart hook, if any; kill the container and raise StartError if it fails."""
        await self._post_start.run(pod, container, container_id)

    async def _attempt(self, pod: Pod, container: Container, last: ObservedContainer | None) -> int:
        """Return the attempt number of this start. Raises StartError while an earlier one is in progress."""
        if last is None:
            return self._logs.count_attempts(pod, container)
        if last.phase != "created" and not await self._never_ran(last):
            return last.restart_count + 1
        # Created and never started: the kubelet was killed in between. Its attempt number is reused.
        try:
            await remove_container(self._cri, last.id)
        except CriError as err:
            wait = STARTING_SECONDS if is_starting(err) else None
            raise StartError("CreateContainerError", err.rpc_text, wait) from err
        # Its empty log would count as a start if the kubelet were killed again before the next one. Not
        # before its removal: a start in progress may still succeed, and write to the log.
        self._logs.remove_if_empty(pod, container, last.attempt)
        return last.restart_count

    async def _never_ran(self, last: ObservedContainer) -> bool:
        """Return whether a container that was killed in state unknown has never run.

        A runtime that was killed together with the kubelet during a start may not know that earlier.
        """
        if last.phase != "unknown":
            return False
        try:
            status = (await self._cri.runtime.container_status(last.id)).status
        except CriError:
            return False
        return observed_container(status).phase == "created"

    def _failed(self, pod: Pod, container: Container, message: str) -> None:
        self._history.event(pod, "Warning", "Failed", f"Error: {message}", field_of(pod, container.name))

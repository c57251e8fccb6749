"""Start of pod sandboxes and containers, from the image to the postStart hook.

The pod syncer's executor calls `ContainerStarter`. Each failure becomes a `StartError` with upstream's
waiting reason; the events are recorded here. No state is kept: after a restart of the kubelet, a container
that was created and never started is removed, and its attempt number is used again.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pykubelet.api.pod import Container, Pod
from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.cm.devices.run_options import NOTHING, DeviceRunOptions
from pykubelet.cm.topology.hints import AllocationError
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.images.credentials import pull_secrets
from pykubelet.images.image_manager import ImageManager, PresentImage
from pykubelet.images.puller import ImageError
from pykubelet.kuberuntime.config import make_container_config, make_sandbox_config
from pykubelet.kuberuntime.dns import pod_dns
from pykubelet.kuberuntime.env import container_env, gather_env_sources
from pykubelet.kuberuntime.errors import ContainerConfigError, ServicesNotSynced
from pykubelet.kuberuntime.kill import ContainerKiller, HookError, HookRunner
from pykubelet.kuberuntime.mounts import hosts_file, should_mount_hosts_file, sub_path
from pykubelet.kuberuntime.observe import Observer, observed_container
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.options import (
    CpusetAssigner,
    IdMappings,
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
    UnrestrictedAssigner,
    block_volumes,
    mounted_image_volumes,
)
from pykubelet.kuberuntime.paths import (
    PodDirs,
    attempts_in_logs,
    container_log_path,
    legacy_log_link,
    pod_log_dir,
)
from pykubelet.kuberuntime.removal import is_starting, remove_container
from pykubelet.linux.mounts import remove_tree
from pykubelet.logs import get_logger
from pykubelet.objects.base import NoObjects, PodObjects
from pykubelet.objects.services import no_services
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.transport.errors import CriError
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.plugin import MountedVolume

log = get_logger(__name__)
STARTING_SECONDS = 0.5
"""Seconds until the retry while a start by a previous kubelet is still in progress."""
SERVICES_SECONDS = 1.0
"""Seconds until the retry while the cluster's services are not synced."""


class StartError(Exception):
    """A container could not be started; `reason` is the waiting reason of its status."""

    def __init__(self, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds until the retry, if known."""


SubPaths = Callable[
    [Pod, Container, Mapping[str, MountedVolume], Mapping[int, str]], Awaitable[dict[int, str]]
]
"""Prepares sub-paths of volumes for a container, by index of the mount. Raises VolumeError."""
GrantsOf = Callable[[Pod, Container], Awaitable[DeviceRunOptions]]
"""Returns the device options of a container that is about to start. Raises AllocationError."""


class OnCreated(Protocol):
    """Callback for every sandbox and container as soon as it exists."""

    def __call__(self, uid: str, *ids: str) -> None:
        """Record the new IDs of a pod."""
        ...


@dataclass(frozen=True, slots=True)
class PodStartContext:
    """Options shared by a pod's containers, gathered before the first of them starts."""

    cgroup_parent: str
    volumes: dict[str, MountedVolume]
    id_mappings: IdMappings | None = None
    extra_groups: tuple[int, ...] = ()


class ContainerStarter:
    """Starts sandboxes and containers."""

    def __init__(
        self,
        cri: RuntimeConnection,
        observer: Observer,
        node: RuntimeNodeOptions,
        dirs: PodDirs,
        images: ImageManager,
        hooks: HookRunner,
        killer: ContainerKiller,
        journal: PodHistory,
        on_created: OnCreated,
        sub_paths: SubPaths,
        read_resolv_conf: Callable[[], str | None],
        legacy_logs: Path | None,
        *,
        objects: PodObjects | None = None,
        services: Callable[[Pod], Mapping[str, str] | None] = no_services,
        grants: GrantsOf | None = None,
        shares: CpusetAssigner | None = None,
        node_event: Record = no_record,
    ) -> None:
        self._cri = cri
        self._observer = observer
        self._node = node
        self._dirs = dirs
        self._images = images
        self._hooks = hooks
        self._killer = killer
        self._journal = journal
        self._on_created = on_created
        self._sub_paths = sub_paths
        self._read_resolv_conf = read_resolv_conf
        self._legacy_logs = legacy_logs
        self._objects = objects or NoObjects()
        self._services = services
        self._grants = grants
        self._shares = shares or UnrestrictedAssigner()
        self._node_event = node_event

    def sandbox_config(self, pod: Pod, attempt: int, context: PodStartContext) -> pb.PodSandboxConfig:
        """Return the config of the pod's sandbox. Raises ContainerConfigError."""
        options = RunSandboxOptions(
            node=self._node,
            attempt=attempt,
            cgroup_parent=context.cgroup_parent,
            resolv_conf=self._read_resolv_conf(),
            id_mappings=context.id_mappings,
            extra_groups=context.extra_groups,
            exclusive_cpus=self._shares.has_exclusive(pod.uid),
        )
        return make_sandbox_config(pod, options)

    async def run_sandbox(
        self, pod: Pod, config: pb.PodSandboxConfig, handler: str = ""
    ) -> tuple[str, tuple[str, ...]]:
        """Run the sandbox and return its ID and IP addresses. Raises CriError after recording an event."""
        for warning in pod_dns(pod, self._node, self._read_resolv_conf()).warnings:
            # A standalone node has no cluster DNS: static pods get no event for that.
            if not (warning.reason == "MissingClusterDNS" and is_static_pod(pod)):
                self._journal.event(pod, "Warning", warning.reason, warning.message)
                if warning.node_message:
                    self._node_event("Warning", warning.reason, warning.node_message)
        logs = self._log_dir(pod)
        logs.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            sandbox_id = await self._cri.runtime.run_pod_sandbox(config, handler)
        except CriError as err:
            message = f"Failed to create pod sandbox: {err.rpc_text}"
            self._journal.event(pod, "Warning", "FailedCreatePodSandBox", message)
            raise
        self._on_created(pod.uid, sandbox_id)
        try:
            return sandbox_id, (await self._observer.observe_sandbox(sandbox_id)).ips
        except CriError as err:
            message = f"Unable to get pod sandbox status: {err.rpc_text}"
            self._journal.event(pod, "Warning", "FailedPodSandBoxStatus", message)
            raise

    async def ensure_image(
        self, pod: Pod, container: Container, sandbox: pb.PodSandboxConfig
    ) -> PresentImage:
        """Ensure that the container's image is present. Raises StartError after recording an event."""
        secrets = await pull_secrets(pod, self._objects, self._journal)
        try:
            return await self._images.ensure(pod, container, sandbox, secrets)
        except ImageError as err:
            self._event(pod, container, "Warning", "Failed", f"Error: {err.reason}")
            raise StartError(err.reason, err.message, err.retry_after) from err

    async def prepare_devices(self, pod: Pod, container: Container) -> DeviceRunOptions:
        """Prepare a container's devices for its start. Raises StartError after recording an event."""
        if self._grants is None:
            return NOTHING
        try:
            return await self._grants(pod, container)
        except AllocationError as err:
            self._event(pod, container, "Warning", "Failed", f"Error: {err}")
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
        grants: DeviceRunOptions = NOTHING,
    ) -> str:
        """Create and start one container and return its ID. Raises StartError."""
        attempt = await self._attempt(pod, container, observed.latest(container.name))
        handlers = self._node.recursive_handlers
        recursive = bool(handlers) and self._observer.handler_of(sandbox_id) in handlers
        config = await self._config(
            pod, container, image, attempt, context, ips, observed, sandbox, grants, recursive
        )
        try:
            container_id = await self._cri.runtime.create_container(sandbox_id, config, sandbox)
        except CriError as err:
            self._event(pod, container, "Warning", "Failed", f"Error: {err.rpc_text}")
            raise StartError("CreateContainerError", err.rpc_text) from err
        self._on_created(pod.uid, container_id)
        self._shares.on_container_created(pod, container, container_id, config.linux.resources.cpuset_cpus)
        self._event(pod, container, "Normal", "Created", "Container created")
        try:
            await self._cri.runtime.start_container(container_id)
        except CriError as err:
            self._event(pod, container, "Warning", "Failed", f"Error: {err.rpc_text}")
            raise StartError("RunContainerError", err.rpc_text) from err
        self._event(pod, container, "Normal", "Started", "Container started")
        self._link_log(pod, container, container_id, config.log_path)
        return container_id

    async def _config(
        self,
        pod: Pod,
        container: Container,
        image: PresentImage,
        attempt: int,
        context: PodStartContext,
        ips: Sequence[str],
        observed: ObservedPod,
        sandbox: pb.PodSandboxConfig,
        grants: DeviceRunOptions,
        recursive_read_only: bool,
    ) -> pb.ContainerConfig:
        hosts, termination = "", ""
        try:
            self._dirs.make(pod.uid)
            if should_mount_hosts_file(pod, ips):
                content = hosts_file(
                    pod, ips, self._node.cluster_domain, _node_hosts() if pod.spec.host_network else ""
                )
                hosts = str(self._dirs.write_hosts(pod.uid, content))
            if container.termination_message_path:
                termination = str(self._dirs.new_termination_log(pod.uid, container.name))
            sources = await gather_env_sources(self._objects, pod, container, context.volumes)
            options = RunContainerOptions(
                node=self._node,
                attempt=attempt,
                image_id=image.id,
                image_uid=image.uid,
                image_username=image.username,
                pod_ips=tuple(ips),
                id_mappings=context.id_mappings,
                extra_groups=context.extra_groups,
                target_id=_target(container, observed),
                hosts_file=hosts,
                termination_log=termination,
                volumes=context.volumes,
                recursive_read_only=recursive_read_only,
                service_env=self._services(pod),
                config_map=sources.config_map,
                secret=sources.secret,
                env_file=sources.file_value,
            )
            options = replace(
                options,
                block_volumes=block_volumes(context.volumes),
                image_volumes=await self._image_volumes(pod, container, context, sandbox),
                device_options=grants,
            )
            options = replace(options, sub_paths=await self._prepare_sub_paths(pod, container, options))
            share = self._shares.assignment_for(pod, container)
            options = replace(
                options,
                cpuset_cpus=share.cpus,
                cpuset_mems=share.memory_nodes,
                exclusive_cpus=share.exclusive,
            )
            return make_container_config(pod, container, options)
        except (ContainerConfigError, VolumeError, OSError) as err:
            self._event(pod, container, "Warning", "Failed", f"Error: {err}")
            wait = SERVICES_SECONDS if isinstance(err, ServicesNotSynced) else None
            raise StartError("CreateContainerConfigError", str(err), wait) from err

    async def _prepare_sub_paths(
        self, pod: Pod, container: Container, options: RunContainerOptions
    ) -> dict[int, str]:
        sub_path_mounts = [
            (index, mount)
            for index, mount in enumerate(container.volume_mounts)
            if (mount.sub_path or mount.sub_path_expr) and mount.name not in options.image_volumes
        ]
        if not sub_path_mounts:
            return {}
        env = container_env(pod, container, options)
        paths = {index: sub_path(mount, env) for index, mount in sub_path_mounts}
        return await self._sub_paths(
            pod, container, options.volumes, {i: path for i, path in paths.items() if path}
        )

    async def _image_volumes(
        self, pod: Pod, container: Container, context: PodStartContext, sandbox: pb.PodSandboxConfig
    ) -> dict[str, pb.ImageSpec]:
        """Ensure that a container's image volumes are present; return them by volume. Raises StartError."""
        images = mounted_image_volumes(pod, container, context.volumes)
        if not images:
            return {}
        secrets = await pull_secrets(pod, self._objects, self._journal)
        found = {}
        for name, (image, policy) in images.items():
            try:
                present = await self._images.ensure_image(
                    pod, image, policy, sandbox, secrets, where=field_of(pod, container.name)
                )
            except ImageError as err:
                message = f"volume {name}: {err.message}"
                self._event(pod, container, "Warning", "Failed", f"Error: {message}")
                raise StartError(err.reason, message, err.retry_after) from err
            found[name] = pb.ImageSpec(image=present.id, user_specified_image=image)
        return found

    async def run_post_start_hook(self, pod: Pod, container: Container, container_id: str) -> None:
        """Run a container's postStart hook, if any; kill the container and raise StartError if it fails."""
        if container.lifecycle is None or container.lifecycle.post_start is None:
            return
        try:
            await self._hooks.run(pod, container, container_id, container.lifecycle.post_start)
        except HookError as err:
            log.error(
                err, "PostStart hook failed", pod=pod.full_name, podUID=pod.uid, containerName=container.name
            )
            self._event(pod, container, "Warning", "FailedPostStartHook", "PostStartHook failed")
            target = ObservedContainer(id=container_id, name=container.name, phase="running")
            try:
                await self._killer.kill_container(pod, target, "FailedPostStartHook")
            except CriError as kill_err:
                log.error(kill_err, "Failed to kill container", pod=pod.full_name, containerID=container_id)
            raise StartError("PostStartHookError", str(err)) from err

    def remove_logs(self, pod: Pod) -> None:
        """Remove a pod's logs and all links to them; of an orphan only its UID must be known. Blocks.

        Failures are logged and left for the garbage collection of logs.
        """
        name, namespace = pod.metadata.name, pod.metadata.namespace
        if not name or not namespace:
            for directory in Path(self._node.pod_logs_dir).glob(f"*_{glob.escape(pod.uid)}"):
                _remove_log_dir(directory)
            return
        directory = self._log_dir(pod)
        _remove_log_dir(directory)
        if self._legacy_logs is not None and self._legacy_logs.is_dir():
            for link in self._legacy_logs.iterdir():
                is_pod_link = link.name.startswith(f"{name}_{namespace}_") and link.is_symlink()
                if is_pod_link and directory in link.readlink().parents:
                    link.unlink(missing_ok=True)

    async def _attempt(self, pod: Pod, container: Container, last: ObservedContainer | None) -> int:
        """Return the attempt number of this start. Raises StartError while an earlier one is in progress."""
        if last is None:
            directory = self._log_dir(pod) / container.name
            return attempts_in_logs(path.name for path in directory.iterdir()) if directory.is_dir() else 0
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
        log_file = self._log_dir(pod) / container_log_path(container.name, last.attempt)
        with contextlib.suppress(OSError):
            if not log_file.stat().st_size:
                log_file.unlink()
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

    def _log_dir(self, pod: Pod) -> Path:
        meta = pod.metadata
        return Path(pod_log_dir(self._node.pod_logs_dir, meta.namespace, meta.name, meta.uid))

    def _link_log(self, pod: Pod, container: Container, container_id: str, log_path: str) -> None:
        if self._legacy_logs is None:
            return
        target = self._log_dir(pod) / log_path
        name = legacy_log_link(pod.metadata.name, pod.metadata.namespace, container.name, container_id)
        try:
            if target.exists():
                self._legacy_logs.mkdir(parents=True, exist_ok=True)
                (self._legacy_logs / name).symlink_to(target)
        except OSError as err:
            log.error(err, "Failed to create legacy symbolic link", path=name, containerID=container_id)

    def _event(self, pod: Pod, container: Container, kind: str, reason: str, message: str) -> None:
        self._journal.event(
            pod, "Warning" if kind == "Warning" else "Normal", reason, message, field_of(pod, container.name)
        )


def _node_hosts() -> str:
    try:
        return Path("/etc/hosts").read_text()
    except FileNotFoundError:
        return ""


def _remove_log_dir(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as err:
        log.error(err, "Failed to remove pod logs directory", path=path)


def _target(container: Container, observed: ObservedPod) -> str:
    """Return the target container ID of an ephemeral container. Raises ContainerConfigError without one."""
    if not container.target_container_name:
        return ""
    target = observed.latest(container.target_container_name)
    if target is None:
        raise ContainerConfigError(f"unable to find target container {container.target_container_name}")
    return target.id

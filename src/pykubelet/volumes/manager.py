"""Volume manager: mounts, refreshes and unmounts the volumes of pods below the kubelet's root directory.

Pod workers call `PodVolumes`, one call at a time per pod. Mounting inspects the disk, unmounting the disk and
the mount table, so every operation can be repeated after any interruption, also by a kubelet process that
has never seen the pod. A pod's volumes are set up concurrently, and the error names each one that failed. A
volume's source comes from the pod's spec or from the persistent volume behind its claim (`pvc.py`); the
plugin of its type sets it up (`registry.py`).

File systems may block (an unreachable server, gigabytes to delete), so blocking work runs in threads. Work
that may hang is an operation (`operations.py`): the pod worker stops waiting for it at a deadline, and other
pods are not affected.

Errors are formatted as upstream's event texts, which users search for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from pykubelet.api.core import ObjectReference
from pykubelet.api.pod import Container, Pod
from pykubelet.api.volume import Volume
from pykubelet.logs import get_logger
from pykubelet.objects.base import PodObjects
from pykubelet.tracing.span import child_span
from pykubelet.util.tasks import TaskScope, in_own_thread
from pykubelet.volumes.attach import AttachedVolumes, ClusterNode
from pykubelet.volumes.csi.names import MIGRATED
from pykubelet.volumes.errors import (
    BadOptions,
    VolumeError,
    VolumeLimitExceeded,
    VolumePluginError,
    format_os_error,
    set_up_failure_text,
)
from pykubelet.volumes.local_claims import ClaimResolver, LocalClaimResolver
from pykubelet.volumes.metrics import VolumeMetrics, plugin_name
from pykubelet.volumes.mounts.block import global_map_path
from pykubelet.volumes.mounts.disks import FilesystemMismatch
from pykubelet.volumes.mounts.selinux import SELinuxAdmission
from pykubelet.volumes.mounts.sub_path import bind_sub_paths
from pykubelet.volumes.operations import FAILURES, OperationPending, PendingOperations, run_concurrently
from pykubelet.volumes.ownership import RecordEvent, record_no_event
from pykubelet.volumes.plugin import (
    MemoryLimits,
    MountedVolume,
    NodeView,
    VolumeHost,
    VolumeOptions,
    VolumePlugin,
    VolumeToMount,
)
from pykubelet.volumes.pvc import (
    ApiServerUnavailable,
    ClaimError,
    PvcResolver,
    is_exclusive,
    used_names,
    volume_group,
)
from pykubelet.volumes.registry import load_plugins
from pykubelet.volumes.unmounter import UNMOUNT_TIMEOUT_SECONDS, PodUnmounter, VolumeGarbageCollector
from pykubelet.volumes.volume_state import VolumeRecord, VolumeState

log = get_logger(__name__)
VOLUME_LIMIT_EXCEEDED = "VolumeAttachmentLimitExceeded"
"""Reason for rejecting a pod whose volume exceeds the node's volume limit."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Failure to set up a volume; `text` is for the pod's author."""

    text: str
    retry_after: float | None = None
    stage: Literal["claim", "slow", "mount", "full"] = "mount"
    """Failed stage: resolving the claim, timeout of the set-up, mounting, or the volume limit of the node."""


def problem_from(name: str, err: Exception, retry_after: float | None, *, block: bool) -> Problem:
    """Return the problem for an exception of a volume plugin; `block`: the volume is used as a device."""
    action = err.action if isinstance(err, VolumePluginError) else VolumePluginError.action
    reason = format_os_error(err) if isinstance(err, OSError) else err
    return Problem(set_up_failure_text(name, reason, action, block=block), retry_after)


def combine_problems(problems: Mapping[str, Problem]) -> VolumeError:
    """Combine all volumes' problems into one error: one text per failed mount, one for all the others."""
    texts = [problem.text for problem in problems.values() if problem.stage == "mount"]
    claims = sorted(name for name, problem in problems.items() if problem.stage == "claim")
    full = sorted(name for name, problem in problems.items() if problem.stage == "full")
    if waiting := {name: problem for name, problem in problems.items() if problem.stage != "mount"}:
        reasons = "; ".join(dict.fromkeys(problem.text for problem in waiting.values()))
        text = (
            f"unmounted volumes=[{' '.join(sorted(problems))}], unattached volumes=[{' '.join(full)}], "
            f"failed to process volumes=[{' '.join(claims)}]: {reasons}"
        )
        if full:
            return VolumeError(
                f"Node has reached its volume attachment limit, rejecting pod. {text}",
                rejection_reason=VOLUME_LIMIT_EXCEEDED,
            )
        texts.append(f"Unable to attach or mount volumes: {text}")
    delays = [problem.retry_after for problem in problems.values()]
    known = [delay for delay in delays if delay is not None]
    return VolumeError(*texts, retry_after=min(known) if len(known) == len(delays) else None)


class OperationRecorder:
    """Recorder of volume operations in the metrics, under the name of each volume's plugin."""

    def __init__(
        self, metrics: VolumeMetrics, plugins: Mapping[str, VolumePlugin], state: VolumeState
    ) -> None:
        self._metrics = metrics
        self._plugins = plugins
        self._state = state

    def record_existing(self, pod: Pod, used: Collection[str]) -> None:
        """Count a pod whose volumes a previous kubelet process mounted, unless it is already counted."""
        if pod.uid not in self._metrics.count:
            for volume in pod.spec.volumes:
                if volume.name in used:
                    self._metrics.count.record(
                        pod.uid, volume.name, self._plugin_name(pod, volume), mounted=True
                    )

    def record_mount(
        self,
        pod: Pod,
        volume: Volume,
        outcome: MountedVolume | Problem | None,
        started_at: float,
        *,
        refreshing: bool,
    ) -> None:
        """Record an attempt to mount or to refresh a volume; `started_at` is in event-loop time."""
        plugin, record = self._plugin_name(pod, volume), self._state.get(pod.uid, volume.name)
        succeeded = not isinstance(outcome, Problem)
        if refreshing:
            self._metrics.count.record(pod.uid, volume.name, plugin, mounted=succeeded)
        elif not isinstance(outcome, Problem) or outcome.stage != "claim":
            now = asyncio.get_running_loop().time()
            self._metrics.record_mount(
                pod.uid,
                volume.name,
                plugin,
                now - started_at,
                now - (record.since if record is not None else started_at),
                block=record is not None and record.volume.block,
                succeeded=succeeded,
            )

    def record_unmount(self, uid: str, plugin_dir: str, name: str, seconds: float, succeeded: bool) -> None:
        """Record the unmount of a pod's volume."""
        operation, plugin = "volume_unmount", plugin_name("", plugin_dir)
        for record in self._state.for_pod(uid):
            if record.volume.name == name:
                operation = "unmap_volume" if record.volume.block else operation
                plugin = plugin_name(record.volume.kind, plugin_dir, record.volume.source)
        self._metrics.record_operation(plugin, operation, seconds, succeeded=succeeded)

    def _plugin_name(self, pod: Pod, volume: Volume) -> str:
        record = self._state.get(pod.uid, volume.name)
        kind, source = "unknown", None
        if record is not None:
            kind, source = record.volume.kind, record.volume.source
        elif volume.sources:
            kind, source = volume.sources[0]
        return plugin_name(kind, self._plugins[kind].directory_name if kind in self._plugins else "", source)


MOUNT_TIMEOUT_SECONDS = 123.0
"""Seconds that a pod worker waits for a volume per attempt; offset from two minutes to be recognizable."""
SUB_PATH_TIMEOUT_SECONDS = 20.0
"""Seconds that a pod worker waits for the bind mounts of sub-paths."""
_SET_UP = "setting up"
_BIND = "binding parts"


class PodVolumes:
    """Volume manager: mounts, refreshes and unmounts pods' volumes below the kubelet's root directory."""

    def __init__(
        self,
        root: Path,
        *,
        objects: PodObjects,
        node: NodeView,
        memory: MemoryLimits,
        cluster: ClusterNode | None = None,
        options: VolumeOptions | None = None,
        record_event: RecordEvent = lambda pod, kind, reason, message: None,
        find_pod: Callable[[str], Pod | None] = lambda uid: None,
        tasks: TaskScope | None = None,
        metrics: VolumeMetrics | None = None,
    ) -> None:
        """Initialize with the kubelet's root directory and the dependencies of the volume plugins.

        `cluster`: None in standalone mode; `record_event` records events about pods; `find_pod` returns the
        pod with a uid, also a terminating one; `tasks`: the scope of operations that outlive their callers.
        """
        options = options or VolumeOptions()
        self._root = root
        self.metrics = metrics or VolumeMetrics()
        self._record_event = record_event
        self._record_object_event = cluster.record_object_event if cluster is not None else record_no_event
        self._listeners: list[Callable[[str], None]] = []
        api = cluster.api if cluster is not None else None
        self._operations = PendingOperations(tasks)
        self._state = VolumeState(root)
        self.attached = AttachedVolumes(
            cluster, options.node_name, self._state, lambda: self.plugins.values(), self._wake
        )
        host = VolumeHost(
            root,
            objects,
            node,
            memory,
            api=api,
            wake=self._wake,
            record_event=record_event,
            record_object_event=self._record_object_event,
            volume_health=cluster is not None and cluster.volume_health,
            on_ready=(cluster.on_in_use_change if cluster is not None else None) or (lambda: None),
            find_pod=find_pod,
            report_in_use=self.attached.report_in_use,
            attached_device=self.attached.attached_device,
            attaches_volumes=not self.attached.by_controller,
            request_cleanup=self._request_cleanup,
            metrics=self.metrics,
            checkpoints=cluster.checkpoints if cluster is not None else None,
            options=options,
        )
        self.plugins = load_plugins(host)
        node_labels = cluster.node_labels if cluster is not None else lambda: None
        self._pvc_resolver: ClaimResolver = PvcResolver(
            api, options.node_name, node_labels, plugin_types=self.plugins, checkpoints=host.checkpoints
        )
        if options.find_claim is not None:
            self._pvc_resolver = LocalClaimResolver(root, options.find_claim)
        self._recorder = OperationRecorder(self.metrics, self.plugins, self._state)
        self._unmounter = PodUnmounter(root, self.plugins, self._operations, self._recorder.record_unmount)
        self._se_linux = SELinuxAdmission(self.metrics.se_linux, all_modes=host.options.se_linux_mount)
        self._waiting_for_exclusive: set[str] = set()
        """Pods that wait for a ReadWriteOncePod volume of another pod."""
        self._garbage_collector = VolumeGarbageCollector(
            self.plugins, self._state, self._operations, self.attached.request_report
        )

    def add_listener(self, wake: Callable[[str], None]) -> None:
        """Call `wake` with the uid of a pod whose volumes can make progress; it must not block."""
        self._listeners.append(wake)

    def records_for_pod(self, uid: str) -> list[VolumeRecord]:
        """Return the records of a pod's volumes that are persistent or have a slow plugin."""
        return self._state.for_pod(uid)

    async def mount(self, pod: Pod) -> dict[str, MountedVolume]:
        """Ensure that all volumes that the pod's containers use are ready, and return them by name.

        Raises VolumeError, which describes each volume that is not.
        """
        mounts, devices = used_names(pod)
        used = mounts | devices
        return await self._set_up(pod, [volume for volume in pod.spec.volumes if volume.name in used])

    async def refresh(self, pod: Pod) -> None:
        """Bring the content of the pod's live volumes up to date; nothing is written if nothing has changed.

        Volumes that a previous kubelet process mounted are set up again, which changes nothing if they are
        intact. Raises VolumeError, which describes each volume that failed; it keeps its previous content.
        """
        mounts, devices = used_names(pod)
        used = mounts | devices
        stale = [
            volume for volume in pod.spec.volumes if volume.name in used and self._needs_refresh(pod, volume)
        ]
        self._recorder.record_existing(pod, used)
        if stale:
            await self._set_up(pod, stale, refreshing=True)

    async def sub_paths(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        """Bind-mount a container's sub-paths and return their paths on the host, by volume mount index.

        `paths` has the path inside the volume for each of the container's volume mounts, by index, that shows
        only a part. Raises VolumeError, whose text reveals nothing about the host.
        """
        if not any(paths.values()):
            return {}
        root = self._root.resolve()

        async def in_thread() -> dict[int, str]:
            return await in_own_thread(
                lambda: bind_sub_paths(root, pod, container, mounted, paths), name="sub-paths"
            )

        try:
            # Access to a volume whose server is down hangs; a retry joins the operation that hangs already.
            return await self._operations.run(
                f"{pod.uid}/sub-paths/{container.name}",
                _BIND,
                in_thread,
                timeout=SUB_PATH_TIMEOUT_SECONDS,
                use_backoff=False,
            )
        except OperationPending:
            names = sorted({container.volume_mounts[index].name for index, path in paths.items() if path})
            raise VolumeError(
                f'failed to prepare subPath for volumeMounts {names} of container "{container.name}": '
                "a volume does not answer: is a server behind it down?"
            ) from None

    async def unmount(self, uid: str) -> None:
        """Unmount all volumes of a pod, and delete those that share its lifetime. Raises VolumeError."""
        try:
            for what in (_SET_UP, _BIND):
                await self._operations.cancel(f"{uid}/", what, timeout=UNMOUNT_TIMEOUT_SECONDS)
        except OperationPending as err:
            raise VolumeError(f"UnmountVolume.TearDown failed for pod {uid} : {err}") from err
        # A set-up that left nothing in the pod's directory may have left something on the node.
        shared = await self._unmounter.unmount_pod(uid) or bool(self._state.for_pod(uid))
        self._operations.reset_backoff(f"{uid}/")
        self._state.unregister(uid)
        self.metrics.count.forget(uid)
        self.attached.forget(uid)
        self._se_linux.forget(uid)
        for waiting in sorted(self._waiting_for_exclusive - {uid}):
            self._wake(waiting)
        self._waiting_for_exclusive.clear()
        if shared:
            self._garbage_collector.request_run()

    async def run(self) -> NoReturn:
        """Release what pods shared of a volume after the last of them is gone, until cancelled."""
        await self._garbage_collector.run()

    async def unmount_unused(self) -> None:
        """Release what the node has of volumes that no pod uses any more; failures are only logged."""
        await self._garbage_collector.run_once()

    def _wake(self, uid: str) -> None:
        self._operations.reset_backoff(f"{uid}/")
        for listener in self._listeners:
            listener(uid)

    def _request_cleanup(self) -> None:
        self._garbage_collector.request_run()

    def _needs_refresh(self, pod: Pod, volume: Volume) -> bool:
        if volume.persistent_volume_claim is None and volume.ephemeral is None:
            kinds = ("csi" if self._is_migrated(kind) else kind for kind in volume.kinds)
            plugin = next((self.plugins[kind] for kind in kinds if kind in self.plugins), None)
            return plugin is not None and (plugin.live or (plugin.slow and self._is_not_mounted(pod, volume)))
        record = self._state.get(pod.uid, volume.name)
        return record is None or record.mounted is None or self.plugins[record.volume.kind].live

    def _is_migrated(self, kind: str) -> bool:
        """Return whether this volume type is migrated to CSI and has no plugin of its own."""
        return kind in MIGRATED and kind not in self.plugins

    def _is_not_mounted(self, pod: Pod, volume: Volume) -> bool:
        record = self._state.get(pod.uid, volume.name)
        return record is None or record.mounted is None

    async def _set_up(
        self, pod: Pod, volumes: Sequence[Volume], *, refreshing: bool = False
    ) -> dict[str, MountedVolume]:
        outcomes = await run_concurrently(
            [self._set_up_and_record(pod, volume, refreshing) for volume in volumes]
        )
        problems, mounted = {}, {}
        for volume, outcome in zip(volumes, outcomes, strict=True):
            if isinstance(outcome, Problem):
                problems[volume.name] = outcome
            elif outcome is not None:
                mounted[volume.name] = outcome
        if problems:
            raise combine_problems(problems)
        return mounted

    async def _set_up_and_record(
        self, pod: Pod, volume: Volume, refreshing: bool
    ) -> MountedVolume | Problem | None:
        started_at = asyncio.get_running_loop().time()
        with child_span("mountVolume", {"k8s.volume.name": volume.name}) as span:
            outcome = await self._set_up_volume(pod, volume, refreshing)
            if isinstance(outcome, Problem):
                span.fail(str(outcome))
        self._recorder.record_mount(pod, volume, outcome, started_at, refreshing=refreshing)
        return outcome

    async def _set_up_volume(
        self, pod: Pod, volume: Volume, refreshing: bool
    ) -> MountedVolume | Problem | None:
        """Set up one volume; return a failure instead of raising it, so that other volumes are set up too.

        None is for a volume that can wait: the pod runs with it, and only the API server is unavailable.
        """
        name, block = volume.name, False
        try:
            to_mount = await self._resolve(pod, volume)
            name, block = to_mount.name, to_mount.block
            plugin = self.plugins.get(to_mount.kind)
            if plugin is None:
                raise VolumePluginError(
                    f"its kind is {to_mount.kind}; supported are {', '.join(self.plugins)}"
                )
            if to_mount.block and not plugin.blocks:
                raise VolumePluginError(f"volumes of kind {to_mount.kind} cannot be had as block devices")
            if to_mount.mount_options and not plugin.options:
                raise BadOptions("mount options are not supported for this volume type")
            # These metrics separate plugin and driver with a slash, all others with a colon.
            metric_name = plugin_name(to_mount.kind, plugin.directory_name, to_mount.source).replace(":", "/")
            await self._se_linux.admit(to_mount, plugin, metric_name)
            if not plugin.slow and to_mount.persistent is None:
                return await plugin.set_up(to_mount)
            record = self._state.get(pod.uid, volume.name)
            mounted = await self._set_up_registered(plugin, to_mount)
            if block and not refreshing and (record is None or record.mounted is None):
                self._record_mapped(plugin, to_mount, mounted)
            return mounted
        except ApiServerUnavailable as err:
            return None if refreshing else Problem(str(err), stage="claim")
        except ClaimError as err:
            return Problem(str(err), stage="claim")
        except OperationPending:
            return Problem("context deadline exceeded", stage="slow")
        except VolumeLimitExceeded as err:
            record = self._state.get(pod.uid, volume.name)
            if record is None or asyncio.get_running_loop().time() - record.since < MOUNT_TIMEOUT_SECONDS:
                return self._problem(pod, name, err, block)
            return Problem("context deadline exceeded", stage="full")
        except FAILURES as err:
            return self._problem(pod, name, err, block)
        except Exception as err:  # third-party plugins may raise anything; the pod's author must see it
            log.exception(err, "Unexpected error from volume plugin", pod=pod.full_name, volumeName=name)
            return self._problem(pod, name, err, block)

    def _record_mapped(self, plugin: VolumePlugin, to_mount: VolumeToMount, mounted: MountedVolume) -> None:
        """Record events for a newly mapped device; mounts have no events, there are too many of them."""
        bound = mounted.bound or str(
            global_map_path(self._root.resolve(), plugin.directory_name, to_mount.name)
        )
        link = Path(mounted.device).parent
        for path in (f'globalMapPath "{bound}"', f'volumeMapPath "{link}"'):
            message = f'MapVolume.MapPodDevice succeeded for volume "{to_mount.name}" {path}'
            self._record_event(to_mount.pod, "Normal", "SuccessfulMountVolume", message)

    def _problem(self, pod: Pod, name: str, err: Exception, block: bool) -> Problem:
        left = self._operations.backoff_left(f"{pod.uid}/{name}", _SET_UP)
        return problem_from(name, err, left or None, block=block)

    async def _resolve(self, pod: Pod, volume: Volume) -> VolumeToMount:
        sources = volume.sources
        if len(sources) != 1:
            what = " and ".join(kind for kind, _ in sources) or "none that is known"
            raise VolumePluginError(f"its kind is {what}; supported are {', '.join(self.plugins)}")
        ((kind, source),) = sources
        if self._is_migrated(kind):
            from pykubelet.volumes.csi.translation import migrated_inline_volume

            return migrated_inline_volume(pod, volume)
        if kind not in ("persistentVolumeClaim", "ephemeral"):
            return VolumeToMount(pod, volume, kind, source, volume.name)
        try:
            return await self._pvc_resolver.resolve(pod, volume)
        except VolumePluginError as err:
            record = self._state.get(pod.uid, volume.name)
            if record is None or record.mounted is None:
                raise
            # The pod already has the volume: a deleted claim or changed labels of the node must not prevent
            # the restart of a container.
            log.v(2).info("Claim is no longer valid", pod=pod.full_name, volumeName=volume.name, err=str(err))
            return record.volume

    async def _plugin_set_up(self, plugin: VolumePlugin, to_mount: VolumeToMount) -> MountedVolume:
        """Call the plugin; a disk of another format is also an event about the persistent volume."""
        try:
            return await plugin.set_up(to_mount)
        except FilesystemMismatch as err:
            if to_mount.persistent is not None:
                meta = to_mount.persistent.metadata
                reference = ObjectReference(
                    kind="PersistentVolume",
                    api_version="v1",
                    name=meta.name,
                    uid=meta.uid,
                    resource_version=meta.resource_version,
                )
                message = f'MountVolume failed for volume "{to_mount.name}" {err}'
                self._record_object_event(reference, "Warning", "FailedMountOnFilesystemMismatch", message)
            raise

    async def _set_up_registered(self, plugin: VolumePlugin, to_mount: VolumeToMount) -> MountedVolume:
        """Set up and record a volume that is persistent or has a slow plugin."""
        persistent = to_mount.persistent
        if (
            persistent is not None
            and is_exclusive(persistent)
            and self._state.is_used_by_other_pod(to_mount, plugin.directory_name)
        ):
            self._waiting_for_exclusive.add(to_mount.uid)
            raise VolumePluginError(
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod"
            )
        record = self._state.register(to_mount)
        if plugin.slow:
            key = f"{to_mount.uid}/{to_mount.name}"
            mounted = await self._operations.run(
                key, _SET_UP, lambda: self._plugin_set_up(plugin, to_mount), timeout=MOUNT_TIMEOUT_SECONDS
            )
        else:
            mounted = await self._plugin_set_up(plugin, to_mount)
        named = to_mount.pod_volume.persistent_volume_claim
        mounted = replace(
            mounted,
            # Another volume of the pod may name the same claim without readOnly.
            read_only=mounted.read_only or (named is not None and named.read_only),
            group=volume_group(persistent),
            name=to_mount.name,
        )
        record.mounted = mounted
        if mounted.attached != record.attached:
            record.attached = mounted.attached
            self.attached.request_report()
        return mounted

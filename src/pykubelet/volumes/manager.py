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

from pykubelet.api.pod import Container, Pod
from pykubelet.api.volume import Volume
from pykubelet.apiserver.client import ApiClient
from pykubelet.logs import get_logger
from pykubelet.objects.base import PodObjects
from pykubelet.util.tasks import TaskScope, in_own_thread
from pykubelet.volumes.attach import AttachVerifier, VolumesInUseReporter
from pykubelet.volumes.block import global_folder
from pykubelet.volumes.csi.names import MIGRATED
from pykubelet.volumes.errors import (
    BadOptions,
    VolumeError,
    VolumeLimitExceeded,
    VolumePluginError,
    set_up_failed,
    told,
)
from pykubelet.volumes.metrics import VolumeMetrics, plugin_name
from pykubelet.volumes.operations import FAILURES, OperationPending, PendingOperations, side_by_side
from pykubelet.volumes.plugin import (
    FLEX_DRIVERS,
    MountedVolume,
    NodeView,
    VolumeHost,
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
from pykubelet.volumes.registry import make_kinds
from pykubelet.volumes.sub_path import bind_sub_paths
from pykubelet.volumes.unmounter import PATIENCE, PodUnmounter, VolumeGarbageCollector
from pykubelet.volumes.volume_state import VolumeRecord, VolumeState

log = get_logger(__name__)
NO_ROOM = "VolumeAttachmentLimitExceeded"
"""Reason for rejecting a pod whose volume exceeds the node's volume limit."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Failure to set up a volume; `text` is for the pod's author."""

    text: str
    retry_after: float | None = None
    stage: Literal["claim", "slow", "mount", "full"] = "mount"
    """Failed stage: resolving the claim, timeout of the set-up, mounting, or the volume limit of the node."""


def failed(name: str, err: Exception, retry_after: float | None, *, block: bool) -> Problem:
    """Return the problem for an exception of a volume plugin; `block`: the volume is used as a device."""
    action = err.action if isinstance(err, VolumePluginError) else VolumePluginError.action
    reason = told(err) if isinstance(err, OSError) else err
    return Problem(set_up_failed(name, reason, action, block=block), retry_after)


def told_together(problems: Mapping[str, Problem]) -> VolumeError:
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
                f"Node has reached its volume attachment limit, rejecting pod. {text}", refusal=NO_ROOM
            )
        texts.append(f"Unable to attach or mount volumes: {text}")
    pauses = [problem.retry_after for problem in problems.values()]
    known = [pause for pause in pauses if pause is not None]
    return VolumeError(*texts, retry_after=min(known) if len(known) == len(pauses) else None)


class OperationRecorder:
    """Recorder of volume operations in the metrics, under the name of each volume's plugin."""

    def __init__(
        self, metrics: VolumeMetrics, kinds: Mapping[str, VolumePlugin], holdings: VolumeState
    ) -> None:
        self._metrics = metrics
        self._kinds = kinds
        self._holdings = holdings

    def met(self, pod: Pod, used: Collection[str]) -> None:
        """Count a pod whose volumes a previous kubelet process mounted, unless it is already counted."""
        if pod.uid not in self._metrics.count:
            for volume in pod.spec.volumes:
                if volume.name in used:
                    self._metrics.count.note(pod.uid, volume.name, self._plugin(pod, volume), there=True)

    def tried(
        self,
        pod: Pod,
        volume: Volume,
        outcome: MountedVolume | Problem | None,
        began: float,
        *,
        refreshing: bool,
    ) -> None:
        """Record an attempt to mount or to refresh a volume; `began` is in event-loop time."""
        plugin, held = self._plugin(pod, volume), self._holdings.get(pod.uid, volume.name)
        well = not isinstance(outcome, Problem)
        if refreshing:
            self._metrics.count.note(pod.uid, volume.name, plugin, there=well)
        elif not isinstance(outcome, Problem) or outcome.stage != "claim":
            now = asyncio.get_running_loop().time()
            self._metrics.tried(
                pod.uid,
                volume.name,
                plugin,
                now - began,
                now - (held.since if held is not None else began),
                block=held is not None and held.wanted.block,
                well=well,
            )

    def unmounted(self, uid: str, folder: str, name: str, seconds: float, well: bool) -> None:
        """Record the unmount of a pod's volume."""
        operation, plugin = "volume_unmount", plugin_name("", folder)
        for holding in self._holdings.of(uid):
            if holding.wanted.name == name:
                operation = "unmap_volume" if holding.wanted.block else operation
                plugin = plugin_name(holding.wanted.kind, folder, holding.wanted.source)
        self._metrics.operated(plugin, operation, seconds, well=well)

    def _plugin(self, pod: Pod, volume: Volume) -> str:
        held = self._holdings.get(pod.uid, volume.name)
        kind, source = "unknown", None
        if held is not None:
            kind, source = held.wanted.kind, held.wanted.source
        elif volume.sources:
            kind, source = volume.sources[0]
        return plugin_name(kind, self._kinds[kind].folder if kind in self._kinds else "", source)


MOUNT_SECONDS = 123.0
"""Seconds that a pod worker waits for a volume per attempt; offset from two minutes to be recognizable."""
SUB_PATH_SECONDS = 20.0
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
        memory_limit: Callable[[Pod], int | None],
        allocatable_memory: int,
        pod_level: bool = True,
        api: ApiClient | None = None,
        node_name: str = "",
        node_labels: Callable[[], Mapping[str, str] | None] = lambda: None,
        image_volumes: bool = False,
        flex_drivers: Path | None = None,
        attach_detach: bool = True,
        tasks: TaskScope | None = None,
        metrics: VolumeMetrics | None = None,
    ) -> None:
        """Initialize with the kubelet's root directory and the dependencies of the volume plugins.

        `memory_limit` and `allocatable_memory`: memory limit of a pod and of all pods together (bytes);
        `pod_level`: whether pod-level resources count (`PodLevelResources`); `image_volumes`: whether the
        runtime mounts images; `flex_drivers`: the directory of FlexVolume drivers; `attach_detach`: whether
        the attach/detach controller attaches volumes (`enableControllerAttachDetach`); `tasks`: the scope of
        operations that outlive their callers.
        """
        self._root = root
        self.metrics = metrics or VolumeMetrics()
        self._listener: Callable[[str], None] = lambda uid: None
        self._teller: Callable[[Pod, Literal["Normal", "Warning"], str, str], None] | None = None
        self._finder: Callable[[str], Pod | None] = lambda uid: None
        self._reports = VolumesInUseReporter()
        self._attached: AttachVerifier | None = None
        if api is not None and attach_detach:
            self._attached = AttachVerifier(api, node_name, self._use, self._wake)
        given = VolumeHost(
            root,
            objects,
            node,
            memory_limit,
            allocatable_memory,
            pod_level,
            api=api,
            node_name=node_name,
            wake=self._wake,
            tell=self._tell,
            find=self._find,
            use=self._use,
            attached=self._attached_device,
            attaches=self._attached is None,
            sweep=self._sweep_soon,
            metrics=self.metrics,
            image_volumes=image_volumes,
            flex_drivers=flex_drivers or Path(FLEX_DRIVERS),
        )
        self.kinds = make_kinds(given)
        self._claims = PvcResolver(api, node_name, node_labels, given=self.kinds)
        self._operations = PendingOperations(tasks)
        self._holdings = VolumeState(root)
        self._counting = OperationRecorder(self.metrics, self.kinds, self._holdings)
        self._unmounting = PodUnmounter(root, self.kinds, self._operations, self._counting.unmounted)
        self._excluded: set[str] = set()
        """Pods that wait for a ReadWriteOncePod volume of another pod."""
        self._sweeping = VolumeGarbageCollector(self.kinds, self._holdings, self._operations)
        self._met_all = False
        """Whether all pods with volumes of previous kubelet processes have been seen."""

    def listen(
        self,
        wake: Callable[[str], None],
        tell: Callable[[Pod, Literal["Normal", "Warning"], str, str], None],
        find: Callable[[str], Pod | None] = lambda uid: None,
    ) -> None:
        """Set the callbacks: `wake` for a pod whose volumes can make progress, `tell` for events about pods.

        `find` returns the pod with a uid, also a terminating one.
        """
        self._listener, self._teller, self._finder = wake, tell, find

    def listen_in_use(self, changed: Callable[[], None]) -> None:
        """Set the callback for changes of `in_use`; the caller passes what was reported to `reported`."""
        self._reports.listen(changed)

    def reported(self, names: Sequence[str]) -> None:
        """Record the names that the API server has in the node's `status.volumesInUse`."""
        self._reports.reported(names)

    def node_changed(self, status: bytes) -> None:
        """Handle a change of the node's status, JSON from the API server: a volume may be attached now."""
        if self._attached is not None:
            self._attached.node_changed(status)

    def in_use(self) -> list[str] | None:
        """Return the names of the attached volumes that pods use; None while unknown.

        Until all pods of a previous kubelet process have been seen, the names that it reported are included.
        """
        earlier: Collection[str] = ()
        if not self._met_all:
            slow = {kind.folder for kind in self.kinds.values() if kind.slow and kind.folder}
            self._met_all = not self._holdings.unknown(slow)
            if not self._met_all:
                if self._reports.last is None:
                    return None
                earlier = self._reports.last
        try:
            known = {name for kind in self.kinds.values() for name in kind.in_use()}
        except Exception as err:  # also of third-party plugins: the node's status keeps its value
            log.error(err, "Failed to determine attached volumes in use")
            return None
        return sorted(known.union(self._holdings.attached(), earlier))

    def held(self, uid: str) -> list[VolumeRecord]:
        """Return the records of a pod's volumes that are persistent or have a slow plugin."""
        return self._holdings.of(uid)

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
        stale = [volume for volume in pod.spec.volumes if volume.name in used and self._is_stale(pod, volume)]
        self._counting.met(pod, used)
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
                patience=SUB_PATH_SECONDS,
                pauses=False,
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
                await self._operations.end(f"{uid}/", what, patience=PATIENCE)
        except OperationPending as err:
            raise VolumeError(f"UnmountVolume.TearDown failed for pod {uid} : {err}") from err
        # A set-up that left nothing in the pod's directory may have left something on the node.
        shared = await self._unmounting.pod(uid) or bool(self._holdings.of(uid))
        self._operations.forget(f"{uid}/")
        self._holdings.drop(uid)
        self.metrics.count.forget(uid)
        if self._attached is not None:
            self._attached.forget(uid)
        for waiting in sorted(self._excluded - {uid}):
            self._wake(waiting)
        self._excluded.clear()
        if shared:
            self._sweeping.soon()

    async def run(self) -> NoReturn:
        """Release what pods shared of a volume after the last of them is gone, until cancelled."""
        await self._sweeping.run(self._reports.changed)

    async def sweep(self) -> None:
        """Release what the node has of volumes that no pod uses any more; failures are only logged."""
        await self._sweeping.once()

    def _wake(self, uid: str) -> None:
        self._operations.forget(f"{uid}/")
        self._listener(uid)

    async def _use(self, wanted: VolumeToMount, name: str) -> None:
        """Report an attached volume as in use, before a pod uses it."""
        new = name not in self._holdings.attached()
        holding = self._holdings.get(wanted.uid, wanted.volume.name)
        if holding is not None:
            holding.attached = name
        await self._reports.wait(name, new=new)

    async def _attached_device(self, wanted: VolumeToMount, name: str) -> str:
        return await self._attached.device(wanted, name) if self._attached is not None else ""

    def _find(self, uid: str) -> Pod | None:
        return self._finder(uid)

    def _sweep_soon(self) -> None:
        self._sweeping.soon()

    def _tell(self, pod: Pod, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        if self._teller is not None:
            self._teller(pod, kind, reason, message)

    def _is_stale(self, pod: Pod, volume: Volume) -> bool:
        if volume.persistent_volume_claim is None and volume.ephemeral is None:
            kinds = ("csi" if self._is_migrated(kind) else kind for kind in volume.kinds)
            kind = next((self.kinds[kind] for kind in kinds if kind in self.kinds), None)
            return kind is not None and (kind.live or (kind.slow and self._is_new(pod, volume)))
        held = self._holdings.get(pod.uid, volume.name)
        return held is None or held.mounted is None or self.kinds[held.wanted.kind].live

    def _is_migrated(self, kind: str) -> bool:
        """Return whether this volume type is migrated to CSI and has no plugin of its own."""
        return kind in MIGRATED and kind not in self.kinds

    def _is_new(self, pod: Pod, volume: Volume) -> bool:
        held = self._holdings.get(pod.uid, volume.name)
        return held is None or held.mounted is None

    async def _set_up(
        self, pod: Pod, volumes: Sequence[Volume], *, refreshing: bool = False
    ) -> dict[str, MountedVolume]:
        outcomes = await side_by_side([self._counted(pod, volume, refreshing) for volume in volumes])
        problems, mounted = {}, {}
        for volume, outcome in zip(volumes, outcomes, strict=True):
            if isinstance(outcome, Problem):
                problems[volume.name] = outcome
            elif outcome is not None:
                mounted[volume.name] = outcome
        if problems:
            raise told_together(problems)
        return mounted

    async def _counted(self, pod: Pod, volume: Volume, refreshing: bool) -> MountedVolume | Problem | None:
        began = asyncio.get_running_loop().time()
        outcome = await self._one(pod, volume, refreshing)
        self._counting.tried(pod, volume, outcome, began, refreshing=refreshing)
        return outcome

    async def _one(self, pod: Pod, volume: Volume, refreshing: bool) -> MountedVolume | Problem | None:
        """Set up one volume; return a failure instead of raising it, so that other volumes are set up too.

        None is for a volume that can wait: the pod runs with it, and only the API server is unavailable.
        """
        name, block = volume.name, False
        try:
            wanted = await self._wanted(pod, volume)
            name, block = wanted.name, wanted.block
            kind = self.kinds.get(wanted.kind)
            if kind is None:
                raise VolumePluginError(f"its kind is {wanted.kind}; supported are {', '.join(self.kinds)}")
            if wanted.block and not kind.blocks:
                raise VolumePluginError(f"volumes of kind {wanted.kind} cannot be had as block devices")
            if wanted.mount_options and not kind.options:
                raise BadOptions("mount options are not supported for this volume type")
            if not kind.slow and wanted.persistent is None:
                return await kind.set_up(wanted)
            held = self._holdings.get(pod.uid, volume.name)
            mounted = await self._held(kind, wanted)
            if block and not refreshing and (held is None or held.mounted is None):
                self._tell_mapped(kind, wanted, mounted)
            return mounted
        except ApiServerUnavailable as err:
            return None if refreshing else Problem(str(err), stage="claim")
        except ClaimError as err:
            return Problem(str(err), stage="claim")
        except OperationPending:
            return Problem("context deadline exceeded", stage="slow")
        except VolumeLimitExceeded as err:
            held = self._holdings.get(pod.uid, volume.name)
            if held is None or asyncio.get_running_loop().time() - held.since < MOUNT_SECONDS:
                return self._failed(pod, name, err, block)
            return Problem("context deadline exceeded", stage="full")
        except FAILURES as err:
            return self._failed(pod, name, err, block)
        except Exception as err:  # third-party plugins may raise anything; the pod's author must see it
            log.exception(err, "Unexpected error from volume plugin", pod=pod.full_name, volumeName=name)
            return self._failed(pod, name, err, block)

    def _tell_mapped(self, kind: VolumePlugin, wanted: VolumeToMount, mounted: MountedVolume) -> None:
        """Record events for a newly mapped device; mounts have no events, there are too many of them."""
        bound = mounted.bound or str(global_folder(self._root.resolve(), kind.folder, wanted.name))
        link = Path(mounted.device).parent
        for place in (f'globalMapPath "{bound}"', f'volumeMapPath "{link}"'):
            message = f'MapVolume.MapPodDevice succeeded for volume "{wanted.name}" {place}'
            self._tell(wanted.pod, "Normal", "SuccessfulMountVolume", message)

    def _failed(self, pod: Pod, name: str, err: Exception, block: bool) -> Problem:
        left = self._operations.pause_left(f"{pod.uid}/{name}", _SET_UP)
        return failed(name, err, left or None, block=block)

    async def _wanted(self, pod: Pod, volume: Volume) -> VolumeToMount:
        sources = volume.sources
        if len(sources) != 1:
            what = " and ".join(kind for kind, _ in sources) or "none that is known"
            raise VolumePluginError(f"its kind is {what}; supported are {', '.join(self.kinds)}")
        ((kind, source),) = sources
        if self._is_migrated(kind):
            from pykubelet.volumes.csi.translation import migrated_inline_volume

            return migrated_inline_volume(pod, volume)
        if kind not in ("persistentVolumeClaim", "ephemeral"):
            return VolumeToMount(pod, volume, kind, source, volume.name)
        try:
            return await self._claims.wanted(pod, volume)
        except VolumePluginError as err:
            held = self._holdings.get(pod.uid, volume.name)
            if held is None or held.mounted is None:
                raise
            # The pod already has the volume: a deleted claim or changed labels of the node must not prevent
            # the restart of a container.
            log.v(2).info("Claim is no longer valid", pod=pod.full_name, volumeName=volume.name, err=str(err))
            return held.wanted

    async def _held(self, kind: VolumePlugin, wanted: VolumeToMount) -> MountedVolume:
        """Set up and record a volume that is persistent or has a slow plugin."""
        persistent = wanted.persistent
        if persistent is not None and is_exclusive(persistent) and self._holdings.others(wanted, kind.folder):
            self._excluded.add(wanted.uid)
            raise VolumePluginError(
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod"
            )
        holding = self._holdings.hold(wanted)
        if kind.slow:
            key = f"{wanted.uid}/{wanted.name}"
            mounted = await self._operations.run(
                key, _SET_UP, lambda: kind.set_up(wanted), patience=MOUNT_SECONDS
            )
        else:
            mounted = await kind.set_up(wanted)
        named = wanted.volume.persistent_volume_claim
        mounted = replace(
            mounted,
            # Another volume of the pod may name the same claim without readOnly.
            read_only=mounted.read_only or (named is not None and named.read_only),
            group=volume_group(persistent),
            name=wanted.name,
        )
        holding.mounted = mounted
        if mounted.attached != holding.attached:
            holding.attached = mounted.attached
            self._reports.changed()
        return mounted

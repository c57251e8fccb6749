"""Attachment of volumes to this node: waits for the attach/detach controller and reports volumes in use.

`AttachVerifier` waits until the node's `status.volumesAttached` lists a volume, before a plugin accesses its
disk. The controller attaches a disk to one node at a time, unless it may be shared: two nodes that mount the
same disk, one of which only seems to be dead, would corrupt it. The check also applies to volume types
without an attach operation (iscsi, fc), where the entry is the permission to use the disk. A waiting pod is
woken when the node's status changes. CSI volumes have VolumeAttachment objects instead
(`csi/volume_attachments.py`).

`VolumesInUseReporter` delays the use of a volume until the API server has it in the node's
`status.volumesInUse`. The controller does not detach volumes listed there; a volume that is mounted and not
yet listed could be detached under its mount. Pods without attachable volumes never wait.

`AttachedVolumes` combines both for the volume manager, and determines which volumes are in use for the node's
status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from pykubelet.apiserver.client import NODES, ApiClient
from pykubelet.apiserver.errors import KubeError
from pykubelet.logs import get_logger
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.volumes.csi.drivers import PodWaiters
from pykubelet.volumes.errors import NotAttached, VolumePluginError
from pykubelet.volumes.ownership import RecordObjectEvent, record_no_event
from pykubelet.volumes.plugin import VolumePlugin, VolumeToMount
from pykubelet.volumes.volume_state import VolumeState

log = get_logger(__name__)


class NodeUnknown(VolumePluginError):
    """Raised when the Node object, which lists the attached volumes, cannot be read."""

    action = NotAttached.action


class AttachVerifier:
    """Verifier that volumes are attached to this node."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        report_in_use: Callable[[VolumeToMount, str], Awaitable[None]],
        wake: Callable[[str], None],
    ) -> None:
        """Initialize with the API client and the node's name.

        `report_in_use` reports a volume as in use, and waits.
        """
        self._api = api
        self._node_name = node_name
        self._report_in_use = report_in_use
        self._waiting = PodWaiters(wake)

    async def attached_device(self, volume: VolumeToMount, name: str) -> str:
        """Return the device path (may be "") of an attached volume; `name` is its name in the node's status.

        Raises NotAttached while it is not attached, and VolumePluginError.
        """
        await self._report_in_use(volume, name)
        self._waiting.add(name, volume.uid)
        try:
            # Uncached: a volume that is being detached must not count as attached.
            node = await self._api.get(NODES, self._node_name)
        except KubeError as err:
            raise NodeUnknown(f"cannot see whether the volume is attached: {err}") from err
        for attached in node.status.volumes_attached:
            if attached.name == name:
                self._waiting.remove(name, volume.uid)
                return attached.device_path
        raise NotAttached(f"volume {name} is not attached according to the status of node {self._node_name}")

    def node_changed(self, status: bytes) -> None:
        """Wake the pods whose volumes the node's status, JSON from the API server, lists as attached."""
        if self._waiting:
            try:
                found = msgspec.json.decode(status, type=_NodeStatus).volumes_attached or ()
            except msgspec.MsgspecError as err:
                log.error(err, "Failed to decode volumesAttached of the node status")
                return
            self._waiting.wake_all(volume.name for volume in found)

    def forget(self, uid: str) -> None:
        """Remove a pod from the waiting pods."""
        self._waiting.forget(uid)


class _AttachedVolume(msgspec.Struct):
    name: str = ""


class _NodeStatus(msgspec.Struct, rename="camel"):
    volumes_attached: list[_AttachedVolume] | None = None


REPORT_TIMEOUT_SECONDS = 60.0


class NotReported(VolumePluginError):
    """Raised when the API server does not have a volume in `status.volumesInUse` in time."""

    action = "MountVolume.WaitForAttach failed"


class VolumesInUseReporter:
    """Reporter of `status.volumesInUse`; without a listener (standalone mode) nothing is reported."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        """Initialize with the callback that requests a new report."""
        self._on_change = on_change
        self._reported_names: set[str] = set()
        self._next_report = asyncio.Event()
        self.last_reported: frozenset[str] | None = None
        """Names last known to be in the node's status; None before the first report."""

    def request_report(self) -> None:
        """Request a new report."""
        if self._on_change is not None:
            self._on_change()

    def set_reported(self, names: Iterable[str]) -> None:
        """Record the names that the API server has just accepted."""
        self.last_reported = frozenset(names)
        self._reported_names = set(self.last_reported)
        current_report, self._next_report = self._next_report, asyncio.Event()
        current_report.set()

    async def wait_reported(self, name: str, *, new: bool) -> None:
        """Wait until a volume in use has been reported. Raises NotReported after REPORT_TIMEOUT_SECONDS.

        `new`: the volume is in use only from now on. Earlier reports then do not count, because one in flight
        may omit it.
        """
        if self._on_change is None:
            return
        if new:
            self._reported_names.discard(name)
            self._on_change()
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_SECONDS):
                while name not in self._reported_names:
                    await self._next_report.wait()
        except TimeoutError:
            raise NotReported(
                "Volume has not been added to the list of VolumesInUse in the node's volume status"
            ) from None


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """This node as a member of a cluster."""

    api: ApiClient
    node_labels: Callable[[], Mapping[str, str] | None] = lambda: None
    """Returns the labels of the Node object; None while they are unknown."""
    attach_detach: bool = True
    """Whether the attach/detach controller attaches volumes (`enableControllerAttachDetach`)."""
    on_in_use_change: Callable[[], None] | None = None
    """Requests a new report of `status.volumesInUse`; None if it is not reported."""
    record_object_event: RecordObjectEvent = record_no_event
    """Records an event about an object that is no pod."""
    checkpoints: Checkpoints | None = None
    """Checkpoints of pods with their claims; None without `--pod-checkpoint-dir`."""
    volume_health: bool = False
    """Whether volumes that CSI drivers report as abnormal become events (`CSIVolumeHealth`)."""


class AttachedVolumes:
    """Volumes attached to this node: verified before their use, and reported in `status.volumesInUse`."""

    def __init__(
        self,
        cluster: ClusterNode | None,
        node_name: str,
        state: VolumeState,
        plugins: Callable[[], Iterable[VolumePlugin]],
        wake: Callable[[str], None],
    ) -> None:
        """Initialize; `cluster` is None in standalone mode, `wake` wakes a pod whose volume is attached."""
        self._state = state
        self._plugins = plugins
        self._reporter = VolumesInUseReporter(cluster.on_in_use_change if cluster is not None else None)
        self._verifier: AttachVerifier | None = None
        if cluster is not None and cluster.attach_detach:
            self._verifier = AttachVerifier(cluster.api, node_name, self.report_in_use, wake)
        self._all_pods_seen = False
        """Whether all pods with volumes of previous kubelet processes have been seen."""

    @property
    def by_controller(self) -> bool:
        """Whether the attach/detach controller attaches volumes, and not the kubelet."""
        return self._verifier is not None

    def in_use(self) -> list[str] | None:
        """Return the names of the attached volumes that pods use; None while unknown.

        Until all pods of a previous kubelet process have been seen, the names that it reported are included.
        """
        previously_reported: Collection[str] = ()
        if not self._all_pods_seen:
            slow = {
                plugin.directory_name for plugin in self._plugins() if plugin.slow and plugin.directory_name
            }
            self._all_pods_seen = not self._state.pods_without_records(slow)
            if not self._all_pods_seen:
                if self._reporter.last_reported is None:
                    return None
                previously_reported = self._reporter.last_reported
        try:
            known = {name for plugin in self._plugins() for name in plugin.in_use()}
        except Exception as err:  # also of third-party plugins: the node's status keeps its value
            log.error(err, "Failed to determine attached volumes in use")
            return None
        return sorted(known.union(self._state.attached_names(), previously_reported))

    def set_reported(self, names: Iterable[str]) -> None:
        """Record the names that the API server has in the node's `status.volumesInUse`."""
        self._reporter.set_reported(names)

    def request_report(self) -> None:
        """Request a new report because `in_use` has changed."""
        self._reporter.request_report()

    def node_changed(self, status: bytes) -> None:
        """Handle a change of the node's status, JSON from the API server: a volume may be attached now."""
        if self._verifier is not None:
            self._verifier.node_changed(status)

    async def report_in_use(self, volume: VolumeToMount, name: str) -> None:
        """Report an attached volume as in use, before a pod uses it. Raises NotReported."""
        new = name not in self._state.attached_names()
        record = self._state.get(volume.uid, volume.pod_volume.name)
        if record is not None:
            record.attached = name
        await self._reporter.wait_reported(name, new=new)

    async def attached_device(self, volume: VolumeToMount, name: str) -> str:
        """Return the device path (may be "") of a volume that the attach/detach controller has attached.

        Raises NotAttached while it is not attached, and VolumePluginError.
        """
        return await self._verifier.attached_device(volume, name) if self._verifier is not None else ""

    def forget(self, uid: str) -> None:
        """Remove a pod from the pods that wait for an attached volume."""
        if self._verifier is not None:
            self._verifier.forget(uid)

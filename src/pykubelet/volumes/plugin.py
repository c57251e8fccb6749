"""Interface of volume plugins: what they receive, provide and return.

A plugin is one class, with one line in `registry.py`; a third-party plugin is found by its entry point and
receives the same `VolumeHost`. Plugins keep no state in memory about the volumes that they have set up: the
kubelet may be killed at any time, and the next process continues from what is on disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.storage import PersistentVolume, PersistentVolumeClaim
from pykubelet.api.volume import Volume
from pykubelet.apiserver.client import ApiClient
from pykubelet.objects.base import PodObjects
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.volumes.metrics import VolumeMetrics
from pykubelet.volumes.ownership import RecordEvent, RecordObjectEvent, record_no_event


@dataclass(frozen=True, slots=True)
class MountedVolume:
    """A volume of a pod that is ready to be mounted into containers."""

    path: str
    read_only: bool = False
    """Whether the volume is read-only, whatever the volume mount specifies."""
    relabel: bool = False
    """Whether its files may be relabelled for SELinux."""
    device: str = ""
    """Path of the block device on the host (`volumeMode: Block`); `path` is then empty."""
    bound: str = ""
    """Directory in which the device is bind-mounted for each pod; empty for the plugin's default."""
    attached: str = ""
    """Name of the volume in `status.volumesInUse`; empty for most volumes."""
    image: str = ""
    """Image that the runtime mounts by itself; `path` is then empty."""
    name: str = ""
    """Directory name if it is not the pod's name for the volume: the persistent volume's name."""
    group: int | None = None
    """Group that the pod's processes need to use the volume."""


FLEX_DRIVERS = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec"
"""Default directory of FlexVolume drivers."""


class NodeView(Protocol):
    """Data about the node that volumes expose to pods."""

    @property
    def host_ips(self) -> Sequence[str]:
        """IP addresses of the node, the preferred family first."""

    @property
    def allocatable(self) -> Resources:
        """Allocatable resources of the node."""

    @property
    def pod_level(self) -> bool:
        """Whether pod-level resources count (`PodLevelResources`)."""


@dataclass(slots=True)
class MemoryLimits:
    """Memory limits that bound the size of volumes in memory, in bytes."""

    for_pod: Callable[[Pod], int | None]
    """Returns the memory limit of a pod; None if it has none."""
    allocatable: int
    """Memory limit of all pods together."""

    def set_allocatable(self, allocatable: int) -> None:
        """Change the memory limit of all pods together, for volumes that are mounted afterwards."""
        self.allocatable = allocatable


async def _report_nothing(volume: VolumeToMount, name: str) -> None:
    """Report nothing, as in standalone mode."""


async def _no_attached_device(volume: VolumeToMount, name: str) -> str:
    """Return no device: in standalone mode no controller attaches volumes."""
    return ""


FindClaim = Callable[[str, str], PersistentVolumeClaim]
"""Returns a claim by namespace and name. Raises ObjectError."""


@dataclass(frozen=True, slots=True)
class VolumeOptions:
    """Settings of the node and abilities of its runtime that concern how volumes are mounted."""

    node_name: str = ""
    mounter: str = ""
    """Binary that mounts network file systems (`--experimental-mounter-path`); empty for `mount`."""
    se_linux_mount: bool = False
    """Whether volumes of all access modes are mounted with the pod's SELinux label (gate `SELinuxMount`)."""
    image_volumes: Callable[[], bool] = lambda: False
    """Returns whether the runtime mounts images by itself."""
    flex_drivers: Path = Path(FLEX_DRIVERS)
    """Directory of FlexVolume drivers (`--volume-plugin-dir`)."""
    find_claim: FindClaim | None = None
    """Returns the claims of a node without an API server."""


@dataclass(frozen=True, slots=True)
class VolumeHost:
    """Dependencies of volume plugins."""

    root: Path
    """Root directory of the kubelet."""
    objects: PodObjects
    node: NodeView
    memory: MemoryLimits
    api: ApiClient | None = None
    """API client; None in standalone mode."""
    wake: Callable[[str], None] = lambda uid: None
    """Wakes a pod's worker (by uid) immediately: a prerequisite of one of its volumes is met."""
    record_event: RecordEvent = lambda pod, kind, reason, message: None
    """Records an event about a pod."""
    record_object_event: RecordObjectEvent = record_no_event
    """Records an event about another object."""
    volume_health: bool = False
    """Whether volumes that CSI drivers report as abnormal become events (`CSIVolumeHealth`)."""
    on_ready: Callable[[], None] = lambda: None
    """Called when a plugin's reason why the node is not ready is resolved."""
    find_pod: Callable[[str], Pod | None] = lambda uid: None
    """Returns the pod with this uid, also a terminating one; None if it is unknown."""
    report_in_use: Callable[[VolumeToMount, str], Awaitable[None]] = _report_nothing
    """Reports an attached volume in `status.volumesInUse`, and waits for it. Raises VolumePluginError."""
    attached_device: Callable[[VolumeToMount, str], Awaitable[str]] = _no_attached_device
    """Returns the device as which the attach/detach controller has attached a volume.

    Reports the volume, by its name in the node's status, as in use first. Raises VolumeNotReady while it is
    not attached, and VolumePluginError.
    """
    attaches_volumes: bool = True
    """Whether the kubelet attaches volumes itself: standalone, or not `enableControllerAttachDetach`."""
    request_cleanup: Callable[[], None] = lambda: None
    """Requests a call of all plugins' `unmount_unused` soon."""
    metrics: VolumeMetrics = field(default_factory=VolumeMetrics)
    checkpoints: Checkpoints | None = None
    """Checkpoints of pods and their objects; None without `--pod-checkpoint-dir`."""
    options: VolumeOptions = field(default_factory=VolumeOptions)


@dataclass(frozen=True, slots=True)
class VolumeToMount:
    """A volume that a pod requires, from its spec or from the persistent volume behind its claim."""

    pod: Pod
    pod_volume: Volume
    """Volume in the pod's spec; its name is the one in events and volume mounts."""
    kind: str
    """API field of the source: `emptyDir`, `csi`, `nfs`, `local`."""
    source: Any
    """Struct of that source (`api/volume.py`)."""
    name: str
    """Directory name: the pod's name for the volume, or the persistent volume's name."""
    persistent: PersistentVolume | None = None
    claim: PersistentVolumeClaim | None = None
    read_only: bool = False
    """Whether the volume is read-only, whatever a volume mount specifies."""
    block: bool = False
    """Whether the volume is used as a device (`volumeMode: Block`)."""
    mount_options: tuple[str, ...] = ()

    @property
    def uid(self) -> str:
        """UID of the pod."""
        return self.pod.uid


class VolumePlugin(Protocol):
    """Plugin that provides the volumes of one type."""

    @property
    def directory_name(self) -> str:
        """Directory of this plugin in a pod's `volumes`; "" if its volumes are elsewhere.

        Its content belongs to the kubelet, which mounted or wrote it, and is unmounted and deleted with the
        pod.
        """

    @property
    def live(self) -> bool:
        """Whether the content follows its source: setting up again then brings it up to date."""

    @property
    def slow(self) -> bool:
        """Whether binaries, servers or devices are involved, which may take long, hang or be expensive.

        What is done to a volume is then an operation (`operations.py`): one at a time per volume, with an
        exponential back-off after failures, and it continues when the pod worker stops waiting. Other plugins
        are fast and are called directly.
        """

    @property
    def blocks(self) -> bool:
        """Whether its volumes can be used as block devices; if not, such volumes are rejected before."""

    @property
    def options(self) -> bool:
        """Whether it supports mount options; if not, volumes with options are rejected before."""

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Ensure that a volume is ready; idempotent at any time and after any interruption.

        Raises VolumePluginError, ValueError, ObjectError or OSError, whose text is for the pod's author;
        VolumeNotReady if `VolumeHost.wake` will be called when a retry can succeed.
        """

    async def tear_down(self, uid: str, name: str) -> None:
        """Undo what `set_up` did beyond mounts and files in `pods/<uid>/volumes/<directory_name>/<name>`.

        Called for each directory found on disk, also by a kubelet process that has never seen the pod;
        general unmounting and deletion follow. Raises as `set_up` does.
        """

    def in_use(self) -> Collection[str]:
        """Return the names (`status.volumesInUse`) of attached volumes that are in use.

        Determined from the disk: volumes of a previous kubelet process count, and volumes that only the node
        still has mounted, so that they are not detached. Blocks briefly.
        """

    async def unmount_unused(self, in_use: Collection[str]) -> None:
        """Release what the node has of volumes (by `VolumeToMount.name`) that no pod uses any more.

        Staged mounts, iSCSI sessions and the like; called periodically. Raises as `set_up` does.
        """


class BaseVolumePlugin:
    """Defaults of most plugins: a volume is completely in the pod's directory, without state on the node."""

    directory_name = ""
    live = False
    slow = True
    blocks = False
    options = False

    async def tear_down(self, uid: str, name: str) -> None:
        """Do nothing: unmounting and deletion suffice."""

    def in_use(self) -> Collection[str]:
        """Return nothing: these volumes are not attached."""
        return ()

    async def unmount_unused(self, in_use: Collection[str]) -> None:
        """Do nothing: there is no state beyond the pods' directories."""

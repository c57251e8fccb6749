"""What a kind of volume is: one file with one class, and one line in `kinds.py`.

A kind keeps nothing in memory about the volumes it gave: the agent may be killed at any time, and
another one, or the same, looks at the disk and goes on. A kind of somebody else's is found by its entry
point (`kinds.py`) and is made of the same `VolumeHost`.

The result of mounting, as the makers of containers need it.
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
from pykubelet.volumes.metrics import VolumeMetrics
from pykubelet.volumes.ownership import Tell


@dataclass(frozen=True, slots=True)
class MountedVolume:
    """A volume of the pod that is ready to be mounted into containers."""

    path: str
    read_only: bool = False
    """The volume cannot be written, whatever the mount says."""
    relabel: bool = False
    """Its files may be relabelled for SELinux."""
    device: str = ""
    """The block device on the host, of a volume that is wanted as one; then `path` is empty."""
    bound: str = ""
    """The folder in which the device is bound for each pod; empty for the usual one of its kind."""
    attached: str = ""
    """The name by which the volume is in use on this node (`status.volumesInUse`); most have none."""
    image: str = ""
    """The image that the runtime shall mount by itself; then `path` is empty."""
    name: str = ""
    """The name of its folder if it is another than the pod's own name for it: the persistent volume's."""
    group: int | None = None
    """A group that the pod's processes need to use the volume."""


FLEX_DRIVERS = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec"
"""Where the drivers of FlexVolume usually are."""


class NodeView(Protocol):
    """What volumes tell pods about their node."""

    @property
    def host_ips(self) -> Sequence[str]:
        """The node's addresses, the preferred family first."""

    @property
    def allocatable(self) -> Resources:
        """What pods may use together."""


async def _use_untold(wanted: VolumeToMount, name: str) -> None:
    """Tell nobody, as on a node that belongs to no cluster."""


async def _attached_by_nobody(wanted: VolumeToMount, name: str) -> str:
    """Wait for nobody, as on a node that belongs to no cluster."""
    return ""


@dataclass(frozen=True, slots=True)
class VolumeHost:
    """All that kinds are made of."""

    root: Path
    """The agent's root directory."""
    objects: PodObjects
    node: NodeView
    memory_limit: Callable[[Pod], int | None]
    """What a pod's memory is bounded by, in bytes."""
    allocatable_memory: int
    """What all pods' memory is bounded by, in bytes."""
    pod_level: bool
    """Whether resources of the whole pod count (`PodLevelResources`)."""
    api: ApiClient | None = None
    """The API server; None for a node that belongs to no cluster."""
    node_name: str = ""
    wake: Callable[[str], None] = lambda uid: None
    """Has a pod's worker look again at once: what a volume of the pod (by its uid) waited for is there."""
    tell: Tell = lambda pod, kind, reason, message: None
    """Records an event about a pod."""
    find: Callable[[str], Pod | None] = lambda uid: None
    """Gives the pod with this uid, also one that ends; None when nobody knows it."""
    use: Callable[[VolumeToMount, str], Awaitable[None]] = _use_untold
    """Has the node's status name an attached volume as in use, and waits for it; raises KindError."""
    attached: Callable[[VolumeToMount, str], Awaitable[str]] = _attached_by_nobody
    """Gives the device that the cluster's controllers have attached a volume as, by its name in the node's
    status, after telling that it will be in use; raises NotYet while they have not, and KindError."""
    attaches: bool = True
    """Whether the node attaches volumes itself: it belongs to no cluster, or its controllers shall not."""
    sweep: Callable[[], None] = lambda: None
    """Has all kinds sweep soon."""
    metrics: VolumeMetrics = field(default_factory=VolumeMetrics)
    image_volumes: bool = False
    """Whether the runtime mounts images by itself."""
    flex_drivers: Path = Path(FLEX_DRIVERS)
    """The folder of the drivers of FlexVolume (`--volume-plugin-dir`)."""


@dataclass(frozen=True, slots=True)
class VolumeToMount:
    """A volume that a pod wants, wherever it was found: in its spec, or behind its claim."""

    pod: Pod
    volume: Volume
    """As the pod's spec has it: its name is the one in events and mounts."""
    kind: str
    """The API's name of the kind of the source: `emptyDir`, `csi`, `nfs`, `local`."""
    source: Any
    """The struct of that source (`api/volume.py`, `api/volume_sources.py`, `api/persistent.py`)."""
    name: str
    """The folder's name: the pod's own name for the volume, or the persistent volume's name."""
    persistent: PersistentVolume | None = None
    claim: PersistentVolumeClaim | None = None
    read_only: bool = False
    """Whatever a mount says, it cannot be written."""
    block: bool = False
    """It is wanted as a device (`volumeMode: Block`)."""
    mount_options: tuple[str, ...] = ()

    @property
    def uid(self) -> str:
        """The pod's uid."""
        return self.pod.uid


class VolumePlugin(Protocol):
    """Gives volumes of one kind."""

    @property
    def folder(self) -> str:
        """The folder of this kind in a pod's `volumes`; "" when volumes lie elsewhere.

        What is in it is the agent's own, mounted or written by it: with the pod it is unmounted and
        deleted.
        """

    @property
    def live(self) -> bool:
        """Whether the content follows its source: then setting up again brings it up to date."""

    @property
    def slow(self) -> bool:
        """Whether programs, servers or devices have a say, so that it may take long, hang or cost much.

        Then what is done to a volume is an operation of its own (`operations.py`): one at a time for
        each volume, with a growing pause after a failure, and it goes on when the pod's worker has
        given up waiting. The others are quick, and are simply done.
        """

    @property
    def blocks(self) -> bool:
        """Whether its volumes can be had as block devices; others are refused before."""

    @property
    def options(self) -> bool:
        """Whether mount options mean something to it; others are refused before."""

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Have a volume ready; harmless to repeat, at any time and after any interruption.

        Raises KindError, ValueError, ObjectError or OSError, whose text is for the pod's author; NotYet
        when `VolumeHost.wake` will be called as soon as there is something to try again for.
        """

    async def take_down(self, uid: str, name: str) -> None:
        """Undo what `set_up` did beyond mounts and files in `pods/<uid>/volumes/<folder>/<name>`.

        Called for each folder that is found on disk, also by an agent that never saw the pod; the
        general unmounting and deleting follows. Raises as `set_up` does.
        """

    def in_use(self) -> Collection[str]:
        """Give the names (`status.volumesInUse`) of the volumes that somebody attached and that are in use.

        By what is on disk, also those of an agent before this one, and those that only the node has
        still: nobody detaches them meanwhile. Blocks for a moment.
        """

    async def sweep(self, in_use: Collection[str]) -> None:
        """Take down what the node has of volumes (by `VolumeToMount.name`) that none of its pods has any
        more.

        Staged mounts, logins and the like; called now and then. Raises as `set_up` does.
        """


class BaseVolumePlugin:
    """What most kinds are like: all of a volume lies in the pod's folder, and the node has nothing else."""

    folder = ""
    live = False
    slow = True
    blocks = False
    options = False

    async def take_down(self, uid: str, name: str) -> None:
        """Do nothing: unmounting and deleting is all that is needed."""

    def in_use(self) -> Collection[str]:
        """Give nothing: nobody attaches these volumes."""
        return ()

    async def sweep(self, in_use: Collection[str]) -> None:
        """Do nothing: there is nothing beyond the pods."""

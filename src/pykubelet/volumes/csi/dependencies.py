"""Dependencies and helpers that the CSI mounter and the CSI block mapper share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pykubelet.api.pod import Pod
from pykubelet.pluginmanager.client import PluginError, PluginUnreachable
from pykubelet.volumes.csi.drivers import CsiDriverInformer, Drivers
from pykubelet.volumes.csi.names import KIND, attachment_name
from pykubelet.volumes.csi.paths import CsiPaths, VolumeData
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublishStore, UnpublishDeadlines
from pykubelet.volumes.csi.request_context import CsiRequestContext
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.csi.volume_attachments import Attachments
from pykubelet.volumes.errors import VolumePluginError, format_os_error
from pykubelet.volumes.metrics import VolumeMetrics
from pykubelet.volumes.operations import Locks, run_concurrently
from pykubelet.volumes.ownership import RecordEvent


@dataclass(frozen=True, slots=True)
class CsiDependencies:
    """Collaborators and state that the mounter, the block mapper and the expander share."""

    paths: CsiPaths
    node_name: str
    drivers: Drivers
    informer: CsiDriverInformer
    attachments: Attachments
    request_context: CsiRequestContext
    pending_unpublishes: PendingUnpublishStore
    metrics: VolumeMetrics
    record_event: RecordEvent
    """Records an event about a pod."""
    find_pod: Callable[[str], Pod | None]
    """Returns the pod with this UID, also a terminating one; None if it is unknown."""
    locks: Locks
    """Locks by unique volume name."""
    on_pending_unpublish: Callable[[], None]
    """Called after a pending unpublish call was stored and its volume was removed from the pod."""
    deadlines: UnpublishDeadlines = field(default_factory=UnpublishDeadlines)
    se_linux_mount: bool = False
    """Whether volumes of all access modes are mounted with SELinux labels (gate `SELinuxMount`)."""
    staged: set[str] = field(default_factory=set)
    """Unique names of the volumes that this process has staged; others are staged again."""

    def record_warning(self, uid: str, reason: str, message: str) -> None:
        """Record a warning event about the pod with this UID, if the pod is known."""
        pod = self.find_pod(uid)
        if pod is not None:
            self.record_event(pod, "Warning", reason, message)

    @contextmanager
    def record_operation(self, driver: str, operation: str) -> Iterator[None]:
        """Record duration and outcome of a node-wide operation on a driver's volume in the metrics."""
        clock = asyncio.get_running_loop().time
        started, succeeded = clock(), False
        try:
            yield
            succeeded = True
        finally:
            self.metrics.record_operation(
                f"{KIND}:{driver}", operation, clock() - started, succeeded=succeeded
            )

    def volume_data(self, volume: CsiVolume, label: str = "") -> VolumeData:
        """Return the content of `vol_data.json` for a pod's volume."""
        return VolumeData(
            volume_handle=volume.handle,
            driver_name=volume.driver,
            spec_vol_id=volume.volume_to_mount.name,
            node_name=self.node_name,
            attachment_id=attachment_name(volume.handle, volume.driver, self.node_name),
            volume_lifecycle_mode=volume.mode,
            se_linux_mount_context=label,
        )


UnstageOperations = dict[str, Callable[[], Coroutine[Any, Any, None]]]
"""Operations that unstage unused volumes, by unique readable names."""


async def run_operations(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all operations concurrently. Raises one VolumePluginError with the reasons of all failures."""

    async def run(operation: Coroutine[Any, Any, None]) -> str:
        try:
            await operation
        except OSError as err:
            return format_os_error(err)
        except VolumePluginError as err:
            return str(err)
        return ""

    results = await run_concurrently([run(operation) for operation in work])
    if failures := [failure for failure in results if failure]:
        raise VolumePluginError("; ".join(failures))


class DriverCallError(VolumePluginError):
    """Raised when a call to a driver failed; `is_final` is that of PluginError.

    `was_reached`: a gRPC server listens on the driver's socket.
    """

    def __init__(self, text: str, action: str, *, is_final: bool, was_reached: bool) -> None:
        super().__init__(text)
        self.action = action
        self.is_final = is_final
        self.was_reached = was_reached


@contextmanager
def driver_call(prefix: str = "", action: str = VolumePluginError.action) -> Iterator[None]:
    """Convert PluginError to DriverCallError; `prefix` and `action` describe the operation in events."""
    try:
        yield
    except PluginError as err:
        was_reached = not isinstance(err, PluginUnreachable)
        raise DriverCallError(
            f"{prefix}{err}", action, is_final=err.is_final, was_reached=was_reached
        ) from err

"""Client of the gRPC Node service of a CSI driver, with plain types for requests and responses.

Each call ends within two minutes. This is the only module of the package that uses protobuf messages.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from google.protobuf.message import Message

from pykubelet.pluginmanager.client import PluginError, call_plugin
from pykubelet.volumes.csi import csi_pb2 as pb
from pykubelet.volumes.csi.names import CONDITION, SINGLE_NODE_MULTI_WRITER
from pykubelet.volumes.csi.types import Context, DriverUsage, NodeFacts, VolumeCapability

TIMEOUT_SECONDS = 120.0
OnCall = Callable[[str, str, float], None]
"""Called after each call with its full path, its gRPC code (`NotFound`) and its duration in seconds."""
Response = TypeVar("Response", bound=Message)
_Mode = pb.VolumeCapability.AccessMode.Mode
_MODES = {
    "ReadWriteOnce": _Mode.SINGLE_NODE_WRITER,
    "ReadOnlyMany": _Mode.MULTI_NODE_READER_ONLY,
    "ReadWriteMany": _Mode.MULTI_NODE_MULTI_WRITER,
    "ReadWriteOncePod": _Mode.SINGLE_NODE_WRITER,
}

# For drivers that distinguish several pods on one node from a single pod.
_EXACT_MODES = _MODES | {
    "ReadWriteOnce": _Mode.SINGLE_NODE_MULTI_WRITER,
    "ReadWriteOncePod": _Mode.SINGLE_NODE_SINGLE_WRITER,
}


class NodeClient:
    """Client of one driver; caches the driver's capabilities, which cannot change while it runs."""

    def __init__(
        self,
        endpoint: str,
        timeout: float = TIMEOUT_SECONDS,
        on_call: OnCall = lambda method, code, seconds: None,
    ) -> None:
        """Initialize with the path of the driver's socket; `on_call` is called after each call."""
        self.endpoint = endpoint
        self._on_call = on_call
        self._timeout = timeout
        self._capabilities: frozenset[str] | None = None

    async def info(self) -> NodeFacts:
        """Call NodeGetInfo. All methods raise PluginError."""
        response = await self._call("NodeGetInfo", pb.NodeGetInfoRequest(), pb.NodeGetInfoResponse)
        return NodeFacts(
            response.node_id, response.max_volumes_per_node, dict(response.accessible_topology.segments)
        )

    async def capabilities(self) -> frozenset[str]:
        """Return the driver's capabilities by their CSI names, calling NodeGetCapabilities the first time."""
        if self._capabilities is None:
            response = await self._call(
                "NodeGetCapabilities", pb.NodeGetCapabilitiesRequest(), pb.NodeGetCapabilitiesResponse
            )
            names = pb.NodeServiceCapability.RPC.Type
            known = set(names.values())
            self._capabilities = frozenset(
                names.Name(capability.rpc.type)
                for capability in response.capabilities
                if capability.rpc.type in known
            )
        return self._capabilities

    async def stage(self, handle: str, path: str, capability: VolumeCapability, context: Context) -> None:
        """Call NodeStageVolume, which prepares a volume for all pods of this node."""
        request = pb.NodeStageVolumeRequest(
            volume_id=handle,
            staging_target_path=path,
            volume_capability=await self._capability(capability),
            publish_context=context.published,
            volume_context=context.attributes,
            secrets=context.secrets,
        )
        await self._call("NodeStageVolume", request, pb.NodeStageVolumeResponse)

    async def unstage(self, handle: str, path: str) -> None:
        """Call NodeUnstageVolume; idempotent."""
        request = pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=path)
        await self._call("NodeUnstageVolume", request, pb.NodeUnstageVolumeResponse)

    async def publish(
        self,
        handle: str,
        path: str,
        staged: str,
        capability: VolumeCapability,
        context: Context,
        *,
        read_only: bool,
    ) -> None:
        """Call NodePublishVolume for one pod; `staged` is the staging path, empty if it is not staged."""
        request = pb.NodePublishVolumeRequest(
            volume_id=handle,
            target_path=path,
            staging_target_path=staged,
            volume_capability=await self._capability(capability),
            readonly=read_only,
            publish_context=context.published,
            volume_context=context.attributes,
            secrets=context.secrets,
        )
        await self._call("NodePublishVolume", request, pb.NodePublishVolumeResponse)

    async def unpublish(self, handle: str, path: str) -> None:
        """Call NodeUnpublishVolume; idempotent."""
        request = pb.NodeUnpublishVolumeRequest(volume_id=handle, target_path=path)
        await self._call("NodeUnpublishVolume", request, pb.NodeUnpublishVolumeResponse)

    async def expand(
        self,
        handle: str,
        path: str,
        staged: str,
        capability: VolumeCapability,
        secrets: dict[str, str],
        size: int,
    ) -> None:
        """Call NodeExpandVolume to expand a volume and its file system to at least `size` bytes."""
        request = pb.NodeExpandVolumeRequest(
            volume_id=handle,
            volume_path=path,
            staging_target_path=staged,
            capacity_range=pb.CapacityRange(required_bytes=size),
            volume_capability=await self._capability(capability),
            secrets=secrets,
        )
        await self._call("NodeExpandVolume", request, pb.NodeExpandVolumeResponse)

    async def usage(self, handle: str, path: str) -> DriverUsage:
        """Call NodeGetVolumeStats; the condition is included if the driver supports VOLUME_CONDITION."""
        request = pb.NodeGetVolumeStatsRequest(volume_id=handle, volume_path=path)
        response = await self._call("NodeGetVolumeStats", request, pb.NodeGetVolumeStatsResponse)
        has_condition = CONDITION in await self.capabilities()
        if not has_condition and not response.usage:
            raise PluginError("Internal", "failed to get usage from response. usage is nil")
        by_unit = {usage.unit: usage for usage in response.usage}
        space = by_unit.get(pb.VolumeUsage.BYTES, pb.VolumeUsage())
        inodes = by_unit.get(pb.VolumeUsage.INODES, pb.VolumeUsage())
        return DriverUsage(
            capacity=space.total,
            available=space.available,
            used=space.used,
            inodes=inodes.total,
            inodes_free=inodes.available,
            inodes_used=inodes.used,
            abnormal=response.volume_condition.abnormal if has_condition else None,
            message=response.volume_condition.message if has_condition else "",
        )

    async def _capability(self, capability: VolumeCapability) -> pb.VolumeCapability:
        exact = SINGLE_NODE_MULTI_WRITER in await self.capabilities()
        mode = (_EXACT_MODES if exact else _MODES).get(capability.access_mode, _Mode.UNKNOWN)
        access = pb.VolumeCapability.AccessMode(mode=mode)
        if capability.block:
            return pb.VolumeCapability(access_mode=access, block=pb.VolumeCapability.BlockVolume())
        mount = pb.VolumeCapability.MountVolume(
            fs_type=capability.fs_type,
            mount_flags=capability.mount_options,
            volume_mount_group="" if capability.group is None else str(capability.group),
        )
        return pb.VolumeCapability(access_mode=access, mount=mount)

    async def _call(self, method: str, request: Message, response_type: type[Response]) -> Response:
        path, started, code = f"/csi.v1.Node/{method}", perf_counter(), "Canceled"
        try:
            response = await call_plugin(self.endpoint, path, request, response_type, timeout=self._timeout)
            code = "OK"
        except PluginError as err:
            code = err.code
            raise
        finally:
            self._on_call(path, code, perf_counter() - started)
        return response

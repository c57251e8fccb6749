"""Runs the test driver: `python -m tests.support.csi_driver --folder DIR --registry DIR`; see `--help`.

It serves CSI's Node service and registers with the agent. The requests it received are in `calls.jsonl`, its
misbehaviour is in `behaviour.json`, which is read at each call:

    {"hang": ["NodePublishVolume"], "late": {"NodeStageVolume": 0.5}, "die": ["NodeUnpublishVolume"],
     "fail": {"NodePublishVolume": ["INVALID_ARGUMENT", "no such thing"]}, "abnormal": "the disk is on fire"}
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from pykubelet.pluginmanager import registration_pb2
from pykubelet.volumes.csi import csi_pb2 as pb
from tests.support.csi_driver.backend import SIZE, Backend, hide, is_mounted, show
from tests.support.plugin_server import Scripted

STAGE, STATS, EXPAND = "STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS", "EXPAND_VOLUME"


class Failure(Exception):
    """A response that is an error: the code's name and a text."""


class Driver(Scripted):
    """Serves calls, or misbehaves as configured."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.folder)
        self.args = args
        self.endpoint = str(self.folder / "csi.sock")
        self.backend = Backend(self.folder / "volumes")

    def abilities(self) -> list[str]:
        found = [STATS, EXPAND, *self.args.ability]
        return found if self.args.no_stage else [STAGE, *found]

    # Registration

    def GetInfo(self, _: Message) -> Message:
        return registration_pb2.PluginInfo(
            type=self.args.type,
            name=self.args.name,
            endpoint=self.endpoint,
            supported_versions=self.args.versions.split(","),
        )

    def NotifyRegistrationStatus(self, _: Message) -> Message:
        return registration_pb2.RegistrationStatusResponse()

    # Node

    def NodeGetInfo(self, _: Message) -> Message:
        topology = dict(pair.split("=") for pair in self.args.topology)
        return pb.NodeGetInfoResponse(
            node_id=self.args.node_id,
            max_volumes_per_node=int(self.behaviour().get("limit", self.args.limit)),
            accessible_topology=pb.Topology(segments=topology),
        )

    def NodeGetCapabilities(self, _: Message) -> Message:
        return pb.NodeGetCapabilitiesResponse(
            capabilities=[
                pb.NodeServiceCapability(rpc=pb.NodeServiceCapability.RPC(type=name))
                for name in self.abilities()
            ]
        )

    def NodeStageVolume(self, request: Any) -> Message:
        staging = Path(request.staging_target_path)
        if not staging.is_dir():
            raise Failure("INVALID_ARGUMENT", f"{staging} is not there")
        if request.volume_capability.HasField("block"):
            self._device(request)
        elif self._is_disk(request):
            show(self._device(request), staging, options="rw")
        else:
            show(str(self.backend.directory(request.volume_id)), staging)
        return pb.NodeStageVolumeResponse()

    def NodeUnstageVolume(self, request: Any) -> Message:
        staging = Path(request.staging_target_path)
        if is_mounted(staging) or not any(staging.iterdir() if staging.is_dir() else ()):
            hide(staging)
        self.backend.release(request.volume_id)
        return pb.NodeUnstageVolumeResponse()

    def NodePublishVolume(self, request: Any) -> Message:
        target = Path(request.target_path)
        if not target.parent.is_dir():
            raise Failure("INVALID_ARGUMENT", f"{target.parent} is not there")
        options = "bind,ro" if request.readonly else "bind"
        if request.volume_capability.HasField("block"):
            show(self._device(request), target, file=True)
        elif STAGE in self.abilities() and request.staging_target_path:
            if not is_mounted(Path(request.staging_target_path)):
                raise Failure("FAILED_PRECONDITION", "the volume is not staged")
            show(request.staging_target_path, target, options=options)
        elif self._is_disk(request):
            show(self._device(request), target, options="ro" if request.readonly else "rw")
        else:
            source = self.backend.directory(request.volume_id)
            (source / "context.json").write_text(json.dumps(dict(request.volume_context)))
            show(str(source), target, options=options)
        return pb.NodePublishVolumeResponse()

    def NodeUnpublishVolume(self, request: Any) -> Message:
        hide(Path(request.target_path))
        if STAGE not in self.abilities():
            self.backend.release(request.volume_id)
        return pb.NodeUnpublishVolumeResponse()

    def NodeExpandVolume(self, request: Any) -> Message:
        size = request.capacity_range.required_bytes
        self.backend.grow(request.volume_id, size, with_files=not request.volume_capability.HasField("block"))
        return pb.NodeExpandVolumeResponse(capacity_bytes=size)

    def NodeGetVolumeStats(self, request: Any) -> Message:
        found = os.statvfs(request.volume_path)
        space = pb.VolumeUsage(
            unit=pb.VolumeUsage.BYTES,
            total=found.f_blocks * found.f_frsize,
            available=found.f_bavail * found.f_frsize,
            used=(found.f_blocks - found.f_bfree) * found.f_frsize,
        )
        inodes = pb.VolumeUsage(
            unit=pb.VolumeUsage.INODES,
            total=found.f_files,
            available=found.f_ffree,
            used=found.f_files - found.f_ffree,
        )
        message = self.behaviour().get("abnormal", "")
        condition = pb.VolumeCondition(abnormal=bool(message), message=message)
        return pb.NodeGetVolumeStatsResponse(usage=[space, inodes], volume_condition=condition)

    def _is_disk(self, request: Any) -> bool:
        return request.volume_context.get("type") == "disk" or bool(request.volume_capability.mount.fs_type)

    def _device(self, request: Any) -> str:
        size = int(request.volume_context.get("size", SIZE))
        block = request.volume_capability.HasField("block")
        return self.backend.device(request.volume_id, size, format_as="" if block else "ext4")

    # Serving

    async def reply(self, name: str, request: Message, context: Any) -> Message:
        try:
            answer: Message = await asyncio.to_thread(getattr(self, name), request)
        except Failure as err:
            await context.abort(grpc.StatusCode[err.args[0]], err.args[1])
            raise
        except OSError as err:
            await context.abort(grpc.StatusCode.INTERNAL, str(err))
            raise
        return answer

    async def serve(self) -> None:
        """Serve until told to end; the sockets go with it, as a polite driver's do."""
        node = pb.DESCRIPTOR.services_by_name["Node"]
        registration = registration_pb2.DESCRIPTOR.services_by_name["Registration"]
        names = [self.args.name, *(f"{self.args.name}-again" for _ in range(self.args.twice))]
        sockets = [(Path(self.endpoint), node)]
        sockets += [(self.args.registry / f"{name}-reg.sock", registration) for name in names]
        servers = []
        for path, service in sockets:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((self.handlers(service),))
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            servers.append(server)
        print("serving", flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await ended.wait()
        for server in servers:
            await server.stop(None)
        for path, _ in sockets:
            path.unlink(missing_ok=True)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="volumes, socket, calls, behaviour")
    parser.add_argument("--registry", type=Path, required=True, help="the agent's plugins_registry")
    parser.add_argument("--name", default="test.csi.example.com")
    parser.add_argument("--type", default="CSIPlugin")
    parser.add_argument("--versions", default="1.0.0")
    parser.add_argument("--node-id", default="node-one")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--topology", action="append", default=[], help="KEY=VALUE")
    parser.add_argument("--ability", action="append", default=[], help="another one, by the protocol's name")
    parser.add_argument("--no-stage", action="store_true", help="cannot stage")
    parser.add_argument("--twice", action="store_true", help="register by a second socket, too")
    asyncio.run(Driver(parser.parse_args()).serve())
    sys.exit(0)


main()

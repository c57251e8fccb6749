"""Runs the test plugin: `python -m tests.support.device_plugin --folder DIR --kubelet DIR`; see `--help`.

It registers with the agent, and again when the agent's socket is another. The requests it received are in
`calls.jsonl`; what it has and how it misbehaves in `behaviour.json`, which it looks at all the time:

    {"devices": {"d1": "Healthy", "d2": "Unhealthy"}, "nodes": {"d1": [0]}, "hang": ["Allocate"],
     "die": ["PreStartContainer"], "fail": {"Allocate": ["INVALID_ARGUMENT", "no"]}, "prefer": ["d2"],
     "answers": 0, "end_list": true}
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from pykubelet.cm.devices import device_plugin_pb2 as pb
from pykubelet.pluginmanager import registration_pb2
from tests.support.plugin_server import Scripted

LOOK_SECONDS = 0.02


class Plugin(Scripted):
    """Serves calls, or misbehaves as configured."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.folder)
        self.args = args

    # Registration, through the directory of all plugins

    def GetInfo(self, _: Message) -> Message:
        return registration_pb2.PluginInfo(
            type="DevicePlugin",
            name=self.args.resource,
            endpoint=self.endpoint(),
            supported_versions=[self.args.version],
        )

    def NotifyRegistrationStatus(self, _: Message) -> Message:
        return registration_pb2.RegistrationStatusResponse()

    # DevicePlugin

    def GetDevicePluginOptions(self, _: Message) -> Message:
        return pb.DevicePluginOptions(
            pre_start_required=self.args.pre_start, get_preferred_allocation_available=self.args.prefers
        )

    def GetPreferredAllocation(self, request: Any) -> Message:
        answer = pb.PreferredAllocationResponse()
        answer.container_responses.add(deviceIDs=self.behaviour().get("prefer", []))
        return answer

    def Allocate(self, request: Any) -> Message:
        answer = pb.AllocateResponse()
        for wanted in request.container_requests[: self.behaviour().get("answers", 1)]:
            ids = list(wanted.devices_ids)
            given = answer.container_responses.add(
                envs={"TEST_DEVICES": ",".join(ids), "TEST_PLUGIN": self.args.mark},
                annotations={"example.com/devices": ",".join(ids)},
            )
            given.mounts.add(container_path="/plugin", host_path=str(self.folder / "data"), read_only=True)
            for one in ids:
                given.devices.add(container_path=f"/dev/{one}", host_path=self.node_of(one), permissions="rw")
                if self.args.cdi:
                    given.cdi_devices.add(name=f"example.com/dongle={one}")
        return answer

    def PreStartContainer(self, _: Message) -> Message:
        return pb.PreStartContainerResponse()

    async def ListAndWatch(self, _: Message, context: Any) -> AsyncIterator[Message]:
        told = None
        while not self.behaviour().get("end_list"):
            behaviour = self.behaviour()
            now = pb.ListAndWatchResponse()
            for one, health in behaviour.get("devices", dict.fromkeys(self.args.device, "Healthy")).items():
                nodes = behaviour.get("nodes", {}).get(one)
                topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes]) if nodes else None
                now.devices.add(ID=one, health=health, topology=topology)
            if now != told:
                told = now
                yield now
            await asyncio.sleep(LOOK_SECONDS)

    def node_of(self, device: str) -> str:
        """The device's node: one that the test has made, or /dev/null."""
        made = self.folder / "nodes" / device
        return str(made) if made.exists() else "/dev/null"

    # Serving

    def endpoint(self) -> str:
        return str(self.args.kubelet / self.args.socket)

    async def register(self) -> None:
        """Tell the agent; what it says is written down."""
        async with grpc.aio.insecure_channel(f"unix://{self.args.kubelet / 'kubelet.sock'}") as channel:
            call = channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=pb.Empty.FromString,
            )
            request = pb.RegisterRequest(
                version=self.args.version, endpoint=self.args.socket, resource_name=self.args.resource
            )
            said = "registered"
            try:
                await call(request, timeout=60)
            except grpc.aio.AioRpcError as err:
                said = f"{err.code().name}: {err.details()}"
        with (self.folder / "registrations.txt").open("a") as file:
            file.write(f"{said}\n")

    async def serve(self) -> Any:
        """Listen on a fresh socket."""
        Path(self.endpoint()).unlink(missing_ok=True)
        server = grpc.aio.server()
        services = (*pb.DESCRIPTOR.services_by_name.values(),)
        services += (*registration_pb2.DESCRIPTOR.services_by_name.values(),)
        server.add_generic_rpc_handlers([self.handlers(one) for one in services])
        server.add_insecure_port(f"unix://{self.endpoint()}")
        await server.start()
        return server

    async def run(self) -> None:
        server = await self.serve()
        print("serving", flush=True)
        if self.args.registry is not None:
            (self.args.registry / "dongle.sock").symlink_to(self.endpoint())
            await server.wait_for_termination()
        registered = 0
        while True:
            try:
                agent = (self.args.kubelet / "kubelet.sock").stat().st_ctime_ns
            except FileNotFoundError:
                agent = 0
            if agent and agent != registered:
                # A new agent has cleared the directory, as every plugin knows.
                await server.stop(0)
                server, registered = await self.serve(), agent
                await self.register()
            await asyncio.sleep(LOOK_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="its own")
    parser.add_argument("--kubelet", type=Path, required=True, help="the agent's folder of device plugins")
    parser.add_argument("--registry", type=Path, help="the folder of all plugins; register there instead")
    parser.add_argument("--resource", default="example.com/dongle")
    parser.add_argument("--socket", default="dongle.sock")
    parser.add_argument("--version", default="v1beta1")
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--mark", default="first", help="tells plugins apart")
    parser.add_argument("--pre-start", action="store_true")
    parser.add_argument("--prefers", action="store_true")
    parser.add_argument("--cdi", action="store_true")
    args = parser.parse_args()
    (args.folder / "data").mkdir(parents=True, exist_ok=True)
    args.kubelet.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    asyncio.run(Plugin(args).run())


main()

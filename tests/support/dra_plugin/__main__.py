"""Runs the test driver: `python -m tests.support.dra_plugin --folder DIR --registry DIR`; see `--help`.

It registers with the agent, prepares the requested claims and stores them in `prepared.json`. The requests
it received are in `calls.jsonl`; how it misbehaves in `behaviour.json`, which is read at each call:

    {"hang": ["NodePrepareResources"], "late": {"NodePrepareResources": 0.5}, "die": ["NodePrepareResources"],
     "fail": {"NodePrepareResources": ["INTERNAL", "no"]}, "refuse": {"claim-name": "no such thing"},
     "skip": ["claim-name"], "unknown": true, "health": {"pool/dev": ["HEALTHY", "fine"]}, "end_health": true}
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from pykubelet.cm.dra import dra_health_pb2
from pykubelet.cm.dra import dra_pb2 as pb
from pykubelet.pluginmanager import registration_pb2
from tests.support.plugin_server import Scripted

LOOK_SECONDS = 0.02


class Driver(Scripted):
    """Serves calls, or misbehaves as configured."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.folder, by=args.instance)
        self.args = args
        self.endpoint = self.folder / f"{args.instance}.sock"
        self.registration = args.registry / f"{args.name}-{args.instance}-reg.sock"

    # Registration

    def GetInfo(self, _: Message) -> Message:
        return registration_pb2.PluginInfo(
            type="DRAPlugin",
            name=self.args.name,
            endpoint=str(self.endpoint),
            supported_versions=self.args.versions.split(","),
        )

    def NotifyRegistrationStatus(self, _: Message) -> Message:
        return registration_pb2.RegistrationStatusResponse()

    # DRAPlugin

    def NodePrepareResources(self, request: Any) -> Message:
        answer = pb.NodePrepareResourcesResponse()
        behaviour = self.behaviour()
        prepared = self.prepared()
        for claim in request.claims:
            if claim.name in behaviour.get("skip", ()):
                continue
            result = answer.claims[claim.uid]
            if claim.name in behaviour.get("refuse", {}):
                result.error = behaviour["refuse"][claim.name]
                continue
            prepared.append(claim.uid)
            for number in range(self.args.devices):
                device = f"dev-{number}"
                result.devices.add(
                    request_names=[self.args.request.format(number)] if self.args.request else [],
                    pool_name=self.args.pool,
                    device_name=device,
                    cdi_device_ids=[f"{self.args.name}/claim={claim.uid}-{device}"],
                    share_id=self.args.share_id,
                )
        if behaviour.get("unknown"):
            answer.claims["nobody-asked"].error = ""
        self.remember(prepared)
        return answer

    def NodeUnprepareResources(self, request: Any) -> Message:
        answer = pb.NodeUnprepareResourcesResponse()
        behaviour = self.behaviour()
        prepared = self.prepared()
        for claim in request.claims:
            if claim.name in behaviour.get("skip", ()):
                continue
            answer.claims[claim.uid].error = behaviour.get("refuse", {}).get(claim.name, "")
            if claim.name not in behaviour.get("refuse", {}):
                prepared = [uid for uid in prepared if uid != claim.uid]
        self.remember(prepared)
        return answer

    # DRAResourceHealth

    async def NodeWatchResources(self, _: Message, context: Any) -> AsyncIterator[Message]:
        told = None
        while not self.behaviour().get("end_health"):
            now = dra_health_pb2.NodeWatchResourcesResponse()
            for name, (health, message) in self.behaviour().get("health", {}).items():
                pool, device = name.split("/")
                one = now.devices.add(message=message, health=health)
                one.device.pool_name, one.device.device_name = pool, device
            if now != told:
                told = now
                yield now
            await asyncio.sleep(LOOK_SECONDS)

    # What it has done

    def prepared(self) -> list[str]:
        """The uids of the claims that are prepared now, each as often as it was."""
        try:
            found: list[str] = json.loads((self.folder / "prepared.json").read_text())
        except FileNotFoundError:
            return []
        return found

    def remember(self, uids: list[str]) -> None:
        new = self.folder / "prepared.new"
        new.write_text(json.dumps(uids))
        new.replace(self.folder / "prepared.json")

    # Serving

    def services(self) -> list[Any]:
        """What is served on the driver's socket: only what it says it serves."""
        plugin = pb.DESCRIPTOR.services_by_name["DRAPlugin"]
        found = [
            self.handlers(plugin, f"k8s.io.kubelet.pkg.apis.dra.{version}")
            for version in self.args.versions.split(",")
            if version.endswith(".DRAPlugin")
        ]
        if self.args.health:
            found.append(self.handlers(dra_health_pb2.DESCRIPTOR.services_by_name["DRAResourceHealth"]))
        return found

    async def serve(self) -> None:
        """Serve until told to end; the sockets go with it, as a polite driver's do."""
        registration = registration_pb2.DESCRIPTOR.services_by_name["Registration"]
        servers = []
        for path, handlers in (
            (self.endpoint, self.services()),
            (self.registration, [self.handlers(registration)]),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            server = grpc.aio.server()
            server.add_generic_rpc_handlers(handlers)
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            servers.append(server)
        print("serving", flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await ended.wait()
        self.registration.unlink(missing_ok=True)
        for server in servers:
            await server.stop(None)
        self.endpoint.unlink(missing_ok=True)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="its own: socket, calls, behaviour")
    parser.add_argument("--registry", type=Path, required=True, help="the agent's plugins_registry")
    parser.add_argument("--name", default="test.dra.example.com")
    parser.add_argument("--instance", default="a", help="tells plugins of one driver apart")
    parser.add_argument("--versions", default="v1.DRAPlugin,v1beta1.DRAPlugin")
    parser.add_argument("--pool", default="pool")
    parser.add_argument("--devices", type=int, default=1, help="how many each claim gets")
    parser.add_argument("--request", default="", help="the request of a device, such as req-{}")
    parser.add_argument("--share-id")
    parser.add_argument("--health", action="store_true", help="tells how its devices are")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(Driver(args).serve())
    sys.exit(0)


main()

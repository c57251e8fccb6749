"""The pod-resources API as monitors of devices ask it, and a plugin with real device nodes for a node."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from pykubelet.cm.podresources import pod_resources_pb2 as pb
from tests.support.device_plugin.process import RESOURCE, DevicePluginProcess, plugin_process

MINORS = {"d1": 3, "d2": 5}
"""Which devices the nodes of the test plugin are: /dev/null and /dev/zero."""


class Asking:
    """Asks an agent what its containers have."""

    def __init__(self, root: Path) -> None:
        self._socket = root / "pod-resources" / "kubelet.sock"

    def _call(self, method: str, request: Any, answer: Any, version: str = "v1") -> Any:
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            call = channel.unary_unary(
                f"/{version}.PodResourcesLister/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString,
            )
            return call(request, timeout=30)

    def listed(self, version: str = "v1") -> dict[str, list[str]]:
        """The devices of each container that has some, as `pod/container`."""
        answer = self._call("List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse, version)
        found = {
            f"{pod.name}/{container.name}": _ids(container.devices)
            for pod in answer.pod_resources
            for container in pod.containers
        }
        return {name: ids for name, ids in found.items() if ids}

    def of(self, namespace: str, name: str) -> pb.PodResources:
        request = pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace)
        answer: pb.PodResources = self._call("Get", request, pb.GetPodResourcesResponse).pod_resources
        return answer

    def offered(self) -> list[str]:
        """The devices that pods can have."""
        request, answer = pb.AllocatableResourcesRequest(), pb.AllocatableResourcesResponse
        return _ids(self._call("GetAllocatableResources", request, answer).devices)


def _ids(devices: Any) -> list[str]:
    return sorted(one for entry in devices if entry.resource_name == RESOURCE for one in entry.device_ids)


@contextmanager
def dongles(folder: Path, root: Path, *options: str) -> Iterator[DevicePluginProcess]:
    """Run the test plugin for a node with this root, with two devices that have nodes of their own."""
    nodes = folder / "nodes"
    nodes.mkdir(parents=True)
    for device, minor in MINORS.items():
        os.mknod(nodes / device, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    (folder / "data").mkdir()
    (folder / "data" / "library").write_text("for dongles\n")
    wanted = [f"--device={device}" for device in MINORS]
    with plugin_process(folder, root / "device-plugins", *wanted, *options) as plugin:
        yield plugin

"""What the runtime really has: a plain CRI client of the tests' own, independent of the agent's."""

import json
import time
from typing import Any

import grpc
from google.protobuf.message import Message

from pykubelet.cri import runtime_pb2 as pb

POD_NAME = "io.kubernetes.pod.name"
POD_UID = "io.kubernetes.pod.uid"
CONTAINER_NAME = "io.kubernetes.container.name"


class Truth:
    """Asks containerd directly, and does to it what an accident would."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(
            endpoint.replace("unix://", "unix:", 1), options=[("grpc.default_authority", "localhost")]
        )

    def close(self) -> None:
        self._channel.close()

    def _call(
        self,
        method: str,
        request: Message,
        answer: type[Message],
        timeout: float = 30,
        service: str = "RuntimeService",
    ) -> Any:
        call = self._channel.unary_unary(
            f"/runtime.v1.{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(request, timeout=timeout, wait_for_ready=True)

    def _insist(self, method: str, request: Message, answer: type[Message]) -> None:
        """Call again what fails while an agent, which has noticed, does the same: the network goes once."""
        for pause in (0.2, 0.5, 1.0, 2.0, 4.0, 8.0):
            try:
                self._call(method, request, answer)
                return
            except grpc.RpcError as err:
                if err.code() is not grpc.StatusCode.UNKNOWN:
                    raise
            time.sleep(pause)
        self._call(method, request, answer)

    def network(self) -> str:
        """The pods' network as the runtime has loaded it, which is a moment after its file was written."""
        request = pb.StatusRequest(verbose=True)
        info = self._call("Status", request, pb.StatusResponse).info
        text: str = info["cniconfig"]
        return text

    def sandboxes(self, pod: str = "") -> list[pb.PodSandbox]:
        """All sandboxes, or those of the pod with this name, newest first."""
        found = self._call("ListPodSandbox", pb.ListPodSandboxRequest(), pb.ListPodSandboxResponse).items
        mine = [box for box in found if not pod or box.labels.get(POD_NAME) == pod]
        return sorted(mine, key=lambda box: box.created_at, reverse=True)

    def containers(self, pod: str = "") -> list[pb.Container]:
        """All containers, or those of the pod with this name, newest first."""
        found = self._call("ListContainers", pb.ListContainersRequest(), pb.ListContainersResponse).containers
        mine = [one for one in found if not pod or one.labels.get(POD_NAME) == pod]
        return sorted(mine, key=lambda one: one.created_at, reverse=True)

    def running(self, pod: str = "") -> list[pb.Container]:
        """The containers that run."""
        return [one for one in self.containers(pod) if one.state == pb.CONTAINER_RUNNING]

    def ready(self, pod: str = "") -> list[pb.PodSandbox]:
        """The sandboxes that are ready."""
        return [box for box in self.sandboxes(pod) if box.state == pb.SANDBOX_READY]

    def container_status(self, container_id: str) -> pb.ContainerStatus:
        request = pb.ContainerStatusRequest(container_id=container_id)
        status: pb.ContainerStatus = self._call("ContainerStatus", request, pb.ContainerStatusResponse).status
        return status

    def container_pid(self, container_id: str) -> int:
        request = pb.ContainerStatusRequest(container_id=container_id, verbose=True)
        return _pid(self._call("ContainerStatus", request, pb.ContainerStatusResponse), container_id)

    def sandbox_pid(self, sandbox_id: str) -> int:
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=sandbox_id, verbose=True)
        return _pid(self._call("PodSandboxStatus", request, pb.PodSandboxStatusResponse), sandbox_id)

    def exec(self, container_id: str, *command: str) -> tuple[int, str]:
        """Run a command in a container; returns its exit code and all that it wrote."""
        request = pb.ExecSyncRequest(container_id=container_id, cmd=command, timeout=30)
        answer = self._call("ExecSync", request, pb.ExecSyncResponse, timeout=45)
        return answer.exit_code, (answer.stdout + answer.stderr).decode(errors="replace")

    def images(self) -> list[pb.Image]:
        """All images."""
        found = self._call(
            "ListImages", pb.ListImagesRequest(), pb.ListImagesResponse, service="ImageService"
        )
        return list(found.images)

    def remove_image(self, name: str) -> None:
        """Remove an image with all of its names."""
        request = pb.RemoveImageRequest(image=pb.ImageSpec(image=name))
        self._call("RemoveImage", request, pb.RemoveImageResponse, service="ImageService")

    def remove_sandbox(self, sandbox_id: str) -> None:
        """Stop and remove a sandbox with everything in it, behind the agent's back."""
        stop = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox_id)
        self._insist("StopPodSandbox", stop, pb.StopPodSandboxResponse)
        remove = pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id)
        self._insist("RemovePodSandbox", remove, pb.RemovePodSandboxResponse)

    def remove_container(self, container_id: str) -> None:
        """Kill and remove a container, behind the agent's back."""
        remove = pb.RemoveContainerRequest(container_id=container_id)
        self._insist("RemoveContainer", remove, pb.RemoveContainerResponse)


def _pid(answer: Any, whose: str) -> int:
    """The process in a verbose status; never 0, which a signal would take for all of the tests."""
    pid = int(json.loads(answer.info["info"])["pid"])
    if not pid:
        raise ProcessLookupError(f"{whose} has no process any more")
    return pid

"""`/runningpods/`: what runs, as the runtime says; not what should run, which is `/pods`."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.errors import CriError
from pykubelet.runtime.labels import CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID
from pykubelet.server.lookup import StreamingRuntime, runtime_refusal
from pykubelet.server.pods import pod_list_json


def running_pods_routes(runtime: StreamingRuntime) -> list[web.RouteDef]:
    """The one route."""

    async def answer(_: web.Request) -> web.Response:
        running = pb.ContainerFilter(state=pb.ContainerStateValue(state=pb.CONTAINER_RUNNING))
        ready = pb.PodSandboxFilter(state=pb.PodSandboxStateValue(state=pb.SANDBOX_READY))
        try:
            containers = await runtime.list_containers(running)
            sandboxes = await runtime.list_pod_sandbox(ready)
        except CriError as err:
            raise runtime_refusal(err) from err
        body = pod_list_json(pods_that_run(sandboxes, containers))
        return web.Response(body=body, content_type="application/json")

    return [web.get("/runningpods/", answer, allow_head=False)]


def pods_that_run(sandboxes: list[pb.PodSandbox], containers: list[pb.Container]) -> list[Pod]:
    """Make pods of what the runtime lists; only their names and images are known."""
    pods: dict[str, Pod] = {}

    def pod_of(labels: Mapping[str, str]) -> Pod | None:
        uid = labels.get(POD_UID, "")
        if uid and uid not in pods:
            name, namespace = labels.get(POD_NAME, ""), labels.get(POD_NAMESPACE, "")
            meta = ObjectMeta(name=name, namespace=namespace, uid=uid)
            pods[uid] = Pod(metadata=meta, spec=PodSpec())
        return pods.get(uid)

    for sandbox in sandboxes:
        pod_of(sandbox.labels)
    for container in containers:
        if (pod := pod_of(container.labels)) is not None:
            image = container.image.user_specified_image or container.image.image
            pod.spec.containers.append(Container(name=container.labels.get(CONTAINER_NAME, ""), image=image))
    return list(pods.values())

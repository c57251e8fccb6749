"""`/run`, `/checkpoint` and `/runningpods/`: a command with its output, checkpoints, pods in the runtime.

A checkpoint is as large as the container's memory and stays on disk until an administrator removes it, so
checkpoints are created one at a time and only for authorized clients (CVE-2025-0426: the read-only port
allowed them).

`/runningpods/` lists the pods that run according to the runtime; `/pods` lists the desired pods.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from aiohttp import web

from pykubelet.api.meta import ObjectMeta, to_json
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.client import RuntimeClient
from pykubelet.kuberuntime.labels import CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID
from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import HttpError
from pykubelet.server.lookup import PodLookup, find_container, runtime_http_error
from pykubelet.server.pods import pod_list_json
from pykubelet.transport.errors import CriError

log = get_logger(__name__)
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


class ContainerActions:
    """Endpoints `/run` and `/checkpoint`; `checkpoints` is a directory, `now` returns the local time."""

    def __init__(self, lookup: PodLookup, checkpoints: Path, now: Callable[[], datetime]) -> None:
        self._lookup = lookup
        self._checkpoints = checkpoints
        self._now = now
        self._checkpoint_lock = asyncio.Lock()

    def run_routes(self) -> list[web.RouteDef]:
        """Return the routes of `/run`."""
        return [
            web.post("/run/{namespace}/{pod}/{container}", self._run),
            web.post("/run/{namespace}/{pod}/{uid}/{container}", self._run),
        ]

    def checkpoint_routes(self) -> list[web.RouteDef]:
        """Return the route of `/checkpoint`."""
        return [web.post("/checkpoint/{namespace}/{pod}/{container}", self._checkpoint)]

    async def _run(self, request: web.Request) -> web.Response:
        pod, name = self._pod(request), request.match_info["container"]
        command = request.query.get("cmd", "").split(" ")
        try:
            container = None
            if self._lookup.matches_uid(pod, request.match_info.get("uid", "")):
                container = await self._lookup.running_container(pod, name)
            if container is None:
                raise HttpError(500, f'container not found ("{name}")')
            result = await self._lookup.runtime.exec_sync(container, command)
        except CriError as err:
            raise HttpError(500, err.rpc_text) from err
        if result.exit_code:
            stderr = result.stderr.decode(errors="replace")
            raise HttpError(500, f"command '{' '.join(command)}' exited with {result.exit_code}: {stderr}")
        return web.Response(body=result.stdout + result.stderr, content_type="application/json")

    async def _checkpoint(self, request: web.Request) -> web.Response:
        pod, name = self._pod(request), request.match_info["container"]
        if find_container(pod, name) is None:
            raise HttpError(404, f"container {name} does not exist")
        timeout = (request.query.getall("timeout", None) or ["0"])[-1]
        if _NUMBER.fullmatch(timeout) is None:
            raise HttpError(404, "cannot parse value of timeout parameter")
        target = f"{pod.metadata.namespace}/{pod.metadata.name}/{name}"
        try:
            location = await self._make_checkpoint(pod, name, max(0, int(timeout)))
        except CriError as err:
            raise HttpError(500, f"checkpointing of {target} failed ({err.rpc_text})") from err
        except OSError as err:
            raise HttpError(500, f"checkpointing of {target} failed ({err.strerror or err})") from err
        if location is None:
            raise HttpError(500, f"checkpointing of {target} failed (container {name} not found)")
        return web.Response(body=to_json({"items": [str(location)]}), content_type="application/json")

    async def _make_checkpoint(self, pod: Pod, name: str, timeout_seconds: int) -> Path | None:
        async with self._checkpoint_lock:
            container = await self._lookup.running_container(pod, name)
            if container is None:
                return None
            self._checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
            timestamp = self._now().astimezone().isoformat(timespec="seconds")
            stem = f"checkpoint-{pod.metadata.name}_{pod.metadata.namespace}-{name}-{timestamp}"
            location = self._checkpoints / f"{stem}.tar"
            log.info("Checkpointing container", pod=pod.full_name, containerName=name, path=str(location))
            await self._lookup.runtime.checkpoint_container(container, str(location), timeout_seconds)
            return location

    def _pod(self, request: web.Request) -> Pod:
        pod = self._lookup.pod(request.match_info["namespace"], request.match_info["pod"])
        if pod is None:
            raise HttpError(404, "pod does not exist")
        return pod


def running_pods_routes(runtime: RuntimeClient) -> list[web.RouteDef]:
    """Return the route of `/runningpods/`."""

    async def respond(_: web.Request) -> web.Response:
        running = pb.ContainerFilter(state=pb.ContainerStateValue(state=pb.CONTAINER_RUNNING))
        ready = pb.PodSandboxFilter(state=pb.PodSandboxStateValue(state=pb.SANDBOX_READY))
        try:
            containers = await runtime.list_containers(running)
            sandboxes = await runtime.list_pod_sandbox(ready)
        except CriError as err:
            raise runtime_http_error(err) from err
        body = pod_list_json(running_pods(sandboxes, containers))
        return web.Response(body=body, content_type="application/json")

    return [web.get("/runningpods/", respond, allow_head=False)]


def running_pods(sandboxes: list[pb.PodSandbox], containers: list[pb.Container]) -> list[Pod]:
    """Build pods from the runtime's sandboxes and containers; only names, UIDs and images are known."""
    pods: dict[str, Pod] = {}

    def pod_for(labels: Mapping[str, str]) -> Pod | None:
        uid = labels.get(POD_UID, "")
        if uid and uid not in pods:
            name, namespace = labels.get(POD_NAME, ""), labels.get(POD_NAMESPACE, "")
            meta = ObjectMeta(name=name, namespace=namespace, uid=uid)
            pods[uid] = Pod(metadata=meta, spec=PodSpec())
        return pods.get(uid)

    for sandbox in sandboxes:
        pod_for(sandbox.labels)
    for container in containers:
        if (pod := pod_for(container.labels)) is not None:
            image = container.image.user_specified_image or container.image.image
            pod.spec.containers.append(Container(name=container.labels.get(CONTAINER_NAME, ""), image=image))
    return list(pods.values())

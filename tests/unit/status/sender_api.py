"""An API server that is played in memory, in the loop's time, and a sender that tells it of pods."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.client import Resource
from pykubelet.apiserver.errors import Conflict, KubeError, NotFound, Unreachable
from pykubelet.status.manager import StatusManager, StatusMetrics
from pykubelet.util.tasks import TaskScope
from tests.support.pods import LATER, container, make_status, waiting
from tests.support.strategic import apply_patch


class Api:
    """Keeps pods, applies patches, and fails as it is told; the watch is `sync`, called by the test."""

    def __init__(self, *pods: Pod, delay: float = 0.01) -> None:
        self.pods = {pod.full_name: pod for pod in pods}
        self.watched = {pod.uid: pod for pod in pods}
        self.delay = delay
        self.down = False
        self.failures: list[KubeError] = []
        self.drops: set[str] = set()
        self.requests: list[tuple[float, str, str, Any]] = []
        self.busy: dict[str, int] = {}
        self.most = 0

    @asynccontextmanager
    async def _request(self, verb: str, name: str, body: Any = None) -> AsyncIterator[None]:
        self.requests.append((asyncio.get_running_loop().time(), verb, name, body))
        self.busy[name] = self.busy.get(name, 0) + 1
        assert self.busy[name] == 1, f"two requests at once for {name}"
        self.most = max(self.most, sum(self.busy.values()))
        try:
            await asyncio.sleep(self.delay)
            if self.down:
                raise Unreachable("https://api", "connection refused")
            if self.failures:
                raise self.failures.pop(0)
            yield
        finally:
            self.busy[name] -= 1

    async def get(self, resource: Resource[Pod], name: str, namespace: str = "") -> Pod:
        async with self._request("get", name):
            return self._find(namespace, name)

    async def patch(
        self,
        resource: Resource[Pod],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        subresource: str = "",
    ) -> Pod:
        assert subresource == "status"
        document = json.loads(msgspec.json.encode(to_document(patch)))
        async with self._request("patch", name, document["status"]):
            pod = self._find(namespace, name)
            if document["metadata"]["uid"] != pod.uid:
                raise Conflict(409, "Conflict", "Precondition failed: UID")
            for field in self.drops:
                document["status"].pop(field, None)
            return self.write(pod, apply_patch(to_document(pod.status), document["status"]))

    async def delete(
        self,
        resource: Resource[Pod],
        name: str,
        namespace: str = "",
        *,
        grace_period_seconds: int | None = None,
        uid: str = "",
    ) -> None:
        assert grace_period_seconds == 0
        async with self._request("delete", name):
            pod = self._find(namespace, name)
            if uid != pod.uid:
                raise Conflict(409, "Conflict", "Precondition failed: UID")
            del self.pods[pod.full_name]

    async def pause(self, seconds: float) -> None:
        self.requests.append((asyncio.get_running_loop().time(), "pause", "", seconds))
        await asyncio.sleep(seconds)

    def _find(self, namespace: str, name: str) -> Pod:
        if (pod := self.pods.get(f"{namespace}/{name}")) is None:
            raise NotFound(404, "NotFound", f"pods {name!r} not found")
        return pod

    def write(self, pod: Pod, status: Any) -> Pod:
        version = str(int(pod.metadata.resource_version) + 1)
        written = msgspec.structs.replace(
            pod,
            metadata=msgspec.structs.replace(pod.metadata, resource_version=version),
            status=from_document(PodStatus, status),
        )
        self.pods[pod.full_name] = written
        return written

    def sync(self, sender: StatusManager) -> None:
        """Have the watch catch up."""
        now = {pod.uid: pod for pod in self.pods.values()}
        for uid in {*self.watched, *now}:
            if self.watched.get(uid) is not now.get(uid):
                if uid in now:
                    self.watched[uid] = now[uid]
                else:
                    del self.watched[uid]
                sender.handle_object_update(uid)

    @property
    def verbs(self) -> list[str]:
        return [f"{verb} {name}" for _, verb, name, _ in self.requests if verb != "pause"]

    @property
    def phases(self) -> dict[str, str]:
        return {pod.metadata.name: pod.status.phase for pod in self.pods.values()}


@asynccontextmanager
async def sending(
    api: Api,
    running: set[str] | None = None,
    metrics: StatusMetrics | None = None,
    crowded: Callable[[], bool] = lambda: False,
) -> AsyncIterator[StatusManager]:
    sender = StatusManager(
        api,
        get_object=api.watched.get,
        may_run=lambda uid: uid in (running or ()),
        in_burst=crowded,
        metrics=metrics,
        clock=lambda: LATER,
    )
    async with TaskScope() as scope:
        scope.start(sender.run(), name="sender")
        yield sender


def pending() -> PodStatus:
    return make_status("Pending", container("main", waiting()), ready="False")

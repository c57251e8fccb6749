"""An API server without a network: objects in memory, watches that follow them, times of the loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from pykubelet.api.core import TokenRequest, TokenRequestStatus
from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import ApiClient, Page, Params, RawPage, Resource, T
from pykubelet.apiserver.errors import KubeError, NotFound

R = TypeVar("R")
Document = dict[str, Any]


def pod(name: str = "web", uid: str = "", account: str = "default", **spec: Any) -> Pod:
    """A pod of the namespace `shop`."""
    metadata = {"name": name, "namespace": "shop", "uid": uid or f"uid-{name}"}
    spec = {"serviceAccountName": account, "containers": [{"name": "main"}], **spec}
    return from_document(Pod, {"metadata": metadata, "spec": spec})


def volumes(**kinds: str) -> list[Document]:
    """Volumes: `configMap="settings"`, `secret="keys"`."""
    keys = {"configMap": "name", "secret": "secretName"}
    return [{"name": f"v-{kind}", kind: {keys[kind]: name}} for kind, name in kinds.items()]


class ObjectApi(ApiClient):
    """Plays the API server as far as objects of pods need it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Document] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.broken: KubeError | None = None
        """What every request fails with."""
        self.refusals: list[KubeError] = []
        """What the next requests fail with, one each."""
        self.slow = 0.0
        """Seconds until a request is answered."""
        self.behind: set[str] = set()
        """Names that lists do not show yet."""
        self.without: set[str] = set()
        """Versions of the API that are not served."""
        self.watchers: list[tuple[str, str, asyncio.Queue[Document]]] = []
        self.tokens: list[TokenRequest] = []
        self.clock = 0.0
        self._version = 100

    def put(self, kind: str, name: str, namespace: str = "shop", **fields: Any) -> None:
        """Create or change an object; `labels` and `annotations` go to its metadata."""
        self._version += 1
        key = (kind, namespace, name)
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}"}
        metadata |= {part: fields.pop(part) for part in ("labels", "annotations") if part in fields}
        event = "MODIFIED" if key in self.objects else "ADDED"
        document = {"metadata": metadata | {"resourceVersion": str(self._version)}, **fields}
        self.objects[key] = document
        self._publish(event, kind, document)

    def remove(self, kind: str, name: str, namespace: str = "shop") -> None:
        self._version += 1
        gone = self.objects.pop((kind, namespace, name))
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._publish("DELETED", kind, gone)

    def count(self, verb: str) -> int:
        return sum(asked[0] == verb for asked in self.asked)

    streams_lists = False

    def disable_streaming(self) -> None:
        raise AssertionError("nothing was streamed")

    async def get(self, resource: Resource[T], name: str, namespace: str = "", *, params: Params = ()) -> T:
        await self._answer("get", f"{resource.plural}/{namespace}/{name}", params)
        document = self.objects.get((resource.plural, namespace, name))
        if document is None:
            raise NotFound(404, "NotFound", f'{resource.plural} "{name}" not found')
        return from_document(resource.struct, document)

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        await self._answer("list", resource.plural, params)
        if resource.version in self.without:
            raise NotFound(404, "NotFound", "the server could not find the requested resource")
        found = [
            msgspec.Raw(json.dumps(document).encode())
            for (kind, place, name), document in self.objects.items()
            if (kind, place) == (resource.plural, namespace or place)
            and _chosen(document, params)
            and name not in self.behind
        ]
        return Page(found, str(self._version), "")

    @asynccontextmanager
    async def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        await self._answer("watch", resource.plural, params)
        queue: asyncio.Queue[Document] = asyncio.Queue()
        watcher = (resource.plural, dict(params).get("fieldSelector", ""), queue)
        self.watchers.append(watcher)
        try:
            yield _following(queue, seconds)
        finally:
            self.watchers.remove(watcher)

    async def create_below(
        self,
        resource: Resource[Any],
        name: str,
        namespace: str,
        subresource: str,
        obj: R,
        *,
        api_version: str,
    ) -> R:
        await self._answer("create", f"{resource.plural}/{namespace}/{name}/{subresource}", ())
        assert isinstance(obj, TokenRequest)
        self.tokens.append(obj)
        life = obj.spec.expiration_seconds or 3600
        expires = datetime.fromtimestamp(self.clock + life, UTC)
        obj.status = TokenRequestStatus(token=f"token-{len(self.tokens)}", expiration_timestamp=expires)
        return obj

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _answer(self, verb: str, what: str, params: Params) -> None:
        self.asked.append((verb, what, dict(params)))
        await asyncio.sleep(self.slow)
        if self.refusals:
            raise self.refusals.pop(0)
        if self.broken is not None:
            raise self.broken

    def _publish(self, event: str, kind: str, document: Document) -> None:
        for plural, selector, queue in self.watchers:
            if plural == kind and _chosen(document, [("fieldSelector", selector)]):
                queue.put_nowait({"type": event, "object": document})


async def settle(turns: int = 20) -> None:
    """Let all that is ready to run have its turn."""
    for _ in range(turns):
        await asyncio.sleep(0)


def _chosen(document: Document, params: Sequence[tuple[str, str]]) -> bool:
    selector = dict(params).get("fieldSelector", "")
    if selector.startswith("metadata.name="):
        return bool(document["metadata"]["name"] == selector.removeprefix("metadata.name="))
    if selector.startswith("spec.nodeName="):
        return bool(document["spec"]["nodeName"] == selector.removeprefix("spec.nodeName="))
    if selector == "spec.clusterIP!=None":
        return bool(document["spec"].get("clusterIP") != "None")
    assert not selector, selector
    return True


async def _following(queue: asyncio.Queue[Document], seconds: float) -> AsyncIterator[bytes]:
    while True:
        yield json.dumps(await queue.get()).encode() + b"\n"

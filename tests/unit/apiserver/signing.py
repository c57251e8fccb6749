"""A cluster's certificates API on a scripted server: requests are kept, decided and signed for real."""

import asyncio
import base64
import json
import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.support.api_server import Server, answer, refuse
from tests.support.certs import Authority

PATH = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
Document = dict[str, Any]


class Signing:
    """Answers for certificate requests; `decide` is called for each new one, and may do nothing."""

    def __init__(self, server: Server, authority: Authority) -> None:
        self.authority = authority
        self.requests: dict[str, Document] = {}
        self.decide: Callable[[Document], None] = self.issue
        self.events: list[Document] = []
        self._news = asyncio.Event()
        self.other = server.default
        server.default = self.handle

    def issue(self, request: Document, *, begins: float = -300, ends: float = 3600) -> None:
        """Approve and sign."""
        pem = base64.b64decode(request["spec"]["request"])
        signed = self.authority.sign_request(pem, begins=begins, ends=ends)
        self.condition(request, "Approved")
        request["status"]["certificate"] = base64.b64encode(signed).decode()
        self.changed("MODIFIED", request)

    def condition(self, request: Document, kind: str, reason: str = "", message: str = "") -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        request["status"].setdefault("conditions", []).append(condition)
        self.changed("MODIFIED", request)

    def remove(self, name: str) -> None:
        self.changed("DELETED", self.requests.pop(name))

    def changed(self, kind: str, request: Document) -> None:
        request["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        self.events.append({"type": kind, "object": json.loads(json.dumps(request))})
        self._news.set()
        self._news = asyncio.Event()

    def text(self, name: str) -> bytes:
        """The request itself, in PEM."""
        return base64.b64decode(self.requests[name]["spec"]["request"])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not request.path.startswith(PATH):
            assert self.other is not None
            return await self.other(request)
        if request.method == "POST":
            return await self._create(request)
        if "watch" in request.query:
            return await self._watch(request)
        name = request.path.removeprefix(PATH).lstrip("/")
        if name:
            found = self.requests.get(name)
            return await (answer(found) if found else refuse(404, "NotFound"))(request)
        items = [found for found in self.requests.values() if _chosen(request, found)]
        version = {"resourceVersion": str(len(self.events) + 1)}
        return await answer({"kind": "List", "metadata": version, "items": items})(request)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        document = await request.json()
        meta = document["metadata"]
        name = meta.get("name") or f"{meta['generateName']}{len(self.events)}"
        if name in self.requests:
            return await refuse(409, "AlreadyExists")(request)
        meta |= {"name": name, "uid": str(uuid.uuid4())}
        document["status"] = {}
        self.requests[name] = document
        self.changed("ADDED", document)
        response = await answer(json.loads(json.dumps(document)), 201)(request)
        # As in a cluster, nobody has decided when the answer goes out.
        asyncio.get_running_loop().call_later(0.05, self.decide, document)
        return response

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        seen = max(0, int(request.query["resourceVersion"]) - 1)
        while True:
            while seen < len(self.events):
                event = self.events[seen]
                seen += 1
                if _chosen(request, event["object"]):
                    await response.write(json.dumps(event).encode() + b"\n")
            await self._news.wait()


def _chosen(request: web.Request, document: Document) -> bool:
    selector = request.query.get("fieldSelector", "")
    return not selector or selector == f"metadata.name={document['metadata']['name']}"

"""An API server that knows some people, and clients of the agent that are or are not among them."""

import ssl
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.certs import Authority, Pair

ADMIN_TOKEN = "admin-token"
VIEWER_TOKEN = "viewer-token"


@dataclass
class People:
    """Serves reviews: whose token it is, and who may do what to nodes."""

    tokens: dict[str, str] = field(
        default_factory=lambda: {ADMIN_TOKEN: "token-admin", VIEWER_TOKEN: "token-viewer"}
    )
    masters: set[str] = field(default_factory=lambda: {"admin", "token-admin"})
    rules: set[tuple[str, str, str]] = field(default_factory=set)
    """Who may do what: user, verb, subresource."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    broken: int = 0
    """The code to refuse with, when not 0."""

    @property
    def kinds(self) -> Counter[str]:
        return Counter(review["kind"] for review in self.asked)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        review = await request.json()
        self.asked.append(review)
        if self.broken:
            return web.json_response({"kind": "Status", "code": self.broken}, status=self.broken)
        judged = self._token if review["kind"] == "TokenReview" else self._access
        return web.json_response(review | {"status": judged(review["spec"])}, status=201)

    def _token(self, spec: dict[str, Any]) -> dict[str, Any]:
        name = self.tokens.get(spec["token"])
        if name is None:
            return {"user": {}}
        return {"authenticated": True, "user": {"username": name, "groups": ["people"], "uid": "7"}}

    def _access(self, spec: dict[str, Any]) -> dict[str, Any]:
        wanted = spec["resourceAttributes"]
        assert (wanted["resource"], wanted["version"]) == ("nodes", "v1")
        rule = (spec["user"], wanted.get("verb", ""), wanted["subresource"])
        return {"allowed": spec["user"] in self.masters or rule in self.rules, "reason": "rbac"}


def client_context(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


def subresources(asked: Iterable[dict[str, Any]]) -> list[str]:
    """What permissions were requested, in order."""
    return [
        review["spec"]["resourceAttributes"]["subresource"]
        for review in asked
        if review["kind"] == "SubjectAccessReview"
    ]

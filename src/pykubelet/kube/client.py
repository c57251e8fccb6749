"""Asking the API server: objects in, objects out, refusals as exceptions.

One client has one limit on how often it asks and one timeout for each answer; several share a
`Transport`. What each request goes through is in `calls.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from pykubelet.api.meta import to_document, to_json
from pykubelet.kube.calls import MOST_RETRIES, Caller, Params, Request
from pykubelet.kube.errors import BadAnswer
from pykubelet.kube.metrics import RestMetrics
from pykubelet.kube.rate import TokenBucket
from pykubelet.kube.resources import Resource, T, read_object
from pykubelet.kube.transport import Transport

R = TypeVar("R")


class PatchKind(StrEnum):
    """How a patch is meant."""

    STRATEGIC = "application/strategic-merge-patch+json"
    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """Some objects of a list; `continues` is the token for the next page, empty on the last."""

    items: list[R]
    resource_version: str
    continues: str


RawPage = Page[msgspec.Raw]


class ApiClient:
    """Asks one API server.

    `timeout` is in seconds for one answer; `retries` is how often a request is made again when the
    server puts it off.
    """

    def __init__(
        self,
        transport: Transport,
        limit: TokenBucket,
        *,
        timeout: float = 60.0,
        retries: int = MOST_RETRIES,
        metrics: RestMetrics | None = None,
    ) -> None:
        self.transport = transport
        self._caller = Caller(transport, limit, timeout=timeout, retries=retries, metrics=metrics)

    async def get(self, resource: Resource[T], name: str, namespace: str = "", *, params: Params = ()) -> T:
        """Get an object; `params` such as `resourceVersion=0` for one from the server's cache."""
        request = Request("get", "GET", resource, namespace, name, params=params)
        return await self._object(resource.struct, request)

    async def list(self, resource: Resource[T], namespace: str = "", *, params: Params = ()) -> Page[T]:
        """List objects, of one namespace or of all; `params` select, limit and continue."""
        raw = await self.list_page(resource, namespace, params)
        try:
            items = [read_object(resource.struct, item) for item in raw.items]
        except ValueError as err:
            raise BadAnswer(f"list {resource.plural}: one is not a {resource.kind}: {err}") from None
        return Page(items, raw.resource_version, raw.continues)

    async def create(self, resource: Resource[T], obj: T, namespace: str = "") -> T:
        """Create an object."""
        body = to_json({"apiVersion": resource.api_version, "kind": resource.kind, **to_document(obj)})
        request = Request("create", "POST", resource, namespace, body=body)
        return await self._object(resource.struct, request)

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
        """Create something that belongs to an object, such as a service account's `token`."""
        document = {"apiVersion": api_version, "kind": type(obj).__name__, **to_document(obj)}
        request = Request("create", "POST", resource, namespace, name, subresource, body=to_json(document))
        return await self._object(type(obj), request)

    async def update(self, resource: Resource[T], obj: T, *, subresource: str = "") -> T:
        """Replace an object as a whole.

        What its struct does not have is lost, so this is for kinds whose struct is complete (leases);
        others are patched.
        """
        body = to_json({"apiVersion": resource.api_version, "kind": resource.kind, **to_document(obj)})
        meta = obj.metadata
        request = Request("update", "PUT", resource, meta.namespace, meta.name, subresource, body=body)
        return await self._object(resource.struct, request)

    async def patch(
        self,
        resource: Resource[T],
        name: str,
        patch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        namespace: str = "",
        *,
        kind: PatchKind = PatchKind.STRATEGIC,
        subresource: str = "",
    ) -> T:
        """Change some fields of an object, or of its `status`."""
        request = Request(
            "patch", "PATCH", resource, namespace, name, subresource, body=to_json(patch), content_type=kind
        )
        return await self._object(resource.struct, request)

    async def delete(
        self,
        resource: Resource[T],
        name: str,
        namespace: str = "",
        *,
        grace_period_seconds: int | None = None,
        uid: str = "",
    ) -> None:
        """Delete an object; with a `uid` only that very one, else Conflict."""
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_period_seconds is not None:
            options["gracePeriodSeconds"] = grace_period_seconds
        if uid:
            options["preconditions"] = {"uid": uid}
        await self._caller.call(Request("delete", "DELETE", resource, namespace, name, body=to_json(options)))

    async def delete_all(self, resource: Resource[Any], namespace: str = "", *, params: Params = ()) -> None:
        """Delete all objects that `params` select, of one namespace or of all."""
        options = to_json({"apiVersion": "v1", "kind": "DeleteOptions"})
        request = Request("deletecollection", "DELETE", resource, namespace, params=params, body=options)
        await self._caller.call(request)

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        """List objects as the server wrote them, each to be read by its own."""
        request = Request("list", "GET", resource, namespace, params=params)
        return read_page(await self._caller.call(request), str(request))

    def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch and give its bytes as they come, at most for so long: then TimedOut."""
        request = Request("watch", "GET", resource, namespace, params=[("watch", "1"), *params])
        return self._caller.stream(request, seconds)

    async def pause(self, seconds: float) -> None:
        """Wait before the next try; less when the API server is found to be back meanwhile."""
        await self.transport.pause(seconds)

    async def _object(self, struct: type[R], request: Request) -> R:
        body = await self._caller.call(request)
        try:
            return read_object(struct, body)
        except ValueError as err:
            raise BadAnswer(f"{request}: the answer is not a {struct.__name__}: {err}") from None


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[msgspec.Raw] | None = None


def read_page(body: bytes, request: str = "") -> RawPage:
    """Read a list without reading its objects; raises BadAnswer."""
    try:
        found = msgspec.json.decode(body, type=_List)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise BadAnswer(f"{request}: the answer is not a list: {err}") from None
    return Page(found.items or [], found.metadata.resource_version, found.metadata.continue_ or "")

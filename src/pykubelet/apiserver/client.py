"""Asking the API server: objects in, objects out, refusals as exceptions.

One client has one limit on how often it asks and one timeout for each answer; several share a
`Transport`. What each request goes through is in `calls.py`.

One request to the API server, from waiting for its turn to an answer or an exception.

A request that the server puts off (429 or 5xx with Retry-After) is made again when it says so, a few
times; a refused identity (401) is renewed once, in case a token or certificate was replaced meanwhile.
Whatever else the server says is raised as an error that tells which request it was about.

The agent's three clients of one API server, each with a limit of its own.

Objects, events and heartbeats do not wait for each other: a flood of events must not delay a pod's
status, and neither may delay the sign of life that decides whether the node's pods are moved away.

The kinds of objects that the agent asks the API server for, and where they are.

A `Resource` knows its place in the API's paths and the struct that its objects become; all requests
are made in its terms, so that a path is never put together twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from pykubelet.api.certificates import CertificateSigningRequest
from pykubelet.api.core import ConfigMap, Event, RuntimeClass, Secret, Service, ServiceAccount
from pykubelet.api.meta import from_document, from_json, to_document, to_json
from pykubelet.api.node import Lease, Node
from pykubelet.api.pod import Pod
from pykubelet.api.storage import PersistentVolume, PersistentVolumeClaim
from pykubelet.apiserver.connection_pool import ConcurrencyLimiter
from pykubelet.apiserver.credentials import Credentials
from pykubelet.apiserver.errors import (
    ApiError,
    InvalidResponse,
    NoCredentials,
    TimedOut,
    api_error,
    forbidden_hint,
)
from pykubelet.apiserver.metrics import RestMetrics
from pykubelet.apiserver.transport import Chunks, Response, Transport
from pykubelet.logs import get_logger
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.rate_limiter import TokenBucket

log = get_logger(__name__)


class Metadata(Protocol):
    """Which object, and in which version: an ObjectMeta, or less where there are many."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def namespace(self) -> str:
        """Its namespace, if it has one."""

    @property
    def uid(self) -> str:
        """Tells it from others of the same name."""

    @property
    def resource_version(self) -> str:
        """Its version."""


class HasMetadata(Protocol):
    """Anything that the API server keeps."""

    @property
    def metadata(self) -> Metadata:
        """Identity and version."""


T = TypeVar("T", bound=HasMetadata)
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """One kind of object: `Resource(Lease, "Lease", "leases", "coordination.k8s.io")`."""

    struct: type[T]
    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`v1`, or `group/version`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Give the path of an object, or of all of a namespace or of the cluster without a name."""
        if name and self.namespaced and not namespace:
            raise ValueError(f"{self.kind} {name} needs a namespace")
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += filter(None, (self.plural, name, subresource))
        return "/" + "/".join(quote(part, safe="") for part in parts)


PODS = Resource(Pod, "Pod", "pods")
NODES = Resource(Node, "Node", "nodes", namespaced=False)
LEASES = Resource(Lease, "Lease", "leases", "coordination.k8s.io")
EVENTS = Resource(Event, "Event", "events")
SECRETS = Resource(Secret, "Secret", "secrets")
CONFIG_MAPS = Resource(ConfigMap, "ConfigMap", "configmaps")
SERVICES = Resource(Service, "Service", "services")
SERVICE_ACCOUNTS = Resource(ServiceAccount, "ServiceAccount", "serviceaccounts")
CLAIMS = Resource(PersistentVolumeClaim, "PersistentVolumeClaim", "persistentvolumeclaims")
PERSISTENT_VOLUMES = Resource(PersistentVolume, "PersistentVolume", "persistentvolumes", namespaced=False)
RUNTIME_CLASSES = Resource(RuntimeClass, "RuntimeClass", "runtimeclasses", "node.k8s.io", namespaced=False)
CERTIFICATE_REQUESTS = Resource(
    CertificateSigningRequest,
    "CertificateSigningRequest",
    "certificatesigningrequests",
    "certificates.k8s.io",
    namespaced=False,
)


def read_object(struct: type[S], data: bytes) -> S:
    """Make an object of what the API server sent; raises ValueError with the field that does not fit.

    Where a list, a map or a text is null, as Go writes those that were never set, it is absent.
    """
    try:
        return from_json(struct, data)
    except ValueError:
        try:
            document = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            document = None
        if document is None:
            raise
        return from_document(struct, _without_nulls(document))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


MAX_ANSWER_BYTES = 128 * 1024 * 1024
MOST_RETRIES = 10
AT_ONCE = 12
"""How many requests of a client may be under way, when the server is slow to answer; see `turns.py`."""
LONGEST_WAIT_SECONDS = 30.0
"""A longer Retry-After is the caller's to obey."""

# Servers begin to answer a watch at once; some proxies only with its first event.
_WATCH_BEGINS_SECONDS = 120.0
Params = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: the verb as RBAC names it, and the place."""

    verb: str
    method: str
    resource: Resource[Any]
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    params: Params = ()
    body: bytes | None = None
    content_type: str = "application/json"

    @property
    def path(self) -> str:
        """The path of the object or list."""
        return self.resource.path(self.namespace, self.name, self.subresource)

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


class RestClient:
    """Makes requests within one limit; `timeout` is in seconds for each answer."""

    def __init__(
        self,
        transport: Transport,
        limit: TokenBucket,
        *,
        timeout: float,
        retries: int,
        metrics: RestMetrics | None,
    ) -> None:
        self._transport = transport
        self._limit = limit
        self._timeout = timeout
        self._retries = retries
        self._metrics = metrics
        self._at_once = ConcurrencyLimiter(AT_ONCE)
        self._renewing = ErrorLogLimiter(log, "Failed to renew refused credentials")

    async def call(self, request: Request) -> bytes:
        """Give the body of a good answer; raises a KubeError otherwise."""
        retries, renewed = 0, False
        while True:
            await self._turn(request)
            # Before the clock runs: a plugin may take its time.
            credentials = await self._transport.credentials.current()
            async with self._at_once:
                answer = await self._ask(request, credentials)
            if self._metrics is not None:
                self._metrics.received(request.method, self._transport.host, len(answer.body))
            if 200 <= answer.code < 300:
                return answer.body
            error = self._refusal(request, answer)
            if error.code == 401 and not renewed:
                renewed = True
                try:
                    if await self._transport.credentials.renewed(credentials):
                        continue
                except NoCredentials as err:
                    self._renewing.failed(err, asyncio.get_running_loop().time())
            wait = error.retry_after
            put_off = error.code == 429 or error.code >= 500
            if not put_off or wait is None or wait > LONGEST_WAIT_SECONDS or retries >= self._retries:
                raise error
            retries += 1
            log.v(4).info("The API server wants to be asked later", seconds=wait, request=str(request))
            await asyncio.sleep(wait)
            if self._metrics is not None:
                self._metrics.retried(error.code, request.method, self._transport.host)

    async def _ask(self, request: Request, credentials: Credentials) -> Response:
        try:
            return await self._transport.fetch(
                credentials,
                request.method,
                request.path,
                params=request.params,
                body=request.body,
                content_type=request.content_type,
                deadline=asyncio.get_running_loop().time() + self._timeout,
                max_bytes=MAX_ANSWER_BYTES,
            )
        except TimedOut as err:
            raise TimedOut(err.server, f"{request}: {err.why} ({self._timeout:g} s)") from None

    @asynccontextmanager
    async def stream(self, request: Request, seconds: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the body of a good answer as it comes, at most for so long: then TimedOut."""
        await self._turn(request)
        credentials = await self._transport.credentials.current()
        begin = asyncio.get_running_loop().time()
        deadline = begin + min(seconds, _WATCH_BEGINS_SECONDS)
        async with self._transport.ask(
            credentials, request.method, request.path, params=request.params, deadline=deadline, stream=True
        ) as answer:
            if answer.code == 200:
                yield Chunks(answer, begin + seconds)
                return
            body = await answer.read(MAX_ANSWER_BYTES, deadline)
            error = self._refusal(request, Response(answer.code, answer.headers, body))
        if error.code == 401:
            await self._transport.credentials.renewed(credentials)
        raise error

    async def _turn(self, request: Request) -> None:
        waited = await self._limit.wait()
        if self._metrics is not None:
            self._metrics.waited(request.method, self._transport.host, waited)
        if waited > 1:
            log.v(2).info("Waited for the agent's own limit", seconds=round(waited, 3), request=str(request))

    def _refusal(self, request: Request, answer: Response) -> ApiError:
        retry_after = _seconds(answer.headers.get("retry-after", ""))
        error = api_error(answer.code, answer.body, request=str(request), retry_after=retry_after)
        resource = request.resource
        if answer.code == 403:
            plural = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
            namespace = request.namespace if resource.namespaced else ""
            error.hint = forbidden_hint(error.message, request.verb, resource.group, plural, namespace)
        elif answer.code == 401:
            error.hint = self._transport.credentials.problem() or (
                "the token or certificate of the kubeconfig's user is not accepted: renew it"
            )
        return error


def _seconds(retry_after: str) -> float | None:
    """Read a Retry-After in seconds; API servers never send dates."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None


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
        self._caller = RestClient(transport, limit, timeout=timeout, retries=retries, metrics=metrics)

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
            raise InvalidResponse(f"list {resource.plural}: one is not a {resource.kind}: {err}") from None
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
            raise InvalidResponse(f"{request}: the answer is not a {struct.__name__}: {err}") from None


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
        raise InvalidResponse(f"{request}: the answer is not a list: {err}") from None
    return Page(found.items or [], found.metadata.resource_version, found.metadata.continue_ or "")


# What every client of Kubernetes falls back to when its limit is given as zero.
_DEFAULT_QPS = 5.0
_DEFAULT_BURST = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """How often to ask; a negative `qps` means no limit, zero the default of Kubernetes' clients."""

    qps: float
    burst: int

    def bucket(self) -> TokenBucket:
        """A new bucket with this limit."""
        return TokenBucket(self.qps or _DEFAULT_QPS, self.burst or _DEFAULT_BURST)


@dataclass(frozen=True, slots=True)
class Clients:
    """Three ways to ask the same API server."""

    objects: ApiClient
    events: ApiClient
    heartbeats: ApiClient
    """Without limit and with a short timeout; it does not repeat what is put off, its owner does."""


def make_clients(
    transport: Transport,
    *,
    objects: Limits,
    events: Limits,
    lease_seconds: float,
    status_seconds: float,
    metrics: RestMetrics | None = None,
) -> Clients:
    """Make the three clients; a heartbeat is late when the next one is due or the lease is over."""
    return Clients(
        objects=ApiClient(transport, objects.bucket(), metrics=metrics),
        events=ApiClient(transport, events.bucket(), metrics=metrics),
        heartbeats=ApiClient(
            transport,
            TokenBucket(-1, 0),
            timeout=min(lease_seconds, status_seconds),
            retries=0,
            metrics=metrics,
        ),
    )

"""Typed REST client of the API server: resource descriptors, requests with retries, the kubelet's client set.

A `Resource` holds the REST path and the struct of one kind, so that paths are built in one place.

`RestClient` sends requests within one rate limit and one concurrency limit. A 429 or 5xx response with
Retry-After is retried after that time, a bounded number of times. After a 401 response the credentials are
reloaded once, because the token or certificate may have been replaced. Any other failure is raised as a
KubeError that names the request. `ApiClient` adds the typed verbs; several clients share one `Transport`.

`make_clients` builds the kubelet's three clients, for objects, events and heartbeats, each with its own
limits: a burst of events does not delay a pod's status, and neither delays the heartbeats that decide
whether the node's pods are evicted.
"""

from __future__ import annotations

import asyncio
import math
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
from pykubelet.tracing.span import NO_SPAN, NoSpan, Span, SpanKind, Tracer
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.rate_limiter import TokenBucket

log = get_logger(__name__)


class Metadata(Protocol):
    """Identity and version of an object: an ObjectMeta, or a smaller struct for numerous objects."""

    @property
    def name(self) -> str:
        """Name of the object."""

    @property
    def namespace(self) -> str:
        """Namespace of the object, empty for cluster-scoped kinds."""

    @property
    def uid(self) -> str:
        """UID, distinguishes objects of the same name."""

    @property
    def resource_version(self) -> str:
        """Resource version."""


class HasMetadata(Protocol):
    """Any API object with metadata."""

    @property
    def metadata(self) -> Metadata:
        """Identity and version."""


T = TypeVar("T", bound=HasMetadata)
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """Descriptor of one API resource: `Resource(Lease, "Lease", "leases", "coordination.k8s.io")`."""

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
        """Return the path of an object, or without a name of the list in a namespace or in the cluster."""
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
    """Decode an object that the API server sent. Raises ValueError that names the invalid field.

    A null list, map or string, as Go encodes unset ones, is treated as absent.
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


MAX_RESPONSE_BYTES = 128 * 1024 * 1024
STREAMING_REFUSED_SECONDS = 600.0
"""Seconds without streaming lists after the API server has refused one; it may be upgraded."""
MAX_RETRIES = 10
MAX_CONCURRENT_REQUESTS = 12
"""Regular limit on the concurrent requests of a client; see `ConcurrencyLimiter`."""
MAX_RETRY_AFTER_SECONDS = 30.0
"""Longest Retry-After that is obeyed here, in seconds; a longer one is left to the caller."""

# API servers send the response headers of a watch immediately, some proxies only with the first event.
_WATCH_BEGINS_SECONDS = 120.0
Params = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """One API request; `verb` is the RBAC verb."""

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
        """Path of the object or list."""
        return self.resource.path(self.namespace, self.name, self.subresource)

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


class RestClient:
    """REST client with one rate limit; `timeout` is in seconds per response."""

    def __init__(
        self,
        transport: Transport,
        limit: TokenBucket,
        *,
        timeout: float,
        retries: int,
        metrics: RestMetrics | None,
        tracer: Tracer | None = None,
    ) -> None:
        self._transport = transport
        self._tracer = tracer
        self._limit = limit
        self._timeout = timeout
        self._retries = retries
        self._metrics = metrics
        self._concurrency = ConcurrencyLimiter(MAX_CONCURRENT_REQUESTS)
        self._renewal_error_log = ErrorLogLimiter(log, "Failed to renew rejected credentials")

    def set_rate(self, qps: float, burst: int) -> None:
        """Change the rate limit, also for requests that wait for it."""
        self._limit.set_rate(qps, burst)

    def set_timeout(self, seconds: float) -> None:
        """Change the timeout of requests that start afterwards."""
        self._timeout = seconds

    async def call(self, request: Request) -> bytes:
        """Send the request and return the body of a 2xx response. Raises KubeError."""
        retries, renewed = 0, False
        while True:
            await self._wait_rate_limit(request)
            # Before the deadline is set: an exec plugin may be slow.
            credentials = await self._transport.credentials.current()
            async with self._concurrency:
                response = await self._send(request, credentials)
            if self._metrics is not None:
                self._metrics.received(request.method, self._transport.host, len(response.body))
            if 200 <= response.code < 300:
                return response.body
            error = self._error(request, response)
            if error.code == 401 and not renewed:
                renewed = True
                try:
                    if await self._transport.credentials.renewed(credentials):
                        continue
                except NoCredentials as err:
                    self._renewal_error_log.failed(err, asyncio.get_running_loop().time())
            wait = error.retry_after
            is_retriable = error.code == 429 or error.code >= 500
            if not is_retriable or wait is None or wait > MAX_RETRY_AFTER_SECONDS or retries >= self._retries:
                raise error
            retries += 1
            log.v(4).info("Delaying API request per Retry-After", seconds=wait, request=str(request))
            await asyncio.sleep(wait)
            if self._metrics is not None:
                self._metrics.retried(error.code, request.method, self._transport.host)

    async def _send(self, request: Request, credentials: Credentials) -> Response:
        try:
            with self._span(request) as span:
                response = await self._transport.fetch(
                    credentials,
                    request.method,
                    request.path,
                    params=request.params,
                    body=request.body,
                    content_type=request.content_type,
                    deadline=asyncio.get_running_loop().time() + self._timeout,
                    max_bytes=MAX_RESPONSE_BYTES,
                )
                span.set_attribute("http.response.status_code", response.code)
                if response.code >= 400:
                    span.fail(f"HTTP status {response.code}")
                return response
        except TimedOut as err:
            raise TimedOut(err.server, f"{request}: {err.why} ({self._timeout:g} s)") from None

    def _span(self, request: Request) -> Span | NoSpan:
        if self._tracer is None:
            return NO_SPAN
        attributes = {"http.request.method": request.method, "url.path": request.path}
        return self._tracer.start(f"HTTP {request.method}", attributes, kind=SpanKind.CLIENT)

    @asynccontextmanager
    async def stream(self, request: Request, seconds: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the body of a 200 response in chunks. Raises TimedOut after `seconds`, other KubeErrors."""
        await self._wait_rate_limit(request)
        credentials = await self._transport.credentials.current()
        begin = asyncio.get_running_loop().time()
        deadline = begin + min(seconds, _WATCH_BEGINS_SECONDS)
        async with self._transport.request(
            credentials, request.method, request.path, params=request.params, deadline=deadline, stream=True
        ) as response:
            if response.code == 200:
                yield Chunks(response, begin + seconds)
                return
            body = await response.read(MAX_RESPONSE_BYTES, deadline)
            error = self._error(request, Response(response.code, response.headers, body))
        if error.code == 401:
            await self._transport.credentials.renewed(credentials)
        raise error

    async def _wait_rate_limit(self, request: Request) -> None:
        waited = await self._limit.wait()
        if self._metrics is not None:
            self._metrics.waited(request.method, self._transport.host, waited)
        if waited > 1:
            log.v(2).info(
                "Waited for client-side rate limiter", seconds=round(waited, 3), request=str(request)
            )

    def _error(self, request: Request, response: Response) -> ApiError:
        retry_after = _seconds(response.headers.get("retry-after", ""))
        error = api_error(response.code, response.body, request=str(request), retry_after=retry_after)
        resource = request.resource
        if response.code == 403:
            plural = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
            namespace = request.namespace if resource.namespaced else ""
            error.hint = forbidden_hint(error.message, request.verb, resource.group, plural, namespace)
        elif response.code == 401:
            error.hint = self._transport.credentials.problem() or (
                "the token or certificate of the kubeconfig's user is not accepted: renew it"
            )
        return error


def _seconds(retry_after: str) -> float | None:
    """Parse Retry-After as seconds; API servers never send dates."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None


R = TypeVar("R")


class PatchKind(StrEnum):
    """Content type of a patch."""

    STRATEGIC = "application/strategic-merge-patch+json"
    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """One page of a list; `continues` is the token of the next page, empty on the last."""

    items: list[R]
    resource_version: str
    continues: str


RawPage = Page[msgspec.Raw]


class ApiClient:
    """Client of one API server.

    `timeout` is in seconds per response; `retries` limits the retries per request that Retry-After causes.
    """

    def __init__(
        self,
        transport: Transport,
        limit: TokenBucket,
        *,
        timeout: float = 60.0,
        retries: int = MAX_RETRIES,
        metrics: RestMetrics | None = None,
        tracer: Tracer | None = None,
        streams_lists: bool = False,
    ) -> None:
        self.transport = transport
        self._streaming_from = 0.0 if streams_lists else math.inf
        """Loop time from which on reflectors use streaming lists."""
        self._rest = RestClient(
            transport, limit, timeout=timeout, retries=retries, metrics=metrics, tracer=tracer
        )

    @property
    def streams_lists(self) -> bool:
        """Whether reflectors use streaming lists (feature gate WatchListClient) and no refusal is recent."""
        return asyncio.get_running_loop().time() >= self._streaming_from

    def disable_streaming(self) -> None:
        """Use no streaming lists for `STREAMING_REFUSED_SECONDS`, because the server has refused one."""
        self._streaming_from = asyncio.get_running_loop().time() + STREAMING_REFUSED_SECONDS

    def set_limits(self, limits: Limits) -> None:
        """Change the rate limit, also for requests that wait for it."""
        self._rest.set_rate(*limits.effective)

    def set_timeout(self, seconds: float) -> None:
        """Change the timeout of requests that start afterwards."""
        self._rest.set_timeout(seconds)

    async def get(self, resource: Resource[T], name: str, namespace: str = "", *, params: Params = ()) -> T:
        """Get an object; `params` such as `resourceVersion=0` reads it from the server's cache."""
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
        """Create a subresource of an object, such as the `token` of a service account."""
        document = {"apiVersion": api_version, "kind": type(obj).__name__, **to_document(obj)}
        request = Request("create", "POST", resource, namespace, name, subresource, body=to_json(document))
        return await self._object(type(obj), request)

    async def update(self, resource: Resource[T], obj: T, *, subresource: str = "") -> T:
        """Replace an object.

        Fields that its struct does not have are lost, so this is only for kinds whose struct is complete
        (leases); other objects are patched.
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
        """Patch fields of an object, or of its `status`."""
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
        """Delete an object; with a `uid` only the object with this UID, otherwise raises Conflict."""
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_period_seconds is not None:
            options["gracePeriodSeconds"] = grace_period_seconds
        if uid:
            options["preconditions"] = {"uid": uid}
        await self._rest.call(Request("delete", "DELETE", resource, namespace, name, body=to_json(options)))

    async def delete_all(self, resource: Resource[Any], namespace: str = "", *, params: Params = ()) -> None:
        """Delete all objects that `params` select, of one namespace or of all."""
        options = to_json({"apiVersion": "v1", "kind": "DeleteOptions"})
        request = Request("deletecollection", "DELETE", resource, namespace, params=params, body=options)
        await self._rest.call(request)

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        """List objects without decoding the items."""
        request = Request("list", "GET", resource, namespace, params=params)
        return read_page(await self._rest.call(request), str(request))

    def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch that yields its bytes as they arrive. Raises TimedOut after `seconds`."""
        request = Request("watch", "GET", resource, namespace, params=[("watch", "1"), *params])
        return self._rest.stream(request, seconds)

    async def pause(self, seconds: float) -> None:
        """Sleep before a retry; less if the API server becomes reachable during the sleep."""
        await self.transport.pause(seconds)

    async def _object(self, struct: type[R], request: Request) -> R:
        body = await self._rest.call(request)
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
    """Decode a list without decoding its items. Raises InvalidResponse."""
    try:
        found = msgspec.json.decode(body, type=_List)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise InvalidResponse(f"{request}: the answer is not a list: {err}") from None
    return Page(found.items or [], found.metadata.resource_version, found.metadata.continue_ or "")


# client-go's defaults for a limit of zero.
_DEFAULT_QPS = 5.0
_DEFAULT_BURST = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Client-side rate limit; a negative `qps` means unlimited, zero means client-go's default."""

    qps: float
    burst: int

    def bucket(self) -> TokenBucket:
        """Return a new token bucket with this limit."""
        return TokenBucket(*self.effective)

    @property
    def effective(self) -> tuple[float, int]:
        """Rate and burst, with client-go's defaults for zero."""
        return self.qps or _DEFAULT_QPS, self.burst or _DEFAULT_BURST


@dataclass(frozen=True, slots=True)
class Clients:
    """Three clients of the same API server."""

    objects: ApiClient
    events: ApiClient
    heartbeats: ApiClient
    """Unlimited, with a short timeout and without retries: its caller retries."""


def heartbeat_timeout(lease_seconds: float, status_seconds: float) -> float:
    """Return the timeout of a heartbeat in seconds: until the next one is due, or the lease expires."""
    return min(lease_seconds, status_seconds)


def make_clients(
    transport: Transport,
    *,
    objects: Limits,
    events: Limits,
    lease_seconds: float,
    status_seconds: float,
    metrics: RestMetrics | None = None,
    tracer: Tracer | None = None,
    streams_lists: bool = False,
) -> Clients:
    """Build the three clients; a heartbeat times out when the next is due or the lease expires."""
    return Clients(
        objects=ApiClient(
            transport, objects.bucket(), metrics=metrics, tracer=tracer, streams_lists=streams_lists
        ),
        events=ApiClient(transport, events.bucket(), metrics=metrics, tracer=tracer),
        heartbeats=ApiClient(
            transport,
            TokenBucket(-1, 0),
            timeout=heartbeat_timeout(lease_seconds, status_seconds),
            retries=0,
            metrics=metrics,
            tracer=tracer,
        ),
    )

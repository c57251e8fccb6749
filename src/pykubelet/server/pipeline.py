"""Middlewares of the servers: metrics, error responses, path validation, authentication, authorization.

Every request to the kubelet API passes them before its handler, also a request for an unknown path, so that
unauthorized clients cannot find out which paths exist.

The path determines both the required permission and the handler; if the two could interpret a path
differently, `/pods/../run/…` or `/pods%2F…` would bypass authorization. Only plain paths are accepted: no
empty, `.` or `..` segments, no encoded slashes, no backslashes, no control characters.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote_to_bytes

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import USER, HttpError, RequestCredentials, required_attributes
from pykubelet.server.auth.request_auth import Authenticator, Authorizer, authorize
from pykubelet.server.metrics.server_metrics import ServerMetrics, ServerType
from pykubelet.server.tls import peer_chain
from pykubelet.tracing.span import SpanKind, Tracer, parse_traceparent

log = get_logger(__name__)
_FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f/\\]")
_DOTS = frozenset({".", ".."})


def is_plain(raw_path: str) -> bool:
    """Return whether a request path (still percent-encoded, without the query) is plain."""
    if not raw_path.startswith("/"):
        return False
    *parents, last = raw_path.removeprefix("/").split("/")
    if not all(parents):
        return False
    return all(_is_plain_part(part) for part in (*parents, last))


def _is_plain_part(part: str) -> bool:
    try:
        decoded = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        return False
    return decoded not in _DOTS and _FORBIDDEN_CHARACTERS.search(decoded) is None


def tracing_middleware(tracer: Tracer | None) -> tuple[Middleware, ...]:
    """Return the middleware that traces requests, outside of all others; empty without tracing.

    As upstream, a request begins a new trace that links to the client's, whether the client is authenticated
    or not: a client cannot choose what is recorded.
    """
    if tracer is None:
        return ()

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        attributes = {
            "http.request.method": request.method,
            "url.scheme": request.scheme,
            "url.path": request.path,
            "server.address": "kubelet",
            "user_agent.original": request.headers.get(hdrs.USER_AGENT, ""),
            **({"http.route": route} if route else {}),
        }
        link = parse_traceparent(request.headers.get("traceparent", ""))
        with tracer.start(
            route or f"HTTP {request.method}", attributes, kind=SpanKind.SERVER, link=link, root=True
        ) as span:
            response: web.StreamResponse = await handler(request)
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.fail(response.reason or "")
            return response

    return (middleware,)


def counting_middleware(metrics: ServerMetrics, server: ServerType) -> Middleware:
    """Return the outermost middleware: counts requests, rejects ambiguous paths, maps errors to responses."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        with metrics.request(request.method, request.path, server):
            try:
                if not is_plain(request.rel_url.raw_path):
                    return plain_text(400, "Bad Request: the path is not plain\n")
                response: web.StreamResponse = await handler(request)
                return response
            except HttpError as error:
                response = plain_text(error.status, error.text)
                response.headers.update(error.headers)
                return response
            except web.HTTPNotFound:
                return plain_text(404, "404: Page Not Found")
            except (web.HTTPException, ConnectionError):
                raise
            except Exception as err:  # a failing handler must not affect the rest of the kubelet
                log.error(err, "Failed to handle request", method=request.method, path=request.path)
                return plain_text(500, "Internal Server Error\n")

    return middleware


def auth_middleware(authenticator: Authenticator, authorizer: Authorizer) -> Middleware:
    """Return the middleware that authenticates and authorizes requests."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        user = await authenticator.user(request_credentials(request))
        if user is None:
            raise HttpError(401, "Unauthorized")
        await authorize(authorizer, user, required_attributes(request.method, request.path))
        request[USER] = user
        response: web.StreamResponse = await handler(request)
        return response

    return middleware


def request_credentials(request: web.Request) -> RequestCredentials:
    """Return the credentials of a request."""
    connection = request.get_extra_info("ssl_object")
    chain = peer_chain(connection) if connection is not None else ()
    subject = connection.getpeercert().get("subject", ()) if chain else ()
    protocols = request.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, []) if is_websocket(request) else None
    return RequestCredentials(chain, subject, request.headers.get(hdrs.AUTHORIZATION, ""), protocols)


def is_upgrade(request: web.BaseRequest) -> bool:
    """Return whether the client requests a protocol upgrade."""
    tokens = ",".join(request.headers.getall(hdrs.CONNECTION, [])).lower().split(",")
    return "upgrade" in (token.strip() for token in tokens) and hdrs.UPGRADE in request.headers


def is_websocket(request: web.BaseRequest) -> bool:
    """Return whether the client requests an upgrade to WebSocket."""
    return is_upgrade(request) and request.headers[hdrs.UPGRADE].lower() == "websocket"


def plain_text(status: int, text: str) -> web.Response:
    """Return a plain text response."""
    # The text may contain undecodable bytes of the request.
    body = text.encode("utf-8", "replace")
    response = web.Response(status=status, body=body, content_type="text/plain", charset="utf-8")
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response

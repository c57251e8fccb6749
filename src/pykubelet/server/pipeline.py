"""What every request goes through before its handler: counted, path checked, sender known and allowed.

Nothing reaches a handler of the secured server without having passed here, also no request for a path that
does not exist: strangers do not learn which paths there are.

Paths that mean one thing only.

A permission is decided by the path, and so is the handler; if the two could read a path differently,
`/pods/../run/…` or `/pods%2F…` would be a hole. So only plain paths are answered: no empty, `.` or `..`
parts, no encoded slashes, no NUL or other control characters.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote_to_bytes

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from pykubelet.logs import get_logger
from pykubelet.server.auth import Authenticator, Authorizer, authorize
from pykubelet.server.identity import HttpError, RequestCredentials, User, wishes
from pykubelet.server.metrics import ServerMetrics, ServerType
from pykubelet.server.tls import peer_chain

log = get_logger(__name__)
_BAD = re.compile(r"[\x00-\x1f\x7f/\\]")
_DOTS = frozenset({".", ".."})


def is_plain(raw_path: str) -> bool:
    """Whether a path, as it came in the request (still encoded, without the query), is plain."""
    if not raw_path.startswith("/"):
        return False
    *folders, last = raw_path.removeprefix("/").split("/")
    if not all(folders):
        return False
    return all(_is_plain_part(part) for part in (*folders, last))


def _is_plain_part(part: str) -> bool:
    try:
        decoded = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        return False
    return decoded not in _DOTS and _BAD.search(decoded) is None


USER: web.RequestKey[User] = web.RequestKey("user", User)
"""Who sends a request, for its handler."""


def counted(metrics: ServerMetrics, server: ServerType) -> Middleware:
    """Count requests and turn what goes wrong into answers; the outermost layer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        with metrics.request(request.method, request.path, server):
            try:
                if not is_plain(request.rel_url.raw_path):
                    return plain_text(400, "Bad Request: the path is not plain\n")
                handled: web.StreamResponse = await handler(request)
                return handled
            except HttpError as refusal:
                answer = plain_text(refusal.status, refusal.text)
                answer.headers.update(refusal.headers)
                return answer
            except web.HTTPNotFound:
                return plain_text(404, "404: Page Not Found")
            except (web.HTTPException, ConnectionError):
                raise
            except Exception as err:  # the border between one request and the agent
                log.error(err, "Failed to answer a request", method=request.method, path=request.path)
                return plain_text(500, "Internal Server Error\n")

    return middleware


def guarded(authenticator: Authenticator, judge: Authorizer) -> Middleware:
    """Let only those pass who may."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        user = await authenticator.user(shown_by(request))
        if user is None:
            raise HttpError(401, "Unauthorized")
        await authorize(judge, user, wishes(request.method, request.path))
        request[USER] = user
        answer: web.StreamResponse = await handler(request)
        return answer

    return middleware


def shown_by(request: web.Request) -> RequestCredentials:
    """What a request shows of its sender."""
    connection = request.get_extra_info("ssl_object")
    chain = peer_chain(connection) if connection is not None else ()
    subject = connection.getpeercert().get("subject", ()) if chain else ()
    protocols = request.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, []) if is_websocket(request) else None
    return RequestCredentials(chain, subject, request.headers.get(hdrs.AUTHORIZATION, ""), protocols)


def user_name(request: web.BaseRequest) -> str:
    """The sender's name; empty on servers that do not ask for it."""
    user = request.get(USER)
    return user.name if user is not None else ""


def is_upgrade(request: web.BaseRequest) -> bool:
    """Whether the client wants to speak another protocol on this connection."""
    tokens = ",".join(request.headers.getall(hdrs.CONNECTION, [])).lower().split(",")
    return "upgrade" in (token.strip() for token in tokens) and hdrs.UPGRADE in request.headers


def is_websocket(request: web.BaseRequest) -> bool:
    """Whether the client wants to speak WebSocket."""
    return is_upgrade(request) and request.headers[hdrs.UPGRADE].lower() == "websocket"


def plain_text(status: int, text: str) -> web.Response:
    """An answer for people."""
    # Bytes of the request that are no text may come back in it.
    body = text.encode("utf-8", "replace")
    answer = web.Response(status=status, body=body, content_type="text/plain", charset="utf-8")
    answer.headers["X-Content-Type-Options"] = "nosniff"
    return answer

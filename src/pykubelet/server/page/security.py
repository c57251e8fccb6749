"""Protection of the page against other sites in the operator's browser.

A site cannot read the page through a host name that resolves to 127.0.0.1 (DNS rebinding), because on plain
loopback the Host header must name this node (`readonly.own_hosts_only`); nor with requests of its own: a
foreign `Origin` or a cross-site request that is no navigation gets 403. It cannot frame the page, and text
of pods that were taken for markup could neither run a script nor load anything (content security policy).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from pykubelet.server.pipeline import plain_text

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def same_origin_only() -> Middleware:
    """Reject requests of other sites, and add the headers of `HEADERS` to all responses."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        if is_foreign(request):
            response: web.StreamResponse = plain_text(403, "Forbidden: the request comes from another site\n")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as err:
                err.headers.update(HEADERS)
                raise
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return middleware


def is_foreign(request: web.BaseRequest) -> bool:
    """Return whether a page of another site sent the request."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None:
        try:
            if urlsplit(origin).netloc.lower() != request.headers.get(hdrs.HOST, "").lower():
                return True
        except ValueError:
            return True
    is_cross_site = request.headers.get("Sec-Fetch-Site", "") in ("cross-site", "same-site")
    return is_cross_site and request.headers.get("Sec-Fetch-Mode", "") != "navigate"

"""A real HTTPS server that plays an API server, and misbehaves as a test tells it."""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.certs import Authority, Pair

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as the server saw it."""

    method: str
    path: str
    query: dict[str, str]
    headers: list[tuple[str, str]]
    body: bytes
    subject: str
    """The common name of the client's certificate."""
    peer: Any
    serial: str = ""
    """The serial number of the client's certificate."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")


@dataclass
class Server:
    """Answers from a script, then with `default`."""

    url: str = ""
    port: int = 0
    script: deque[Handler] = field(default_factory=deque)
    default: Handler | None = None
    seen: list[Seen] = field(default_factory=list)
    context: ssl.SSLContext | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        certificate = request.transport.get_extra_info("peercert") or {}
        subject = dict(pair for part in certificate.get("subject", ()) for pair in part)
        self.seen.append(
            Seen(
                request.method,
                request.path,
                dict(request.query),
                list(request.headers.items()),
                await request.read(),
                subject.get("commonName", ""),
                request.transport.get_extra_info("peername"),
                certificate.get("serialNumber", ""),
            )
        )
        handler = self.script.popleft() if self.script else self.default
        assert handler is not None, f"nobody expected {request.method} {request.path}"
        return await handler(request)

    def say(self, *handlers: Handler) -> None:
        self.script.extend(handlers)

    def identify_as(self, pair: Pair) -> None:
        """Show this certificate to all clients that connect from now on."""
        assert self.context is not None
        self.context.load_cert_chain(pair.certificate, pair.key)


def server_context(authority: Authority, pair: Pair, *, demand: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED if demand else ssl.CERT_OPTIONAL
    return context


@asynccontextmanager
async def serving(context: ssl.SSLContext | None, port: int = 0) -> AsyncIterator[Server]:
    server = Server(context=context)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.05, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=context, reuse_address=True)
        await site.start()
        server.port = runner.addresses[0][1]
        server.url = f"{'https' if context else 'http'}://127.0.0.1:{server.port}"
        yield server
    finally:
        await runner.cleanup()


def answer(document: Any = None, code: int = 200, headers: dict[str, str] | None = None) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(document if document is not None else {}, status=code, headers=headers)

    return handler


def refuse(
    code: int, reason: str = "", message: str = "", headers: dict[str, str] | None = None, **details: Any
) -> Handler:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    status |= {"reason": reason, "message": message}
    return answer(status | ({"details": details} if details else {}), code, headers)


def text(body: str | bytes, code: int = 200) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body if isinstance(body, bytes) else body.encode(), status=code)

    return handler


def hang(seconds: float = 30) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.Response()

    return handler


async def reset(request: web.Request) -> web.StreamResponse:
    """Break the connection without a response."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def cut(body: bytes, promised: int) -> Handler:
    """Promise more bytes than come."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(promised)})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.close()
        return response

    return handler


def stream(*chunks: Any, end: bool = True) -> Handler:
    """Send chunks, each bytes, a document for a line of its own, or seconds to wait; then end or hold."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for chunk in chunks:
            if isinstance(chunk, float):
                await asyncio.sleep(chunk)
            else:
                await response.write(
                    chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode() + b"\n"
                )
        if not end:
            await asyncio.sleep(30)
        return response

    return handler


def listing(items: Iterable[Any], version: str = "100", continues: str = "") -> Handler:
    metadata = {"resourceVersion": version} | ({"continue": continues} if continues else {})
    return answer({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": list(items)})

"""Runtimes to connect to, real servers on real sockets: a scripted gRPC one and several broken ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pykubelet.cri import events_pb2, tasks_pb2
from pykubelet.cri import runtime_pb2 as pb

VERSION = pb.VersionResponse(
    version="0.1.0", runtime_name="scripted", runtime_version="1.2.3", runtime_api_version="v1"
)
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb.DESCRIPTOR, events_pb2.DESCRIPTOR, tasks_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


@dataclass
class Refuse:
    """A response that is an error."""

    code: str
    details: str


@dataclass
class Hang:
    """No response at all, until the client gives up."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.given_up.set()


@dataclass
class Seen:
    """A call that arrived."""

    method: str
    request: Message
    seconds_left: float | None
    metadata: dict[str, str] = field(default_factory=dict)


Answer = Message | Refuse | Hang | list[Message | Refuse | Hang]


@dataclass
class Runtime:
    """A gRPC server that returns the answers it was told to, and an empty message otherwise.

    A list is a stream's messages; of a call with one answer, what is said to each call in turn.
    With `prefix` it is found under another version of the protocol.
    """

    path: Path
    answers: dict[str, Answer] = field(default_factory=lambda: {"Version": VERSION})
    prefix: str = "/runtime.v1."
    services: tuple[str, ...] = ("RuntimeService", "ImageService")
    seen: list[Seen] = field(default_factory=list)
    server: Any = None

    def service(self, handler_call_details: Any) -> Any:
        """Find the method, as gRPC asks a server to."""
        path: str = handler_call_details.method
        service, _, name = path.removeprefix(self.prefix).rpartition("/")
        method = METHODS.get(f"/runtime.v1.{service}/{name}") or METHODS.get(path)
        if method is None or (path.startswith("/runtime.") and not path.startswith(self.prefix)):
            return None
        if path.startswith(self.prefix) and service not in self.services:
            return None
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        codec = {
            "request_deserializer": request.FromString,
            "response_serializer": response.SerializeToString,
        }

        async def unary(request: Message, context: Any) -> Message:
            metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            self.seen.append(Seen(name, request, context.time_remaining(), metadata))
            answer = self.answers.get(name, response())
            if isinstance(answer, list):
                answer = answer.pop(0) if len(answer) > 1 else answer[0]
            return await self._give(answer, context)

        async def stream(request: Message, context: Any) -> AsyncIterator[Message]:
            self.seen.append(Seen(name, request, context.time_remaining()))
            answer = self.answers.get(name, [])
            for part in answer if isinstance(answer, list) else [answer]:
                yield await self._give(part, context)

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, **codec)
        return grpc.unary_unary_rpc_method_handler(unary, **codec)

    async def _give(self, answer: Message | Refuse | Hang, context: Any) -> Message:
        if isinstance(answer, Refuse):
            await context.abort(grpc.StatusCode[answer.code], answer.details)
        if isinstance(answer, Hang):
            await answer.wait()
        assert isinstance(answer, Message)
        return answer

    async def start(self) -> None:
        """Listen."""
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers((self,))
        self.server.add_insecure_port(f"unix:{self.path}")
        await self.server.start()

    async def stop(self) -> None:
        """Die: connections break, the socket's file goes."""
        await self.server.stop(None)
        self.path.unlink(missing_ok=True)

    async def __aenter__(self) -> Runtime:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(path: Path, talk: Talk) -> AsyncIterator[None]:
    """Listen and do something that is not gRPC."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)

"""`pykubelet port-forward`: connections to local ports are forwarded to ports in a pod's network namespace.

Each local connection has a connection to the runtime's streaming server of its own, prepared with the CRI
call PortForward. SPDY servers implement no flow control per stream: on a shared connection, one that does
not read would stop the others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from pykubelet.api.pod import Pod
from pykubelet.cli.client import choose_pod, run_command
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.offline import node_pods
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.exec import NotRunning, running_id, runtime_client
from pykubelet.cli.printers import escape_unprintable
from pykubelet.transport.errors import CriError
from pykubelet.transport.remote_command import StreamError, connect_spdy, write_pong
from pykubelet.transport.spdy import Data, FrameReader, FrameWriter, GoAway, Ping, Reset, SpdyError
from pykubelet.util.tasks import TaskScope

PROGRAM = "pykubelet port-forward"
PROTOCOL = "portforward.k8s.io"
MAX_CONNECTIONS = 256
"""Concurrent forwarded connections; one more is closed immediately."""
_BLOCK = 64 * 1024
_MAX_ERROR_BYTES = 64 * 1024


class ForwardError(Exception):
    """Raised for a port of `port-forward` that is not valid or cannot be listened on."""


@dataclass(frozen=True, slots=True)
class PortForwardOptions:
    """Options of `pykubelet port-forward`."""

    pod: str
    ports: Sequence[str]
    address: str = "127.0.0.1"


def parse_port(text: str) -> tuple[int, int]:
    """Return the local port (zero for any) and the pod's port. Raises ForwardError."""
    local, colon, remote = text.rpartition(":")
    # Without a colon the ports are equal; an empty local port is any.
    texts = ((local or "0") if colon else remote, remote)
    numbers = [int(part) if part.isascii() and part.isdigit() and len(part) < 6 else -1 for part in texts]
    if not (0 <= numbers[0] < 2**16 and 0 < numbers[1] < 2**16):
        raise ForwardError(
            f"cannot forward port {text!r}: expected PORT, LOCAL:PORT or :PORT, from 1 to 65535"
        )
    return numbers[0], numbers[1]


def run_port_forward(selection: NodeSelection, options: PortForwardOptions) -> int:
    """Forward ports until interrupted; return the exit code."""

    def work() -> int:
        ports = [parse_port(text) for text in options.ports]
        node = select_node(selection)
        found = node_pods(node, PROGRAM)
        pod = choose_pod(found.pods, options.pod, found.states)
        asyncio.run(_forward_ports(node, _running_container(pod), ports, options.address))
        return 0

    return run_command(PROGRAM, work, NotRunning, StreamError, CriError, ForwardError)


def _running_container(pod: Pod) -> str:
    """Return the ID of a container of the pod that runs. Raises NotRunning."""
    for container in pod.spec.containers:
        with suppress(NotRunning):
            return running_id(pod, container.name)
    raise NotRunning(f"no container of pod {pod.metadata.name} runs, so nothing listens in it")


async def _forward_ports(
    node: Node, container_id: str, ports: Sequence[tuple[int, int]], address: str
) -> None:
    from pykubelet.cri import runtime_pb2 as pb

    async with runtime_client(node) as runtime, AsyncExitStack() as stack:
        containers = await runtime.list_containers(pb.ContainerFilter(id=container_id))
        if not containers:
            raise NotRunning("the container has just been removed; try again")
        sandbox = containers[0].pod_sandbox_id

        async def prepare() -> str:
            return await runtime.port_forward(pb.PortForwardRequest(pod_sandbox_id=sandbox))

        forwarder = Forwarder(prepare)
        for local, remote in ports:
            try:
                server = await asyncio.start_server(forwarder.handler(remote), address, local)
            except OSError as err:
                raise ForwardError(f"cannot listen on {address}:{local}: {err.strerror or err}") from err
            except UnicodeError as err:
                raise ForwardError(f"cannot listen on {address}: it is not a valid host name") from err
            await stack.enter_async_context(server)
            for name in (listener.getsockname() for listener in server.sockets):
                print(f"Forwarding from {name[0]}:{name[1]} -> {remote}", flush=True)
        await asyncio.Event().wait()


class Forwarder:
    """Forwards local connections; `prepare` returns the URL of a stream that is valid once."""

    def __init__(self, prepare: Callable[[], Awaitable[str]]) -> None:
        self._prepare = prepare
        self._open = 0

    def handler(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        """Return the handler of the connections to a port of the pod."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._open >= MAX_CONNECTIONS:
                _report(f"connection for port {port} closed: {MAX_CONNECTIONS} are open")
                writer.close()
                return
            self._open += 1
            try:
                if message := await forward_connection(await self._prepare(), port, reader, writer):
                    _report(message)
            except (StreamError, CriError) as err:
                _report(str(err))
            except ConnectionError:
                pass  # the local client disconnected
            finally:
                self._open -= 1
                writer.close()

        return handle


def _report(message: str) -> None:
    print(f"{PROGRAM}: {' '.join(escape_unprintable(message).split())}", file=sys.stderr, flush=True)


async def forward_connection(
    url: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> str:
    """Forward one connection until the pod's side ends; return the runtime's error, or an empty text.

    Raises StreamError, and ConnectionError if the local side breaks.
    """
    try:
        async with connect_spdy(url, PROTOCOL) as (remote_reader, remote_writer), TaskScope() as tasks:
            frames = FrameWriter()
            headers = {"port": str(port), "requestID": "0"}
            errors, opening = frames.open_stream({"streamType": "error", **headers})
            # Nothing is sent on the error stream.
            remote_writer.write(opening + frames.data(errors, b"", last=True))
            stream, opening = frames.open_stream({"streamType": "data", **headers})
            remote_writer.write(opening)

            async def upload() -> None:
                data = b"-"
                while data:
                    # A local client that resets its connection ends both directions.
                    data = await reader.read(_BLOCK)
                    try:
                        remote_writer.write(frames.data(stream, data, last=not data))
                        await remote_writer.drain()
                    except ConnectionError:
                        return  # `_download` reports it

            tasks.start(upload(), name="upload")
            return await _download(remote_reader, remote_writer, writer, frames, stream, errors)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _download(
    remote_reader: asyncio.StreamReader,
    remote_writer: asyncio.StreamWriter,
    local: asyncio.StreamWriter,
    frames: FrameWriter,
    stream: int,
    errors: int,
) -> str:
    """Write the data of the pod to the local connection until both streams end; return the error."""
    received, message, open_streams = FrameReader(), b"", {stream, errors}
    try:
        while open_streams and (data := await _receive(remote_reader)):
            received.feed(data)
            for frame in received.frames():
                match frame:
                    case Data(number, piece, last):
                        if number == stream:
                            local.write(piece)
                        elif number == errors:
                            message += piece[: _MAX_ERROR_BYTES - len(message)]
                        if last:
                            open_streams.discard(number)
                    case Reset(number):
                        open_streams.discard(number)
                    case Ping():
                        write_pong(remote_writer, frames, frame)
                    case GoAway():
                        open_streams.clear()
            await local.drain()
            if message:
                break
    except SpdyError as err:
        raise StreamError(f"the runtime's stream is not SPDY: {err}") from err
    return message.decode(errors="replace")


async def _receive(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(_BLOCK)
    except ConnectionError as err:
        raise StreamError(f"the connection to the runtime broke: {err}") from err

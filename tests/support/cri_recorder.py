"""A proxy in front of a runtime that passes everything through and keeps what was asked for.

It knows nothing of the messages: bytes in, bytes out, so the agent on one side and containerd on
the other speak to each other as they always do.
"""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

_STREAMS = ("GetContainerEvents", "Subscribe")
_OPTIONS = [("grpc.default_authority", "localhost"), ("grpc.max_receive_message_length", 16 << 20)]


@dataclass(slots=True)
class Call:
    """One call; without a response it failed, or is not over."""

    method: str
    request: bytes
    answer: bytes = b""


class Recording(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Forwards every call to `endpoint` and keeps the calls, in their order."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint.replace("unix://", "unix:", 1), options=_OPTIONS)
        self._lock = threading.Lock()
        self._calls: list[Call] = []

    def requests(self, *methods: str) -> list[tuple[str, bytes]]:
        """Requests, as (method, request)."""
        return [(call.method, call.request) for call in self.calls() if call.method in methods]

    def calls(self) -> list[Call]:
        """All calls so far."""
        with self._lock:
            return list(self._calls)

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        if method in _STREAMS:
            return grpc.unary_stream_rpc_method_handler(self._streamed(details.method))
        return grpc.unary_unary_rpc_method_handler(self._forwarded(details.method, method))

    def _forwarded(self, path: str, method: str) -> Any:
        call = self._channel.unary_unary(path)

        def forward(request: bytes, context: Any) -> bytes:
            kept = Call(method, request)
            with self._lock:
                self._calls.append(kept)
            try:
                kept.answer = call(request)
            except grpc.RpcError as err:
                context.abort(err.code(), err.details())
                raise
            return kept.answer

        return forward

    def _streamed(self, path: str) -> Any:
        call = self._channel.unary_stream(path)

        def forward(request: bytes, context: Any) -> Iterator[bytes]:
            stream = call(request)
            context.add_callback(stream.cancel)
            try:
                yield from stream
            except grpc.RpcError as err:
                context.abort(err.code(), err.details())

        return forward

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def recorded(endpoint: str, socket: Path) -> Iterator[Recording]:
    """Run a recording proxy on a socket of its own for the time of a block."""
    recording = Recording(endpoint)
    server = grpc.server(ThreadPoolExecutor(32), handlers=[recording], options=_OPTIONS)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield recording
    finally:
        server.stop(grace=None).wait()
        recording.close()
        socket.unlink(missing_ok=True)

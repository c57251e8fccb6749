"""An OpenTelemetry collector for tests: a real gRPC server (grpcio) that keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from pykubelet.tracing import otlp_pb2 as pb
from pykubelet.tracing.otlp import EXPORT_METHOD


class Collector:
    """Keeps what is exported; `failure` is the code of the status that it answers with instead."""

    def __init__(self) -> None:
        self.requests: list[pb.ExportTraceServiceRequest] = []
        self.attempts = 0
        self.failure: grpc.StatusCode | None = None
        self.response = pb.ExportTraceServiceResponse()
        self.hang = threading.Event()
        self.hang.set()
        self.address = ""

    @property
    def spans(self) -> list[pb.Span]:
        """All spans so far."""
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[pb.Span]:
        return [span for span in self.spans if span.name == name]

    def wait(self, met: Callable[[Collector], Any], seconds: float = 30) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not met(self):
            names = sorted({span.name for span in self.spans})
            assert time.monotonic() < end, f"not in time; spans: {names}"
            time.sleep(0.05)

    def service(self, details: Any) -> Any:
        if details.method != EXPORT_METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=pb.ExportTraceServiceRequest.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    def _export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self.attempts += 1
        self.hang.wait(30)
        if self.failure is not None:
            context.abort(self.failure, "as the test says")
        self.requests.append(request)
        return self.response


def attributes(span: pb.Span) -> dict[str, Any]:
    """The attributes of a span."""
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value")
        for item in span.attributes
    }


@contextmanager
def collecting(address: str = "127.0.0.1:0") -> Iterator[Collector]:
    """Run a collector, on a free port or at `unix:/path`."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4), handlers=(collector,))
    port = server.add_insecure_port(address)
    collector.address = address if address.startswith("unix") else f"127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        collector.hang.set()
        server.stop(None).wait()

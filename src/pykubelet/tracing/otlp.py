"""OTLP: encoding of spans and of requests, and the addresses of collectors.

A span is encoded when it ends (about 10 µs), so that sending a batch only joins bytes: encoding hundreds of
spans in one step would block the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from pykubelet.tracing import otlp_pb2 as pb
from pykubelet.tracing.span import AttributeValue, Span, SpanContext

EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
DEFAULT_ENDPOINT = "localhost:4317"
DEFAULT_PORT = 4317
_STATUS_ERROR = 2
_SCOPE_SPANS, _SPANS, _RESOURCE_SPANS = 2, 2, 1


def encode_span(span: Span) -> bytes:
    """Encode a span that has ended."""
    message = pb.Span(
        trace_id=span.context.trace_id,
        span_id=span.context.span_id,
        parent_span_id=span.parent_id,
        name=_text(span.name),
        kind=int(span.kind),
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=[_key_value(name, value) for name, value in span.attributes.items()],
        flags=_flags(span.context),
    )
    if span.link is not None:
        message.links.add(trace_id=span.link.trace_id, span_id=span.link.span_id, flags=_flags(span.link))
    if span.error is not None:
        message.status.code = _STATUS_ERROR
        message.status.message = _text(span.error)
    return message.SerializeToString()


class RequestEncoder:
    """Encoder of export requests: joins encoded spans of one resource and one scope."""

    def __init__(self, resource: Mapping[str, str], scope: str, version: str) -> None:
        attributes = [_key_value(name, value) for name, value in resource.items()]
        self._resource = pb.ResourceSpans(resource=pb.Resource(attributes=attributes)).SerializeToString()
        scope_message = pb.InstrumentationScope(name=scope, version=version)
        self._scope = pb.ScopeSpans(scope=scope_message).SerializeToString()

    def encode(self, spans: Iterable[bytes]) -> bytes:
        """Return an encoded ExportTraceServiceRequest."""
        scope_spans = self._scope + b"".join(_field(_SPANS, span) for span in spans)
        return _field(_RESOURCE_SPANS, self._resource + _field(_SCOPE_SPANS, scope_spans))


def rejected_spans(response: bytes) -> tuple[int, str]:
    """Return the number of spans that the collector rejected, and its reason. Raises ValueError."""
    try:
        partial = pb.ExportTraceServiceResponse.FromString(response).partial_success
    except Exception as err:  # protobuf's DecodeError does not derive from ValueError
        raise ValueError(f"the response is not valid: {err}") from None
    return partial.rejected_spans, partial.error_message


@dataclass(frozen=True, slots=True)
class CollectorAddress:
    """Address of a collector: a Unix socket, or a host and port."""

    host: str = ""
    port: int = 0
    socket: str = ""
    """Path of the socket; an abstract one begins with a zero byte."""

    @classmethod
    def parse(cls, endpoint: str | None) -> CollectorAddress:
        """Parse `tracing.endpoint`, which validation has accepted. Raises ValueError."""
        endpoint = endpoint or DEFAULT_ENDPOINT
        is_url = "//" in endpoint or endpoint.startswith(("unix:/", "unix-abstract:/"))
        url = urlsplit(endpoint if is_url else f"dns://{endpoint}")
        if url.scheme in ("unix", "unix-abstract"):
            path = unquote(url.path)
            if url.netloc or not path:
                raise ValueError(f"{endpoint!r} names no socket; write {url.scheme}:///path")
            return cls(socket=path if url.scheme == "unix" else f"\0{path}")
        if path := url.path.strip("/"):
            # dns://server/host:port, as in gRPC; the host's own resolver is used.
            url = urlsplit(f"dns://{path}")
        if not url.hostname:
            raise ValueError(f"{endpoint!r} names no host; write host:port")
        return cls(host=url.hostname, port=url.port or DEFAULT_PORT)

    def __str__(self) -> str:
        if self.socket:
            return f"unix:{self.socket}".replace("\0", "@")
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _flags(context: SpanContext) -> int:
    return int(context.sampled)


def _key_value(name: str, value: AttributeValue) -> pb.KeyValue:
    if isinstance(value, bool):
        return pb.KeyValue(key=name, value=pb.AnyValue(bool_value=value))
    if isinstance(value, int):
        return pb.KeyValue(key=name, value=pb.AnyValue(int_value=max(-(1 << 63), min(value, (1 << 63) - 1))))
    return pb.KeyValue(key=name, value=pb.AnyValue(string_value=_text(value)))


def _text(value: str) -> str:
    """Return a text that can be encoded: paths may contain undecodable bytes."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field."""
    size, length = len(payload), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes((number << 3 | 2,)) + bytes(length) + payload

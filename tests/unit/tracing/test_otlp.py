"""OTLP messages are the protocol's, number by number, and joined bytes are what protobuf would write."""

import pytest
from google.protobuf.descriptor import Descriptor

from pykubelet.tracing import otlp_pb2 as pb
from pykubelet.tracing.otlp import CollectorAddress, RequestEncoder, encode_span, rejected_spans
from pykubelet.tracing.span import Span, SpanContext, SpanKind, Tracer
from tests.support.proto_tables import DATA, kind_of, read_table
from tests.support.trace_collector import attributes


class Sink:
    def record(self, span: Span) -> None:
        self.span = span


def all_messages() -> list[Descriptor]:
    top = list(pb.DESCRIPTOR.message_types_by_name.values())
    return [*top, *(nested for message in top for nested in message.nested_types)]


def test_proto_messages_field_numbers_equal_upstream() -> None:
    facts = read_table(DATA / "otlp.txt").messages
    assert {message.full_name for message in all_messages()} == set(facts)
    for message in all_messages():
        known = facts[message.full_name]
        found = {
            field.name: (field.number, kind_of(field).replace("pykubelet.otlp.", ""))
            for field in message.fields
        }
        # Ours is a subset; an enum is sent as its number.
        assert found == {name: known[name] for name in found}, message.full_name


def ended(**options: object) -> Span:
    sink = Sink()
    with Tracer(sink, 1.0).start("name", **options) as span:  # type: ignore[arg-type]
        pass
    return span


def test_encode_span_all_fields() -> None:
    parent, link = SpanContext(b"t" * 16, b"p" * 8, True), SpanContext(b"o" * 16, b"l" * 8, False)
    span = ended(
        attributes={"s": "v", "i": -3, "b": True, "huge": 1 << 80, "bad": "\udcff"},
        kind=SpanKind.CLIENT,
        parent=parent,
        link=link,
    )
    span.fail("why")
    found = pb.Span.FromString(encode_span(span))
    assert (found.trace_id, found.parent_span_id, found.name, found.kind) == (b"t" * 16, b"p" * 8, "name", 3)
    assert found.span_id == span.context.span_id
    assert attributes(found) == {"s": "v", "i": -3, "b": True, "huge": (1 << 63) - 1, "bad": "?"}
    assert (found.links[0].trace_id, found.links[0].span_id) == (b"o" * 16, b"l" * 8)
    assert (found.status.code, found.status.message) == (2, "why")
    assert found.end_time_unix_nano >= found.start_time_unix_nano > 10**18


@pytest.mark.parametrize("count", [0, 1, 500])
def test_request_encoder_equals_protobuf(count: int) -> None:
    spans = [encode_span(ended(attributes={"k": "v" * index})) for index in range(count)]
    request = RequestEncoder({"service.name": "kubelet"}, "scope", "1").encode(spans)
    expected = pb.ExportTraceServiceRequest()
    resource = expected.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "kubelet"
    scope = resource.scope_spans.add(scope=pb.InstrumentationScope(name="scope", version="1"))
    for span in spans:
        scope.spans.add().ParseFromString(span)
    assert pb.ExportTraceServiceRequest.FromString(request) == expected


def test_rejected_spans_read_from_response() -> None:
    response = pb.ExportTraceServiceResponse()
    assert rejected_spans(response.SerializeToString()) == (0, "")
    response.partial_success.rejected_spans = 3
    response.partial_success.error_message = "full"
    assert rejected_spans(response.SerializeToString()) == (3, "full")
    with pytest.raises(ValueError, match="not valid"):
        rejected_spans(b"\xff\xff")


@pytest.mark.parametrize(
    ("endpoint", "expected", "text"),
    [
        (None, CollectorAddress("localhost", 4317), "localhost:4317"),
        ("host:1", CollectorAddress("host", 1), "host:1"),
        ("host", CollectorAddress("host", 4317), "host:4317"),
        ("[::1]:4317", CollectorAddress("::1", 4317), "[::1]:4317"),
        ("dns:///host:1", CollectorAddress("host", 1), "host:1"),
        ("dns://8.8.8.8/host:1", CollectorAddress("host", 1), "host:1"),
        ("unix:///run/otel.sock", CollectorAddress(socket="/run/otel.sock"), "unix:/run/otel.sock"),
        ("unix:/run/otel.sock", CollectorAddress(socket="/run/otel.sock"), "unix:/run/otel.sock"),
        ("unix-abstract:///otel", CollectorAddress(socket="\0/otel"), "unix:@/otel"),
    ],
)
def test_collector_address_parse(endpoint: str | None, expected: CollectorAddress, text: str) -> None:
    address = CollectorAddress.parse(endpoint)
    assert address == expected
    assert str(address) == text


@pytest.mark.parametrize("endpoint", ["unix://host/path", "unix://", "dns://"])
def test_collector_address_without_target_is_rejected(endpoint: str) -> None:
    with pytest.raises(ValueError, match="names no"):
        CollectorAddress.parse(endpoint)

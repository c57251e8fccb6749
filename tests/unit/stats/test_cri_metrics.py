"""The runtime's own metrics as Prometheus text."""

from prometheus_client.parser import text_string_to_metric_families

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.stats.cri.metrics import SAMPLES_PER_PIECE, render_cri_metrics


def described(name: str, *labels: str, help: str = "Help.") -> pb.MetricDescriptor:
    return pb.MetricDescriptor(name=name, help=help, label_keys=labels)


def metric(name: str, value: int, *labels: str, time: int = 0, kind: str = "GAUGE") -> pb.Metric:
    return pb.Metric(
        name=name,
        timestamp=time,
        metric_type=kind,
        label_values=labels,
        value=pb.UInt64Value(value=value),
    )


def text(descriptors: list[pb.MetricDescriptor], *metrics: pb.Metric) -> str:
    pod = pb.PodSandboxMetrics(
        metrics=metrics[:1], container_metrics=[pb.ContainerMetrics(metrics=metrics[1:])]
    )
    return b"".join(render_cri_metrics(descriptors, [pod])).decode()


def test_render_cri_metrics_sorted_with_labels_and_times() -> None:
    descriptors = [described("b", "pod", "id", help="Two\nlines."), described("a_total")]
    rendered = text(
        descriptors,
        metric("b", 7, 'p"1', "i\\1", time=1_800_000_000_123_456_789),
        metric("a_total", 9, kind="COUNTER"),
        metric("b", 8, "p2", "i2"),
    )
    assert rendered == (
        "# HELP a_total [INTERNAL] Help.\n# TYPE a_total counter\na_total{} 9\n"
        "# HELP b [INTERNAL] Two\\nlines.\n# TYPE b gauge\n"
        'b{id="i\\\\1",pod="p\\"1"} 7 1800000000123\nb{id="i2",pod="p2"} 8\n'
    )
    families = {family.name: family for family in text_string_to_metric_families(rendered)}
    assert families["b"].samples[0].labels == {"pod": 'p"1', "id": "i\\1"}


def test_render_cri_metrics_invalid_parts_skipped() -> None:
    descriptors = [described("ok", "l"), described("bad name", "l"), described("twice", "l", "l")]
    rendered = text(
        descriptors,
        metric("ok", 1, "x"),
        metric("ok", 2, "x"),
        metric("ok", 3, "y", "z"),
        metric("ok", 4, "w", kind="COUNTER"),
        metric("bad name", 5, "x"),
        metric("twice", 6, "x", "x"),
        metric("undescribed", 7),
    )
    assert [line for line in rendered.splitlines() if line[0] != "#"] == ['ok{l="x"} 1']


def test_render_cri_metrics_many_samples_in_pieces() -> None:
    samples = [metric("m", number, f"p{number}") for number in range(5000)]
    pods = [pb.PodSandboxMetrics(metrics=samples)]
    pieces = list(render_cri_metrics([described("m", "pod")], pods))
    assert max(piece.count(b"\n") for piece in pieces) <= SAMPLES_PER_PIECE
    assert b"".join(pieces).count(b"\n") == 5002

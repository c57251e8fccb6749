"""Traces of a kubelet with real containers, in a real collector."""

import re
from collections.abc import Iterator

import pytest

from pykubelet.tracing import otlp_pb2 as pb
from tests.support.data_dir import short_dir
from tests.support.manifests import container, forever, pod
from tests.support.node import Node, kubelet_node, running
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime, runtime_process
from tests.support.trace_collector import Collector, attributes, collecting

pytestmark = pytest.mark.machine
CALLS = "RunPodSandbox CreateContainer StartContainer"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


@pytest.fixture(scope="module")
def node(runtime: RunningRuntime, collector: Collector) -> Iterator[Node]:
    tracing = {"endpoint": collector.address, "samplingRatePerMillion": 1_000_000}
    with running(kubelet_node(runtime, tracing=tracing)) as started:
        yield started
        started.clear()


def syncs_of(collector: Collector, name: str, of: str = "syncPod") -> list[pb.Span]:
    return [span for span in collector.named(of) if attributes(span)["k8s.pod.name"] == name]


def test_tracing_start_of_a_pod_is_one_trace(node: Node, collector: Collector) -> None:
    mounted = [{"name": "data", "mountPath": "/data"}]
    document = pod(
        "traced",
        container(command=forever(), volumeMounts=mounted),
        initContainers=[container("first", ["true"])],
        volumes=[{"name": "data", "emptyDir": {}}],
    )
    name = node.start_pod(document)["metadata"]["name"]
    started = f"runtime.v1.RuntimeService/{CALLS.split()[-1]}"
    collector.wait(lambda found: syncs_of(found, name) and len(found.named(started)) >= 2)
    root = next(span for span in syncs_of(collector, name) if not span.parent_span_id)
    assert attributes(root)["k8s.pod.update_type"] == "create"
    trace = [span for span in collector.spans if span.trace_id == root.trace_id]
    names = {span.name for span in trace}
    assert {f"runtime.v1.RuntimeService/{call}" for call in CALLS.split()} <= names
    assert {"prepare/cgroup", "prepare/volumes", "mountVolume", "createPodSandbox", "ensureImage"} <= names
    containers = {attributes(span)["k8s.container.name"] for span in trace if span.name == "startContainer"}
    assert containers == {"first", "main"}
    # Every span has its parent in the same trace, and lies within the time of the pod's start.
    ids = {span.span_id for span in trace}
    assert all(span.parent_span_id in ids for span in trace if span is not root)
    assert all(span.start_time_unix_nano >= root.start_time_unix_nano for span in trace)


def test_tracing_request_of_a_client_is_a_span(node: Node, collector: Collector) -> None:
    node.page("/pods")
    collector.wait(lambda found: found.named("/pods") or found.named("/pods/"))


def test_tracing_stop_exports_the_last_spans(node: Node, collector: Collector) -> None:
    document = pod("last", container(command=forever()))
    name = node.start_pod(document)["metadata"]["name"]
    assert node.stop() == 0
    # No batch was due: they were flushed.
    assert syncs_of(collector, name)
    node.start()
    node.clear()


def test_tracing_unreachable_collector_pods_start_and_kubelet_stops() -> None:
    tracing = {"endpoint": f"127.0.0.1:{free_port()}", "samplingRatePerMillion": 1_000_000}
    with short_dir() as path, runtime_process(path) as runtime:
        with running(kubelet_node(runtime, tracing=tracing)) as node:
            node.start_pod(pod("unseen"))
            node.wait("the failure to be logged", lambda: "Failed to export spans" in node.log_text())
            node.clear()
            assert node.stop() == 0
            assert len(re.findall(r"^E.*Failed to export spans", node.log_text(), re.MULTILINE)) == 1

"""The pods API, as its clients see it through grpcio."""

import asyncio
import base64
import contextlib
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio
import msgspec
import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from prometheus_client import CollectorRegistry

from pykubelet.api.meta import from_document, now, to_document
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.podconfig.mux import PodChange, PodStore
from pykubelet.server.podsapi import core_pb2
from pykubelet.server.podsapi import pods_pb2 as pb
from pykubelet.server.podsapi.encoding import EMBEDDED, EncodingError, encode_pod
from pykubelet.server.podsapi.metrics import PodWatchMetrics
from pykubelet.server.podsapi.server import BURST, PodsServer, serving_pods
from pykubelet.server.podsapi.watch import MAX_WATCHERS, QUEUE_EVENTS, PodWatch
from pykubelet.status.compute import StatusStore
from pykubelet.transport.grpc_connection import Status
from pykubelet.transport.grpc_server import GrpcError, UnaryMethod
from tests.support.proto_tables import DATA

SECONDS = 60
DROPPED = "kubelet_pod_watch_events_dropped_total"


def pod_named(name: str, **spec: Any) -> Pod:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": {"app": name}}
    return from_document(Pod, {"metadata": metadata, "spec": spec})


class PodsNode:
    """A node's stores, with the pods API on them."""

    def __init__(self, channel: Any, registry: CollectorRegistry) -> None:
        self.store, self.statuses = PodStore(), StatusStore()
        self.terminated: set[str] = set()
        self.watch = PodWatch(
            self.store, self.statuses, self.terminated.__contains__, PodWatchMetrics(registry)
        )
        self.store.add_listener(self.watch.handle_pod)
        self.statuses.add_listener(self.watch.handle_status)
        self.channel = channel
        self.registry = registry

    def put(self, pod: Pod, op: Literal["ADD", "UPDATE", "RECONCILE", "DELETE", "REMOVE"] = "ADD") -> Pod:
        self.store.apply(PodChange(op, pod, "api"))
        return pod

    def report(self, pod: Pod, phase: str, message: str = "") -> None:
        self.statuses.set(pod, PodStatus(phase=phase, message=message))

    async def call(self, method: str, request: Message, answer: Any) -> Any:
        call = self.channel.unary_unary(f"/v1alpha1.Pods/{method}", response_deserializer=answer.FromString)
        return await call(request.SerializeToString(), timeout=SECONDS)

    def start_watch(self) -> Any:
        method = self.channel.unary_stream(
            "/v1alpha1.Pods/WatchPods", response_deserializer=pb.WatchPodsEvent.FromString
        )
        return method(b"", timeout=SECONDS)

    async def synced_watch(self) -> Any:
        """A watch that has received the initial pods."""
        watch = self.start_watch()
        while (await watch.read()).type != pb.INITIAL_SYNC_COMPLETE:
            pass
        return watch

    @property
    def dropped(self) -> float | None:
        return self.registry.get_sample_value(DROPPED)


@asynccontextmanager
async def node_in(directory: Path, send_timeout: float = SECONDS) -> AsyncIterator[PodsNode]:
    path = directory / "pods-api"
    async with grpc.aio.insecure_channel(f"unix://{path / 'pods-api.sock'}") as channel:
        node = PodsNode(channel, CollectorRegistry())
        async with serving_pods(path, PodsServer(node.store, node.statuses, node.watch, send_timeout)):
            yield node


def decoded(data: bytes) -> Any:
    return core_pb2.Pod.FromString(data)


async def event_of(watch: Any) -> tuple[str, str, str]:
    """Type, name and phase of the next event."""
    event = await watch.read()
    pod = decoded(event.pod)
    return pb.EventType.Name(event.type), pod.metadata.name, pod.status.phase


async def test_list_pods_stored_status_sorted_by_uid(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        node.put(pod_named("b"))
        node.report(node.put(pod_named("a")), "Running")
        assert stat.S_IMODE((tmp_path / "pods-api").stat().st_mode) == 0o750
        for _ in range(2):  # the second from the cache
            response = await node.call("ListPods", pb.ListPodsRequest(), pb.ListPodsResponse)
            pods = [decoded(data) for data in response.pods]
            assert [(pod.metadata.name, pod.status.phase) for pod in pods] == [("a", "Running"), ("b", "")]


async def test_get_pod_known_uid_returns_spec_and_status(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        pod = node.put(pod_named("a", nodeName="n1", containers=[{"name": "c", "image": "i"}]))
        node.report(pod, "Pending")
        response = await node.call("GetPod", pb.GetPodRequest(podUID="uid-a"), pb.GetPodResponse)
        found = decoded(response.pod)
        assert (found.spec.nodeName, found.spec.containers[0].image) == ("n1", "i")
        assert (found.status.phase, dict(found.metadata.labels)) == ("Pending", {"app": "a"})
        node.report(pod, "Running")
        response = await node.call("GetPod", pb.GetPodRequest(podUID="uid-a"), pb.GetPodResponse)
        assert decoded(response.pod).status.phase == "Running"


async def test_get_pod_unknown_uid_fails_with_not_found(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.call("GetPod", pb.GetPodRequest(podUID="x"), pb.GetPodResponse)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "pod with UID x not found"


async def test_get_pod_value_out_of_range_fails_with_internal(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        node.put(pod_named("a", priority=1 << 40))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.call("GetPod", pb.GetPodRequest(podUID="uid-a"), pb.GetPodResponse)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert (caught.value.details() or "").startswith("failed to marshal pod: ")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.start_watch().read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert node.dropped == 1


async def test_list_pods_over_rate_limit_rejected(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        method = PodsServer(node.store, node.statuses, node.watch).methods["/v1alpha1.Pods/ListPods"]
        assert isinstance(method, UnaryMethod)
        # Without a client in between, all of them take less than the time of one further request.
        calls = [method.handler(pb.ListPodsRequest()) for _ in range(20 * BURST)]
        results = await asyncio.gather(*calls, return_exceptions=True)
    statuses = [result.status for result in results if isinstance(result, GrpcError)]
    assert BURST <= len(results) - len(statuses) < len(results)
    assert set(statuses) == {Status("RESOURCE_EXHAUSTED", "rejected by rate limit")}


async def test_watch_pods_life_of_pod_sends_each_change(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        node.report(node.put(pod_named("old")), "Running")
        watch = node.start_watch()
        assert await event_of(watch) == ("ADDED", "old", "Running")
        first = await watch.read()
        assert (first.type, first.pod) == (pb.INITIAL_SYNC_COMPLETE, b"")

        pod = node.put(pod_named("new"))  # without a status it is not sent yet
        node.report(pod, "Pending")
        assert await event_of(watch) == ("ADDED", "new", "Pending")
        node.report(pod, "Running")
        assert await event_of(watch) == ("MODIFIED", "new", "Running")
        relabelled = msgspec.structs.replace(
            pod, metadata=msgspec.structs.replace(pod.metadata, labels={"app": "other"})
        )
        node.put(relabelled, "UPDATE")
        event = await watch.read()
        assert (event.type, dict(decoded(event.pod).metadata.labels)) == (pb.MODIFIED, {"app": "other"})
        # A status from the API server is the kubelet's own: no event.
        node.put(msgspec.structs.replace(relabelled, status=PodStatus(phase="Running")), "RECONCILE")
        node.put(relabelled, "REMOVE")
        event = await watch.read()
        assert event.type == pb.DELETED
        only = {"name": "new", "namespace": "default", "uid": "uid-new"}
        sent = decoded(event.pod)
        assert {field.name: value for field, value in sent.metadata.ListFields()} == only
        assert [field.name for field, _ in sent.ListFields()] == ["metadata"]


async def test_watch_pods_terminated_pod_deleted_once(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        watch = await node.synced_watch()
        pod = node.put(pod_named("a"))
        node.report(pod, "Succeeded")
        assert await event_of(watch) == ("ADDED", "a", "Succeeded")
        node.watch.handle_worker(pod.uid)  # it terminates, and has not terminated yet
        node.terminated.add(pod.uid)
        node.watch.handle_worker(pod.uid)
        assert await event_of(watch) == ("DELETED", "a", "")
        node.report(pod, "Failed")
        node.put(pod, "REMOVE")
        node.report(node.put(pod_named("b")), "Running")
        assert await event_of(watch) == ("ADDED", "b", "Running")


async def test_watch_pods_terminating_pod_of_previous_kubelet_modified(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        watch = await node.synced_watch()
        pod = pod_named("a")
        pod.metadata.deletion_timestamp = now()
        node.report(node.put(pod, "DELETE"), "Running")
        assert await event_of(watch) == ("MODIFIED", "a", "Running")


async def test_watch_pods_many_clients_all_receive_event(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        watches = [await node.synced_watch() for _ in range(3)]
        node.report(node.put(pod_named("a")), "Running")
        assert [await event_of(watch) for watch in watches] == [("ADDED", "a", "Running")] * 3


async def test_watch_pods_over_client_limit_rejected_until_one_ends(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        # Fewer than the calls that the server accepts on one connection.
        held = [node.watch.watching() for _ in range(MAX_WATCHERS - 1)]
        for one in held:
            one.__enter__()
        last = await node.synced_watch()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.start_watch().read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "too many watch clients" in (caught.value.details() or "")
        held.pop().__exit__(None, None, None)
        again = await node.synced_watch()
        for one in held:
            one.__exit__(None, None, None)
        last.cancel()
        again.cancel()


async def test_watch_pods_queue_full_ends_with_resource_exhausted(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        slow, pod = await node.synced_watch(), node.put(pod_named("a"))
        # Without a turn of the event loop in between, no client can be sent anything.
        for i in range(QUEUE_EVENTS + 1):
            node.report(pod, "Running", str(i))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await slow.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "watch client channel closed"
        assert node.dropped == 1
        node.report(pod, "Running", "later")
        assert node.dropped == 1


async def test_watch_pods_client_that_does_not_read_ended_after_timeout(tmp_path: Path) -> None:
    async with node_in(tmp_path, send_timeout=0.05) as node:
        silent, pod = await node.synced_watch(), node.put(pod_named("a"))
        big = "x" * 1_000_000
        held = [node.watch.watching() for _ in range(MAX_WATCHERS - 1)]
        for one in held:
            one.__enter__()
        # Its window is full after some of them; then its place is free again.
        for i in range(QUEUE_EVENTS - 1):
            node.report(pod, "Running", f"{big}{i}")
        async with asyncio.timeout(SECONDS):
            while True:
                free = node.start_watch()
                with contextlib.suppress(grpc.aio.AioRpcError):  # there are too many
                    await free.read()
                    break
        with pytest.raises(grpc.aio.AioRpcError):
            while True:
                await silent.read()
        for one in held:
            one.__exit__(None, None, None)
        free.cancel()


async def test_pod_encoder_removed_pod_forgotten(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        watch, pod = await node.synced_watch(), node.put(pod_named("a"))
        node.report(pod, "Running")
        await event_of(watch)
        assert len(node.watch.encoder) == 1
        node.report(pod, "Failed")
        node.put(pod, "REMOVE")  # before the last status is encoded
        assert [await event_of(watch) for _ in range(2)] == [
            ("MODIFIED", "a", "Failed"),
            ("DELETED", "a", ""),
        ]
        assert len(node.watch.encoder) == 0


GOLDEN = json.loads((DATA / "core-pod.json").read_text())
"""A pod with every field set, as JSON and as v1.Pod#Marshal of k8s.io/api v0.36.3 encodes it."""


def upstream_pod() -> Any:
    return core_pb2.Pod.FromString(base64.b64decode(GOLDEN["protobuf"]))


def test_core_proto_upstream_pod_has_no_unknown_fields() -> None:
    def check(message: Any) -> None:
        assert not len(UnknownFieldSet(message)), message.DESCRIPTOR.name
        for field, value in message.ListFields():
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                for inner in value if field.is_repeated else [value]:
                    check(inner)

    check(upstream_pod())


def test_encode_pod_every_struct_field_equals_upstream() -> None:
    pod = from_document(Pod, GOLDEN["pod"])
    ours = core_pb2.Pod.FromString(encode_pod(pod, pod.status))

    def check(message: Any, upstream: Any, document: Any, path: str) -> set[str]:
        """Compare the fields of a message; return the names of those that came from the document."""
        names: set[str] = set()
        for field, value in message.ListFields():
            theirs, where = getattr(upstream, field.name), f"{path}.{field.name}"
            if field.name in EMBEDDED:
                names |= check(value, theirs, None, where)
                continue
            names.add(field.name)
            inner = document.get(field.name) if isinstance(document, dict) else None
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                assert value == theirs, where
            elif field.is_repeated:
                for one, other, part in zip(value, theirs, inner or [None], strict=True):
                    check(one, other, part, where)
            else:
                check(value, theirs, inner, where)
        if isinstance(document, dict):
            assert names >= document.keys() - {"kind", "apiVersion"}, path
        return names

    document = to_document(pod)
    for part in ("metadata", "spec", "status"):
        check(getattr(ours, part), getattr(upstream_pod(), part), document[part], part)


def test_encode_pod_explicit_zero_and_false_are_present() -> None:
    pod = pod_named(
        "a",
        terminationGracePeriodSeconds=0,
        hostUsers=False,
        volumes=[{"name": "v", "emptyDir": {}}, {"name": "i", "iscsi": {"iqn": "q"}}],
    )
    spec = decoded(encode_pod(pod, pod.status)).spec
    assert spec.HasField("terminationGracePeriodSeconds")
    assert spec.HasField("hostUsers")
    assert not spec.HasField("hostNetwork")
    assert spec.volumes[0].volumeSource.HasField("emptyDir")
    assert spec.volumes[1].volumeSource.iscsi.iscsiInterface == "default"


def test_encode_pod_invalid_unicode_replaced() -> None:
    pod = pod_named("a")
    message = decoded(encode_pod(pod, PodStatus(message="file \udcff"))).status.message
    assert message == "file \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("value", ["text", {"partition": "one"}, {"partition": []}])
def test_encode_pod_invalid_volume_source_raises_encoding_error(value: Any) -> None:
    pod = pod_named("a", volumes=[{"name": "v"}])
    pod.spec.volumes[0].aws_elastic_block_store = value
    with pytest.raises(EncodingError):
        encode_pod(pod, pod.status)

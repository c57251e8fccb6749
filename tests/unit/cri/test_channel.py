"""What every call has in common: failures are named, waiting ends, the connection heals, all is counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.transport import errors
from pykubelet.transport.grpc_connection import MAX_MESSAGE_BYTES
from tests.support.cri_servers import VERSION, Hang, Refuse, Runtime


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        ("NOT_FOUND", errors.NotFound, "NotFound"),
        ("UNAVAILABLE", errors.Unavailable, "Unavailable"),
        ("ALREADY_EXISTS", errors.AlreadyExists, "AlreadyExists"),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceeded, "DeadlineExceeded"),
        ("UNIMPLEMENTED", errors.Unimplemented, "Unimplemented"),
        ("RESOURCE_EXHAUSTED", errors.ResourceExhausted, "ResourceExhausted"),
        ("UNKNOWN", errors.CriError, "Unknown"),
        ("CANCELLED", errors.CriError, "Canceled"),
        ("FAILED_PRECONDITION", errors.CriError, "FailedPrecondition"),
    ],
)
async def test_channel_call_grpc_error_mapped_to_exception_with_call_name(
    scripted: Runtime, cri: RuntimeConnection, status: str, kind: type[errors.CriError], code: str
) -> None:
    scripted.answers["StopContainer"] = Refuse(status, "because")
    with pytest.raises(errors.CriError) as caught:
        await cri.runtime.stop_container("c1", 0)
    assert type(caught.value) is kind
    assert (caught.value.call, caught.value.code, caught.value.message) == ("StopContainer", code, "because")
    assert str(caught.value) == f"StopContainer: rpc error: code = {code} desc = because"


async def test_channel_call_grpc_error_without_message_has_placeholder(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    scripted.answers["Status"] = Refuse("INTERNAL", "")
    with pytest.raises(errors.CriError, match="no details"):
        await cri.runtime.status()


async def test_channel_call_timeout_raises_deadline_exceeded_and_counts_error(
    scripted: Runtime, metrics: CriMetrics, registry: CollectorRegistry
) -> None:
    hang = scripted.answers["ListContainers"] = Hang()
    async with await connect(str(scripted.path), timeout=Duration.from_seconds(1), metrics=metrics) as cri:
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await cri.runtime.list_containers()
        assert 0.9 < time.monotonic() - started < 20
        assert "ListContainers: rpc error: code = DeadlineExceeded" in str(caught.value)
        assert "context deadline exceeded" in str(caught.value)
        # On a busy machine its time may be up before it has come there at all.
        if hang.begun.is_set():
            await asyncio.wait_for(hang.given_up.wait(), 30)
    assert registry.get_sample_value(
        "kubelet_runtime_operations_errors_total", {"operation_type": "list_containers"}
    )


async def test_channel_call_task_cancelled_cancels_rpc(
    scripted: Runtime, cri: RuntimeConnection, registry: CollectorRegistry
) -> None:
    hang = scripted.answers["PullImage"] = Hang()
    pull = asyncio.ensure_future(cri.images.pull_image(pb.ImageSpec(image="x")))
    await asyncio.wait_for(hang.begun.wait(), 30)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await asyncio.wait_for(hang.given_up.wait(), 30)
    assert registry.get_sample_value(
        "kubelet_runtime_operations_errors_total", {"operation_type": "pull_image"}
    )


async def test_channel_close_calls_in_flight_raise_unavailable(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    scripted.answers["PullImage"] = Hang()
    scripted.answers["GetContainerEvents"] = [pb.ContainerEventResponse(container_id="c"), Hang()]

    async def listen() -> None:
        async for _ in cri.runtime.container_events():
            pass

    async def fails(call: Callable[[], Awaitable[object]], *, name: str) -> None:
        with pytest.raises(errors.Unavailable, match=f"{name}.*closed"):
            await call()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fails(lambda: cri.images.pull_image(pb.ImageSpec(image="x")), name="PullImage"))
        tasks.create_task(fails(listen, name="GetContainerEvents"))
        await asyncio.sleep(0.1)
        await cri.close()
    with pytest.raises(errors.Unavailable, match=r"Version.*closed"):
        await cri.runtime.version()
    await cri.close()


async def test_channel_runtime_stopped_calls_fail_fast_then_reconnect(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    assert await cri.runtime.version() == VERSION
    await scripted.stop()
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(errors.Unavailable, match="Version: rpc error: code = Unavailable"):
            await cri.runtime.version()
        assert time.monotonic() - started < 10, "a call to a dead runtime fails at once"
    await asyncio.sleep(1.5)
    await scripted.start()
    await eventually_answers(cri, within=45)


async def test_channel_runtime_restarted_quickly_reconnects(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    assert await cri.runtime.version() == VERSION
    await scripted.stop()
    await scripted.start()
    await eventually_answers(cri, within=45)


async def eventually_answers(cri: RuntimeConnection, within: float) -> None:
    async with asyncio.timeout(within):
        while True:
            try:
                assert await cri.runtime.version() == VERSION
                return
            except errors.Unavailable:
                await asyncio.sleep(0.02)


async def test_channel_runtime_stopped_during_call_raises_error(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    scripted.answers["PullImage"] = Hang()
    async with asyncio.TaskGroup() as tasks:
        pull = tasks.create_task(_failure_of_pull(cri))
        await asyncio.sleep(0.1)
        await scripted.stop()
        assert (await asyncio.wait_for(pull, 20)).call == "PullImage"
    await scripted.start()


async def _failure_of_pull(cri: RuntimeConnection) -> errors.CriError:
    with pytest.raises(errors.CriError) as caught:
        await cri.images.pull_image(pb.ImageSpec(image="x"))
    return caught.value


async def test_channel_response_over_max_message_bytes_raises_resource_exhausted(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    big = pb.ExecSyncResponse(stdout=b"x" * (MAX_MESSAGE_BYTES - 100))
    scripted.answers["ExecSync"] = big
    assert await cri.runtime.exec_sync("c", ["true"]) == big
    scripted.answers["ExecSync"] = pb.ExecSyncResponse(stdout=b"x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(errors.ResourceExhausted, match="ExecSync"):
        await cri.runtime.exec_sync("c", ["true"])


async def test_channel_stream_runtime_error_raised_after_messages(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    event = pb.ContainerEventResponse(container_id="c1")
    scripted.answers["GetContainerEvents"] = [event, event, Refuse("UNAVAILABLE", "going down")]
    heard = []
    with pytest.raises(errors.Unavailable, match=r"GetContainerEvents.*going down"):
        async for one in cri.runtime.container_events():
            heard.append(one)
    assert heard == [event, event]


async def test_channel_stream_closed_early_cancels_rpc_without_error_metric(
    scripted: Runtime, cri: RuntimeConnection, registry: CollectorRegistry
) -> None:
    hang = Hang()
    scripted.answers["GetContainerEvents"] = [pb.ContainerEventResponse(container_id="c1"), hang]
    async with aclosing(cri.runtime.container_events()) as events:
        async for _ in events:
            await asyncio.wait_for(hang.begun.wait(), 30)
            break
    await asyncio.wait_for(hang.given_up.wait(), 30)
    labels = {"operation_type": "get_container_events"}
    assert registry.get_sample_value("kubelet_runtime_operations_total", labels) == 1
    assert registry.get_sample_value("kubelet_runtime_operations_errors_total", labels) is None


async def test_channel_stream_task_cancelled_cancels_rpc(scripted: Runtime, cri: RuntimeConnection) -> None:
    hang = scripted.answers["GetContainerEvents"] = Hang()

    async def listen() -> None:
        async for _ in cri.runtime.container_events():
            pass

    listening = asyncio.create_task(listen())
    await asyncio.wait_for(hang.begun.wait(), 30)
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    await asyncio.wait_for(hang.given_up.wait(), 30)


async def test_channel_metrics_operations_errors_and_duration_buckets(
    scripted: Runtime, cri: RuntimeConnection, registry: CollectorRegistry
) -> None:
    await cri.runtime.list_containers()
    await cri.runtime.list_containers()
    scripted.answers["ListContainers"] = Refuse("UNKNOWN", "no")
    with pytest.raises(errors.CriError):
        await cri.runtime.list_containers()
    labels = {"operation_type": "list_containers"}
    assert registry.get_sample_value("kubelet_runtime_operations_total", labels) == 3
    assert registry.get_sample_value("kubelet_runtime_operations_errors_total", labels) == 1
    assert registry.get_sample_value("kubelet_runtime_operations_duration_seconds_count", labels) == 3
    bounds = {
        sample.labels["le"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "kubelet_runtime_operations_duration_seconds_bucket"
    }
    assert len(bounds) == 15
    assert {"0.005", "0.0125", "0.48828125", "745.0580596923828", "+Inf"} <= bounds


async def test_channel_invalid_response_raises_bad_response_and_counts_error(
    scripted: Runtime, cri: RuntimeConnection, registry: CollectorRegistry
) -> None:
    with pytest.raises(errors.BadResponse, match=r"RunPodSandbox.*not set: pod_sandbox_id"):
        await cri.runtime.run_pod_sandbox(pb.PodSandboxConfig(), "kata")
    scripted.answers["RunPodSandbox"] = pb.RunPodSandboxResponse(pod_sandbox_id="s1")
    assert await cri.runtime.run_pod_sandbox(pb.PodSandboxConfig(), "kata") == "s1"
    value = registry.get_sample_value
    assert value("kubelet_runtime_operations_total", {"operation_type": "run_podsandbox"}) == 2
    assert value("kubelet_runtime_operations_errors_total", {"operation_type": "run_podsandbox"}) == 1
    assert value("kubelet_run_podsandbox_duration_seconds_count", {"runtime_handler": "kata"}) == 2
    assert value("kubelet_run_podsandbox_errors_total", {"runtime_handler": "kata"}) == 1


async def test_channel_two_connections_have_independent_metrics(scripted: Runtime) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    async with (
        await connect(str(scripted.path), timeout=Duration.from_seconds(30), metrics=CriMetrics(ours)) as a,
        await connect(str(scripted.path), timeout=Duration.from_seconds(30), metrics=CriMetrics(theirs)) as b,
    ):
        await a.runtime.version()
        await a.close()
        assert await b.runtime.version() == VERSION
        await b.runtime.version()
    labels = {"operation_type": "version"}
    assert ours.get_sample_value("kubelet_runtime_operations_total", labels) == 1
    assert theirs.get_sample_value("kubelet_runtime_operations_total", labels) == 2


async def test_channel_log_names_call_without_secrets(
    scripted: Runtime, cri: RuntimeConnection, records: list[logging.LogRecord]
) -> None:
    scripted.answers["PullImage"] = Refuse("NOT_FOUND", "no such image")
    auth = pb.AuthConfig(username="user", password="hunter2", registry_token="hunter2")
    with pytest.raises(errors.NotFound):
        await cri.images.pull_image(pb.ImageSpec(image="docker.io/x/y:1"), auth)
    config = pb.ContainerConfig(envs=[pb.KeyValue(key="PASSWORD", value=b"hunter2")])
    scripted.answers["CreateContainer"] = pb.CreateContainerResponse(container_id="c1")
    await cri.runtime.create_container("s1", config, pb.PodSandboxConfig())
    keys = [getattr(record, "klog_keys", {}) for record in records]
    assert "hunter2" not in repr([(record.getMessage(), vars(record)) for record in records])
    assert [(k["call"], k["code"]) for k in keys if "call" in k] == [
        ("PullImage", "NotFound"),
        ("CreateContainer", "OK"),
    ]
    assert keys[0]["image"] == "docker.io/x/y:1"
    assert keys[1]["podSandboxID"] == "s1"
    assert all(k["seconds"] >= 0 for k in keys)


async def test_channel_many_concurrent_calls_succeed(scripted: Runtime, cri: RuntimeConnection) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(cri.runtime.version()) for _ in range(200)]
    assert all(call.result() == VERSION for call in calls)

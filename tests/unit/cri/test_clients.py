"""Every RPC has a method that sends what it should, within its deadline, under the reference's name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import client as checks
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.transport import errors
from tests.support.cri_servers import METHODS, VERSION, Refuse, Runtime

TIMEOUT = 30


class Rpc(NamedTuple):
    """One call of a typed method and what the runtime must see of it."""

    method: str
    operation: str
    call: Callable[[RuntimeConnection], Any]
    request: Message
    answer: Message
    result: object = None
    seconds: float | None = TIMEOUT


SANDBOX = pb.PodSandboxConfig(metadata=pb.PodSandboxMetadata(name="p", uid="u", namespace="n"))
CONFIG = pb.ContainerConfig(metadata=pb.ContainerMetadata(name="c"))
LINUX = pb.LinuxContainerResources(cpu_shares=2)
IMAGE = pb.ImageSpec(image="busybox")
READY = pb.StatusResponse(
    status=pb.RuntimeStatus(
        conditions=[pb.RuntimeCondition(type=name, status=True) for name in ("RuntimeReady", "NetworkReady")]
    )
)
NETWORK = pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr="10.0.0.0/24"))
CONTAINER_FILTER = pb.ContainerFilter(id="c1")
AUTH = pb.AuthConfig(username="u", password="p")
SANDBOX_STATUS = pb.PodSandboxStatusResponse(
    status=pb.PodSandboxStatus(id="s1", metadata=SANDBOX.metadata, created_at=1)
)
CONTAINER_STATUS = pb.ContainerStatusResponse(
    status=pb.ContainerStatus(id="c1", metadata=CONFIG.metadata, created_at=1, image=IMAGE, image_ref="r")
)
IMAGE_STATUS = pb.ImageStatusResponse(image=pb.Image(id="i1", size=1))
PULL = pb.PullImageRequest(image=IMAGE, auth=AUTH, sandbox_config=SANDBOX)

# fmt: off
RPCS = [
    Rpc("Version", "version", lambda c: c.runtime.version(), pb.VersionRequest(version="0.1.0"), VERSION,
        VERSION),
    Rpc("Status", "status", lambda c: c.runtime.status(verbose=True), pb.StatusRequest(verbose=True), READY,
        READY),
    Rpc("RuntimeConfig", "runtime_config", lambda c: c.runtime.runtime_config(), pb.RuntimeConfigRequest(),
        pb.RuntimeConfigResponse(), pb.RuntimeConfigResponse()),
    Rpc("UpdateRuntimeConfig", "update_runtime_config",
        lambda c: c.runtime.update_runtime_config(NETWORK),
        pb.UpdateRuntimeConfigRequest(runtime_config=NETWORK),
        pb.UpdateRuntimeConfigResponse()),
    Rpc("RunPodSandbox", "run_podsandbox", lambda c: c.runtime.run_pod_sandbox(SANDBOX, "kata"),
        pb.RunPodSandboxRequest(config=SANDBOX, runtime_handler="kata"),
        pb.RunPodSandboxResponse(pod_sandbox_id="s1"), "s1", 2 * TIMEOUT),
    Rpc("StopPodSandbox", "stop_podsandbox", lambda c: c.runtime.stop_pod_sandbox("s1"),
        pb.StopPodSandboxRequest(pod_sandbox_id="s1"), pb.StopPodSandboxResponse()),
    Rpc("RemovePodSandbox", "remove_podsandbox", lambda c: c.runtime.remove_pod_sandbox("s1"),
        pb.RemovePodSandboxRequest(pod_sandbox_id="s1"), pb.RemovePodSandboxResponse()),
    Rpc("PodSandboxStatus", "podsandbox_status", lambda c: c.runtime.pod_sandbox_status("s1", verbose=True),
        pb.PodSandboxStatusRequest(pod_sandbox_id="s1", verbose=True), SANDBOX_STATUS, SANDBOX_STATUS),
    Rpc("ListPodSandbox", "list_podsandbox",
        lambda c: c.runtime.list_pod_sandbox(pb.PodSandboxFilter(id="s1")),
        pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(id="s1")),
        pb.ListPodSandboxResponse(items=[pb.PodSandbox(id="s1")]), [pb.PodSandbox(id="s1")]),
    Rpc("UpdatePodSandboxResources", "update_podsandbox_resources",
        lambda c: c.runtime.update_pod_sandbox_resources("s1", resources=LINUX),
        pb.UpdatePodSandboxResourcesRequest(pod_sandbox_id="s1", resources=LINUX),
        pb.UpdatePodSandboxResourcesResponse()),
    Rpc("CreateContainer", "create_container", lambda c: c.runtime.create_container("s1", CONFIG, SANDBOX),
        pb.CreateContainerRequest(pod_sandbox_id="s1", config=CONFIG, sandbox_config=SANDBOX),
        pb.CreateContainerResponse(container_id="c1"), "c1"),
    Rpc("StartContainer", "start_container", lambda c: c.runtime.start_container("c1"),
        pb.StartContainerRequest(container_id="c1"), pb.StartContainerResponse()),
    Rpc("StopContainer", "stop_container", lambda c: c.runtime.stop_container("c1", 45),
        pb.StopContainerRequest(container_id="c1", timeout=45), pb.StopContainerResponse(), None,
        TIMEOUT + 45),
    Rpc("RemoveContainer", "remove_container", lambda c: c.runtime.remove_container("c1"),
        pb.RemoveContainerRequest(container_id="c1"), pb.RemoveContainerResponse()),
    Rpc("ListContainers", "list_containers", lambda c: c.runtime.list_containers(CONTAINER_FILTER),
        pb.ListContainersRequest(filter=CONTAINER_FILTER),
        pb.ListContainersResponse(containers=[pb.Container(id="c1")]), [pb.Container(id="c1")]),
    Rpc("ContainerStatus", "container_status", lambda c: c.runtime.container_status("c1", verbose=True),
        pb.ContainerStatusRequest(container_id="c1", verbose=True), CONTAINER_STATUS, CONTAINER_STATUS),
    Rpc("UpdateContainerResources", "update_container",
        lambda c: c.runtime.update_container_resources("c1", LINUX),
        pb.UpdateContainerResourcesRequest(container_id="c1", linux=LINUX),
        pb.UpdateContainerResourcesResponse()),
    Rpc("ReopenContainerLog", "reopen_container_log", lambda c: c.runtime.reopen_container_log("c1"),
        pb.ReopenContainerLogRequest(container_id="c1"), pb.ReopenContainerLogResponse()),
    Rpc("CheckpointContainer", "checkpoint_container",
        lambda c: c.runtime.checkpoint_container("c1", "/x", 99),
        pb.CheckpointContainerRequest(container_id="c1", location="/x", timeout=99),
        pb.CheckpointContainerResponse(), None, 99),
    Rpc("CheckpointContainer", "checkpoint_container",
        lambda c: c.runtime.checkpoint_container("c1", "/x", 1),
        pb.CheckpointContainerRequest(container_id="c1", location="/x", timeout=TIMEOUT),
        pb.CheckpointContainerResponse()),
    Rpc("ExecSync", "exec_sync", lambda c: c.runtime.exec_sync("c1", ["ls", "-l"], 5),
        pb.ExecSyncRequest(container_id="c1", cmd=["ls", "-l"], timeout=5),
        pb.ExecSyncResponse(stdout=b"x", exit_code=3), pb.ExecSyncResponse(stdout=b"x", exit_code=3),
        TIMEOUT + 5),
    Rpc("ExecSync", "exec_sync", lambda c: c.runtime.exec_sync("c1", ["ls"]),
        pb.ExecSyncRequest(container_id="c1", cmd=["ls"]), pb.ExecSyncResponse(), pb.ExecSyncResponse(),
        None),
    Rpc("Exec", "exec", lambda c: c.runtime.exec(pb.ExecRequest(container_id="c1")),
        pb.ExecRequest(container_id="c1"), pb.ExecResponse(url="http://x"), "http://x"),
    Rpc("Attach", "attach", lambda c: c.runtime.attach(pb.AttachRequest(container_id="c1")),
        pb.AttachRequest(container_id="c1"), pb.AttachResponse(url="http://x"), "http://x"),
    Rpc("PortForward", "port_forward", lambda c: c.runtime.port_forward(pb.PortForwardRequest(port=[80])),
        pb.PortForwardRequest(port=[80]), pb.PortForwardResponse(url="http://x"), "http://x"),
    Rpc("ContainerStats", "container_stats", lambda c: c.stats.container_stats("c1"),
        pb.ContainerStatsRequest(container_id="c1"), pb.ContainerStatsResponse(stats=pb.ContainerStats()),
        pb.ContainerStats()),
    Rpc("ListContainerStats", "list_container_stats", lambda c: c.stats.list_container_stats(),
        pb.ListContainerStatsRequest(), pb.ListContainerStatsResponse(stats=[pb.ContainerStats()]),
        [pb.ContainerStats()]),
    Rpc("PodSandboxStats", "podsandbox_stats", lambda c: c.stats.pod_sandbox_stats("s1"),
        pb.PodSandboxStatsRequest(pod_sandbox_id="s1"),
        pb.PodSandboxStatsResponse(stats=pb.PodSandboxStats()),
        pb.PodSandboxStats()),
    Rpc("ListPodSandboxStats", "list_podsandbox_stats", lambda c: c.stats.list_pod_sandbox_stats(),
        pb.ListPodSandboxStatsRequest(), pb.ListPodSandboxStatsResponse(stats=[pb.PodSandboxStats()]),
        [pb.PodSandboxStats()]),
    Rpc("ListMetricDescriptors", "list_metric_descriptors", lambda c: c.stats.list_metric_descriptors(),
        pb.ListMetricDescriptorsRequest(),
        pb.ListMetricDescriptorsResponse(descriptors=[pb.MetricDescriptor(name="m")]),
        [pb.MetricDescriptor(name="m")]),
    Rpc("ListPodSandboxMetrics", "list_podsandbox_metrics", lambda c: c.stats.list_pod_sandbox_metrics(),
        pb.ListPodSandboxMetricsRequest(),
        pb.ListPodSandboxMetricsResponse(pod_metrics=[pb.PodSandboxMetrics()]),
        [pb.PodSandboxMetrics()]),
    Rpc("ListImages", "list_images", lambda c: c.images.list_images(pb.ImageFilter(image=IMAGE)),
        pb.ListImagesRequest(filter=pb.ImageFilter(image=IMAGE)),
        pb.ListImagesResponse(images=[pb.Image(id="i1")]), [pb.Image(id="i1")]),
    Rpc("ImageStatus", "image_status", lambda c: c.images.image_status(IMAGE, verbose=True),
        pb.ImageStatusRequest(image=IMAGE, verbose=True), IMAGE_STATUS, IMAGE_STATUS),
    Rpc("ImageStatus", "image_status", lambda c: c.images.image_status(IMAGE),
        pb.ImageStatusRequest(image=IMAGE), pb.ImageStatusResponse(), pb.ImageStatusResponse()),
    Rpc("PullImage", "pull_image", lambda c: c.images.pull_image(IMAGE, AUTH, SANDBOX), PULL,
        pb.PullImageResponse(image_ref="r"), "r", None),
    Rpc("RemoveImage", "remove_image", lambda c: c.images.remove_image(IMAGE),
        pb.RemoveImageRequest(image=IMAGE), pb.RemoveImageResponse()),
    Rpc("ImageFsInfo", "image_fs_info", lambda c: c.images.image_fs_info(), pb.ImageFsInfoRequest(),
        pb.ImageFsInfoResponse(), pb.ImageFsInfoResponse()),
]
STREAMS: dict[str, tuple[str, Callable[[RuntimeConnection], Awaitable[Any]], Message, Message]] = {
    "StreamPodSandboxes": ("ListPodSandbox", lambda c: c.runtime.list_pod_sandbox(),
        pb.StreamPodSandboxesResponse(pod_sandboxes=[pb.PodSandbox(id="s1")]), pb.PodSandbox(id="s1")),
    "StreamContainers": ("ListContainers", lambda c: c.runtime.list_containers(),
        pb.StreamContainersResponse(containers=[pb.Container(id="c1")]), pb.Container(id="c1")),
    "StreamContainerStats": ("ListContainerStats", lambda c: c.stats.list_container_stats(),
        pb.StreamContainerStatsResponse(container_stats=[pb.ContainerStats()]), pb.ContainerStats()),
    "StreamPodSandboxStats": ("ListPodSandboxStats", lambda c: c.stats.list_pod_sandbox_stats(),
        pb.StreamPodSandboxStatsResponse(pod_sandbox_stats=[pb.PodSandboxStats()]), pb.PodSandboxStats()),
    "StreamPodSandboxMetrics": ("ListPodSandboxMetrics", lambda c: c.stats.list_pod_sandbox_metrics(),
        pb.StreamPodSandboxMetricsResponse(pod_sandbox_metrics=[pb.PodSandboxMetrics()]),
        pb.PodSandboxMetrics()),
    "StreamImages": ("ListImages", lambda c: c.images.list_images(),
        pb.StreamImagesResponse(images=[pb.Image(id="i1")]), pb.Image(id="i1")),
}
# fmt: on


@pytest.mark.parametrize("rpc", RPCS, ids=[rpc.method for rpc in RPCS])
async def test_cri_client_rpc_request_deadline_and_metric(
    scripted: Runtime, cri: RuntimeConnection, registry: CollectorRegistry, rpc: Rpc
) -> None:
    scripted.answers[rpc.method] = rpc.answer
    assert await rpc.call(cri) == rpc.result
    [seen] = scripted.seen
    assert (seen.method, seen.request) == (rpc.method, rpc.request)
    if rpc.seconds is None:
        assert seen.seconds_left is None or seen.seconds_left > 1e6, "no deadline"
    else:
        assert seen.seconds_left == pytest.approx(rpc.seconds, abs=10)
    labels = {"operation_type": rpc.operation}
    assert registry.get_sample_value("kubelet_runtime_operations_total", labels) == 1


def test_cri_client_every_rpc_is_covered() -> None:
    covered = {rpc.method for rpc in RPCS} | set(STREAMS) | {"GetContainerEvents"}
    assert covered == {path.rsplit("/")[-1] for path in METHODS if path.startswith("/runtime.v1.")}


@pytest.mark.parametrize("method", STREAMS)
async def test_cri_client_stream_lists_uses_streaming_rpc(
    scripted: Runtime, metrics: CriMetrics, method: str
) -> None:
    _, call, part, item = STREAMS[method]
    scripted.answers[method] = [part, part]
    async with await connect(
        str(scripted.path), timeout=Duration.from_seconds(TIMEOUT), metrics=metrics, stream_lists=True
    ) as cri:
        scripted.seen.clear()
        assert await call(cri) == [item, item]
    assert [seen.method for seen in scripted.seen] == [method]
    assert scripted.seen[0].seconds_left == pytest.approx(TIMEOUT, abs=10)


@pytest.mark.parametrize("method", STREAMS)
async def test_cri_client_stream_lists_unimplemented_falls_back_until_reconnect(
    scripted: Runtime, metrics: CriMetrics, method: str
) -> None:
    plain, call, _, _ = STREAMS[method]
    scripted.answers[method] = Refuse("UNIMPLEMENTED", "unknown method")
    async with await connect(
        str(scripted.path), timeout=Duration.from_seconds(TIMEOUT), metrics=metrics, stream_lists=True
    ) as cri:
        scripted.seen.clear()
        assert await call(cri) == []
        assert await call(cri) == []
        assert [seen.method for seen in scripted.seen] == [method, plain, plain]
        await scripted.stop()
        del scripted.answers[method]
        await scripted.start()
        await cri.runtime.version()
        await cri.images.image_fs_info()
        scripted.seen.clear()
        assert await call(cri) == []
    assert [seen.method for seen in scripted.seen] == [method]


async def test_cri_client_stream_lists_other_error_raised(scripted: Runtime, metrics: CriMetrics) -> None:
    part = pb.StreamContainersResponse(containers=[pb.Container(id="c1")])
    scripted.answers["StreamContainers"] = [part, Refuse("INTERNAL", "half way")]
    async with await connect(
        str(scripted.path), timeout=Duration.from_seconds(TIMEOUT), metrics=metrics, stream_lists=True
    ) as cri:
        with pytest.raises(errors.CriError, match=r"StreamContainers.*half way"):
            await cri.runtime.list_containers()


async def test_exec_sync_deadline_exceeded_raises_command_timed_out(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    scripted.answers["ExecSync"] = Refuse("DEADLINE_EXCEEDED", "timeout 1s exceeded")
    with pytest.raises(errors.CommandTimedOut) as caught:
        await cri.runtime.exec_sync("c1", ["sleep", "9"], 1)
    assert str(caught.value) == 'command timed out: "sleep 9" timed out after 1s'
    assert isinstance(caught.value, errors.DeadlineExceeded)


async def test_checkpoint_container_negative_timeout_raises_value_error(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    with pytest.raises(ValueError, match="negative"):
        await cri.runtime.checkpoint_container("c1", "/x", -1)
    assert scripted.seen == []


META = pb.PodSandboxMetadata(name="p", namespace="n", uid="u")


@pytest.mark.parametrize(
    ("check", "answer", "wrong"),
    [
        (checks.version, VERSION, ""),
        (
            checks.version,
            pb.VersionResponse(),
            "not set: version, runtime_name, runtime_version, runtime_api_version",
        ),
        (checks.status, READY, ""),
        (checks.status, pb.StatusResponse(), "the RuntimeReady or the NetworkReady condition is not set"),
        (checks.sandbox_status, SANDBOX_STATUS, ""),
        (checks.sandbox_status, pb.PodSandboxStatusResponse(), ""),
        (
            checks.sandbox_status,
            pb.PodSandboxStatusResponse(status=pb.PodSandboxStatus(id="s", metadata=META)),
            "not set: status.created_at",
        ),
        (
            checks.sandbox_status,
            pb.PodSandboxStatusResponse(status=pb.PodSandboxStatus(id="s", created_at=1)),
            "not set: status.metadata.name, status.metadata.namespace, status.metadata.uid",
        ),
        (checks.container_status, CONTAINER_STATUS, ""),
        (checks.container_status, pb.ContainerStatusResponse(), ""),
        (
            checks.container_status,
            pb.ContainerStatusResponse(
                status=pb.ContainerStatus(id="c", metadata=CONFIG.metadata, created_at=1)
            ),
            "not set: status.image.image, status.image_ref",
        ),
        (checks.image_status, IMAGE_STATUS, ""),
        (checks.image_status, pb.ImageStatusResponse(image=pb.Image(id="i")), "not set: image.size"),
        (checks.container_id, pb.CreateContainerResponse(), "not set: container_id"),
        (checks.image_ref, pb.PullImageResponse(), "not set: image_ref"),
        (checks.url, pb.AttachResponse(), "not set: url"),
    ],
)
def test_cri_response_checks_report_missing_fields(
    check: Callable[[Message], str], answer: Message, wrong: str
) -> None:
    assert check(answer) == wrong

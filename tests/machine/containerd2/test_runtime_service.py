"""Newer CRI calls to a real runtime: features, cgroup driver, resources, streamed lists, images."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.kuberuntime.runtime_features import RuntimeFeatures
from pykubelet.transport.errors import CriError
from tests.support.cri_pods import connected, start_pod
from tests.support.data_dir import short_dir
from tests.support.image_registry import running_registry
from tests.support.manifests import pod
from tests.support.newer_runtime import needs_containerd
from tests.support.node import kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime, runtime_process

pytestmark = [pytest.mark.machine, needs_containerd(2, 4)]


@pytest.fixture
async def cri(runtime: RunningRuntime) -> AsyncIterator[RuntimeConnection]:
    async with connected(runtime.endpoint) as made:
        yield made


async def test_features_of_real_runtime_complete(cri: RuntimeConnection) -> None:
    features = RuntimeFeatures(cri)
    await features.status()
    assert features.missing() == []
    assert features.has_user_namespaces("")
    assert features.has_user_namespaces("runc")
    assert not features.has_user_namespaces("absent")
    assert features.recursive_handlers() == {"", "runc"}


async def test_runtime_config_reports_cgroup_driver(cri: RuntimeConnection) -> None:
    response = await cri.runtime.runtime_config()
    assert response.HasField("linux")
    assert response.linux.cgroup_driver == pb.CGROUPFS


def test_kubelet_other_cgroup_driver_configured_uses_runtimes(runtime: RunningRuntime) -> None:
    with running(kubelet_node(runtime, cgroupDriver="systemd")) as node:
        node.wait_ready(node.write(pod("driven")))
        assert "Using the runtime's cgroup driver" in node.log_text()
        assert [path for path in node.pod_cgroups() if path.name.startswith("pod")]
        node.clear()


def test_runtime_config_systemd_reported() -> None:
    async def reported(endpoint: str) -> int:
        async with connected(endpoint) as cri:
            return (await cri.runtime.runtime_config()).linux.cgroup_driver

    with short_dir() as path, runtime_process(path, "systemd") as other:
        assert asyncio.run(reported(other.endpoint)) == pb.SYSTEMD


async def test_update_pod_sandbox_resources_accepted(cri: RuntimeConnection, runtime: RunningRuntime) -> None:
    started = await start_pod(cri, runtime.instance, runtime.busybox_image, "sleep", "3600")
    try:
        resources = pb.LinuxContainerResources(
            cpu_period=100_000, cpu_quota=50_000, memory_limit_in_bytes=2**27
        )
        await cri.runtime.update_pod_sandbox_resources(
            started.sandbox, overhead=pb.LinuxContainerResources(), resources=resources
        )
        with pytest.raises(CriError, match="sandbox"):
            await cri.runtime.update_pod_sandbox_resources(
                "absent", overhead=pb.LinuxContainerResources(), resources=resources
            )
    finally:
        await cri.runtime.stop_pod_sandbox(started.sandbox)
        await cri.runtime.remove_pod_sandbox(started.sandbox)


async def test_streamed_lists_equal_unary_lists(
    cri: RuntimeConnection, runtime: RunningRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    started = [
        await start_pod(cri, runtime.instance, runtime.busybox_image, "sleep", "3600") for _ in range(3)
    ]
    metrics = CriMetrics(CollectorRegistry())
    try:
        async with await connect(
            runtime.endpoint, timeout=Duration.from_seconds(60), metrics=metrics, stream_lists=True
        ) as streaming:
            with caplog.at_level(logging.DEBUG):
                sandboxes = await streaming.runtime.list_pod_sandbox()
                containers = await streaming.runtime.list_containers()
                images = await streaming.images.list_images()
                usage = await streaming.stats.list_container_stats()
                pods = await streaming.stats.list_pod_sandbox_stats()
            assert not [line for line in caplog.messages if "does not implement streaming" in line]
        ids = {one.container for one in started}
        assert {one.sandbox for one in started} <= {box.id for box in sandboxes}
        assert ids <= {one.id for one in containers}
        assert ids <= {one.attributes.id for one in usage}
        assert {one.sandbox for one in started} <= {one.attributes.id for one in pods}
        by_id = {one.id: one for one in await cri.runtime.list_containers()}
        assert all(by_id[one.id] == one for one in containers)
        assert sorted(image.id for image in images) == sorted(
            image.id for image in await cri.images.list_images()
        )
    finally:
        for one in started:
            await cri.runtime.stop_pod_sandbox(one.sandbox)
            await cri.runtime.remove_pod_sandbox(one.sandbox)


def test_kubelet_list_streaming_gate_runs_pods(runtime: RunningRuntime) -> None:
    with running(kubelet_node(runtime, featureGates={"CRIListStreaming": True})) as node:
        name = node.write(pod("streamed"))
        uid = node.wait_ready(name)["metadata"]["uid"]
        assert "does not implement streaming lists" not in node.log_text()
        node.remove(name)
        node.wait_gone(name, uid)


def test_kubelet_evented_pleg_disabled_relists(runtime: RunningRuntime) -> None:
    """Verify that an explicit `EventedPLEG=false` is an escape from a faulty event stream."""
    with running(kubelet_node(runtime, featureGates={"EventedPLEG": False})) as node:
        name = node.write(pod("relisted"))
        node.wait_ready(name)
        [main] = node.truth.running(name)
        os.kill(node.truth.container_pid(main.id), signal.SIGKILL)
        node.wait_pod(name, "to be restarted", lambda found: status_of(found, "main")["restartCount"] == 1)
        assert "Receiving events of the container runtime" not in node.log_text()
        node.clear()


async def test_images_only_sandbox_image_pinned(cri: RuntimeConnection, runtime: RunningRuntime) -> None:
    pinned = {tag: image.pinned for image in await cri.images.list_images() for tag in image.repo_tags}
    assert pinned[runtime.pause_image]
    assert not pinned[runtime.busybox_image]


async def test_pull_image_for_handler_found_and_removed(
    cri: RuntimeConnection, runtime: RunningRuntime, tmp_path: Path
) -> None:
    with running_registry(tmp_path / "registry") as registry:
        registry.push("handled", "1")
        name = f"{registry.host}/handled:1"
        spec = pb.ImageSpec(image=name, runtime_handler="runc")
        await cri.images.pull_image(spec)
        try:
            assert (await cri.images.image_status(spec)).image.id
        finally:
            await cri.images.remove_image(spec)
        assert not (await cri.images.image_status(spec)).image.id


async def test_checkpoint_without_criu_fails_with_the_reason(
    cri: RuntimeConnection, runtime: RunningRuntime, tmp_path: Path
) -> None:
    started = await start_pod(cri, runtime.instance, runtime.busybox_image, "sleep", "3600")
    location = tmp_path / "checkpoint.tar"
    try:
        with pytest.raises(CriError, match="criu"):
            await cri.runtime.checkpoint_container(started.container, str(location), 10)
        assert not location.exists()
        # The container goes on.
        result = await cri.runtime.exec_sync(started.container, ["true"])
        assert result.exit_code == 0
    finally:
        await cri.runtime.stop_pod_sandbox(started.sandbox)
        await cri.runtime.remove_pod_sandbox(started.sandbox)


async def test_container_events_second_subscriber_gets_all_events(
    cri: RuntimeConnection, runtime: RunningRuntime
) -> None:
    """Verify that a monitor beside the kubelet takes no events away from it."""
    seen: list[set[str]] = [set(), set()]

    async def follow(index: int) -> None:
        async for event in cri.runtime.container_events():
            if event.container_event_type == pb.CONTAINER_STOPPED_EVENT:
                seen[index].add(event.container_id)

    followers = [asyncio.create_task(follow(index), name=f"follow-{uuid.uuid4()}") for index in range(2)]
    started = await start_pod(cri, runtime.instance, runtime.busybox_image, "sleep", "3600")
    try:
        await cri.runtime.stop_pod_sandbox(started.sandbox)
        async with asyncio.timeout(60):
            while not all(started.container in one for one in seen):
                await asyncio.sleep(0.05)
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        await cri.runtime.remove_pod_sandbox(started.sandbox)

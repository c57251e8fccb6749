"""Starts and hooks in numbers."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Container, LifecycleHandler, Pod, PodSpec, SleepAction, VolumeMount
from pykubelet.api.volume import ImageVolume, Volume
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.config_builder import PodStartContext
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.errors import StartError
from pykubelet.kuberuntime.kill import HookRunner
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.transport.errors import CriError
from pykubelet.volumes.plugin import MountedVolume
from tests.support.containers import make_pod
from tests.unit.kuberuntime.starting import make_starter

POD = Pod(
    spec=PodSpec(
        containers=[Container(name="main")],
        init_containers=[Container(name="first")],
        ephemeral_containers=[Container(name="look")],
    )
)
USERS = Pod(spec=PodSpec(containers=[Container(name="main")], host_users=False))


def test_start_metrics_sandbox_starts_and_errors_counted() -> None:
    registry = CollectorRegistry()
    metrics = StartMetrics(registry)
    for pod, error in ((POD, None), (USERS, OSError), (POD, OSError), (USERS, asyncio.CancelledError)):
        try:
            with metrics.measure_sandbox_start(pod):
                if error is not None:
                    raise error
        except (OSError, asyncio.CancelledError):
            pass
    names = ("started_pods", "started_pods_errors", "started_user_namespaced_pods")
    counts = [registry.get_sample_value(f"kubelet_{name}_total") for name in names]
    assert counts == [4, 2, 2]
    assert registry.get_sample_value("kubelet_started_user_namespaced_pods_errors_total") == 1


def test_start_metrics_container_starts_counted_by_type() -> None:
    registry = CollectorRegistry()
    metrics = StartMetrics(registry)
    kinds = {"main": "container", "first": "init_container", "look": "ephemeral_container"}
    for name, kind in kinds.items():
        metrics.record_container_start(POD, Container(name=name))
        metrics.record_container_failure(POD, Container(name=name), "RunContainerError")
        labels = {"container_type": kind}
        assert registry.get_sample_value("kubelet_started_containers_total", labels) == 1
        labels["code"] = "RunContainerError"
        assert registry.get_sample_value("kubelet_started_containers_errors_total", labels) == 1


@pytest.mark.looptime
async def test_hook_runner_sleep_cancelled_counts_early_termination() -> None:
    registry = CollectorRegistry()
    nobody: Any = None  # a sleep asks nobody for anything
    hooks = HookRunner(nobody, nobody, nobody, StartMetrics(registry))
    sleep = LifecycleHandler(sleep=SleepAction(seconds=5))
    await hooks.run(POD, POD.spec.containers[0], "c1", sleep)
    assert registry.get_sample_value("kubelet_sleep_action_terminated_early_total") == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await hooks.run(POD, POD.spec.containers[0], "c1", sleep)
    assert registry.get_sample_value("kubelet_sleep_action_terminated_early_total") == 1


class Node:
    """A runtime and an image manager; a container is created unless `error` is set."""

    error: CriError | None = None

    def __init__(self) -> None:
        self.runtime = self

    async def ensure_image(self, *_: object, **__: object) -> PresentImage:
        return PresentImage("sha256:tools", 0, "")

    async def create_container(self, *_: object) -> str:
        if self.error is not None:
            raise self.error
        return "c1"

    async def start_container(self, _: str) -> None:
        return None

    async def pod_sandbox_status(self, _: str) -> pb.PodSandboxStatusResponse:
        return pb.PodSandboxStatusResponse(status=pb.PodSandboxStatus(id="sandbox", state=pb.SANDBOX_READY))


@pytest.mark.parametrize(
    ("message", "requested", "succeeded", "failed"),
    [
        ("", 1, 2, 0),
        ("ImageVolumeMountFailed: no space left", 1, 0, 2),
        # As upstream, only this failure is one of a mount.
        ("runc is missing", 1, 2, 0),
    ],
)
async def test_start_container_image_volume_mounts_counted(
    tmp_path: Path, message: str, requested: int, succeeded: int, failed: int
) -> None:
    registry, node = CollectorRegistry(), Node()
    if message:
        node.error = CriError("CreateContainer", "Unknown", message)
    mounts = [VolumeMount(name="tools", mount_path=path) for path in ("/a", "/b")]
    container = Container(name="main", volume_mounts=mounts)
    pod = make_pod(container, volumes=[Volume(name="tools", image=ImageVolume(reference="tools:1"))])
    observer = Observer(cast(Any, node))
    await observer.observe_sandbox("sandbox")
    options = RuntimeNodeOptions(pod_logs_dir=str(tmp_path / "logs"))
    starter = make_starter(
        node,
        observer,
        options,
        tmp_path,
        PodHistory(),
        image_manager=node,
        metrics=StartMetrics(registry),
    )
    volumes = {"tools": MountedVolume("", read_only=True, image="tools:1")}
    with pytest.raises(StartError) if message else nullcontext():
        await starter.start_container(
            pod,
            container,
            PresentImage("sha256:x", 0, ""),
            "sandbox",
            pb.PodSandboxConfig(),
            PodStartContext("/kubepods", volumes),
            (),
            ObservedPod(uid=pod.uid),
        )
    names = ("requested", "mounted_succeed", "mounted_errors")
    counts = [registry.get_sample_value(f"kubelet_image_volume_{name}_total") for name in names]
    assert counts == [requested, succeeded, failed]

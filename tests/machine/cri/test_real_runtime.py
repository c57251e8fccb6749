"""The client against a real containerd: a pod's life, events, and the runtime's death."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.cri.containerd import task_events
from pykubelet.cri.events_tasks_pb2 import TaskExit, TaskStart
from pykubelet.transport import errors

pytestmark = pytest.mark.machine


class Instance(Protocol):
    """The part of a private runtime's instance that is used here."""

    @property
    def cgroup_root(self) -> str: ...


class PrivateRuntime(Protocol):
    """The part of the `private_runtime` fixture that is used here."""

    endpoint: str
    instance: Instance
    pid: int


@pytest.fixture
async def real(private_runtime: PrivateRuntime, metrics: CriMetrics) -> AsyncIterator[RuntimeConnection]:
    async with await connect(
        private_runtime.endpoint, timeout=Duration.from_seconds(60), metrics=metrics
    ) as cri:
        yield cri


@pytest.fixture
async def image(real: RuntimeConnection) -> pb.ImageSpec:
    """The seed image with a shell."""
    tags = [tag for image in await real.images.list_images() for tag in image.repo_tags]
    return pb.ImageSpec(image=next(tag for tag in tags if "/busybox:" in tag))


@pytest.fixture
async def config(private_runtime: PrivateRuntime, folder: Path) -> pb.PodSandboxConfig:
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name="cri-test", uid=str(uuid.uuid4()), namespace="default"),
        hostname="cri-test",
        log_directory=str(folder),
        labels={"test": "cri"},
        linux=pb.LinuxPodSandboxConfig(cgroup_parent=private_runtime.instance.cgroup_root),
    )


@pytest.fixture
async def sandbox(real: RuntimeConnection, config: pb.PodSandboxConfig) -> AsyncIterator[str]:
    sandbox = await real.runtime.run_pod_sandbox(config)
    try:
        yield sandbox
    finally:
        async with asyncio.timeout(60):
            while not await is_removed(real, sandbox):
                await asyncio.sleep(0.2)


async def is_removed(real: RuntimeConnection, sandbox: str) -> bool:
    """Remove a sandbox; one whose container ends at the same moment can fail to be stopped, for once."""
    try:
        await real.runtime.stop_pod_sandbox(sandbox)
        await real.runtime.remove_pod_sandbox(sandbox)
    except errors.CriError:
        return False
    return True


def shell(image: pb.ImageSpec, script: str) -> pb.ContainerConfig:
    return pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="main"),
        image=image,
        command=["sh", "-c", script],
        envs=[pb.KeyValue(key="GREETING", value=b"hello")],
        log_path="main.log",
        linux=pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(cpu_shares=128)),
    )


async def test_containerd_version_status_and_image_fs_info(real: RuntimeConnection) -> None:
    assert real.version.runtime_name == "containerd"
    assert (await real.runtime.version()) == real.version
    conditions = {c.type: c.status for c in (await real.runtime.status()).status.conditions}
    # containerd 2.x has one more, for deprecated settings of the host.
    assert conditions.items() >= {"RuntimeReady": True, "NetworkReady": True}.items()
    assert (await real.images.image_fs_info()).image_filesystems[0].fs_id.mountpoint


async def test_containerd_sandbox_and_container_lifecycle(
    real: RuntimeConnection, sandbox: str, config: pb.PodSandboxConfig, image: pb.ImageSpec, folder: Path
) -> None:
    runtime = real.runtime
    [found] = await runtime.list_pod_sandbox(pb.PodSandboxFilter(id=sandbox))
    assert (found.metadata, found.labels["test"]) == (config.metadata, "cri")
    status = (await runtime.pod_sandbox_status(sandbox)).status
    assert status.state == pb.SANDBOX_READY
    assert status.network.ip

    container = await runtime.create_container(
        sandbox, shell(image, "echo started; trap 'exit 7' TERM; while :; do sleep 0.05; done"), config
    )
    assert (await runtime.container_status(container)).status.state == pb.CONTAINER_CREATED
    await runtime.start_container(container)
    assert (await runtime.container_status(container)).status.state == pb.CONTAINER_RUNNING
    [listed] = await runtime.list_containers(pb.ContainerFilter(pod_sandbox_id=sandbox))
    assert listed.id == container
    assert (await real.stats.container_stats(container)).attributes.id == container

    done = await runtime.exec_sync(container, ["sh", "-c", "echo $GREETING; echo oh >&2; exit 3"], 45)
    assert (done.stdout, done.stderr, done.exit_code) == (b"hello\n", b"oh\n", 3)
    with pytest.raises(errors.CommandTimedOut, match="timed out after 1s"):
        await runtime.exec_sync(container, ["sleep", "30"], 1)
    assert (await runtime.exec(pb.ExecRequest(container_id=container, cmd=["ls"], stdout=True))).startswith(
        "http://"
    )
    await runtime.update_container_resources(container, pb.LinuxContainerResources(cpu_shares=256))
    await runtime.reopen_container_log(container)

    await runtime.stop_container(container, 45)
    ended = (await runtime.container_status(container)).status
    assert (ended.state, ended.exit_code) == (pb.CONTAINER_EXITED, 7)
    assert "started" in (folder / "main.log").read_text()
    await runtime.remove_container(container)
    with pytest.raises(errors.NotFound) as caught:
        await runtime.container_status(container)
    assert str(caught.value).startswith("ContainerStatus: rpc error: code = NotFound desc = ")
    await runtime.remove_container(container)


async def test_containerd_image_status_and_failed_pull(real: RuntimeConnection, image: pb.ImageSpec) -> None:
    assert (await real.images.image_status(image)).image.repo_tags == [image.image]
    missing = await real.images.image_status(pb.ImageSpec(image="pykubelet.local/none:1"))
    assert not missing.HasField("image")
    with pytest.raises(errors.CriError, match="PullImage"):
        await real.images.pull_image(pb.ImageSpec(image="127.0.0.1:1/none:1"))


async def test_containerd_start_missing_container_counts_error(
    real: RuntimeConnection, registry: CollectorRegistry
) -> None:
    with pytest.raises(errors.CriError, match="StartContainer"):
        await real.runtime.start_container("none")
    labels = {"operation_type": "start_container"}
    assert registry.get_sample_value("kubelet_runtime_operations_errors_total", labels) == 1


async def created_event(
    cri: RuntimeConnection, sandbox: str
) -> pb.ContainerEventResponse | errors.Unimplemented:
    """Return the first event of a created container in a sandbox; a new client gets events of minutes ago."""
    async with aclosing(cri.runtime.container_events()) as events:
        try:
            async for event in events:
                created = event.container_event_type == pb.CONTAINER_CREATED_EVENT
                if created and event.pod_sandbox_status.id == sandbox != event.container_id:
                    return event
        except errors.Unimplemented as err:
            return err
    raise AssertionError("the stream of events ended")


async def test_containerd_container_events_delivered_or_unimplemented(
    real: RuntimeConnection, sandbox: str, config: pb.PodSandboxConfig, image: pb.ImageSpec
) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(created_event(real, sandbox))
        await asyncio.sleep(1)
        container = await real.runtime.create_container(sandbox, shell(image, "true"), config)
        heard = await listening
    if isinstance(heard, errors.Unimplemented):  # containerd before 1.7
        assert heard.call == "GetContainerEvents"
    else:
        assert heard.container_id == container


async def test_containerd_task_events_start_and_exit_delivered(
    real: RuntimeConnection, sandbox: str, config: pb.PodSandboxConfig, image: pb.ImageSpec
) -> None:
    container = await real.runtime.create_container(sandbox, shell(image, "exit 5"), config)
    async with aclosing(task_events(real.runtime_channel)) as events, asyncio.timeout(60):
        heard = []
        async with asyncio.TaskGroup() as tasks:

            async def start_when_listening() -> None:
                await asyncio.sleep(1)
                await real.runtime.start_container(container)

            tasks.create_task(start_when_listening())
            async for event in events:
                heard.append(event)
                if isinstance(event.details, TaskExit) and event.container_id == container:
                    break
    last = heard[-1]
    assert isinstance(last.details, TaskExit)
    assert (last.details.id, last.details.exit_status) == (container, 5)
    assert last.time == pytest.approx(time.time(), abs=30)
    assert last.details.exited_at.seconds == pytest.approx(time.time(), abs=30)
    assert any(isinstance(event.details, TaskStart) for event in heard)


def pid_behind(endpoint: str) -> int:
    """The process that listens on a socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(endpoint.removeprefix("unix://"))
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")


async def test_containerd_killed_and_restarted_container_still_running(
    real: RuntimeConnection,
    private_runtime: PrivateRuntime,
    sandbox: str,
    config: pb.PodSandboxConfig,
    image: pb.ImageSpec,
) -> None:
    container = await real.runtime.create_container(sandbox, shell(image, "sleep 600"), config)
    await real.runtime.start_container(container)
    before = (await real.runtime.container_status(container)).status
    failures = []
    # Who starts it again waits until it was seen to be down.
    os.kill(private_runtime.pid, signal.SIGSTOP)
    try:
        os.kill(pid_behind(private_runtime.endpoint), signal.SIGKILL)
        async with asyncio.timeout(60):
            while not isinstance(down := await status_or_failure(real, container), errors.CriError):
                await asyncio.sleep(0.02)
        failures.append(down)
    finally:
        os.kill(private_runtime.pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        while isinstance(after := await status_or_failure(real, container), errors.CriError):
            failures.append(after)
            await asyncio.sleep(0.02)
    assert (after.state, after.started_at) == (pb.CONTAINER_RUNNING, before.started_at)
    assert {failure.call for failure in failures} == {"ContainerStatus"}


async def status_or_failure(cri: RuntimeConnection, container: str) -> pb.ContainerStatus | errors.CriError:
    try:
        return (await cri.runtime.container_status(container)).status
    except errors.CriError as err:
        return err

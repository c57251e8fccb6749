"""Image garbage collection with a real containerd on a small disk, in the kubelet and beside it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent.images import KeptImages
from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.images.image_gc import DiskUsage, ImageGC, ImageGCError, ImageGCPolicy
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.metrics import ImageGCMetrics, ImageMetrics
from pykubelet.images.puller import ImageError, PullLimits
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.util.tasks import TaskScope
from tests.support.image_service import a_pod, a_sandbox
from tests.support.manifests import container, pod
from tests.support.metrics_page import Page
from tests.support.node import Node, kubelet_node, running
from tests.support.runtime import RunningRuntime
from tests.support.small_disk import MIB, free_percent, import_image, runtime_on_small_disk

pytestmark = pytest.mark.machine

DISK = 384 * MIB
IMAGE = 24 * MIB
PERIODS = {
    "PYTHONPATH": f"{Path('tests/support/short_gc_period').absolute()}:{os.environ.get('PYTHONPATH', '')}"
}


@pytest.fixture(scope="module")
def small_runtime() -> Iterator[RunningRuntime]:
    with runtime_on_small_disk(DISK) as started:
        yield started


@pytest.fixture
async def cri(small_runtime: RunningRuntime, registry: CollectorRegistry) -> AsyncIterator[RuntimeConnection]:
    """The runtime; images that a test brings are removed."""
    async with await connect(
        small_runtime.endpoint, timeout=Duration.from_seconds(60), metrics=CriMetrics(registry)
    ) as client:
        yield client
        for image in await client.images.list_images():
            if not any(name.startswith("pykubelet.local/") for name in image.repo_tags):
                await client.images.remove_image(pb.ImageSpec(image=image.id))


def names_of(runtime: RunningRuntime) -> set[str]:
    """Return the short names of all images, as the runtime lists them."""

    async def names() -> set[str]:
        metrics = CriMetrics(CollectorRegistry())
        async with await connect(
            runtime.endpoint, timeout=Duration.from_seconds(60), metrics=metrics
        ) as client:
            images = await client.images.list_images()
        return {tag.rpartition("/")[2].partition(":")[0] for image in images for tag in image.repo_tags}

    return asyncio.run(names())


def remove_all(runtime: RunningRuntime) -> None:
    """Remove the images of a test."""

    async def remove() -> None:
        metrics = CriMetrics(CollectorRegistry())
        async with await connect(
            runtime.endpoint, timeout=Duration.from_seconds(60), metrics=metrics
        ) as client:
            for image in await client.images.list_images():
                if not any(name.startswith("pykubelet.local/") for name in image.repo_tags):
                    await client.images.remove_image(pb.ImageSpec(image=image.id))

    asyncio.run(remove())


def collected(node: Node, reason: str) -> float:
    return Page(node.page("/metrics")).total("kubelet_image_garbage_collected_total", reason=reason)


def users_of_images(node: Node) -> None:
    """Write a pod that runs, and one whose container has exited."""
    node.manifests.mkdir(parents=True, exist_ok=True)
    node.write(pod("runs", container(image="example.org/used:1", imagePullPolicy="Never")))
    ended = container(image="example.org/exited:1", imagePullPolicy="Never", command=["true"])
    node.write(pod("ended", ended, restartPolicy="Never"))


def test_kubelet_disk_above_high_threshold_removes_unused_images_down_to_low(
    small_runtime: RunningRuntime,
) -> None:
    instance = small_runtime.instance
    for name in ("used", "exited"):
        import_image(instance, f"example.org/{name}:1", with_shell=True)
    for number in range(4):
        import_image(instance, f"example.org/unused{number}:1", IMAGE)
    try:
        high = 100 - int(free_percent(instance.containerd_root))
        node = kubelet_node(
            small_runtime,
            env=PERIODS,
            imageGCHighThresholdPercent=high,
            # 9 % of the disk are more than one image, and less than two.
            imageGCLowThresholdPercent=high - 9,
            imageMinimumGCAge="10s",
        )
        users_of_images(node)
        with running(node):
            node.wait_ready("runs-n1")
            node.wait_phase("ended-n1", "Succeeded")
            node.wait("images to be removed", lambda: collected(node, "space") >= 2)
            percent = 100 - int(free_percent(instance.containerd_root))
            assert percent < high
            left = names_of(small_runtime)
            assert {"used", "exited", "pause", "busybox"} <= left
            assert len([name for name in left if name.startswith("unused")]) == 2
            rounds = node.log_text().count("Image garbage collection succeeded")
            node.wait(
                "another collection",
                lambda: node.log_text().count("Image garbage collection succeeded") > rounds + 1,
            )
            assert names_of(small_runtime) == left, "nothing more is removed below the high threshold"
            assert collected(node, "space") == 2
            assert collected(node, "age") == 0
            node.clear()
    finally:
        remove_all(small_runtime)


def test_kubelet_maximum_age_removes_unused_images(small_runtime: RunningRuntime) -> None:
    instance = small_runtime.instance
    for name in ("used", "exited", "unused"):
        import_image(instance, f"example.org/{name}:1", with_shell=True)
    try:
        node = kubelet_node(
            small_runtime,
            env=PERIODS,
            imageGCHighThresholdPercent=100,
            imageMinimumGCAge="1s",
            imageMaximumGCAge="10s",
        )
        users_of_images(node)
        with running(node):
            node.wait_ready("runs-n1")
            node.wait_phase("ended-n1", "Succeeded")
            node.wait("the unused image to be removed", lambda: "unused" not in names_of(small_runtime))
            assert names_of(small_runtime) == {"used", "exited", "pause", "busybox"}
            # It is counted when the runtime has answered.
            node.wait("its removal to be counted", lambda: collected(node, "age") == 1)
            assert collected(node, "space") == 0
            node.remove("runs", "ended")
            node.wait(
                "the images of removed pods to be removed",
                lambda: names_of(small_runtime) == {"pause", "busybox"},
            )
            node.clear()
    finally:
        remove_all(small_runtime)


class Collector:
    """Garbage collection and an image manager at the real runtime."""

    def __init__(self, cri: RuntimeConnection, tasks: TaskScope, registry: CollectorRegistry) -> None:
        self.available = 0
        self.manager = ImageManager(
            cri.images, PodHistory(), tasks, limits=PullLimits(), metrics=ImageMetrics(registry)
        )
        self.events: list[str] = []
        self.gc = ImageGC(
            cri.images,
            cri.runtime,
            self.manager,
            self._measure,
            ImageGCPolicy(min_age=Duration(0)),
            lambda kind, reason, message: self.events.append(reason),
            ImageGCMetrics(registry),
            kept_names=KeptImages(cri).names,
        )

    async def request(self, pod: Pod, delay: float) -> bool:
        """Request a pod's image after some seconds; return whether it is present."""
        await asyncio.sleep(delay)
        try:
            await self.manager.ensure(pod, pod.spec.containers[0], a_sandbox(pod))
        except ImageError as err:
            if err.reason != "ErrImageNeverPull":
                raise
            return False
        return True

    async def _measure(self, path: Path) -> DiskUsage | None:
        sizes = os.statvfs(path)
        return DiskUsage(sizes.f_blocks * sizes.f_frsize, self.available)


@pytest.fixture
def collector(cri: RuntimeConnection, scope: TaskScope, registry: CollectorRegistry) -> Collector:
    return Collector(cri, scope, registry)


async def test_find_sandbox_image_real_runtime_reports_it(
    cri: RuntimeConnection, small_runtime: RunningRuntime
) -> None:
    assert await KeptImages(cri).find_sandbox_image() == small_runtime.pause_image


async def test_collect_full_disk_without_enough_images_records_event(
    cri: RuntimeConnection, collector: Collector, small_runtime: RunningRuntime
) -> None:
    await asyncio.to_thread(import_image, small_runtime.instance, "example.org/small:1")
    with pytest.raises(
        ImageGCError, match=r"^Insufficient free disk space .* \(100% of 3\d\d\.\d MiB used\)"
    ):
        await collector.gc.collect()
    assert collector.events == ["FreeDiskSpaceFailed"]
    tags = [tag for image in await cri.images.list_images() for tag in image.repo_tags]
    assert sorted(tags) == sorted([small_runtime.pause_image, small_runtime.busybox_image])


async def test_delete_unused_images_while_pods_request_them_never_removes_a_granted_one(
    cri: RuntimeConnection, collector: Collector, small_runtime: RunningRuntime
) -> None:
    """Verify for the orders in which a request and a removal can meet that a granted image is present."""
    granted = 0
    for attempt in range(20):
        name = f"example.org/requested{attempt}:1"
        await asyncio.to_thread(import_image, small_runtime.instance, name)
        async with asyncio.timeout(30):
            while not (await cri.images.image_status(pb.ImageSpec(image=name))).HasField("image"):
                await asyncio.sleep(0.01)
        mine = a_pod(name, "Never", uid=f"pod-{attempt}")

        is_granted, _ = await asyncio.gather(
            collector.request(mine, attempt * 0.002), collector.gc.delete_unused_images()
        )
        present = (await cri.images.image_status(pb.ImageSpec(image=name))).HasField("image")
        assert present == is_granted
        granted += is_granted
        collector.manager.forget_pod(mine.uid)
    assert granted, "the earliest request comes before the removal"

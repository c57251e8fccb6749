"""Progress of pulls from a slow registry, on a real containerd."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent.images import build_pull_tracker
from pykubelet.api.duration import Duration
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.puller import PullLimits
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.util.tasks import TaskScope
from tests.support.image_registry import Registry, running_registry
from tests.support.image_service import a_pod, a_sandbox
from tests.support.manifests import container, pod
from tests.support.node import Node
from tests.support.runtime import RunningRuntime
from tests.support.slow_registry import slow_proxy

pytestmark = pytest.mark.machine

MIB = 1024 * 1024
LAYERS = (MIB, 2 * MIB, MIB // 2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture
async def cri(runtime: RunningRuntime, registry: CollectorRegistry) -> AsyncIterator[RuntimeConnection]:
    async with await connect(
        runtime.endpoint, timeout=Duration.from_seconds(60), metrics=CriMetrics(registry)
    ) as client:
        yield client


async def test_pull_progress_slow_registry_is_measured_until_the_end(
    cri: RuntimeConnection, source: Registry, journal: PodHistory, metrics: ImageMetrics, scope: TaskScope
) -> None:
    """Verify that bytes and layers are the image's, and that two tags of a repository are not mixed."""
    source.push_layers("team/my-app.x", "1", [os.urandom(size) for size in LAYERS])
    source.push_layers("other", "1", [os.urandom(size) for size in LAYERS[:2]])
    source.push_layers("other", "2", [os.urandom(size) for size in LAYERS[:2]])
    manager = ImageManager(
        cri.images,
        journal,
        scope,
        limits=PullLimits(serialize=False, qps=0),
        metrics=metrics,
        tracker=build_pull_tracker(cri, scope),
    )
    async with slow_proxy(source.host, MIB) as proxy:
        images = [f"{proxy.host}/{name}" for name in ("team/my-app.x:1", "other:1", "other:2")]
        pods = [a_pod(image, uid=f"uid-{number}") for number, image in enumerate(images)]
        pulls = [
            asyncio.create_task(manager.ensure(pod, pod.spec.containers[0], a_sandbox(pod))) for pod in pods
        ]
        seen = []
        while not pulls[0].done():
            await asyncio.sleep(0.2)
            seen += [item for item in manager.pulls() if item.image == images[0] and item.total_bytes]
            ambiguous = [item for item in manager.pulls() if item.image != images[0]]
            if len(ambiguous) == 2:
                assert all(item.total_bytes is None for item in ambiguous)
        proxy.rate = 100 * MIB
        await asyncio.gather(*pulls)
    assert {item.total_layers for item in seen} == {3}
    [total] = {item.total_bytes or 0 for item in seen}
    assert sum(LAYERS) <= total <= sum(LAYERS) * 1.1
    received = [item.done_bytes or 0 for item in seen]
    assert received == sorted(received)
    assert any(0 < done < total for done in received)
    assert manager.pulls() == []


async def test_waiting_message_slow_pull_of_a_pod_has_its_progress(node: Node, source: Registry) -> None:
    source.push_layers("slow", "1", [os.urandom(3 * MIB), os.urandom(MIB)])
    async with slow_proxy(source.host, MIB / 8) as proxy:
        image = f"{proxy.host}/slow:1"
        name = node.write(pod("slow", container(image=image)))

        def message() -> str:
            found = node.pod(name) or {}
            [status] = found.get("status", {}).get("containerStatuses", [{}])
            waiting = status.get("state", {}).get("waiting", {})
            assert waiting.get("reason", "ContainerCreating") == "ContainerCreating"
            return str(waiting.get("message", ""))

        text = await asyncio.to_thread(node.wait, "a waiting message", message)
        assert re.fullmatch(rf'Pulling image "{image}": [0-9.]+ [KM]iB of 4.0 MiB, [01] of 2 layers', text)
        [pull] = await asyncio.to_thread(node.control, "GET", "/images/pulls")
        assert (pull["image"], pull["totalLayers"]) == (image, 2)
        proxy.rate = 100 * MIB
        await asyncio.to_thread(node.wait_event, name, "Pulled")
        await asyncio.to_thread(node.clear)

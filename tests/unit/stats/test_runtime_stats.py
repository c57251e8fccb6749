"""Statistics from a scripted runtime: cached, with one call in flight, also when it hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.stats.cached_call import CachedCall
from pykubelet.stats.cri.runtime_stats import ImageFilesystems, LayerUsage, RuntimeStatistics
from pykubelet.util.tasks import TaskScope
from tests.support.cri_servers import Hang, Refuse, Runtime

NANOSECONDS = 1_800_000_000 * 10**9


def filesystem(used: int, path: str = "/images") -> pb.FilesystemUsage:
    return pb.FilesystemUsage(
        timestamp=NANOSECONDS,
        fs_id=pb.FilesystemIdentifier(mountpoint=path),
        used_bytes=pb.UInt64Value(value=used),
    )


def container(container_id: str, used: int) -> pb.ContainerStats:
    return pb.ContainerStats(
        attributes=pb.ContainerAttributes(id=container_id), writable_layer=filesystem(used)
    )


def layers(*used: int) -> pb.ListContainerStatsResponse:
    return pb.ListContainerStatsResponse(
        stats=[container(f"c{number}", size) for number, size in enumerate(used)]
    )


def statistics(cri: RuntimeConnection, tasks: TaskScope, **options: Any) -> RuntimeStatistics:
    return RuntimeStatistics(cri.stats, cri.images, tasks, **options)


def calls(runtime: Runtime, method: str) -> int:
    return sum(seen.method == method for seen in runtime.seen)


async def test_facts_running_runtime_returns_layers_and_filesystems(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    scripted.answers["ListContainerStats"] = layers(5, 6)
    scripted.answers["ImageFsInfo"] = pb.ImageFsInfoResponse(
        image_filesystems=[filesystem(7), filesystem(8)], container_filesystems=[filesystem(9, "/layers")]
    )
    facts = await statistics(cri, tasks).facts()
    assert facts.layers == {
        "c0": LayerUsage(1_800_000_000.0, "/images", 5, None),
        "c1": LayerUsage(1_800_000_000.0, "/images", 6, None),
    }
    assert facts.filesystems.images == LayerUsage(1_800_000_000.0, "/images", 7, None)
    assert facts.mount_points() == {"/images", "/layers"}
    assert facts.sandboxes is None


async def test_facts_many_readers_share_one_call_per_interval(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    scripted.answers["ListContainerStats"] = layers(5)
    found = statistics(cri, tasks)
    await asyncio.gather(*(found.facts() for _ in range(50)))
    for _ in range(50):
        await found.facts()
    assert calls(scripted, "ListContainerStats") == 1
    assert calls(scripted, "ImageFsInfo") == 1
    assert calls(scripted, "ListPodSandboxStats") == 0


async def test_facts_interval_elapsed_refreshes(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    scripted.answers["ListContainerStats"] = [layers(5), layers(6)]
    found = statistics(cri, tasks, interval=0.0, keep_fresh=0)
    assert (await found.facts()).layers["c0"].used == 5
    assert (await found.facts()).layers["c0"].used == 6


async def test_facts_hanging_runtime_other_parts_returned_and_one_call_in_flight(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    hang = Hang()
    scripted.answers["ListContainerStats"] = hang
    scripted.answers["ImageFsInfo"] = pb.ImageFsInfoResponse(image_filesystems=[filesystem(7)])
    found = statistics(cri, tasks, wait=0.05, interval=0.0, timeout=60.0)
    async with asyncio.timeout(30):
        while (facts := await found.facts()).filesystems.images is None:
            assert facts.layers == {}
        await hang.begun.wait()
    for _ in range(5):
        assert (await found.facts()).layers == {}
    assert calls(scripted, "ListContainerStats") == 1


async def test_facts_runtime_starts_to_hang_returns_last_values(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    hang = Hang()
    scripted.answers["ListContainerStats"] = [layers(5), hang]
    found = statistics(cri, tasks, wait=0.5, interval=0.0, timeout=60.0, keep_fresh=0)
    async with asyncio.timeout(30):
        while not (first := (await found.facts()).layers):
            pass
    assert (await found.facts()).layers == first
    assert hang.begun.is_set()


async def test_facts_hanging_call_ends_at_its_time_limit_and_is_retried(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    hang = Hang()
    scripted.answers["ListContainerStats"] = [hang, layers(5)]
    found = statistics(cri, tasks, wait=0.05, interval=0.0, timeout=1.0)
    assert (await found.facts()).layers == {}
    async with asyncio.timeout(30):
        while not (await found.facts()).layers:
            await asyncio.sleep(0.01)
        await hang.given_up.wait()


async def test_facts_failing_runtime_values_omitted(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    scripted.answers["ListContainerStats"] = Refuse("INTERNAL", "no")
    scripted.answers["ImageFsInfo"] = Refuse("UNAVAILABLE", "no")
    facts = await statistics(cri, tasks).facts()
    assert (dict(facts.layers), facts.filesystems) == ({}, ImageFilesystems())


async def test_facts_gate_on_returns_sandboxes_without_listing_containers(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    pod = pb.PodSandboxStats(
        attributes=pb.PodSandboxAttributes(id="s0"),
        linux=pb.LinuxPodSandboxStats(containers=[container("c0", 5)]),
    )
    nameless = pb.PodSandboxStats(linux=pb.LinuxPodSandboxStats())
    scripted.answers["ListPodSandboxStats"] = pb.ListPodSandboxStatsResponse(stats=[pod, nameless])
    found = statistics(cri, tasks, pods_from_cri=True)
    facts = await found.facts()
    assert facts.sandboxes == {"s0": pod}
    assert facts.layers["c0"].used == 5
    assert await found.sandboxes() == {"s0": pod}
    assert calls(scripted, "ListContainerStats") == 0


async def test_facts_gate_on_and_call_unimplemented_falls_back(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    for method in ("ListPodSandboxStats", "ListMetricDescriptors", "ListPodSandboxMetrics"):
        scripted.answers[method] = Refuse("UNIMPLEMENTED", "unknown method")
    scripted.answers["ListContainerStats"] = layers(5)
    found = statistics(cri, tasks, pods_from_cri=True)
    facts = await found.facts()
    assert facts.sandboxes is None
    assert facts.layers["c0"].used == 5
    assert await found.metrics() is None
    assert not found.has_metrics


async def test_metrics_gate_on_returns_descriptors_once(
    scripted: Runtime, cri: RuntimeConnection, tasks: TaskScope
) -> None:
    scripted.answers["ListMetricDescriptors"] = pb.ListMetricDescriptorsResponse(
        descriptors=[pb.MetricDescriptor(name="m")]
    )
    scripted.answers["ListPodSandboxMetrics"] = pb.ListPodSandboxMetricsResponse(
        pod_metrics=[pb.PodSandboxMetrics(pod_sandbox_id="s0")]
    )
    found = statistics(cri, tasks, pods_from_cri=True, interval=0.0)
    for _ in range(3):
        listed = await found.metrics()
        assert listed is not None
        assert [metric.name for metric in listed.descriptors] == ["m"]
        assert [pod.pod_sandbox_id for pod in listed.pods] == ["s0"]
    assert calls(scripted, "ListMetricDescriptors") == 1
    assert found.has_metrics
    without = statistics(cri, tasks)
    assert await without.metrics() is None
    assert not without.has_metrics


class Source:
    """A source that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def fetch(self) -> int:
        self.calls += 1
        return self.calls


@pytest.mark.looptime
async def test_cached_call_invalidated_refreshes_at_most_once_per_second() -> None:
    async with TaskScope() as tasks:
        source = Source()
        call = CachedCall("x", source.fetch, tasks, interval=10.0, wait=1.0, max_age=60.0)
        assert await call.get() == 1
        for _ in range(30):
            call.invalidate()
            await call.get()
            await asyncio.sleep(0.1)
        assert source.calls in (3, 4)
        await asyncio.sleep(9)
        assert await call.get() == source.calls
        assert source.calls in (3, 4, 5)


@pytest.mark.looptime
async def test_cached_call_old_result_omitted() -> None:
    async with TaskScope() as tasks:
        source = Source()
        call = CachedCall("x", source.fetch, tasks, interval=1000.0, wait=1.0, max_age=60.0)
        assert await call.get() == 1
        await asyncio.sleep(59)
        assert await call.get() == 1
        await asyncio.sleep(2)
        assert await call.get() is None


async def test_cached_call_closed_scope_returns_latest() -> None:
    async with TaskScope() as tasks:
        source = Source()
        call = CachedCall("x", source.fetch, tasks, interval=0.0, wait=1.0, max_age=60.0)
        assert await call.get() == 1
    assert await call.get() == 1


@pytest.mark.looptime
async def test_cached_call_source_hangs_readers_of_first_seconds_wait_and_old_result_omitted() -> None:
    source = Source()

    async def fetch() -> int:
        if source.calls:
            await asyncio.sleep(3600)
        return await source.fetch()

    async with TaskScope() as tasks:
        loop = asyncio.get_running_loop()
        call = CachedCall("x", fetch, tasks, interval=10.0, wait=2.0, max_age=60.0)
        assert await call.get() == 1
        await asyncio.sleep(10)
        started = loop.time()
        assert await call.get() == 1
        assert loop.time() - started == pytest.approx(2, abs=0.01)
        for _ in range(10):
            assert await call.get() == 1
        assert loop.time() - started == pytest.approx(2, abs=0.01)
        await asyncio.sleep(60)
        assert await call.get() is None


@pytest.mark.looptime
async def test_cached_call_keep_fresh_periodic_reader_never_waits_until_it_stops() -> None:
    loop, started = asyncio.get_running_loop(), []

    async def fetch() -> float:
        started.append(loop.time())
        await asyncio.sleep(1.5)
        return started[-1]

    async with TaskScope() as scope:
        call = CachedCall("x", fetch, scope, interval=10, wait=2, max_age=60, keep_fresh=90)
        assert await call.get() == 0
        for _ in range(5):
            await asyncio.sleep(60)
            before = loop.time()
            result = await call.get()
            assert loop.time() == before, "it does not wait"
            assert result is not None
            assert before - result <= 12
        count = len(started)
        await asyncio.sleep(1000)
        assert len(started) - count <= 10, "nobody reads it any more"


@pytest.mark.looptime
async def test_cached_call_keep_fresh_invalidated_waits_for_new_result() -> None:
    numbers = iter(range(100))

    async def fetch() -> int:
        await asyncio.sleep(1)
        return next(numbers)

    async with TaskScope() as scope:
        call = CachedCall("x", fetch, scope, interval=10, wait=2, max_age=60, keep_fresh=90)
        assert await call.get() == 0
        await asyncio.sleep(5)
        call.invalidate()
        assert await call.get() == 1

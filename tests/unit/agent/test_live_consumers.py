"""Each reloadable field takes effect in the real component, without a restart of it.

`observes` records the fields that a test observes; the last test compares them with the table.
"""

import asyncio
import contextlib
import logging
import ssl
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import AdmitRejection
from pykubelet.agent.cluster import AgentSettings, Cluster
from pykubelet.agent.live_config import ReloadError
from pykubelet.agent.live_consumers import (
    LiveComponents,
    build_consumers,
    prepare_api_client,
    prepare_credential_providers,
    prepare_eviction,
    prepare_image_gc,
    prepare_image_pulls,
    prepare_log_rotation,
    prepare_logging,
    prepare_node,
    prepare_node_status,
    prepare_pod_sources,
    prepare_pod_sync,
    prepare_sysctls,
)
from pykubelet.agent.servers import LiveTls
from pykubelet.agent.volumes import VolumeNode
from pykubelet.api.duration import Duration
from pykubelet.apiserver.certificates.serving import CertificateFiles, SwitchableCertificate
from pykubelet.apiserver.client import ApiClient, Limits, make_clients
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.live import CONSUMERS, RELOADABLE, consumer_fields
from pykubelet.config.load import load
from pykubelet.config.types import KubeletConfiguration, VModuleItem
from pykubelet.images.credential_provider import ProviderPlugins, load_providers
from pykubelet.images.image_gc import DiskUsage, ImageGCError
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.puller import PullLimits, PullRateExceeded
from pykubelet.kuberuntime.configuration.config_builder import PodStartContext
from pykubelet.kuberuntime.log_rotation import manager as log_module
from pykubelet.kuberuntime.log_rotation.plan import RotationPolicy
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.logs.logger import ROOT, get_logger
from pykubelet.logs.setup import set_levels
from pykubelet.node.informer import NodeInformer
from pykubelet.node.reporter import NodeReporter
from pykubelet.podconfig import file_source
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.static_sources import StaticSources
from pykubelet.server.tls import ServingTls, TlsSettings
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.tasks import TaskScope
from tests.support.admission import asking, pod
from tests.support.api_client import access, authority, opened, server, server_pair
from tests.support.certs import NAMES, Authority
from tests.support.eviction import ScriptedNode, usage
from tests.support.eviction import pod as eviction_pod
from tests.support.image_service import FakeImages
from tests.support.node_status import CAPACITY, FakeRuntime, MemoryApi, settings
from tests.unit.cm.test_cgroup_v2 import v2
from tests.unit.images.test_image_gc import Rig as ImageRig
from tests.unit.images.test_image_gc import listed
from tests.unit.kuberuntime.test_log_rotation import Host, logs
from tests.unit.podworkers.many_pods import Rig, engine_with_fakes
from tests.unit.podworkers.test_cost_per_pod import cgroups

__all__ = ["access", "authority", "cgroups", "logs", "opened", "server", "server_pair", "v2"]

F = TypeVar("F", bound=Callable[..., Any])
OBSERVED: set[str] = set()
FLAGS = KubeletFlags()
SETTINGS = AgentSettings(FLAGS, KubeletConfiguration(), FeatureGates(), "n1")
HOUR = Duration.parse("1h")


def observes(*fields: str) -> Callable[[F], F]:
    """Record which fields a test observes."""
    OBSERVED.update(fields)
    return lambda test: test


def config(**fields: Any) -> KubeletConfiguration:
    return KubeletConfiguration(**{"eviction_hard": {}, **fields})


def seconds(text: str) -> Duration:
    return Duration.parse(text)


# Log


@pytest.fixture
def log_levels() -> Iterator[None]:
    before = logging.getLogger(ROOT).level
    yield
    logging.getLogger(ROOT).setLevel(before)
    set_levels(0, [])
    logging.getLogger(ROOT).setLevel(before)


@observes("logging.verbosity", "logging.vmodule")
async def test_logging_verbosity_and_vmodule_apply_to_existing_loggers(log_levels: None) -> None:
    log, other = get_logger(f"{ROOT}.test.live_one"), get_logger(f"{ROOT}.test.live_two")
    set_levels(0, [])
    assert not log.v(3)
    new = config()
    new.logging.verbosity = 3
    new.logging.vmodule = [VModuleItem(file_pattern="live_two", verbosity=6)]
    (await prepare_logging(SETTINGS, new))()
    assert log.v(3)
    assert not log.v(4)
    assert other.v(6)
    (await prepare_logging(SETTINGS, config()))()
    assert not log.v(1)
    assert not other.v(1)


# Eviction


def pressed_node(memory: str = "900Mi") -> ScriptedNode:
    return ScriptedNode(
        memory=memory,
        pods=[eviction_pod("hog", requests={"memory": "1Mi"}, terminationGracePeriodSeconds=30)],
        usages={"hog": usage("700Mi")},
    )


@observes("evictionHard")
async def test_eviction_hard_threshold_evicts_in_round_that_follows_immediately() -> None:
    node = pressed_node()
    manager = node.manager(interval=3600.0)
    async with asyncio.timeout(20), TaskScope() as scope:
        scope.start(manager.run(), name="eviction")
        await asyncio.sleep(0.1)
        assert node.killed == []
        (await prepare_eviction(SETTINGS, manager, config(eviction_hard={"memory.available": "1Gi"})))()
        while not node.killed:
            await asyncio.sleep(0.01)


@observes("evictionSoft", "evictionSoftGracePeriod", "evictionMaxPodGracePeriod")
async def test_eviction_soft_threshold_evicts_after_grace_with_pod_grace_period() -> None:
    node = pressed_node()
    manager = node.manager()
    new = config(
        eviction_soft={"memory.available": "1Gi"},
        eviction_soft_grace_period={"memory.available": "1ms"},
        eviction_max_pod_grace_period=7,
    )
    (await prepare_eviction(SETTINGS, manager, new))()
    async with asyncio.timeout(10):
        while not node.killed:
            await asyncio.sleep(0.005)
            await manager.synchronize()
    assert node.killed == [("hog", 7)]


@observes("evictionMinimumReclaim")
async def test_eviction_minimum_reclaim_keeps_threshold_met_while_configured() -> None:
    node = pressed_node()
    node.pods = []
    manager = node.manager()
    fields = {
        "eviction_hard": {"memory.available": "1Gi"},
        "eviction_pressure_transition_period": Duration(0),
    }
    reclaim = {"memory.available": "1Gi"}
    (await prepare_eviction(SETTINGS, manager, config(**fields, eviction_minimum_reclaim=reclaim)))()
    await manager.synchronize()
    node.memory = "1500Mi"
    await manager.synchronize()
    assert list(node.conditions.current) == ["MemoryPressure"], (
        "above the threshold, below it with the reclaim"
    )
    (await prepare_eviction(SETTINGS, manager, config(**fields)))()
    await manager.synchronize()
    assert list(node.conditions.current) == []


@observes("evictionPressureTransitionPeriod")
async def test_eviction_transition_period_ends_condition() -> None:
    node = pressed_node()
    node.pods = []
    manager = node.manager()
    hard = {"memory.available": "1Gi"}
    new = config(eviction_hard=hard, eviction_pressure_transition_period=HOUR)
    (await prepare_eviction(SETTINGS, manager, new))()
    await manager.synchronize()
    node.memory = "2Gi"
    await manager.synchronize()
    assert list(node.conditions.current) == ["MemoryPressure"]
    new = config(eviction_hard=hard, eviction_pressure_transition_period=Duration(0))
    (await prepare_eviction(SETTINGS, manager, new))()
    await manager.synchronize()
    assert list(node.conditions.current) == []


@observes("mergeDefaultEvictionSettings")
async def test_eviction_merged_defaults_become_thresholds(tmp_path: Path) -> None:
    head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
    path = tmp_path / "config.yaml"
    node = ScriptedNode(nodefs="5Gi")
    manager = node.manager()
    for merge, expected in ((False, ()), (True, ("DiskPressure",))):
        path.write_text(
            f"{head}evictionHard: {{memory.available: 1Mi}}\n"
            f"mergeDefaultEvictionSettings: {str(merge).lower()}\n"
        )
        (await prepare_eviction(SETTINGS, manager, load([f"--config={path}"]).config))()
        await manager.synchronize()
        assert node.conditions.current == expected


# Images


@observes(
    "imageGCHighThresholdPercent", "imageGCLowThresholdPercent", "imageMinimumGCAge", "imageMaximumGCAge"
)
@pytest.mark.looptime
async def test_image_gc_policy_applies_to_next_collection() -> None:
    rig = ImageRig()
    rig.disk = DiskUsage(1000, 500)
    rig.add(listed("one", 100), listed("two", 100), listed("three", 100))

    async def collect(**fields: Any) -> int:
        before = len(rig.removed)
        (await prepare_image_gc(rig.gc, config(**fields)))()
        with contextlib.suppress(ImageGCError):  # raised if not enough could be freed
            await rig.gc.collect()
        return len(rig.removed) - before

    assert await collect() == 0
    low = {"image_gc_high_threshold_percent": 50, "image_gc_low_threshold_percent": 45}
    await asyncio.sleep(60)
    assert await collect(**low, image_minimum_gc_age=HOUR) == 0, "too young"
    assert await collect(**low, image_minimum_gc_age=Duration(0)) == 1, "50 bytes are to be freed"
    await asyncio.sleep(7200)
    assert await collect(image_maximum_gc_age=HOUR) == 2


@observes("registryPullQPS", "registryBurst", "serializeImagePulls", "maxParallelImagePulls")
@pytest.mark.looptime
async def test_image_pulls_limits_apply_to_next_pulls() -> None:
    limits = PullLimits(qps=1, burst=1)
    async with TaskScope() as scope:
        images = ImageManager(
            FakeImages(), PodHistory(), scope, limits=limits, metrics=ImageMetrics(CollectorRegistry())
        )

        async def pulls(**fields: Any) -> tuple[int, int]:
            """Return how many of ten pulls ran, and how many concurrently."""
            if fields:
                (await prepare_image_pulls(images, config(**fields)))()
            done = running = most = 0

            async def pull() -> None:
                nonlocal done, running, most
                try:
                    async with limits.slot():
                        running += 1
                        most = max(most, running)
                        await asyncio.sleep(0.001)
                        running -= 1
                        done += 1
                except PullRateExceeded:
                    return

            await asyncio.gather(*(pull() for _ in range(10)))
            await asyncio.sleep(3600)
            return done, most

        assert await pulls() == (1, 1)
        assert await pulls(registry_pull_qps=1, registry_burst=4) == (4, 1)
        assert await pulls(registry_pull_qps=0) == (10, 1)
        fields = {"registry_pull_qps": 0, "serialize_image_pulls": False}
        assert await pulls(**fields, max_parallel_image_pulls=3) == (10, 3)
        assert await pulls(**fields) == (10, 10)


PROVIDER = """
apiVersion: kubelet.config.k8s.io/v1
kind: CredentialProviderConfig
providers:
- name: {name}
  apiVersion: credentialprovider.kubelet.k8s.io/v1
  matchImages: ["{pattern}"]
  defaultCacheDuration: {cache}
"""


async def test_credential_providers_changed_file_replaces_changed_providers_only(tmp_path: Path) -> None:
    path, bin_dir = tmp_path / "providers.yaml", tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("one", "two"):
        (bin_dir / name).write_text("#!/bin/sh\nexit 1\n")
        (bin_dir / name).chmod(stat.S_IRWXU)
    path.write_text(PROVIDER.format(name="one", pattern="*.one.example", cache="1m"))
    flags = KubeletFlags(
        image_credential_provider_config=str(path), image_credential_provider_bin_dir=str(bin_dir)
    )
    agent = AgentSettings(flags, config(), FeatureGates(), "n1")
    async with TaskScope() as scope:
        metrics = ImageMetrics(CollectorRegistry())
        plugins = ProviderPlugins(load_providers(path, bin_dir), bin_dir, scope, metrics)

        async def failures(repository: str) -> int:
            return len((await plugins.lookup(repository, pod())).failures)

        assert await prepare_credential_providers(agent, plugins, config()) is None, "nothing has changed"
        assert (await failures("a.one.example/x"), await failures("a.two.example/x")) == (1, 0)
        first = plugins._exec_plugins[0]
        more = PROVIDER.format(name="two", pattern="*.two.example", cache="1m").partition("providers:\n")[2]
        path.write_text(path.read_text() + more)
        apply = await prepare_credential_providers(agent, plugins, config())
        assert apply is not None
        assert await failures("a.two.example/x") == 0, "nothing changes before all are prepared"
        apply()
        assert (await failures("a.one.example/x"), await failures("a.two.example/x")) == (1, 1)
        assert plugins._exec_plugins[0] is first, "with its cache"
        path.write_text("{")
        with pytest.raises(ReloadError, match="image-credential-provider-config"):
            await prepare_credential_providers(agent, plugins, config())
        assert await failures("a.two.example/x") == 1


# Container logs


@observes(
    "containerLogMaxSize", "containerLogMaxFiles", "containerLogMaxWorkers", "containerLogMonitorInterval"
)
async def test_log_rotation_limits_apply_to_running_containers(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "TICK_SECONDS", 0.02)
    host = Host(logs, RotationPolicy(-1, 5))
    host.runtime.write(100)
    fields = {"container_log_max_size": "1000", "container_log_max_files": 2}
    async with host.running():
        await asyncio.sleep(0.2)
        assert host.names() == ["0.log"], "rotation is disabled"
        new = config(**fields, container_log_monitor_interval=seconds("50ms"), container_log_max_workers=3)
        (await prepare_log_rotation(host.manager, new))()
        assert (host.manager._compressions._value, host.manager._interval) == (3, 0.05)
        for _ in range(3):
            count = host.runtime.reopened
            host.runtime.write(100)
            await host.until(lambda count=count: host.runtime.reopened > count)  # type: ignore[misc]
        await host.until(lambda: len(host.rotated()) == 1)
        (await prepare_log_rotation(host.manager, config(container_log_max_size="-1")))()
        count = host.runtime.reopened
        await asyncio.sleep(0.1)
        host.runtime.write(1000)
        await asyncio.sleep(0.3)
        assert host.runtime.reopened <= count + 1, "a rotation that had begun may end"


# Pods


@asynccontextmanager
async def engine_rig(tmp_path: Path, cgroups: Cgroups) -> AsyncIterator[Rig]:
    async with engine_with_fakes(tmp_path / "root", cgroups) as rig:
        yield rig


def live_parts(rig: Rig, reporter: NodeReporter | None = None) -> LiveComponents:
    """Return the components of the engine; the others are not used."""
    unused: Any = None
    return LiveComponents(
        settings=rig.settings,
        options=rig.options,
        capacity=rig.options.allocatable,
        engine=rig.live,
        cgroups=rig.pod_cgroups,
        volume_node=VolumeNode(rig.options),
        images=unused,
        image_gc=unused,
        eviction=unused,
        log_manager=unused,
        tasks=unused,
        reporter=reporter,
    )


@observes("allowedUnsafeSysctls")
@pytest.mark.looptime
async def test_sysctls_allowed_for_next_pods(tmp_path: Path, cgroups: Cgroups) -> None:
    unsafe = pod(securityContext={"sysctls": [{"name": "net.core.somaxconn", "value": "1"}]})
    async with engine_rig(tmp_path, cgroups) as rig:
        assert isinstance(rig.live.admission.evaluate_resize(unsafe), AdmitRejection)
        (await prepare_sysctls(rig.live, config(allowed_unsafe_sysctls=["net.core.*"])))()
        assert rig.live.admission.evaluate_resize(unsafe) is None
        (await prepare_sysctls(rig.live, config()))()
        assert isinstance(rig.live.admission.evaluate_resize(unsafe), AdmitRejection)


@observes("clusterDNS", "clusterDomain")
@pytest.mark.looptime
async def test_dns_new_sandboxes_use_new_servers_and_domain(tmp_path: Path, cgroups: Cgroups) -> None:
    web_pod = pod(dnsPolicy="ClusterFirst")
    async with engine_rig(tmp_path, cgroups) as rig:
        new = config(cluster_dns=["10.0.0.10"], cluster_domain="new.local", resolv_conf="")
        (await prepare_node(live_parts(rig), new, with_reservations=False))()
        found = rig.live.config_builder.sandbox_config(web_pod, 0, PodStartContext("", {})).dns_config
    assert list(found.servers) == ["10.0.0.10"]
    assert "svc.new.local" in found.searches


@observes("syncFrequency")
@pytest.mark.looptime
async def test_pod_sync_frequency_applies_to_waiting_workers(tmp_path: Path, cgroups: Cgroups) -> None:
    async with engine_rig(tmp_path, cgroups) as rig:
        await rig.start_pods(2)

        async def syncs(span: float) -> float:
            name = "kubelet_pod_worker_duration_seconds_count"
            before = rig.registry.get_sample_value(name, {"operation_type": "sync"}) or 0.0
            await asyncio.sleep(span)
            return (rig.registry.get_sample_value(name, {"operation_type": "sync"}) or 0.0) - before

        (await prepare_pod_sync(rig.live, None, config(sync_frequency=HOUR)))()
        await asyncio.sleep(10)
        assert await syncs(600) <= 2
        (await prepare_pod_sync(rig.live, None, config(sync_frequency=seconds("10s"))))()
        assert await syncs(600) >= 2 * 600 / 15 - 2
        assert rig.live.loop._longest_round == 120.0


@observes("maxPods", "podsPerCore", "kubeReserved", "systemReserved")
@pytest.mark.looptime
async def test_allocatable_admission_cgroups_and_volumes_use_new_reservations(
    tmp_path: Path, cgroups: Cgroups
) -> None:
    async with engine_rig(tmp_path, cgroups) as rig:
        parts = live_parts(rig)

        async def apply(**fields: Any) -> None:
            base = {"cgroup_root": "/pyk", "max_pods": 1000}
            (await prepare_node(parts, config(**{**base, **fields}), with_reservations=True))()

        def is_admitted(**requests: Any) -> bool:
            return rig.live.admission.evaluate_resize(asking("new", **requests)) is None

        limit = cgroups.root / "pyk" / "kubepods" / "memory.max"
        assert int(limit.read_text()) == 64 << 30
        assert is_admitted(memory="60Gi", cpu="60")
        await apply(kube_reserved={"memory": "8Gi"}, system_reserved={"cpu": "10", "memory": "2Gi"})
        assert not is_admitted(memory="60Gi")
        assert not is_admitted(cpu="60")
        assert is_admitted(memory="54Gi", cpu="54")
        assert parts.volume_node.memory.allocatable == 54 << 30
        assert str(parts.volume_node.allocatable["cpu"]) == "54"
        await asyncio.sleep(5)
        assert int(limit.read_text()) == 54 << 30, "written by housekeeping"
        await apply(eviction_hard={"memory.available": "1Gi"})
        assert not is_admitted(memory="64Gi")
        await asyncio.sleep(5)
        assert int(limit.read_text()) == 64 << 30
        await apply(max_pods=0)
        assert not is_admitted()
        await apply(max_pods=500)
        assert is_admitted()
        await apply(max_pods=500, pods_per_core=1)
        assert str(parts.volume_node.allocatable["pods"]) == "64"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"system_reserved": {"memory": "65Gi"}}, "65Gi of memory is reserved"),
        ({"eviction_hard": {"memory.available": "60%"}, "kube_reserved": {"memory": "30Gi"}}, "reserved"),
        ({"enforce_node_allocatable": ["pods", "system-reserved"]}, "set systemReserved"),
        ({"max_pods": 2**31 - 1}, "/etc/subuid"),
    ],
)
@pytest.mark.looptime
async def test_allocatable_impossible_reservations_change_nothing(
    tmp_path: Path, cgroups: Cgroups, fields: dict[str, Any], problem: str
) -> None:
    async with engine_rig(tmp_path, cgroups) as rig:
        with pytest.raises(ReloadError, match=problem):
            await prepare_node(live_parts(rig), config(**fields), with_reservations=True)
        assert rig.live.admission.evaluate_resize(asking("new", memory="64Gi")) is None


# Static pod sources


@observes("fileCheckFrequency", "httpCheckFrequency")
async def test_pod_sources_periods_apply_to_waiting_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, scans = 0, 0

    async def respond(_: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": []})

    real_scan = file_source.scan

    def scan(*args: Any) -> Any:
        nonlocal scans
        scans += 1
        return real_scan(*args)

    monkeypatch.setattr(file_source, "scan", scan)
    app = web.Application()
    app.router.add_get("/", respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    mux = cast(Any, SimpleNamespace(expect=lambda name: None))
    start = config(
        static_pod_path=str(tmp_path),
        static_pod_url=url,
        file_check_frequency=HOUR,
        http_check_frequency=HOUR,
    )
    sources = StaticSources(start, "n1", mux, lambda *_: None, objects=None)
    engine = cast(Any, SimpleNamespace(sources=sources))
    async with TaskScope() as scope:
        sources.start(scope)
        async with asyncio.timeout(20):
            while not (requests and scans):
                await asyncio.sleep(0.01)
            new = config(file_check_frequency=seconds("100ms"), http_check_frequency=seconds("100ms"))
            (await prepare_pod_sources(engine, new))()
            while requests < 4 or scans < 4:
                await asyncio.sleep(0.01)
    await runner.cleanup()


# Cluster


@observes("kubeAPIQPS", "kubeAPIBurst", "eventRecordQPS", "eventBurst")
async def test_api_client_rates_apply_to_all_clients(opened: Any, access: Any) -> None:
    transport = opened(access).transport
    clients = make_clients(
        transport, objects=Limits(5, 10), events=Limits(5, 10), lease_seconds=40, status_seconds=10
    )

    def rate(client: ApiClient) -> tuple[int, float]:
        """Return burst and rate of a client whose bucket is full."""
        bucket, later = client._rest._limit, asyncio.get_running_loop().time() + 1e6
        burst = 0
        while (delay := bucket.reserve(later)) == 0:
            burst += 1
        return burst, round(1 / delay)

    async with TaskScope() as scope:
        cluster = Cluster(SETTINGS, clients, CollectorRegistry(), scope)
        review = cluster.review_client()
        new = config(
            kube_api_qps=20,
            kube_api_burst=30,
            event_record_qps=7,
            event_burst=9,
            node_status_update_frequency=seconds("3s"),
        )
        (await prepare_api_client(cluster, new))()
        assert rate(clients.objects) == (30, 20)
        assert rate(review) == (30, 20)
        assert rate(clients.events) == (9, 7)
        assert clients.heartbeats._rest._timeout == 3.0


@pytest.mark.looptime
async def test_api_client_higher_rate_serves_waiting_requests_in_order() -> None:
    bucket, served = TokenBucket(0.01, 1), list[tuple[int, float]]()
    loop = asyncio.get_running_loop()

    async def request(number: int) -> None:
        await bucket.wait()
        served.append((number, loop.time()))

    async with TaskScope() as scope:
        for number in range(5):
            scope.start(request(number), name="request")
        await asyncio.sleep(10)
        assert [number for number, _ in served] == [0]
        began = loop.time()
        bucket.set_rate(10, 2)
        await asyncio.sleep(5)
    assert [number for number, _ in served] == [0, 1, 2, 3, 4]
    assert served[-1][1] - began < 0.6
    assert bucket.try_acquire(loop.time())


class ReportedNode:
    """A node reporter on an API server in memory."""

    def __init__(self) -> None:
        self.api, self.runtime = MemoryApi(), FakeRuntime()
        self.api.transport = SimpleNamespace(close_all=self.api.close_all)  # type: ignore[attr-defined]
        clients: Any = SimpleNamespace(objects=self.api, heartbeats=self.api, events=self.api)
        self.informer = cast(NodeInformer, _Informer(self.api))
        start = settings(update_seconds=3600.0, report_seconds=3600.0, lease_seconds=14400)
        self.reporter = NodeReporter(clients, start, self.runtime.sources(), lambda *_: None, self.informer)
        agent = AgentSettings(KubeletFlags(node_ip="192.0.2.2"), KubeletConfiguration(), FeatureGates(), "vm")
        unused: Any = None
        self.parts = LiveComponents(
            settings=agent,
            options=unused,
            capacity=CAPACITY,
            engine=unused,
            cgroups=unused,
            volume_node=unused,
            images=unused,
            image_gc=unused,
            eviction=unused,
            log_manager=unused,
            tasks=unused,
            reporter=self.reporter,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.runtime.health.status()
        async with TaskScope() as scope:
            scope.start(self.reporter.run(), name="node")
            await asyncio.sleep(30)
            yield

    async def apply(self, **fields: Any) -> None:
        defaults = {
            "eviction_hard": {},
            "node_status_update_frequency": HOUR,
            "node_status_report_frequency": HOUR,
            "node_lease_duration_seconds": 14400,
        }
        new = KubeletConfiguration(**{**defaults, **fields})
        (await prepare_node_status(self.parts, self.reporter, new))()

    async def count(self, request: str, span: float) -> int:
        before = self.api.asked.count(request)
        await asyncio.sleep(span)
        return self.api.asked.count(request) - before


class _Informer:
    """An informer that is notified by the API server in memory."""

    def __init__(self, api: MemoryApi) -> None:
        self._api = api

    def add_listener(self, listener: Callable[[Any], None]) -> None:
        self._api.on_change = listener

    async def run(self) -> None:
        await asyncio.Event().wait()


@observes(
    "nodeStatusUpdateFrequency",
    "nodeStatusReportFrequency",
    "nodeLeaseDurationSeconds",
    "nodeStatusMaxImages",
)
@pytest.mark.looptime
async def test_node_status_periods_lease_and_images_apply_immediately() -> None:
    node = ReportedNode()
    async with node.running():
        assert await node.count("patch nodes", 600) == 0
        assert await node.count("update leases", 600) == 0
        assert len(node.api.node["status"]["images"]) == 2
        await node.apply(
            node_status_update_frequency=seconds("10s"), node_status_report_frequency=seconds("1m")
        )
        assert 8 <= await node.count("patch nodes", 600) <= 12
        await node.apply(node_lease_duration_seconds=40)
        assert await node.count("update leases", 600) >= 55
        assert node.api.lease["spec"]["leaseDurationSeconds"] == 40
        await node.apply(node_status_max_images=1)
        await asyncio.sleep(60)
        assert len(node.api.node["status"]["images"]) == 1


@pytest.mark.looptime
async def test_node_status_reservations_and_pods_reported_immediately() -> None:
    node = ReportedNode()
    async with node.running():
        assert node.api.node["status"]["allocatable"]["pods"] == "110"
        await node.apply(max_pods=33, system_reserved={"cpu": "500m"})
        await asyncio.sleep(5)
        status = node.api.node["status"]
    assert (status["capacity"]["pods"], status["allocatable"]["pods"]) == ("33", "33")
    assert (status["capacity"]["cpu"], status["allocatable"]["cpu"]) == ("2", "1500m")


# TLS


class TlsNode:
    """The TLS of an API server, and connections to it in memory."""

    def __init__(self, start: KubeletConfiguration, tmp_path: Path, source: Any) -> None:
        agent = AgentSettings(KubeletFlags(cert_dir=str(tmp_path / "pki")), start, FeatureGates(), "n1")
        self.certificate = SwitchableCertificate(source)
        self.live = LiveTls(agent, ["127.0.0.1"], self.certificate, source)
        self.tls = ServingTls(
            TlsSettings.from_config(start, request_certificates=True), self.certificate.current
        )

    async def apply(self, **fields: Any) -> None:
        (await self.live.prepare(self.tls, config(**fields)))()

    def connect(
        self, change: Callable[[ssl.SSLContext], None] = lambda context: None
    ) -> tuple[str, str, bytes]:
        """Return version, cipher and certificate of a new connection. Raises SSLError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        change(context)
        ends = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(ends[0], ends[1])
        server = self.tls.context().wrap_bio(ends[1], ends[0], server_side=True)
        for _ in range(5):
            for end in (client, server):
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        cipher, certificate = client.cipher(), client.getpeercert(binary_form=True)
        assert cipher is not None
        assert certificate is not None
        return str(client.version()), cipher[0], certificate


def at_most_1_2(context: ssl.SSLContext) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2


@pytest.fixture
def files(authority: Authority) -> dict[str, str]:
    pair = authority.sign("/CN=first", NAMES)
    return {"tls_cert_file": str(pair.certificate), "tls_private_key_file": str(pair.key)}


def certificate_files(files: dict[str, str]) -> CertificateFiles:
    return CertificateFiles(Path(files["tls_cert_file"]), Path(files["tls_private_key_file"]))


@observes("tlsMinVersion", "tlsCipherSuites", "tlsCurvePreferences")
async def test_tls_options_apply_to_new_connections(tmp_path: Path, files: dict[str, str]) -> None:
    source = certificate_files(files)
    node = TlsNode(config(**files), tmp_path, source)
    assert node.connect(at_most_1_2)[0] == "TLSv1.2"
    await node.apply(**files, tls_min_version="VersionTLS13")
    with pytest.raises(ssl.SSLError):
        node.connect(at_most_1_2)
    assert node.connect()[0] == "TLSv1.3"
    await node.apply(**files, tls_cipher_suites=["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"])
    assert "AES256" in node.connect(at_most_1_2)[1]
    await node.apply(**files, tls_curve_preferences=[24])
    with pytest.raises(ssl.SSLError):
        node.connect(lambda context: context.set_ecdh_curve("prime256v1"))
    node.connect(lambda context: context.set_ecdh_curve("secp384r1"))


@observes("tlsCertFile", "tlsPrivateKeyFile")
async def test_tls_certificate_files_replaced_and_removed(
    tmp_path: Path, authority: Authority, files: dict[str, str]
) -> None:
    node = TlsNode(config(**files), tmp_path, certificate_files(files))
    async with TaskScope() as scope:
        scope.start(node.certificate.run(), name="certificate")
        first = node.connect()[2]
        second = authority.sign("/CN=second", NAMES)
        await node.apply(tls_cert_file=str(second.certificate), tls_private_key_file=str(second.key))
        assert node.connect()[2] != first
        await node.apply()
        assert node.connect()[2] not in (first, second.certificate.read_bytes())
        assert (tmp_path / "pki" / "kubelet.crt").exists()
        await node.apply(**files)
        assert node.connect()[2] == first


@pytest.mark.parametrize(
    "change",
    [
        {"tls_cert_file": "/nowhere/tls.crt"},
        {"tls_private_key_file": "/dev/null"},
        {"tls_cipher_suites": ["TLS_RSA_WITH_RC4_128_SHA"]},
    ],
)
async def test_tls_impossible_options_change_nothing(
    tmp_path: Path, files: dict[str, str], change: dict[str, Any]
) -> None:
    node = TlsNode(config(**files), tmp_path, certificate_files(files))
    before = node.connect(at_most_1_2)
    with pytest.raises(ReloadError):
        await node.live.prepare(node.tls, config(**{**files, **change}))
    assert node.connect(at_most_1_2)[::2] == before[::2]


# Completeness


def test_reloadable_fields_all_observed() -> None:
    assert set(RELOADABLE) == OBSERVED


def test_build_consumers_every_consumer_of_table_exists() -> None:
    flags, own = SimpleNamespace(experimental_mounter_path="/m/mounter"), SimpleNamespace(resolv_conf="")
    unused: Any = SimpleNamespace(plugins=None, flags=flags, config=own)
    parts = LiveComponents(**dict.fromkeys(LiveComponents.__slots__, unused))
    consumers = {consumer.name: consumer for consumer in build_consumers(parts)}
    assert consumers.keys() | {"tls"} == CONSUMERS.keys()
    assert all(consumer.fields == consumer_fields(name) for name, consumer in consumers.items())

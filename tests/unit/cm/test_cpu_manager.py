"""The CPU manager as the engine sees it: over restarts, lost CPUs, full disks."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api import cpuset
from pykubelet.cm.cpu.manager import CpuManager, CpuMetrics, CpusetUpdate, RunningContainer, open_cpu_manager
from pykubelet.cm.cpu.state import FILE_NAME
from pykubelet.cm.topology.hints import ANYWHERE, AllocationError, HintProvider, PolicyError, TopologyHint
from pykubelet.config.types import KubeletConfiguration
from tests.support.cpu_machines import machine, write, write_system
from tests.support.pod_resources import pod_of
from tests.unit.cm.test_cpu_policy import ask

MACHINE = machine(sockets=2, cores=4)
"""Sixteen CPUs: cores 0 to 3 on socket and node 0, 4 to 7 on 1; second threads from 8."""


class Bench:
    """A machine with the policy `static`, whose agent can be started again."""

    def __init__(self, folder: Path) -> None:
        self.system = write_system(folder / "system", MACHINE)
        self.root = folder / "root"
        self.root.mkdir()
        self.file = self.root / FILE_NAME
        self.config = KubeletConfiguration(cpu_manager_policy="static", reserved_system_cpus="0,8")

    def start(self, metrics: CpuMetrics | None = None) -> CpuManager:
        return open_cpu_manager(self.config, self.root, system=self.system, metrics=metrics)

    def online(self, cpus: str) -> None:
        write(self.system / "cpu/online", cpus)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def running(*each: tuple[str, str, str]) -> list[RunningContainer]:
    return [RunningContainer(*one) for one in each]


def test_cpu_manager_satisfies_hint_provider(bench: Bench) -> None:
    provider: HintProvider = bench.start()
    pod = pod_of(ask("2"))
    hints = provider.hints(pod, pod.spec.containers[0])["cpu"]
    assert hints == provider.pod_hints(pod)["cpu"]
    assert hints is not None
    assert TopologyHint(frozenset({1}), preferred=True) in hints


def test_cpu_manager_allocation_survives_restart_until_forgotten(bench: Bench) -> None:
    cpus = bench.start()
    before = bench.file.read_bytes()
    assert before.startswith(b'{"policyName":"static","defaultCpuSet":"0-15","checksum":')
    pod = pod_of(ask("4"), ask("500m"))
    for container in pod.spec.containers:
        cpus.allocate(pod, container, TopologyHint(frozenset({1}), preferred=True))
    assert cpus.exclusive_of(pod.uid, "c0") == {4, 5, 12, 13}
    assert cpus.exclusive_of(pod.uid, "c1") == frozenset()
    assert cpus.has_exclusive(pod.uid)
    assert cpus.cpuset_of(pod.uid, "c0") == "4-5,12-13"
    assert cpus.cpuset_of(pod.uid, "c1") == "0-3,6-11,14-15"
    assert cpuset.format(cpus.allocatable) == "1-7,9-15"
    again = bench.start()
    assert again.shared == cpus.shared
    assert again.cpuset_of(pod.uid, "c0") == "4-5,12-13"
    written = bench.file.read_bytes()
    again.allocate(pod, pod.spec.containers[0], ANYWHERE)
    assert bench.file.read_bytes() == written
    again.forget(pod.uid)
    again.forget(pod.uid)
    assert not again.has_exclusive(pod.uid)
    assert bench.file.read_bytes() == before


def test_cpu_manager_retain_releases_removed_pods(bench: Bench) -> None:
    cpus = bench.start()
    stays, goes = pod_of(ask("2"), ask("2")), pod_of(ask("2"))
    for pod in (stays, goes):
        for container in pod.spec.containers:
            cpus.allocate(pod, container, ANYWHERE)
    cpus.retain({stays.uid, goes.uid})
    assert len(cpus.shared) == 10
    again = bench.start()
    again.retain({stays.uid})
    assert len(again.shared) == 12
    assert again.holders == {stays.uid}
    assert len(bench.start().shared) == 12


def test_cpu_manager_allocation_fails_leaves_state_unchanged(bench: Bench) -> None:
    registry = CollectorRegistry()
    cpus = bench.start(CpuMetrics(registry))
    before = bench.file.read_bytes()
    pod = pod_of(ask("15"))
    with pytest.raises(AllocationError):
        cpus.allocate(pod, pod.spec.containers[0], ANYWHERE)
    assert bench.file.read_bytes() == before
    assert registry.get_sample_value("kubelet_cpu_manager_pinning_requests_total") == 1
    assert registry.get_sample_value("kubelet_cpu_manager_pinning_errors_total") == 1


def test_cpu_manager_metrics_follow_allocations(bench: Bench) -> None:
    registry = CollectorRegistry()
    cpus = bench.start(CpuMetrics(registry))
    pod = pod_of(ask("4"))
    cpus.allocate(pod, pod.spec.containers[0], TopologyHint(frozenset({1}), preferred=True))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kubelet_cpu_manager_{name}", labels)

    assert value("exclusive_cpu_allocation_count") == 4
    assert value("shared_pool_size_millicores") == 10_000
    assert (value("allocation_per_numa", numa_node="0"), value("allocation_per_numa", numa_node="1")) == (
        0,
        4,
    )
    cpus.forget(pod.uid)
    assert value("exclusive_cpu_allocation_count") == 0
    assert value("allocation_per_numa", numa_node="1") == 0


class TestReconcile:
    """Who is told what, and when."""

    def test_returns_only_changed_cpusets(self, bench: Bench) -> None:
        cpus = bench.start()
        all_running = running(("web", "c0", "id-web"), ("db", "c0", "id-db"))
        cpus.record_applied(CpusetUpdate("id-web", cpus.cpuset_of("web", "c0")))
        updates = cpus.reconcile(all_running)
        assert updates == [CpusetUpdate("id-db", "0-15")]
        # Until the runtime has taken it, it is told again.
        assert cpus.reconcile(all_running) == updates
        cpus.record_applied(updates[0])
        assert cpus.reconcile(all_running) == []

    def test_shared_pool_changed_updates_shared_containers(self, bench: Bench) -> None:
        cpus = bench.start()
        pod = pod_of(ask("2"))
        shared = running(("web", "c0", "id-web"))
        for update in cpus.reconcile(shared):
            cpus.record_applied(update)
        cpus.allocate(pod, pod.spec.containers[0], ANYWHERE)
        everything = shared + running((pod.uid, "c0", "id-own"))
        assert cpus.reconcile(everything) == [
            CpusetUpdate("id-web", "0,2-8,10-15"),
            CpusetUpdate("id-own", "1,9"),
        ]
        cpus.forget(pod.uid)
        assert cpus.reconcile(shared) == []

    def test_restarted_container_is_updated(self, bench: Bench) -> None:
        cpus = bench.start()
        for update in cpus.reconcile(running(("web", "c0", "first"))):
            cpus.record_applied(update)
        assert cpus.reconcile(running(("web", "c0", "second"))) == [CpusetUpdate("second", "0-15")]

    def test_empty_shared_pool_returns_no_update(self, bench: Bench) -> None:
        """An empty pool cannot be told: what runs stays where it is."""
        bench.config.cpu_manager_policy_options = {"strict-cpu-reservation": "true"}
        cpus = bench.start()
        pod = pod_of(ask("14"))
        cpus.allocate(pod, pod.spec.containers[0], ANYWHERE)
        assert cpus.reconcile(running(("web", "c0", "id-web"))) == []


class TestOffline:
    """CPUs that go away while the agent runs, or while it does not."""

    def test_reconcile_cpu_goes_offline_updates_cpusets(self, bench: Bench) -> None:
        cpus = bench.start()
        pod = pod_of(ask("2"))
        cpus.allocate(pod, pod.spec.containers[0], TopologyHint(frozenset({1}), preferred=True))
        assert cpus.cpuset_of(pod.uid, "c0") == "4,12"
        both = running((pod.uid, "c0", "own"), ("web", "c0", "web"))
        bench.online("0-3,5,7-11,13,15")
        assert cpus.reconcile(both) == [
            CpusetUpdate("own", "0-3,5,7-11,13,15"),
            CpusetUpdate("web", "0-3,5,7-11,13,15"),
        ]
        bench.online("0-4,8-11,13-15")
        assert cpus.reconcile(both) == [CpusetUpdate("own", "4"), CpusetUpdate("web", "0-3,8-11,13-15")]
        more = pod_of(ask("3"))
        cpus.allocate(more, more.spec.containers[0], TopologyHint(frozenset({1}), preferred=True))
        assert cpus.exclusive_of(more.uid, "c0") == {13, 14, 15}
        bench.online("0-15")
        assert CpusetUpdate("own", "4,12") in cpus.reconcile(both)

    def test_start_after_cpu_went_offline_raises_policy_error(self, bench: Bench) -> None:
        bench.start()
        bench.online("0-14")
        before = bench.file.read_bytes()
        with pytest.raises(PolicyError) as err:
            bench.start()
        assert str(bench.file) in str(err.value)
        assert "about CPUs 0-15, but pods may have 0-14 here" in str(err.value)
        assert "delete the file" in str(err.value)
        assert bench.file.read_bytes() == before


class TestFiles:
    """The state file of others, and none at all."""

    def test_policy_none_writes_upstream_state_and_allocates_nothing(self, bench: Bench) -> None:
        bench.config.cpu_manager_policy = "none"
        cpus = bench.start()
        assert bench.file.read_bytes() == b'{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'
        pod = pod_of(ask("2"))
        cpus.allocate(pod, pod.spec.containers[0], ANYWHERE)
        assert cpus.hints(pod, pod.spec.containers[0]) == cpus.pod_hints(pod) == {}
        assert cpus.cpuset_of(pod.uid, "c0") == ""
        assert cpus.allocatable == frozenset()
        assert cpus.reconcile(running((pod.uid, "c0", "id"))) == []

    def test_policy_changed_raises_policy_error(self, bench: Bench) -> None:
        bench.start()
        bench.config.cpu_manager_policy = "none"
        with pytest.raises(PolicyError, match="'static', but 'none' is configured"):
            bench.start()

    def test_state_file_not_writable_raises_policy_error(self, bench: Bench) -> None:
        bench.root.rmdir()
        with pytest.raises(PolicyError, match="must be able to write"):
            bench.start()

    def test_state_file_write_fails_is_retried_by_reconcile(self, bench: Bench) -> None:
        cpus = bench.start()
        saved = bench.file.read_bytes()
        bench.file.unlink()
        bench.file.mkdir()
        pod = pod_of(ask("2"))
        cpus.allocate(pod, pod.spec.containers[0], ANYWHERE)
        assert cpus.exclusive_of(pod.uid, "c0")
        bench.file.rmdir()
        bench.file.write_bytes(saved)
        cpus.reconcile([])
        assert bench.start().exclusive_of(pod.uid, "c0") == cpus.exclusive_of(pod.uid, "c0")

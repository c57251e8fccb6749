"""The options of a run, and the specs that its passes select."""

import re

import pytest

from tests.conformance.__main__ import read_options
from tests.conformance.table import OURS, REFERENCE

STATISTICS = (
    "[sig-node] Summary API [NodeConformance] when querying /stats/summary should report resource usage",
    "[sig-node] ContainerMetrics [LinuxOnly] [NodeConformance] when querying /metrics/cadvisor should report",
    "[sig-node] Summary API [NodeConformance] when querying /stats/summary under pressure [Serial] "
    "[NodeConformance] [FeatureGate:KubeletPSI] [Beta] should report CPU pressure in PSI metrics",
    "[sig-node] ResourceMetricsAPI [Feature:ResourceMetrics] when querying /resource/metrics should report",
)
OTHERS = (
    "[sig-node] Pods [NodeConformance] should be submitted and removed",
    "[sig-node] Probing container [NodeConformance] should be restarted",
)
NEITHER = (
    "[sig-node] MemoryAllocatableEviction [Slow] [Serial] [Disruptive] when we run containers",
    "[sig-node] Restart [Serial] [Slow] [Disruptive] Container Runtime Network should recover",
    "[sig-node] Device Plugin [NodeFeature:DevicePlugin] [Serial] gets restarted",
    "[sig-node] CPU Manager Metrics [Serial] [Feature:CPUManager] when querying /metrics should report",
)
PRESSURE = (
    NEITHER[0],
    "[sig-node] ImageGarbageCollect [Serial] [NodeConformance] when ImageMaximumGCAge is set should GC",
    "[sig-node] LocalStorageSoftEvictionNotOverwriteTerminationGracePeriodSeconds [Slow] [Serial] when",
    "[sig-node] PriorityPidEvictionOrdering [Slow] [Serial] [Disruptive] [Feature:Eviction] when we run",
    "[sig-node] ContainerLogRotationWithMultipleWorkers [Slow] [Serial] [Disruptive] when a container",
    "[sig-node] SystemNodeCriticalPod [Slow] [Serial] [Disruptive] [Feature:SystemNodeCriticalPod] when",
    "[sig-node] OOMKiller for pod using more memory than node allocatable [LinuxOnly] [Serial] The",
    "[sig-node] OOMKiller [LinuxOnly] [NodeConformance] [Serial] The containers terminated by OOM killer",
    "[sig-node] CriticalPod [Serial] [Disruptive] [Feature:CriticalPod] when we need to admit a critical pod",
    "[sig-node] CriticalPodWithPodLevelResources [Serial] [Disruptive] [Feature:PodLevelResources] when we",
    "[sig-node] KubeletSeparateDiskGC [Feature:KubeletSeparateDiskGC] when there is disk pressure [Slow]",
    "[sig-node] LocalStorageCapacityIsolationFSQuotaMonitoring [Slow] [Serial] [Disruptive] when we run",
)


def selected(environ: dict[str, str], spec: str) -> list[str]:
    """Return the names of the passes that run a spec."""
    return [
        one.name
        for one in read_options(environ).passes
        if re.search(one.focus, spec) and not (one.skip and re.search(one.skip, spec))
    ]


@pytest.mark.parametrize(
    ("specs", "passes"), [(OTHERS, ["suite"]), (STATISTICS, ["statistics"]), (NEITHER, [])]
)
def test_read_options_complete_run_selects_specs_once(specs: tuple[str, ...], passes: list[str]) -> None:
    for spec in specs:
        assert selected({}, spec) == passes


def test_read_options_complete_run_statistics_in_virtual_machine_in_one_process() -> None:
    first, second = read_options({"PROCS": "7"}).passes
    assert (first.procs, second.procs) == (7, 1)
    assert (first.in_vm, second.in_vm) == (False, True)


def test_read_options_pass_vm_selects_statistics_only() -> None:
    options = read_options({"PASS": "vm"})
    assert [(one.name, one.in_vm) for one in options.passes] == [("statistics", True)]
    assert not options.complete
    for spec in STATISTICS:
        assert selected({"PASS": "vm"}, spec) == ["statistics"]


def test_read_options_pass_vm_with_selection_runs_it_in_virtual_machine() -> None:
    (one,) = read_options({"PASS": "vm", "FOCUS": "Pods", "SKIP": ""}).passes
    assert (one.focus, one.skip, one.in_vm) == ("Pods", "", True)


def test_read_options_pass_host_leaves_statistics_out() -> None:
    options = read_options({"PASS": "host"})
    assert [(one.name, one.in_vm) for one in options.passes] == [("suite", False)]
    assert not options.complete


def test_read_options_pass_pressure_has_its_own_table_and_no_skip() -> None:
    options = read_options({"PASS": "pressure"})
    assert [(one.name, one.skip, one.in_vm) for one in options.passes] == [("pressure", "", True)]
    assert options.table.name == "conformance_pressure.tsv"
    assert not options.complete
    for spec in PRESSURE:
        assert selected({"PASS": "pressure"}, spec) == ["pressure"]
    for spec in (*STATISTICS, *OTHERS, *NEITHER[1:]):
        assert selected({"PASS": "pressure"}, spec) == []


def test_read_options_defaults_are_complete_run_of_ours() -> None:
    options = read_options({})
    assert (options.agent, options.passes[0].procs, options.complete) == (OURS, 10, True)


def test_read_options_selection_is_not_complete_and_has_one_pass() -> None:
    chosen = read_options({"AGENT": "reference", "FOCUS": "Pods", "PROCS": "2"})
    assert (chosen.agent, chosen.complete) == (REFERENCE, False)
    assert [(one.focus, one.procs, one.in_vm) for one in chosen.passes] == [("Pods", 2, False)]
    everything = read_options({"SKIP": ""})
    assert [one.skip for one in everything.passes] == [""]
    assert not everything.complete


@pytest.mark.parametrize(
    "environ", [{"AGENT": "theirs"}, {"PROCS": "0"}, {"PROCS": "many"}, {"PASS": "guest"}]
)
def test_read_options_invalid_value_raises(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is invalid: use"):
        read_options(environ)


def test_read_options_runtime_2_keeps_table_and_results_apart() -> None:
    options, newer = read_options({}), read_options({"RUNTIME": "2"})
    assert options.table.name == "conformance.tsv"
    assert newer.table.name == "conformance-containerd2.tsv"
    assert newer.results != options.results
    with pytest.raises(ValueError, match="RUNTIME=3 is invalid"):
        read_options({"RUNTIME": "3"})

"""The Summary API's document: compared with the recorded one, and with facts missing."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from pykubelet.api.meta import from_json, to_json
from pykubelet.api.stats import Summary, stats_time
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.stats.cri.runtime_stats import ImageFilesystems, RuntimeFacts
from pykubelet.stats.machine import read_rlimit
from pykubelet.stats.samples import Limits, Psi, PsiLine, Record
from pykubelet.stats.storage.pod_storage import VolumeUsage
from pykubelet.stats.summary import SummaryInputs, SummaryUnavailable, build_summary, encode_summary
from pykubelet.volumes.usage import VolumeStats
from tests.support.golden import GOLDEN
from tests.unit.stats.summary_facts import (
    LAYERS,
    NOW,
    ROOT_FS,
    eth0,
    layer,
    node_inputs,
    pod_records,
    record,
    recorded,
    recorded_inputs,
    root,
    usage,
)

VOLUME = VolumeStats(capacity=9, available=8, used=7, inodes=6, inodes_free=5, inodes_used=4, moment=NOW)


def document(inputs: SummaryInputs, **options: bool) -> Any:
    return json.loads(b"".join(encode_summary(inputs, **options)))


def keys(value: Any) -> Any:
    """Return the names and their order."""
    if isinstance(value, dict):
        return [(name, keys(inner)) for name, inner in value.items()]
    return [keys(inner) for inner in value] if isinstance(value, list) else None


def without_psi_of_containers(summary: Any) -> Any:
    """Remove from containers what the recording lacks, because it came from the runtime."""
    for pod in summary["pods"]:
        for container in pod["containers"]:
            for part in ("cpu", "memory", "io"):
                container.get(part, {}).pop("psi", None)
    return summary


@pytest.mark.parametrize("name", ["summary", "summary-cpu-memory"])
def test_summary_struct_recorded_document_round_trips(name: str) -> None:
    data = (GOLDEN / "stats" / f"{name}.json").read_bytes()
    written = json.loads(to_json(from_json(Summary, data)))
    assert written == json.loads(data)
    assert keys(written) == keys(json.loads(data))


@pytest.mark.parametrize("name", ["summary", "summary-cpu-memory"])
def test_encode_summary_recorded_facts_equal_the_recording(name: str) -> None:
    built = document(recorded_inputs(name), only_cpu_and_memory=name != "summary")
    theirs = recorded(name)
    ours = without_psi_of_containers(built)
    assert keys(ours) == keys(theirs)
    for pod in theirs["pods"]:
        for container in pod["containers"]:
            # The recorded times of the runtime's parts differ; ours are all those of the cgroup's sample.
            for part in ("memory", "swap", "io"):
                if part in container:
                    container[part]["time"] = container["cpu"]["time"]
    assert ours == theirs


def test_encode_summary_equals_built_document() -> None:
    inputs = node_inputs(3, containers=2)
    assert from_json(Summary, b"".join(encode_summary(inputs))) == build_summary(inputs)


def test_encode_summary_pod_has_process_stats_and_network() -> None:
    (pod,) = document(node_inputs(1, containers=2))["pods"]
    assert pod["process_stats"] == {"process_count": 4}
    assert pod["network"] == {
        "time": "2027-01-15T08:00:00Z",
        "name": "eth0",
        "rxBytes": 7,
        "rxErrors": 2,
        "txBytes": 9,
        "txErrors": 3,
        "interfaces": [{"name": "eth0", "rxBytes": 7, "rxErrors": 2, "txBytes": 9, "txErrors": 3}],
    }
    assert pod["startTime"] == "2027-01-15T07:58:20Z"
    assert [container["name"] for container in pod["containers"]] == ["c0", "c1"]
    # Two layers and logs, and the hosts file.
    assert pod["ephemeral-storage"]["usedBytes"] == 2 * (30 + 8) + 4
    assert pod["ephemeral-storage"]["inodesUsed"] == 2 * (3 + 1) + 1
    assert pod["ephemeral-storage"]["capacityBytes"] == ROOT_FS.capacity


def test_encode_summary_other_default_interface_written_with_empty_name() -> None:
    inputs = node_inputs(0, records=[root(network=(eth0("ens3"),))])
    network = document(inputs)["node"]["network"]
    assert network["name"] == ""
    assert "rxBytes" not in network
    assert [found["name"] for found in network["interfaces"]] == ["ens3"]


def test_encode_summary_psi_copied_in_microseconds() -> None:
    psi = Psi(PsiLine(1.5, 2.5, 3.5, 1234), PsiLine(0.5, 0.25, 0.125, 99))
    inputs = node_inputs(0, records=[root(sample=usage(cpu_psi=psi, memory_psi=psi, io_psi=psi))])
    node = document(inputs)["node"]
    for part in ("cpu", "memory", "io"):
        assert node[part]["psi"] == {
            "full": {"total": 99, "avg10": 0.5, "avg60": 0.25, "avg300": 0.125},
            "some": {"total": 1234, "avg10": 1.5, "avg60": 2.5, "avg300": 3.5},
        }


def test_encode_summary_system_containers_ordered_and_kubelet_start_known() -> None:
    found = [record(f"/{name}", "node", sample=usage()) for name in ("misc", "kubelet", "runtime")]
    paths = {"runtime": "/runtime", "misc": "/misc", "kubelet": "/kubelet", "pods": "/gone"}
    node = document(node_inputs(0, records=[root(), *found], system_containers=paths))["node"]
    assert [part["name"] for part in node["systemContainers"]] == ["kubelet", "runtime", "misc"]
    assert node["systemContainers"][0]["startTime"] == "2027-01-15T07:51:40Z"
    assert node["systemContainers"][1]["startTime"] == "2027-01-15T07:59:10Z"
    assert "rootfs" not in node["systemContainers"][0]


@pytest.mark.parametrize("records", [[], [root(sample=None)]])
def test_encode_summary_no_sample_of_root_raises(records: list[Record]) -> None:
    with pytest.raises(SummaryUnavailable, match='cgroup stats not found for "/"'):
        next(encode_summary(node_inputs(0, records=records)))


def test_encode_summary_missing_sandbox_uses_start_of_pod_and_omits_network() -> None:
    records = [found for found in pod_records(0) if found.target.kind != "sandbox"]
    (pod,) = document(node_inputs(0, records=[root(), *records]))["pods"]
    assert "network" not in pod
    assert pod["startTime"] == "2027-01-15T07:59:10Z"
    assert pod["podRef"] == {"name": "pod-0", "namespace": "default", "uid": "uid-0"}


def test_encode_summary_missing_pod_cgroup_omits_its_usage() -> None:
    records = [found for found in pod_records(0) if found.target.kind == "container"]
    (pod,) = document(node_inputs(0, records=[root(), *records]))["pods"]
    assert pod.keys() == {"podRef", "startTime", "containers", "ephemeral-storage", "process_stats"}
    assert pod["startTime"] == "2027-01-15T07:58:30Z"


def test_encode_summary_newest_sandbox_and_container_win() -> None:
    old = pod_records(0, created=NOW - 900)
    new = pod_records(0, runtime_id="new", created=NOW - 10)
    for stale in old:
        stale.network = (eth0(received=1),) if stale.network else None
        stale.usage = usage(cpu=1)
    new[2].target = new[0].target.__class__(
        **{name: getattr(new[2].target, name) for name in new[2].target.__struct_fields__}
        | {"created": NOW - 5}
    )
    for order in ([*old, *new], [*new, *old]):
        (pod,) = document(node_inputs(0, records=[root(), *order]))["pods"]
        assert pod["network"]["rxBytes"] == 7
        assert pod["startTime"] == "2027-01-15T07:59:50Z"
        assert [container["cpu"]["usageCoreNanoSeconds"] for container in pod["containers"]] == [5000]


def test_encode_summary_pod_without_running_containers_omitted() -> None:
    assert document(node_inputs(0, records=[root(), *pod_records(0, containers=0)]))["pods"] == []


def test_encode_summary_first_sample_omits_rate() -> None:
    first = record("/", "root", sample=usage(), nano_cores=None)
    cpu = document(node_inputs(0, records=[first]))["node"]["cpu"]
    assert cpu.keys() == {"time", "usageCoreNanoSeconds", "psi"}


def test_encode_summary_unsampled_container_listed_without_usage() -> None:
    records = pod_records(0)
    records[2].usage = records[2].processes = records[2].nano_cores = None
    (pod,) = document(node_inputs(1, records=[root(), *records]))["pods"]
    assert pod["containers"][0].keys() == {"name", "startTime", "rootfs", "logs"}
    assert "process_stats" not in pod


@pytest.mark.parametrize(
    ("limit", "swap_limit", "available", "swap_available"),
    [
        (500, 50, 300, 40),
        (100, 5, 0, 0),
        (0, 0, None, 0),
        (2**63 - 4096, 2**64 - 1, None, None),
    ],
)
def test_encode_summary_available_memory_never_negative(
    limit: int, swap_limit: int, available: int | None, swap_available: int | None
) -> None:
    limits = Limits(created=NOW, memory_limit=limit, memory_swap_limit=swap_limit)
    node = document(node_inputs(0, records=[root(sample=usage(swap=10), limits=limits)]))["node"]
    assert node["memory"].get("availableBytes") == available
    assert node["swap"].get("swapAvailableBytes") == swap_available
    assert node["swap"]["swapUsageBytes"] == 10


def test_encode_summary_nothing_from_runtime_and_disk_omits_storage() -> None:
    summary = document(
        node_inputs(1, root_fs=None, filesystems={}, runtime=RuntimeFacts(), storage={}, rlimit=None)
    )
    assert summary["node"].keys().isdisjoint({"fs", "runtime", "rlimit"})
    (pod,) = summary["pods"]
    assert "ephemeral-storage" not in pod
    assert pod["containers"][0].keys().isdisjoint({"rootfs", "logs"})


def test_encode_summary_volumes_have_claims_health_and_count_as_ephemeral() -> None:
    found = [
        VolumeUsage("data", VOLUME, "", True),
        VolumeUsage("claimed", VolumeStats(1, 2, 3, 4, 5, 6, NOW, abnormal=True), "claim", False),
    ]
    (pod,) = document(node_inputs(1, volumes=lambda _: found))["pods"]
    assert [volume["name"] for volume in pod["volume"]] == ["data", "claimed"]
    assert pod["volume"][0] == {
        "time": "2027-01-15T08:00:00Z",
        "availableBytes": 8,
        "capacityBytes": 9,
        "usedBytes": 7,
        "inodesFree": 5,
        "inodes": 6,
        "inodesUsed": 4,
        "name": "data",
    }
    assert pod["volume"][1]["pvcRef"] == {"name": "claim", "namespace": "default"}
    assert pod["volume"][1]["volumeHealthStats"] == {"abnormal": True}
    assert pod["ephemeral-storage"]["usedBytes"] == 30 + 8 + 4 + 7


def test_encode_summary_split_disks_have_own_container_fs() -> None:
    other = ROOT_FS.__class__(
        **{name: getattr(ROOT_FS, name) for name in ROOT_FS.__struct_fields__} | {"minor": 1, "capacity": 77}
    )
    runtime = RuntimeFacts(filesystems=ImageFilesystems(layer(80), layer(20, "/other")))
    inputs = node_inputs(0, runtime=runtime, filesystems={LAYERS: ROOT_FS, "/other": other})
    found = document(inputs)["node"]["runtime"]
    assert (found["imageFs"]["usedBytes"], found["imageFs"]["capacityBytes"]) == (80, 1000)
    assert (found["containerFs"]["usedBytes"], found["containerFs"]["capacityBytes"]) == (20, 77)
    one_disk = node_inputs(0, runtime=runtime, filesystems={LAYERS: ROOT_FS, "/other": ROOT_FS})
    found = document(one_disk)["node"]["runtime"]
    assert found["containerFs"] == found["imageFs"]


def test_encode_summary_only_cpu_and_memory_has_no_other_parts() -> None:
    summary = document(node_inputs(1), only_cpu_and_memory=True)
    assert summary["node"].keys() == {"nodeName", "systemContainers", "startTime", "cpu", "memory", "swap"}
    assert summary["node"]["startTime"] == "2027-01-15T07:43:22Z"
    (pod,) = summary["pods"]
    assert pod.keys() == {"podRef", "startTime", "containers", "cpu", "memory", "swap"}
    assert pod["containers"][0].keys() == {"name", "startTime", "cpu", "memory", "swap"}


def value(number: int) -> pb.UInt64Value:
    return pb.UInt64Value(value=number)


def sandbox_stats() -> pb.PodSandboxStats:
    nanoseconds = int(NOW) * 10**9
    psi = pb.PsiStats(Full=pb.PsiData(Total=1, Avg10=2.0), Some=pb.PsiData(Total=3))
    cpu = pb.CpuUsage(
        timestamp=nanoseconds, usage_core_nano_seconds=value(11), usage_nano_cores=value(12), psi=psi
    )
    memory = pb.MemoryUsage(timestamp=nanoseconds, working_set_bytes=value(13))
    swap = pb.SwapUsage(timestamp=nanoseconds, swap_usage_bytes=value(14), swap_available_bytes=value(0))
    interface = pb.NetworkInterfaceUsage(name="eth0", rx_bytes=value(15))
    return pb.PodSandboxStats(
        attributes=pb.PodSandboxAttributes(id="s0"),
        linux=pb.LinuxPodSandboxStats(
            cpu=cpu,
            memory=memory,
            io=pb.IoUsage(timestamp=nanoseconds, psi=psi),
            network=pb.NetworkUsage(timestamp=nanoseconds, default_interface=interface),
            process=pb.ProcessUsage(process_count=value(16)),
            containers=[
                pb.ContainerStats(
                    attributes=pb.ContainerAttributes(id=container_id), cpu=cpu, memory=memory, swap=swap
                )
                for container_id in ("c0-0", "unknown")
            ],
        ),
    )


def test_encode_summary_sandbox_stats_replace_samples() -> None:
    runtime = RuntimeFacts(layers={"c0-0": layer()}, sandboxes={"s0": sandbox_stats()})
    inputs = node_inputs(2, runtime=runtime)
    (pod,) = document(inputs)["pods"]
    assert pod["cpu"]["usageCoreNanoSeconds"] == 11
    assert pod["cpu"]["psi"]["full"] == {"total": 1, "avg10": 2.0, "avg60": 0.0, "avg300": 0.0}
    assert pod["memory"] == {"time": "2027-01-15T08:00:00Z", "workingSetBytes": 13}
    assert pod["network"] == {"time": "2027-01-15T08:00:00Z", "name": "eth0", "rxBytes": 15}
    assert pod["process_stats"] == {"process_count": 16}
    assert "swap" not in pod
    (container,) = pod["containers"]
    assert container["startTime"] == "2027-01-15T07:58:30Z"
    assert container["rootfs"]["usedBytes"] == 30
    assert container["logs"]["usedBytes"] == 8
    assert pod["ephemeral-storage"]["usedBytes"] == 30 + 8 + 4


def test_encode_summary_sandbox_stats_only_cpu_and_memory_sums_swap() -> None:
    inputs = node_inputs(1, runtime=RuntimeFacts(sandboxes={"s0": sandbox_stats()}))
    (pod,) = document(inputs, only_cpu_and_memory=True)["pods"]
    assert pod.keys() == {"podRef", "startTime", "containers", "cpu", "memory", "swap"}
    assert pod["swap"]["swapUsageBytes"] == 14


@pytest.mark.parametrize("seconds", [0.0, -5.0, 1e30, float("nan"), float("inf")])
def test_stats_time_out_of_range_returns_none(seconds: float) -> None:
    assert stats_time(seconds) is None


def test_encode_summary_500_pods_steps_are_short() -> None:
    inputs = node_inputs(500, containers=2)
    slowest, pieces = 0.0, encode_summary(inputs)
    count, last = 0, perf_counter()
    for _ in pieces:
        now = perf_counter()
        slowest, last, count = max(slowest, now - last), now, count + 1
    assert count == 502
    # 5 ms are claimed, on a machine that does nothing else.
    assert slowest < 0.1


def test_read_rlimit_reads_smaller_limit_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/pid_max").write_text("4194304\n")
    (tmp_path / "sys/kernel/threads-max").write_text("32768\n")
    (tmp_path / "loadavg").write_text("0.20 0.18 0.12 1/80 11206\n")
    found = read_rlimit(NOW, tmp_path)
    assert (found.maxpid, found.curproc) == (32768, 80)


def test_read_rlimit_nothing_readable_returns_none(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("?")
    found = read_rlimit(NOW, tmp_path)
    assert (found.maxpid, found.curproc) == (None, None)


def test_encode_summary_pressure_disabled_omits_psi_and_io() -> None:
    shown, hidden = (
        b"".join(encode_summary(node_inputs(pods=2, containers=2, has_pressure=enabled)))
        for enabled in (True, False)
    )
    assert shown.count(b'"psi"') == shown.count(b'"psi":{') > 0
    assert shown.count(b'"io"') > 0
    assert b'"psi"' not in hidden
    assert b'"io"' not in hidden
    assert len(json.loads(hidden)["pods"]) == 2

"""cAdvisor's API about the container of a real pod, compared with what the kernel reports."""

from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.stats.cgroups.readers import cgroup_reader_factory
from pykubelet.stats.collector import Collector
from pykubelet.stats.samples import Target
from pykubelet.util.tasks import TaskScope
from tests.support.manifests import container, pod
from tests.support.node import Node
from tests.unit.server.test_cadvisor_api import api
from tests.unit.server.test_stats_metrics import Samples

pytestmark = pytest.mark.machine
MIB = 1 << 20
_WORK = "dd if=/dev/zero of=/dev/shm/held bs=1M count=24; while true; do sleep 0.1; done"


def memory_files(path: str) -> tuple[Path, Path]:
    """Return the files with the usage and the limit of a cgroup's memory."""
    cgroups = detect_cgroups()
    if cgroups.unified:
        directory = cgroups.root / path.strip("/")
        return directory / "memory.current", directory / "memory.max"
    directory = cgroups.mounts["memory"] / path.strip("/")
    return directory / "memory.usage_in_bytes", directory / "memory.limit_in_bytes"


async def test_containers_of_real_pod_equal_the_kernels_numbers(node: Node) -> None:
    limits = {"limits": {"memory": "64Mi", "cpu": "200m"}}
    node.start_pod(pod("measured", container(command=["sh", "-c", _WORK], resources=limits)))
    uid = next(found["metadata"]["uid"] for found in node.pods() if "measured" in found["metadata"]["name"])
    pids = [int(line.name) for line in Path("/proc").iterdir() if line.name.isdigit() and _is_work(line)]
    assert pids
    path = _cgroup_of(pids[0])
    target = Target(path=path, kind="container", pod="measured-n1", pod_uid=uid, container="main")
    usage, limit = memory_files(path)
    async with TaskScope() as tasks:
        collector = Collector(cgroup_reader_factory(detect_cgroups()), tasks)
        collector.set_targets(uid, [target])
        await collector.sample_due()
        await collector.refresh_details()
        async with api(Samples(list(collector.records()))) as server:
            status, info = await server.get(f"/api/v1.3/containers{path}")
            _, machine = await server.get("/api/v1.3/machine")
    assert status == 200
    assert info["spec"]["memory"]["limit"] == int(limit.read_text()) == 64 * MIB
    assert info["spec"]["cpu"]["quota"] == 20_000
    (stats,) = info["stats"]
    assert abs(stats["memory"]["usage"] - int(usage.read_text())) < 4 * MIB
    assert stats["memory"]["usage"] > 24 * MIB
    assert stats["processes"]["process_count"] >= 1
    assert stats["cpu"]["usage"]["total"] > 0
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert machine["memory_capacity"] == int(total.split()[1]) * 1024
    collector.close()


def _is_work(process: Path) -> bool:
    try:
        return _WORK.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _cgroup_of(pid: int) -> str:
    """Return the cgroup in which memory is accounted."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "" and detect_cgroups().unified) or "memory" in controllers.split(","):
            return path
    raise AssertionError("the process has no memory cgroup")

"""Cgroups of pods on v2: in a folder that behaves like it, and in the real one as far as there is one."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pykubelet.cm.cgroups import driver as cgroup_files
from pykubelet.cm.cgroups import pod_cgroups
from pykubelet.cm.cgroups.driver import CgroupFiles, CgroupMetrics, CgroupWriteError
from pykubelet.cm.cgroups.pod_cgroups import LIST_SECONDS, PodCgroups
from pykubelet.cm.cgroups.values import CgroupValues
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from tests.support.cgroups import CAPACITY, root
from tests.support.metrics_page import Page
from tests.support.pod_resources import amounts, pod_of

__all__ = ["root"]

V2_FILES = (
    "cgroup.procs",
    "cpu.weight",
    "cpu.max",
    "memory.max",
    "memory.min",
    "memory.low",
    "memory.current",
    "pids.max",
    "hugetlb.2MB.max",
)


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    """A folder that behaves like a v2 hierarchy: new folders have files, and what is handed down."""
    every = ("cpu", "cpuset", "hugetlb", "io", "memory", "pids")
    put, make = cgroup_files._put, cgroup_files._mkdir

    def fill(folder: Path, controllers: str) -> None:
        (folder / "cgroup.controllers").write_text(controllers)
        (folder / "cgroup.subtree_control").write_text("")
        for file in V2_FILES:
            if file.partition(".")[0] in ("cgroup", *controllers.split()):
                (folder / file).write_text("")

    def mkdir(folder: Path) -> None:
        make(folder)
        fill(folder, (folder.parent / "cgroup.subtree_control").read_text())

    def write(path: Path, text: str) -> None:
        if path.name != "cgroup.subtree_control":
            put(path, text)
            return
        wanted = [word.removeprefix("+") for word in text.split()]
        if not set(wanted) <= set((path.parent / "cgroup.controllers").read_text().split()):
            raise OSError(2, "No such controller", str(path))
        path.write_text(" ".join(sorted({*path.read_text().split(), *wanted})))
        for child in path.parent.iterdir():
            if child.is_dir():
                fill(child, path.read_text())

    monkeypatch.setattr(cgroup_files, "_mkdir", mkdir)
    monkeypatch.setattr(cgroup_files, "_put", write)
    fill(tmp_path, " ".join(every))
    return Cgroups(CgroupMode.V2, tmp_path, dict.fromkeys(every, tmp_path), {})


class TestV2:
    @staticmethod
    def pods(
        v2: Cgroups,
        gates: FeatureGates | None = None,
        clock: Callable[[], float] = time.monotonic,
        **config: Any,
    ) -> PodCgroups:
        settings = KubeletConfiguration(cgroup_root="/pyk", **config)
        capacity = CAPACITY | amounts(hugepages_2Mi="4Mi")
        return PodCgroups(settings, gates or FeatureGates(), v2, capacity, ("2MB",), clock=clock)

    async def test_pod_cgroups_v2_delegates_controllers_and_sets_limits(self, v2: Cgroups) -> None:
        cgroups = self.pods(v2, pod_pids_limit=1024)
        await cgroups.setup()
        pod = pod_of({"limits": {"cpu": "500m", "memory": "64Mi", "hugepages-2Mi": "2Mi"}})
        parent = await cgroups.ensure(pod)
        assert parent == f"/pyk/kubepods/pod{pod.uid}"
        folder = v2.root / parent.lstrip("/")
        assert (folder / "cgroup.controllers").read_text() == "cpu cpuset hugetlb io memory pids"
        limits = {file: (folder / file).read_text() for file in V2_FILES}
        assert limits == {
            "cgroup.procs": "",
            "cpu.weight": "20",
            "cpu.max": "50000 100000",
            "memory.max": "67108864",
            "memory.min": "",
            "memory.low": "",
            "memory.current": "",
            "pids.max": "1024",
            "hugetlb.2MB.max": "2097152",
        }
        whole = v2.root / "pyk/kubepods"
        assert (whole / "cpu.weight").read_text() == "79"
        assert (whole / "memory.max").read_text() == str(int(CAPACITY["memory"]))
        assert (whole / "besteffort/cpu.weight").read_text() == "1"
        assert cgroups.uids() == {pod.uid}

    async def test_pod_cgroups_uids_unchanged_lists_no_directory(
        self, v2: Cgroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, listed, scandir = [0.0], [], os.scandir

        def counted(path: str) -> Any:
            listed.append(path)
            return scandir(path)

        cgroups, first, second = self.pods(v2, clock=lambda: now[0]), pod_of({}), pod_of({})
        await cgroups.setup()
        await cgroups.ensure(first)
        monkeypatch.setattr(os, "scandir", counted)
        assert cgroups.uids() == {first.uid}
        listed.clear()
        assert cgroups.uids() == {first.uid}
        assert listed == []
        # One pod in place of another: the number of directories is the same.
        shutil.rmtree(v2.root / "pyk/kubepods/besteffort" / f"pod{first.uid}")
        await cgroups.remove(first.uid)
        await cgroups.ensure(second)
        assert cgroups.uids() == {second.uid}
        # A directory of another process.
        orphan = v2.root / "pyk/kubepods/besteffort/pod3"
        orphan.mkdir()
        assert cgroups.uids() == {second.uid, "3"}
        orphan.rename(orphan.with_name("pod4"))
        now[0] += LIST_SECONDS
        assert cgroups.uids() == {second.uid, "4"}

    async def test_pod_cgroups_v2_cgroup_without_controllers_is_completed(self, v2: Cgroups) -> None:
        cgroups, pod = self.pods(v2), pod_of({})
        folder = v2.root / "pyk/kubepods/besteffort" / f"pod{pod.uid}"
        folder.mkdir(parents=True)
        for above in (folder, *folder.parents[:3]):
            (above / "cgroup.controllers").write_text("")
            (above / "cgroup.subtree_control").write_text("")
        await cgroups.ensure(pod)
        assert "memory" in (folder / "cgroup.controllers").read_text()
        assert (folder / "cpu.weight").read_text() == "1"

    async def test_pod_cgroups_v2_controller_delegation_fails_raises_cgroup_error(
        self, v2: Cgroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put = cgroup_files._put

        def busy(path: Path, text: str) -> None:
            if path.name == "cgroup.subtree_control" and "memory" in text:
                raise OSError(16, "Device or resource busy", str(path))
            put(path, text)

        monkeypatch.setattr(cgroup_files, "_put", busy)
        with pytest.raises(
            CgroupWriteError, match=r"cannot make cgroup /pyk.*controllers memory are not handed down"
        ):
            await self.pods(v2).setup()

    async def test_pod_cgroups_v2_memory_qos_sets_memory_min_and_low(self, v2: Cgroups) -> None:
        gates, registry = FeatureGates().with_overrides({"MemoryQoS": True}), CollectorRegistry()
        settings = KubeletConfiguration(cgroup_root="/pyk", memory_reservation_policy="TieredReservation")
        metrics = CgroupMetrics(registry, unified=True, memory_qos=True)
        cgroups = PodCgroups(settings, gates, v2, CAPACITY, metrics=metrics)
        await cgroups.setup()
        pods = [pod_of({"limits": {"cpu": "1", "memory": "10Mi"}}), pod_of({"requests": {"memory": "5Mi"}})]
        await cgroups.update_qos(pods)
        parents = [v2.root / (await cgroups.ensure(pod)).lstrip("/") for pod in pods]
        assert (parents[0] / "memory.min").read_text() == str(10 << 20)
        assert (parents[1] / "memory.low").read_text() == str(5 << 20)
        assert (v2.root / "pyk/kubepods/memory.min").read_text() == str(15 << 20)
        assert (v2.root / "pyk/kubepods/burstable/memory.low").read_text() == str(5 << 20)
        page = Page(generate_latest(registry).decode())
        assert page.value("kubelet_memory_qos_node_memory_min_bytes") == 10 << 20
        assert page.value("kubelet_memory_qos_node_memory_low_bytes") == 5 << 20
        await cgroups.update_qos(pods[1:])
        page = Page(generate_latest(registry).decode())
        assert page.value("kubelet_memory_qos_node_memory_min_bytes") == 0

    async def test_pod_cgroups_v2_qos_reserved_limits_lower_tiers(
        self, v2: Cgroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also when a tier is above its limit already."""
        monkeypatch.setattr(pod_cgroups, "REWRITE_SECONDS", 0.0)
        gates = FeatureGates().with_overrides({"QOSReserved": True})
        cgroups = self.pods(v2, gates, qos_reserved={"memory": "50%"})
        await cgroups.setup()
        pod = pod_of({"limits": {"cpu": "1", "memory": "1Gi"}})
        await cgroups.update_qos([pod])
        half = int(CAPACITY["memory"]) - (512 << 20)
        assert (v2.root / "pyk/kubepods/burstable/memory.max").read_text() == str(half)
        put = cgroup_files._put
        first: list[str] = []

        def over(path: Path, text: str) -> None:
            if path.name == "memory.max" and path.parent.name == "besteffort" and not first:
                first.append(text)
                raise OSError(16, "Device or resource busy", str(path))
            put(path, text)

        (v2.root / "pyk/kubepods/besteffort/memory.current").write_text(str(half + 5))
        monkeypatch.setattr(cgroup_files, "_put", over)
        pods = [pod, pod_of({})]
        await cgroups.update_qos(pods)
        assert (v2.root / "pyk/kubepods/besteffort/memory.max").read_text() == str(half + 5)
        await cgroups.update_qos(pods)
        assert (v2.root / "pyk/kubepods/besteffort/memory.max").read_text() == str(half)


@pytest.mark.machine
async def test_cgroup_files_real_v2_hierarchy_make_and_remove(root: str) -> None:
    """As far as this machine has one: controllers that no v1 hierarchy holds work in it."""
    unified = Path("/sys/fs/cgroup/unified")
    if os.geteuid() != 0 or not (unified / "cgroup.controllers").is_file():
        pytest.skip("needs root and a v2 hierarchy on the side")
    controllers = (unified / "cgroup.controllers").read_text().split()
    files = CgroupFiles(Cgroups(CgroupMode.V2, unified, dict.fromkeys(controllers, unified), {}))
    kept = (unified / "cgroup.subtree_control").read_text().split()
    name = (root.strip("/"), "kubepods", "pod1")
    try:
        files.make(name, CgroupValues(shares=1, memory=1, huge_pages={"2MB": 4 << 20}))
        assert files.exists(name)
        if "hugetlb" in controllers:
            assert (unified.joinpath(*name) / "hugetlb.2MB.max").read_text().strip() == str(4 << 20)
        assert files.children(name[:-1]) == {"pod1"}
        await files.remove(name[:1])
        assert not unified.joinpath(*name[:1]).exists()
    finally:
        assert await cgroup_tree.remove(unified.joinpath(*name[:1]))
        for controller in set(controllers) - set(kept):
            (unified / "cgroup.subtree_control").write_text(f"-{controller}")


def test_child_count_v1_reads_one_directory_of_all_hierarchies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = {name: tmp_path / name for name in ("cpu", "memory", "pids", "cpuset", "blkio")}
    for mount in mounts.values():
        (mount / "kubepods").mkdir(parents=True)
    files, read, stat = CgroupFiles(Cgroups(CgroupMode.V1, tmp_path, mounts, {})), list[Any](), os.stat

    def counted(path: Any, **options: Any) -> os.stat_result:
        read.append(path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", counted)
    before = files.child_count(("kubepods",))
    assert len(read) == 1
    for mount in mounts.values():
        (mount / "kubepods/pod1").mkdir()
    assert files.child_count(("kubepods",)) != before
    assert files.child_count(("absent",)) == 0

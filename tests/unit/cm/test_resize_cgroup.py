"""A pod's own cgroup while it is resized, read back from the kernel's files."""

import asyncio
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.driver import CgroupDriver
from pykubelet.cm.cgroups.pod_cgroups import PodCgroup, PodCgroups
from pykubelet.cm.cgroups.values import CgroupValues, weight_of_shares
from pykubelet.cm.resize import PodLimits
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups, detect_cgroups
from tests.support.pod_resources import amounts, pod_of

MI = 1024**2
NO_BOUND = 2**63 - 1
SMALL = {"requests": {"cpu": "100m"}, "limits": {"cpu": "200m", "memory": "64Mi"}}
LARGE = {"requests": {"cpu": "250m"}, "limits": {"cpu": "500m", "memory": "128Mi"}}


def resized(pod: Pod, resources: dict[str, Any]) -> Pod:
    return msgspec.structs.replace(pod, spec=pod_of(resources).spec)


class TestV2:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "pods/one"
        folder.mkdir(parents=True)
        for file, text in (("cpu.weight", "10"), ("cpu.max", "max 100000"), ("memory.max", "max")):
            (folder / file).write_text(f"{text}\n")
        (folder / "memory.current").write_text("4096\n")
        return folder

    @staticmethod
    def group(tmp_path: Path, **values: Any) -> PodCgroup:
        machine = Cgroups(CgroupMode.V2, tmp_path, dict.fromkeys(("cpu", "memory"), tmp_path), {})
        return PodCgroup(CgroupDriver(machine), ("pods", "one"), CgroupValues(**values), unified=True)

    async def test_pod_cgroup_set_applies_desired_limits(self, tmp_path: Path, folder: Path) -> None:
        group = self.group(tmp_path, shares=1024, quota=50_000, memory=64 * MI)
        now = group.now()
        assert (now.memory, now.quota, weight_of_shares(now.shares)) == (NO_BOUND, -1, 10)
        wanted = group.desired(now)
        assert (wanted.memory, wanted.quota) == (64 * MI, 50_000)
        for part in ("memory", "quota", "shares"):
            await group.set(part)
        assert (folder / "memory.max").read_text().split()[0] == str(64 * MI)
        assert (folder / "cpu.max").read_text().split()[:2] == ["50000", "100000"]
        assert group.now() == group.desired(group.now()) == wanted
        assert group.memory_usage() == 4096

    def test_pod_cgroup_desired_unspecified_limits_unchanged(self, tmp_path: Path, folder: Path) -> None:
        (folder / "cpu.max").write_text("20000 100000\n")
        (folder / "memory.max").write_text(f"{MI}\n")
        group = self.group(tmp_path, shares=2)
        now = group.now()
        assert group.desired(now) == PodLimits(MI, 20_000, 2)
        assert group.memory_limit is None

    def test_pod_cgroup_desired_same_cpu_weight_is_no_change(self, tmp_path: Path, folder: Path) -> None:
        (folder / "cpu.weight").write_text(f"{weight_of_shares(102)}\n")
        group = self.group(tmp_path, shares=103)
        assert group.desired(group.now()) == group.now()

    def test_pod_cgroup_now_missing_cgroup_raises_oserror(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No such file"):
            self.group(tmp_path).now()


@pytest.fixture
def root() -> Iterator[str]:
    """A cgroup of our own, gone afterwards in every hierarchy."""
    name = f"pyk-test-{secrets.token_hex(4)}"
    try:
        yield f"/{name}"
    finally:
        for tree in cgroup_tree.find_trees(name):
            assert asyncio.run(cgroup_tree.remove(tree)), f"{tree} stays"


@pytest.fixture
async def cgroups(root: str) -> PodCgroups:
    """The real ones."""
    config = KubeletConfiguration(cgroup_root=root)
    made = PodCgroups(config, FeatureGates(), detect_cgroups(), amounts(cpu="2", memory="1Gi", pid="100"))
    await made.setup()
    return made


on_this_machine = pytest.mark.skipif(
    os.geteuid() != 0 or bool(detect_cgroups().missing), reason="needs root and cgroups"
)


@pytest.mark.machine
@on_this_machine
async def test_pod_cgroup_on_host_resize_applied_and_read_back(cgroups: PodCgroups) -> None:
    pod = pod_of(SMALL)
    await cgroups.ensure(pod)
    group = cgroups.group(pod)
    assert group is not None
    assert group.now() == group.desired(group.now())
    more = resized(pod, LARGE)
    group = cgroups.group(more)
    assert group is not None
    wanted = group.desired(group.now())
    assert (wanted.memory, wanted.quota) == (128 * MI, 50_000)
    # While it is not done yet, the status tells what the kernel has.
    found = cgroups.in_force(more, group.settings())
    assert found is not None
    assert str(found[0]["memory"]) == "64Mi"
    assert found[0]["cpu"].milli == 200
    for part in ("memory", "quota", "shares"):
        await group.set(part)
    assert group.now() == wanted
    assert group.memory_usage() >= 0
    await cgroups.remove(pod.uid)


@pytest.mark.machine
@on_this_machine
async def test_pod_cgroup_on_host_pod_without_limits_is_unlimited(cgroups: PodCgroups) -> None:
    pod = pod_of({"requests": {"cpu": "100m"}})
    await cgroups.ensure(pod)
    group = cgroups.group(pod)
    assert group is not None
    now = group.now()
    assert (now.memory, now.quota) == (NO_BOUND, -1)
    assert group.settings().memory is None

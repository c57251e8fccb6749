"""Pods in slices of systemd on the hierarchies of v1: one life, with a systemd of ours or a real one."""

from typing import Protocol

from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.cm.cgroups.values import parse_systemd_path, systemd_path
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cgroups import CAPACITY, process_in, value
from tests.support.pod_resources import pod_of

COUNTED = ("name=systemd", "cpu", "memory", "pids", "blkio")
"""The hierarchies in which systemd makes directories for its slices."""


class Manager(Protocol):
    """Who keeps the slices."""

    def reload(self) -> None:
        """Set what it believes, as at a `systemctl daemon-reload`."""

    def names(self, root: str) -> list[str]:
        """Return the slices that it has below one."""
        ...


def pods_in(root: str) -> PodCgroups:
    settings = KubeletConfiguration(cgroup_root=f"/{root}", cgroup_driver="systemd", pod_pids_limit=99)
    return PodCgroups(settings, FeatureGates(), detect_cgroups(), CAPACITY)


async def a_life(root: str, manager: Manager) -> None:
    """Start and end pods of all classes, below a slice of this name."""
    cgroups = pods_in(root)
    await cgroups.setup()
    best_effort, burstable = pod_of({}), pod_of({"requests": {"cpu": "300m"}})
    guaranteed = pod_of({"limits": {"cpu": "1", "memory": "64Mi"}})
    pods = [best_effort, burstable, guaranteed]
    await cgroups.update_qos(pods)
    parents = [await cgroups.ensure(pod) for pod in pods]
    tiers = (f"{root}-kubepods-besteffort", f"{root}-kubepods-burstable", f"{root}-kubepods")
    escaped = [pod.uid.replace("-", "_") for pod in pods]
    assert parents == [f"{tier}-pod{uid}.slice" for tier, uid in zip(tiers, escaped, strict=True)]
    places = [systemd_path(parse_systemd_path(unit)) for unit in parents]
    # systemd takes directories away again in a hierarchy about which it was told nothing.
    for controller in detect_cgroups().mounts.keys() - {"devices"}:
        assert all(detect_cgroups().path(controller, place).is_dir() for place in places), controller
    shares = ["2", "307", "1024"]
    assert [value("cpu", place, "cpu.shares") for place in places] == shares
    assert [value("pids", place, "pids.max") for place in places] == ["99"] * 3
    assert value("memory", places[2], "memory.limit_in_bytes") == str(64 << 20)
    assert value("cpu", places[2], "cpu.cfs_quota_us") == "100000"
    assert value("cpu", systemd_path((root, "kubepods", "burstable")), "cpu.shares") == "307"
    assert value("cpuset", places[0], "cpuset.cpus") == value("cpuset", "/", "cpuset.cpus")
    manager.reload()
    assert [value("cpu", place, "cpu.shares") for place in places] == shares, "both say the same"
    assert cgroups.uids() == {pod.uid for pod in pods}
    # Another life of the agent knows them, and takes them down with all who are inside.
    again = pods_in(root)
    await again.setup()
    assert again.uids() == {pod.uid for pod in pods}
    with process_in(places[2]) as process:
        for pod in pods:
            await again.remove(pod.uid)
        assert process.wait(30) != 0
    assert again.uids() == set()
    assert not any(detect_cgroups().path(controller, places[0]).exists() for controller in COUNTED)
    assert [unit for unit in manager.names(root) if "-pod" in unit] == []

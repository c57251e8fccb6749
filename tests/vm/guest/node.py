"""The node under test, and where its cgroups are; patient, because everything in the guest is slow."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.node import Node, kubelet_node
from tests.support.runtime import runtime_process

ROOT = Path("/sys/fs/cgroup")
SLOW = 400.0
"""Seconds that anything may take here."""
PIDS = 512


class GuestNode(Node):
    """A node whose cgroups are v2, of one of the two drivers."""

    driver = "cgroupfs"

    def start(self, *, wait: bool = True) -> None:
        super().start(wait=False)
        if wait:
            self.wait("the agent to be healthy", self.is_healthy, SLOW)

    def place(self, *parts: str) -> Path:
        """Where the cgroup is that has this name below the node's own root."""
        names = [self.instance.cgroup_root.strip("/"), *parts]
        if self.driver == "cgroupfs":
            return ROOT.joinpath(*names)
        names = [name.replace("-", "_") for name in names]
        return ROOT.joinpath(*("-".join(names[: depth + 1]) + ".slice" for depth in range(len(names))))

    def pod_place(self, uid: str, qos: str) -> Path:
        tier = {"Guaranteed": (), "Burstable": ("burstable",), "BestEffort": ("besteffort",)}[qos]
        return self.place("kubepods", *tier, f"pod{uid}")

    def container_place(self, name: str) -> Path:
        """Where the only running container of a pod is."""
        (one,) = self.truth.running(name)
        pod = self.pod(name)
        assert pod is not None
        inside = one.id if self.driver == "cgroupfs" else f"cri-containerd-{one.id}.scope"
        return self.pod_place(pod["metadata"]["uid"], pod["status"]["qosClass"]) / inside

    def pod_cgroups(self) -> list[Path]:
        above = [self.place("kubepods", *tier) for tier in ((), ("burstable",), ("besteffort",))]
        return [
            path for folder in above for path in folder.glob("*pod*") if path.is_dir() and path not in above
        ]

    def units(self) -> list[str]:
        """The units that systemd has of us, in whatever state."""
        said = subprocess.run(
            ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", "*.slice", "*.scope"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        mine = self.instance.cgroup_root.strip("/").replace("-", "_")
        names = [line.split()[0] for line in said.splitlines()]
        return [name for name in names if name.startswith((f"{mine}.", f"{mine}-", "cri-containerd-"))]


@contextlib.contextmanager
def guest_node(path: Path, driver: str, *flags: str) -> Iterator[GuestNode]:
    """Make a node beside a runtime, both with this driver; it is not started."""
    with runtime_process(path, driver) as runtime:
        plain = kubelet_node(
            runtime,
            cgroupDriver=driver,
            podPidsLimit=PIDS,
            featureGates={"MemoryQoS": True},
            memoryReservationPolicy="TieredReservation",
            memorySwap={"swapBehavior": "LimitedSwap"},
        )
        command = [*plain.command, *flags]
        node = GuestNode(plain.instance, command, (plain._healthz, plain._read_only), root=plain.root)
        plain.truth.close()
        node.driver = driver
        yield node


def value(folder: Path, file: str) -> str:
    return (folder / file).read_text().strip()


def meminfo(field: str) -> int:
    """A number of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024

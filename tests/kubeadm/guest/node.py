"""Preparation of a guest as a node for kubeadm, as its documentation tells operators to prepare a host.

containerd with the systemd cgroup driver, the images, forwarding and bridge filtering, the kubelet as a unit
with kubeadm's drop-in, and the network of pods. Nothing of the cluster exists afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.kubeadm.remote import Result, run_command
from tests.kubeadm.settings import (
    IMAGES,
    INDEX,
    MEMBERS,
    PROGRAMS,
    ROLE,
    Member,
    cni_configuration,
    shared,
)

SLOW = 900.0
"""Seconds that a single step may take on an emulated processor."""
PACKAGE = "pykubelet.deb"
"""The kubelet's package in the share, if it is tested instead of the checkout's kubelet."""
_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
}
_UNIT = """\
[Unit]
Description=kubelet: The Kubernetes Node Agent
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=/usr/bin/kubelet
Restart=always
StartLimitInterval=0
RestartSec=10

[Install]
WantedBy=multi-user.target
"""
_DROP_IN = """\
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
--kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS \
$KUBELET_EXTRA_ARGS
"""
_LOGGED = """\
[Service]
StandardOutput=append:{log}
StandardError=append:{log}
"""
_UNITS = Path("/etc/systemd/system")


def this_member() -> Member:
    """Return which of the two machines this guest is."""
    return MEMBERS[os.environ[ROLE]]


def prepare_node(archives: list[str] | None = None) -> None:
    """Prepare this guest; without a list of archives all images are imported."""
    for path, value in _SYSCTLS.items():
        (Path("/proc/sys") / path).write_text(value)
    for directory in os.environ[PROGRAMS].split(":"):
        for name in ("kubeadm", "kubectl"):
            if (Path(directory) / name).exists():
                _link(Path("/usr/bin", name), Path(directory) / name)
    _log_unit("containerd")
    must("systemctl", "daemon-reload")
    must("systemctl", "start", "containerd")
    index = json.loads(shared(f"{IMAGES}/{INDEX}").read_text())
    for file, names in index.items():
        if archives is None or file in archives:
            import_image(shared(f"{IMAGES}/{file}"), names)
    install_kubelet()


def import_image(archive: Path, names: list[str]) -> None:
    """Import an archive with one image for the kubelet, and name it."""
    first, *others = names
    must("ctr", "-n", "k8s.io", "images", "import", str(archive))
    if others:
        must("ctr", "-n", "k8s.io", "images", "tag", first, *others)


def install_kubelet() -> None:
    """Install the kubelet's package, or this checkout's kubelet by hand in the same form, and enable it."""
    _log_unit("kubelet")
    if (package := shared(PACKAGE)).exists():
        must("dpkg", "-i", str(package))
    else:
        _link(Path("/usr/bin/kubelet"), Path(__file__).parents[3] / ".venv/bin/kubelet")
        (_UNITS / "kubelet.service").write_text(_UNIT)
        (_UNITS / "kubelet.service.d/10-kubeadm.conf").write_text(_DROP_IN)
    must("systemctl", "daemon-reload")
    must("systemctl", "enable", "kubelet")


def write_network(member: Member) -> None:
    """Configure the network of this node's pods, and the way to those of the other node."""
    directory = Path("/etc/cni/net.d")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "10-bridge.conflist").write_text(cni_configuration(member))
    for other in MEMBERS.values():
        if other != member:
            must("ip", "route", "replace", other.pod_subnet, "via", other.address)


def must(*command: str, timeout: float = SLOW) -> str:
    """Run a command, and return its output. Raises AssertionError with it when the command fails."""
    result = run_command(command, timeout)
    assert result.code == 0, f"{' '.join(command)} ended with {result.code}:\n{result.output[-6000:]}"
    return result.output


def attempt(*command: str, timeout: float = SLOW) -> Result:
    """Run a command that may fail."""
    return run_command(command, timeout)


def wait_for(what: str, condition: Callable[[], bool], timeout: float = SLOW) -> None:
    """Wait until a condition holds. Raises AssertionError when it does not in `timeout` s."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout:g} s"
        time.sleep(9)


def running_tasks() -> int:
    """Return the number of containers that run in the kubelet's namespace of containerd."""
    return len(must("ctr", "-n", "k8s.io", "tasks", "list", "-q").split())


def mounts_below(directory: str) -> list[str]:
    """Return the mount points below a directory."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{directory}/")]


def say(text: str) -> None:
    """Print a line of progress with the time since the guest started."""
    seconds = float(Path("/proc/uptime").read_text().split()[0])
    print(f"[{this_member().name} {seconds:6.0f} s] {text}", flush=True)


def save_logs() -> None:
    """Copy what helps to understand a failure to the share: logs of pods, and state."""
    target = shared(f"logs-{this_member().name}")
    target.mkdir(exist_ok=True)
    if Path("/var/log/pods").exists():
        shutil.copytree("/var/log/pods", target / "pods", dirs_exist_ok=True, symlinks=True)
    for name, command in {
        "iptables": ["iptables-save"],
        "units": ["systemctl", "--no-pager", "list-units", "--all"],
        "images": ["ctr", "-n", "k8s.io", "images", "list"],
        "tasks": ["ctr", "-n", "k8s.io", "tasks", "list"],
        "routes": ["ip", "route"],
    }.items():
        with (target / name).open("wb") as file:
            subprocess.run(command, stdout=file, stderr=file, check=False)


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)  # what the host has there
    path.symlink_to(target)


def _log_unit(name: str) -> None:
    directory = _UNITS / f"{name}.service.d"
    directory.mkdir(parents=True, exist_ok=True)
    log = shared(f"{name}-{this_member().name}.log")
    (directory / "90-log.conf").write_text(_LOGGED.format(log=log))

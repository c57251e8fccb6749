"""Facts that the host and both guests share: addresses, files, and the configuration for kubeadm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.vm.machine import SHARED

ROLE = "PYKUBELET_KUBEADM_ROLE"
"""Variable of the guest's environment with its node's name."""
PROGRAMS = "PYKUBELET_KUBEADM_PROGRAMS"
"""Variable with the directories of kubeadm and kubectl, separated by a colon."""
CRI_SOCKET = "unix:///run/containerd/containerd.sock"
POD_SUBNET = "10.244.0.0/16"


@dataclass(frozen=True, slots=True)
class Member:
    """One of the two machines."""

    name: str
    address: str
    pod_subnet: str
    """The node's part of POD_SUBNET, which the controller manager allocates in the order of registration."""


CONTROL = Member("control", "10.99.0.2", "10.244.0.0/24")
WORKER = Member("worker", "10.99.0.3", "10.244.1.0/24")
MEMBERS = {member.name: member for member in (CONTROL, WORKER)}

IMAGES = "images"
"""Directory of the image archives in the share, and `images.json` in it: names by file."""
INDEX = "images.json"

PATIENT = """\
timeouts:
  controlPlaneComponentHealthCheck: 30m
  discovery: 15m
  etcdAPICall: 10m
  kubeletHealthCheck: 15m
  kubernetesAPICall: 10m
  tlsBootstrap: 20m
  upgradeManifests: 30m
"""
"""kubeadm's own settings of its time limits: an emulated processor takes ten times as long."""


def init_configuration(version: str) -> str:
    """Return the configuration of `kubeadm init`."""
    slow_lease = """\
  extraArgs:
  - name: leader-elect-lease-duration
    value: 150s
  - name: leader-elect-renew-deadline
    value: 120s
"""
    return f"""\
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint:
  advertiseAddress: {CONTROL.address}
nodeRegistration:
  criSocket: {CRI_SOCKET}
{PATIENT}---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: {version}
networking:
  podSubnet: {POD_SUBNET}
controllerManager:
{slow_lease}  - name: node-monitor-grace-period
    value: 300s
scheduler:
{slow_lease}---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: systemd
"""


def join_configuration(token: str, ca_hash: str) -> str:
    """Return the configuration of `kubeadm join` with a bootstrap token."""
    return f"""\
apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
discovery:
  bootstrapToken:
    apiServerEndpoint: {CONTROL.address}:6443
    token: {token}
    caCertHashes:
    - {ca_hash}
nodeRegistration:
  criSocket: {CRI_SOCKET}
{PATIENT}"""


def containerd_configuration(pause: str) -> str:
    """Return the configuration of Debian's containerd as kubeadm expects it: the systemd cgroup driver.

    Its data are on the machine's disk, because the root is an overlay, which cannot hold another one.
    """
    return f"""\
version = 2
root = "/tmp/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""


def cni_configuration(member: Member) -> str:
    """Return the network of a node's pods: the bridge plugin with the node's part of the subnet."""
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": "bridge",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "ipMasq": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": member.pod_subnet}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
    )


def shared(name: str) -> Path:
    """Return the guest's path of a file in the share."""
    return SHARED / name

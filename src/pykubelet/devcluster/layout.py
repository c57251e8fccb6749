"""One control plane, as the files in its directory and the choices that were made for it.

Everything lies below one directory, and each of its processes is started with an argument that
names a file in it: that is how a process is recognised as this cluster's, so there are no pid files
that could be stale.

What can go wrong with a control plane of our own: always one line with the cause and a remedy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec


class DevClusterError(Exception):
    """The control plane cannot do what was asked."""


class NotAvailable(DevClusterError):
    """Its programs are not here and cannot be built here."""


SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"
"""The first address of the services' network: the API server's own."""
DNS_IP = "10.96.0.10"
POD_CIDR = "10.244.0.0/16"
CLUSTER_DOMAIN = "cluster.local"
ISSUER = f"https://kubernetes.default.svc.{CLUSTER_DOMAIN}"
DEFAULT_PORT = 6443
YEAR = "8760h"


class Component(StrEnum):
    """The processes of a control plane, in the order in which they are needed."""

    ETCD = "etcd"
    APISERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen for one control plane; kept beside it."""

    address: str
    """The machine's own address, at which nodes and pods reach the API server."""
    port: int
    etcd_port: int
    etcd_peer_port: int
    token: str
    """The bootstrap token, ID.SECRET."""
    signing_duration: str = YEAR
    """How long certificates live that are signed for nodes, as a Go duration."""
    audit: bool = False
    """Whether every request is written down, without its body."""
    verify_kubelets: bool = False
    """Whether the API server talks only to kubelets whose certificate the cluster has signed."""
    durable: bool = True
    """Whether the data must survive a power cut."""
    api_flags: tuple[str, ...] = ()
    """More flags for kube-apiserver."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of one control plane; `directory` is absolute."""

    directory: Path

    @classmethod
    def at(cls, directory: Path) -> Layout:
        """Take a directory as given by a person; raises DevClusterError for one that cannot work."""
        try:
            path = directory.resolve()
            str(path).encode()
        except (OSError, RuntimeError, ValueError) as err:
            raise DevClusterError(
                f"data directory {str(directory)!r} cannot be used ({err}): choose another path"
            ) from err
        return cls(path)

    @property
    def marker(self) -> Path:
        """The file that says that this directory is ours to remove."""
        return self.directory / ".pykubelet-dev"

    @property
    def lock(self) -> Path:
        """Locked while somebody starts or removes the cluster."""
        return self.directory / "lock"

    @property
    def settings(self) -> Path:
        """What was chosen."""
        return self.directory / "cluster.json"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.directory / "pki"

    @property
    def etcd_data(self) -> Path:
        """Everything that the cluster knows."""
        return self.directory / "etcd"

    @property
    def audit_policy(self) -> Path:
        """What the API server writes down."""
        return self.directory / "audit-policy.yaml"

    @property
    def audit_log(self) -> Path:
        """Where it writes it, a JSON document per line."""
        return self.directory / "audit.log"

    @property
    def kubelet_config(self) -> Path:
        """A KubeletConfiguration for a node of this cluster."""
        return self.directory / "kubelet.yaml"

    @property
    def authority(self) -> Path:
        """The certificate of the cluster's authority."""
        return self.certificate("ca")

    def certificate(self, name: str) -> Path:
        """The certificate with this name."""
        return self.pki / f"{name}.crt"

    def key(self, name: str) -> Path:
        """The private key with this name."""
        return self.pki / f"{name}.key"

    def kubeconfig(self, name: str) -> Path:
        """The kubeconfig of this user."""
        return self.directory / f"{name}.kubeconfig"

    def log(self, component: Component) -> Path:
        """What a component says."""
        return self.directory / f"{component}.log"

    def load_settings(self) -> Settings | None:
        """Read what was chosen; None when nothing was yet. Raises DevClusterError when unreadable."""
        try:
            return msgspec.json.decode(self.settings.read_bytes(), type=Settings)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as err:
            raise DevClusterError(
                f"{self.settings} cannot be read ({err}): remove it all with `pykubelet dev cluster down`"
            ) from err

    def save_settings(self, settings: Settings) -> None:
        """Write what was chosen, at once and whole; the token is for nobody else to read."""
        hidden = self.settings.with_name(".cluster.json.new")
        fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(settings)) + b"\n")
        hidden.rename(self.settings)

"""Files and settings of one control plane, and the errors of this package.

Everything is below one directory, and each process is started with an argument that contains the path of a
file in it. Processes are identified by that argument, so there are no pid files that could be stale. Errors
are one line with the cause and a remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from pykubelet.util.files import write_atomically


class DevClusterError(Exception):
    """Raised when an operation on the control plane fails."""


class NotAvailable(DevClusterError):
    """Raised when the executables are not installed and cannot be built."""


SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"
"""First address of the service network, which is the API server's."""
DNS_IP = "10.96.0.10"
POD_CIDR = "10.244.0.0/16"
CLUSTER_DOMAIN = "cluster.local"
ISSUER = f"https://kubernetes.default.svc.{CLUSTER_DOMAIN}"
DEFAULT_PORT = 6443
YEAR = "8760h"


class Component(StrEnum):
    """Processes of a control plane, in the order of their start."""

    ETCD = "etcd"
    APISERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one control plane, stored in its directory."""

    address: str
    """IP address of the host, at which nodes and pods reach the API server."""
    port: int
    etcd_port: int
    etcd_peer_port: int
    token: str
    """Bootstrap token, ID.SECRET."""
    signing_duration: str = YEAR
    """Lifetime of certificates signed for nodes, as a Go duration."""
    audit: bool = False
    """Whether requests are written to the audit log, without bodies."""
    verify_kubelets: bool = False
    """Whether the API server verifies kubelets' serving certificates with the cluster CA."""
    durable: bool = True
    """Whether etcd calls fsync, so that the data survives a power failure."""
    api_flags: tuple[str, ...] = ()
    """Additional flags of kube-apiserver."""
    controller_flags: tuple[str, ...] = ()
    """Additional flags of kube-controller-manager."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one control plane; `directory` is absolute."""

    directory: Path

    @classmethod
    def at(cls, directory: Path) -> Layout:
        """Return the layout of a directory. Raises DevClusterError for a path that cannot be used."""
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
        """Marker file of a directory that pykubelet created and may remove."""
        return self.directory / ".pykubelet-dev"

    @property
    def lock(self) -> Path:
        """File that is locked while the cluster is started or removed."""
        return self.directory / "lock"

    @property
    def settings(self) -> Path:
        """File of the `Settings`."""
        return self.directory / "cluster.json"

    @property
    def pki(self) -> Path:
        """Directory of keys and certificates."""
        return self.directory / "pki"

    @property
    def etcd_data(self) -> Path:
        """etcd's data directory."""
        return self.directory / "etcd"

    @property
    def audit_policy(self) -> Path:
        """Audit policy of the API server."""
        return self.directory / "audit-policy.yaml"

    @property
    def audit_log(self) -> Path:
        """Audit log, one JSON object per line."""
        return self.directory / "audit.log"

    @property
    def kubelet_config(self) -> Path:
        """KubeletConfiguration of a node of this cluster."""
        return self.directory / "kubelet.yaml"

    @property
    def authority(self) -> Path:
        """Certificate of the cluster CA."""
        return self.certificate("ca")

    def certificate(self, name: str) -> Path:
        """Return the path of a certificate."""
        return self.pki / f"{name}.crt"

    def key(self, name: str) -> Path:
        """Return the path of a private key."""
        return self.pki / f"{name}.key"

    def kubeconfig(self, name: str) -> Path:
        """Return the path of a user's kubeconfig."""
        return self.directory / f"{name}.kubeconfig"

    def log(self, component: Component) -> Path:
        """Return the path of a component's log."""
        return self.directory / f"{component}.log"

    def load_settings(self) -> Settings | None:
        """Return the settings, or None if they do not exist. Raises DevClusterError when unreadable."""
        try:
            return msgspec.json.decode(self.settings.read_bytes(), type=Settings)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as err:
            raise DevClusterError(
                f"{self.settings} cannot be read ({err}): remove it all with `pykubelet dev cluster down`"
            ) from err

    def save_settings(self, settings: Settings) -> None:
        """Write the settings atomically, readable only by the owner because of the token."""
        content = msgspec.json.format(msgspec.json.encode(settings)) + b"\n"
        write_atomically(self.settings, content, durable=False)

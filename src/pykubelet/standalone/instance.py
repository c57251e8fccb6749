"""Paths and names of one private runtime, derived from its data directory, and the errors of this package.

Everything that a private runtime creates is below its data directory or has a name derived from it, so that
several can run on one host and each can be removed without affecting the others. Nothing is created here;
`data_dir` does that. Errors are one line with the cause and a remedy.
"""

from __future__ import annotations

import hashlib
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from pykubelet.transport.endpoint import MAX_PATH_BYTES, Endpoint


class EmbeddedError(Exception):
    """Base class of the errors of the private runtime."""


class DirectoryError(EmbeddedError):
    """Raised when the data directory cannot be used, or is not pykubelet's."""


class AlreadyRunning(EmbeddedError):
    """Raised when another process holds the lock of the data directory."""

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid
        """Pid of the holder; None if it is unknown."""


class MissingPrograms(EmbeddedError):
    """Raised when executables of the private runtime are not installed."""


class RuntimeFailed(EmbeddedError):
    """Raised when containerd does not start or does not respond."""


DEFAULT_DATA_DIR = Path("/var/lib/pykubelet")
NAMESPACE = "k8s.io"
"""Namespace of containerd's CRI plugin."""
_LONGEST_SOCKET = "kubelet/device-plugins/kubelet.sock"
_SYSTEM = """
/ /bin /boot /etc /home /lib /lib32 /lib64 /media /mnt /opt /root /run /sbin /srv /tmp
/usr /usr/bin /usr/lib /usr/local /usr/sbin /usr/share /usr/src
/var /var/cache /var/lib /var/log /var/run /var/spool /var/tmp
/var/lib/cni /var/lib/containerd /var/lib/containers /var/lib/docker /var/lib/dpkg /var/lib/kubelet
"""
_FORBIDDEN = frozenset(Path(path) for path in _SYSTEM.split())
_FORBIDDEN_PARENTS = (Path("/proc"), Path("/sys"), Path("/dev"))


@dataclass(frozen=True, slots=True)
class Instance:
    """A data directory and the names derived from it; created by `Instance.at`."""

    data_dir: Path
    name: str
    """Name of the CNI network, the cgroup root and the registry entry; unique on this host."""
    bridge: str

    @classmethod
    def at(cls, data_dir: Path = DEFAULT_DATA_DIR) -> Instance:
        """Return the instance of a data directory, which need not exist.

        Raises DirectoryError for a path that cannot work or that belongs to the system.
        """
        path = _resolve(data_dir)
        _validate(path)
        if path == DEFAULT_DATA_DIR.resolve():
            return cls(path, name="pykubelet", bridge="pyk0")
        tag = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        return cls(path, name=f"pykubelet-{tag}", bridge=f"pyk-{tag}")

    # The kubelet's paths

    @property
    def manifests(self) -> Path:
        """Directory of static pod manifests."""
        return self.data_dir / "manifests"

    @property
    def kubelet_root(self) -> Path:
        """The kubelet's root directory: pods, plugins, checkpoints."""
        return self.data_dir / "kubelet"

    @property
    def pod_logs(self) -> Path:
        """Directory of the container logs."""
        return self.data_dir / "logs" / "pods"

    @property
    def cgroup_root(self) -> str:
        """Cgroup of all pods, for the cgroupfs driver."""
        return f"/{self.name}"

    # containerd's paths

    @property
    def containerd(self) -> Path:
        """Directory of all files of containerd."""
        return self.data_dir / "containerd"

    @property
    def containerd_config(self) -> Path:
        """Configuration file; the process is identified by this argument."""
        return self.containerd / "config.toml"

    @property
    def containerd_root(self) -> Path:
        """Images, snapshots and metadata, which survive a reboot."""
        return self.containerd / "root"

    @property
    def containerd_state(self) -> Path:
        """Bundles, network namespaces and runc's state, which are void after a reboot."""
        return self.containerd / "state"

    @property
    def socket(self) -> Path:
        """Path of the CRI socket."""
        return self.containerd / "containerd.sock"

    @property
    def endpoint(self) -> str:
        """Endpoint of the socket, for `--container-runtime-endpoint`."""
        return str(Endpoint(str(self.socket)))

    @property
    def containerd_log(self) -> Path:
        """Log file of containerd."""
        return self.containerd / "containerd.log"

    @property
    def registry_hosts(self) -> Path:
        """Directory of registry mirrors: `<host>/hosts.toml` in containerd's format; it need not exist."""
        return self.containerd / "certs.d"

    @property
    def cni_conf(self) -> Path:
        """Directory of the CNI configuration."""
        return self.data_dir / "cni" / "conf"

    @property
    def cni_leases(self) -> Path:
        """Directory of the IP address leases of pods."""
        return self.data_dir / "cni" / "ipam"

    # Marker, lock and state

    @property
    def marker(self) -> Path:
        """Marker file of a data directory that pykubelet created."""
        return self.data_dir / ".pykubelet"

    @property
    def lock(self) -> Path:
        """File that a running kubelet or `down` holds a lock on."""
        return self.data_dir / "lock"

    @property
    def state(self) -> Path:
        """File of the `State`."""
        return self.data_dir / "state.json"


def _resolve(data_dir: Path) -> Path:
    try:
        path = data_dir.resolve()
        str(path).encode()
    except UnicodeEncodeError:
        raise DirectoryError(
            f"data directory {str(data_dir)!r} is not valid UTF-8: choose another path"
        ) from None
    except (OSError, RuntimeError, ValueError) as err:
        raise DirectoryError(
            f"data directory {str(data_dir)!r} cannot be used: {err}: choose another path"
        ) from err
    return path


def _validate(path: Path) -> None:
    """Raise DirectoryError for paths that containerd cannot use, or that belong to the system or a user."""
    if (
        path in _FORBIDDEN
        or path in _homes()
        or any(path.is_relative_to(parent) for parent in _FORBIDDEN_PARENTS)
    ):
        raise DirectoryError(
            f"data directory {path} belongs to the system or to a person: "
            f"choose a directory of its own, such as {DEFAULT_DATA_DIR}"
        )
    # overlayfs separates directories by colons and options by commas, without quoting.
    if bad := sorted({char for char in str(path) if char in ":,\\" or not char.isprintable()}):
        shown = " ".join(repr(char) for char in bad)
        raise DirectoryError(
            f"data directory {str(path)!r} contains {shown}, which mounts cannot express: choose another path"
        )
    size = len(os.fsencode(path / _LONGEST_SOCKET))
    if size > MAX_PATH_BYTES:
        allowed = MAX_PATH_BYTES - len(f"/{_LONGEST_SOCKET}")
        raise DirectoryError(
            f"data directory {path} is too long for the sockets in it "
            f"({len(os.fsencode(path))} bytes, at most {allowed}): choose a shorter path"
        )


def _homes() -> set[Path]:
    homes = {Path(entry.pw_dir) for entry in pwd.getpwall()}
    if home := os.environ.get("HOME"):
        homes.add(Path(home))
    return homes

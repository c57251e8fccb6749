"""One private runtime, as the paths and names that follow from its data directory.

Everything it makes lies below that one directory or bears a name derived from it, so that several
can live on one machine and each can be removed without touching the others. Nothing is created
here; `claim.py` does that.

What can go wrong with the private runtime: always one line with the cause and a remedy.
"""

from __future__ import annotations

import hashlib
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from pykubelet.transport.endpoint import MAX_PATH_BYTES, Endpoint


class EmbeddedError(Exception):
    """The private runtime cannot do what was asked."""


class DirectoryError(EmbeddedError):
    """The data directory cannot be used, or is not ours."""


class AlreadyRunning(EmbeddedError):
    """Another process holds the data directory."""

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid
        """Who holds it; None when that could not be found out."""


class MissingPrograms(EmbeddedError):
    """Programs that the private runtime consists of are not installed."""


class RuntimeFailed(EmbeddedError):
    """containerd does not start, or does not answer."""


DEFAULT_DATA_DIR = Path("/var/lib/pykubelet")
NAMESPACE = "k8s.io"
"""containerd's own namespace for everything that comes through CRI."""
_LONGEST_SOCKET = "kubelet/device-plugins/kubelet.sock"
_SYSTEM = """
/ /bin /boot /etc /home /lib /lib32 /lib64 /media /mnt /opt /root /run /sbin /srv /tmp
/usr /usr/bin /usr/lib /usr/local /usr/sbin /usr/share /usr/src
/var /var/cache /var/lib /var/log /var/run /var/spool /var/tmp
/var/lib/cni /var/lib/containerd /var/lib/containers /var/lib/docker /var/lib/dpkg /var/lib/kubelet
"""
_NEVER = frozenset(Path(path) for path in _SYSTEM.split())
_NEVER_IN = (Path("/proc"), Path("/sys"), Path("/dev"))


@dataclass(frozen=True, slots=True)
class Instance:
    """A data directory and all that is derived from it; make one with `Instance.at`."""

    data_dir: Path
    name: str
    """Unique on this machine: the CNI network, the cgroup root and the registry entry bear it."""
    bridge: str

    @classmethod
    def at(cls, data_dir: Path = DEFAULT_DATA_DIR) -> Instance:
        """Derive everything from a data directory, which need not exist.

        Raises DirectoryError for a path that could not work or that must never be ours.
        """
        path = _resolve(data_dir)
        _refuse(path)
        if path == DEFAULT_DATA_DIR.resolve():
            return cls(path, name="pykubelet", bridge="pyk0")
        tag = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        return cls(path, name=f"pykubelet-{tag}", bridge=f"pyk-{tag}")

    # The agent's side

    @property
    def manifests(self) -> Path:
        """The folder whose pods the agent runs."""
        return self.data_dir / "manifests"

    @property
    def kubelet_root(self) -> Path:
        """The agent's root directory: pods, plugins, checkpoints."""
        return self.data_dir / "kubelet"

    @property
    def pod_logs(self) -> Path:
        """The folder of the containers' logs."""
        return self.data_dir / "logs" / "pods"

    @property
    def cgroup_root(self) -> str:
        """The cgroup below which all pods live, for the cgroupfs driver."""
        return f"/{self.name}"

    # containerd's side

    @property
    def containerd(self) -> Path:
        """The folder of everything that belongs to containerd."""
        return self.data_dir / "containerd"

    @property
    def containerd_config(self) -> Path:
        """Its configuration; also how its process is recognised."""
        return self.containerd / "config.toml"

    @property
    def containerd_root(self) -> Path:
        """Images, snapshots and metadata: what outlives a reboot."""
        return self.containerd / "root"

    @property
    def containerd_state(self) -> Path:
        """Bundles, network namespaces, runc's state: what means nothing after a reboot."""
        return self.containerd / "state"

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.containerd / "containerd.sock"

    @property
    def endpoint(self) -> str:
        """Where it listens, as `--container-runtime-endpoint` takes it."""
        return str(Endpoint(str(self.socket)))

    @property
    def containerd_log(self) -> Path:
        """What it says."""
        return self.containerd / "containerd.log"

    @property
    def registry_hosts(self) -> Path:
        """Directory of registry mirrors: `<host>/hosts.toml` in containerd's format; it need not exist."""
        return self.containerd / "certs.d"

    @property
    def cni_conf(self) -> Path:
        """The folder of the pod network's configuration."""
        return self.data_dir / "cni" / "conf"

    @property
    def cni_leases(self) -> Path:
        """Which pod has which address."""
        return self.data_dir / "cni" / "ipam"

    # Its own bookkeeping

    @property
    def marker(self) -> Path:
        """The file that says that this directory is ours."""
        return self.data_dir / ".pykubelet"

    @property
    def lock(self) -> Path:
        """The file that is locked while an agent or a `down` is at work."""
        return self.data_dir / "lock"

    @property
    def state(self) -> Path:
        """What was chosen, and what was there before us."""
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


def _refuse(path: Path) -> None:
    """Raise for paths that containerd could not work in, or that hold what is not ours."""
    if path in _NEVER or path in _homes() or any(path.is_relative_to(place) for place in _NEVER_IN):
        raise DirectoryError(
            f"data directory {path} belongs to the system or to a person: "
            f"choose a directory of its own, such as {DEFAULT_DATA_DIR}"
        )
    # overlayfs separates its directories by colons and its options by commas, and knows no quoting.
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

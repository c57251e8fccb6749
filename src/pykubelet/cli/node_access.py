"""Selection of the node that a command works on, and what commands need to know of it.

`select_node` is the only way from options to a node. It returns a node of `pykubelet up` (`--data-dir`) or of
the drop-in `kubelet` (`--root-dir`). Without either option, in this order:

1. the directory in PYKUBELET_DATA_DIR or PYKUBELET_ROOT_DIR,
2. the default data directory, if its kubelet runs,
3. the only running kubelet of this host, found by its control socket,
4. the default data directory, if it exists,
5. the default root directory of the drop-in, if a kubelet of this project has run there.

Several running kubelets are an error that lists them, and a stopped default data directory, with the option
that chooses each. Paths and names come
from the running kubelet, else from the file that it wrote at its last start (`server/node_info`).

A socket counts as a kubelet's if it has the control socket's name, belongs to root, and its process has the
root directory of this host: a container with the host's network can create a socket of any name, but it is
listed in /proc/net/unix with the path inside the container.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from pykubelet.cli.client import NodeClient, NodeError, NodeNotFound
from pykubelet.cli.options import DATA_DIR_VARIABLE, DEFAULT_DATA_DIR, ROOT_DIR_VARIABLE, NodeSelection
from pykubelet.server.node_info import INFO_FILE_NAME, NodeInfo, read_node_info
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.standalone.data_dir import LockOwner, is_owned, lock_owner
from pykubelet.standalone.instance import EmbeddedError, Instance

DEFAULT_ROOT_DIR = Path("/var/lib/kubelet")
_LISTENING = 0x10000
"""Flag __SO_ACCEPTCON of a socket in /proc/net/unix."""
_CONNECT_SECONDS = 2.0


class Node:
    """A node of this host, which may be stopped; `instance` is None for one of the drop-in `kubelet`."""

    def __init__(self, root_dir: Path, instance: Instance | None = None) -> None:
        self.root_dir = root_dir
        """The kubelet's root directory."""
        self.instance = instance
        self.socket = root_dir / SOCKET_NAME
        """The control socket; it exists while the kubelet runs."""

    @classmethod
    def of(cls, instance: Instance) -> Node:
        """Return the node of a data directory."""
        return cls(instance.kubelet_root, instance)

    @classmethod
    def at_root(cls, root_dir: Path) -> Node:
        """Return the node of a root directory, which may be the one in a data directory."""
        path = _absolute(root_dir)
        try:
            instance = Instance.at(path.parent)
        except EmbeddedError:
            return cls(path)
        return cls(path, instance if instance.kubelet_root == path and is_owned(instance) else None)

    @cached_property
    def client(self) -> NodeClient:
        """Client of the running kubelet."""
        return NodeClient(self)

    @property
    def title(self) -> str:
        """Path of the directory by which users know the node."""
        return str(self.instance.data_dir if self.instance is not None else self.root_dir)

    @property
    def option(self) -> str:
        """The option that selects this node, with a space in front; empty for the default data directory."""
        if self.instance is None:
            return f" --root-dir {shlex.quote(str(self.root_dir))}"
        if self.instance.data_dir == DEFAULT_DATA_DIR.resolve():
            return ""
        return f" --data-dir {shlex.quote(str(self.instance.data_dir))}"

    @property
    def start_hint(self) -> str:
        """How to start the kubelet."""
        if self.instance is None:
            return f"start it with `systemctl start kubelet`, or `kubelet --root-dir {self.root_dir} …`"
        return f"start it with `pykubelet up{self.option}`"

    def lock_owner(self) -> LockOwner | None:
        """Return the process that uses the data directory; None for a node of the drop-in."""
        return lock_owner(self.instance) if self.instance is not None else None

    def is_running(self) -> bool:
        """Return whether a kubelet runs here, even if it is starting or stopping."""
        return self.lock_owner() is not None or self.accepts_connections()

    def accepts_connections(self) -> bool:
        """Return whether the kubelet accepts connections on the control socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_SECONDS)
            try:
                probe.connect(str(self.socket))
            except (OSError, ValueError):
                return False
        return True

    # Paths and names

    @cached_property
    def info(self) -> NodeInfo:
        """Paths and names of the node. Raises NodeError when no kubelet has run here."""
        try:
            return self.client.info()
        except NodeError:
            pass  # stopped, or of an older version
        try:
            written = read_node_info(self.root_dir)
        except PermissionError:
            raise NodeError("only root may ask the node: run it with sudo") from None
        if written is not None:
            return written
        if self.instance is None:
            raise NodeNotFound(
                f"no kubelet of pykubelet has run in {self.root_dir} (it has no {INFO_FILE_NAME}): "
                "give the --root-dir of the kubelet"
            )
        return _derived(self.instance)

    @property
    def manifests(self) -> Path | None:
        """Directory of static pod manifests, if one is configured."""
        return Path(self.info.static_pod_path) if self.info.static_pod_path else None

    @property
    def pod_logs(self) -> Path:
        """Directory of the container logs."""
        return Path(self.info.pod_logs_dir)

    @property
    def endpoint(self) -> str:
        """Endpoint of the container runtime."""
        return self.info.container_runtime_endpoint

    @property
    def image_endpoint(self) -> str:
        """Endpoint of the image service."""
        return self.info.image_service_endpoint or self.endpoint


def select_node(selection: NodeSelection) -> Node:
    """Return the node that the options select.

    Raises NodeError without a node or with several, and DirectoryError for an unusable data directory.
    """
    chosen = selection_or_environment(selection)
    if chosen.root_dir is not None:
        return _existing(chosen.root_dir)
    if chosen.data_dir is not None:
        return Node.of(Instance.at(chosen.data_dir))
    if not DEFAULT_DATA_DIR.is_dir():
        return _only_running()
    default = Node.of(Instance.at(DEFAULT_DATA_DIR))
    if default.is_running():
        return default
    # `pykubelet down --keep-data` leaves the directory.
    found = running_kubelets()
    if len(found) > 1:
        raise _several(found, stopped=default)
    return found[0] if found else default


def selection_or_environment(selection: NodeSelection) -> NodeSelection:
    """Return the selection of the options, else that of the environment. Raises NodeError for two."""
    if selection.data_dir is not None and selection.root_dir is not None:
        raise NodeError("--data-dir and --root-dir each select a node: give one of the two")
    if selection.data_dir is not None or selection.root_dir is not None:
        return selection
    data_dir, root_dir = os.environ.get(DATA_DIR_VARIABLE), os.environ.get(ROOT_DIR_VARIABLE)
    if data_dir and root_dir:
        raise NodeError(f"{DATA_DIR_VARIABLE} and {ROOT_DIR_VARIABLE} are both set: unset one of the two")
    return NodeSelection(Path(data_dir) if data_dir else None, Path(root_dir) if root_dir else None)


def running_kubelets(proc: Path = Path("/proc")) -> list[Node]:
    """Return the nodes of this host whose kubelet runs, sorted by root directory."""
    roots = {root for root in _listening_roots(proc) if _is_kubelet_socket(root / SOCKET_NAME, proc)}
    return [Node.at_root(root) for root in sorted(roots)]


def _existing(root_dir: Path) -> Node:
    try:
        if not root_dir.is_dir():
            raise NodeNotFound(f"there is no directory {root_dir}: give the --root-dir of the kubelet")
    except PermissionError:
        raise NodeError("only root may ask the node: run it with sudo") from None
    return Node.at_root(root_dir)


def _only_running() -> Node:
    found = running_kubelets()
    if len(found) == 1:
        return found[0]
    if found:
        raise _several(found)
    if (DEFAULT_ROOT_DIR / INFO_FILE_NAME).exists():
        return Node.at_root(DEFAULT_ROOT_DIR)
    if os.geteuid() != 0:
        raise NodeError("only root may ask the node: run it with sudo")
    raise NodeNotFound(
        "no node runs on this host: start one with `pykubelet up`, "
        "or name a stopped one with --data-dir or --root-dir"
    )


def _several(running: list[Node], stopped: Node | None = None) -> NodeError:
    """Return the error about nodes of which none is meant without an option."""
    options = ", ".join(_full_option(node) for node in running)
    more = f"; or the stopped one: {_full_option(stopped)}" if stopped is not None else ""
    return NodeError(f"several kubelets run on this host, choose one of them: {options}{more}")


def _full_option(node: Node) -> str:
    return node.option.strip() or f"--data-dir {shlex.quote(node.title)}"


def _listening_roots(proc: Path) -> Iterator[Path]:
    """Yield the directories of listening sockets with the control socket's name."""
    try:
        text = (proc / "net" / "unix").read_bytes().decode(errors="surrogateescape")
    except OSError:
        return
    for line in text.split("\n")[1:]:
        # Num RefCount Protocol Flags Type St Inode Path; any process of this host chooses the path, which may
        # contain spaces and line breaks.
        fields = line.split(None, 7)
        if len(fields) < 8 or not _is_listening(fields[3]):
            continue
        path = Path(fields[7])
        # The kubelet binds the socket to a hidden name and renames it, which the kernel does not report.
        if path.is_absolute() and path.name.removeprefix(".") == SOCKET_NAME:
            yield path.parent


def _is_listening(flags: str) -> bool:
    try:
        return bool(int(flags, 16) & _LISTENING)
    except ValueError:
        return False


def _is_kubelet_socket(path: Path, proc: Path) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in (0, os.geteuid()):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_SECONDS)
            probe.connect(str(path))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        return uid in (0, os.geteuid()) and os.path.samestat(
            (proc / str(pid) / "root").stat(), Path("/").stat()
        )
    except (OSError, ValueError):
        return False


def _derived(instance: Instance) -> NodeInfo:
    """Return what `pykubelet up` configures, for a data directory of an older version."""
    return NodeInfo(
        node_name=socket.gethostname().lower(),
        root_dir=str(instance.kubelet_root),
        cert_dir=str(instance.kubelet_root / "pki"),
        static_pod_path=str(instance.manifests),
        pod_logs_dir=str(instance.pod_logs),
        container_runtime_endpoint=_written_endpoint(instance),
        config_file=str(instance.data_dir / "kubelet.yaml"),
        standalone=True,
    )


def _written_endpoint(instance: Instance) -> str:
    """Return the endpoint in the kubelet.yaml that `up` writes, else the private runtime's."""
    # Imported here: most commands do not read it.
    import yaml

    try:
        written = yaml.safe_load((instance.data_dir / "kubelet.yaml").read_bytes())
        return str(written["containerRuntimeEndpoint"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return instance.endpoint


def _absolute(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()

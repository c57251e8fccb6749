"""`up`, `down` and `status` of a control plane in a directory, serialized by a lock file.

`up` may be killed at any time: the next one finds and uses what exists so far, and `down` removes it. A
directory is removed only if it contains the marker file.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pykubelet.devcluster import cluster as processes
from pykubelet.devcluster.admin_client import admin_client
from pykubelet.devcluster.binaries import find_programs
from pykubelet.devcluster.cluster import DevCluster, new_settings
from pykubelet.devcluster.layout import DEFAULT_PORT, YEAR, Component, DevClusterError, Layout, Settings
from pykubelet.linux.mounts import remove_tree
from pykubelet.linux.port_owner import find_port_owner
from pykubelet.linux.processes import Process

DEFAULT_DATA_DIR = Path("/var/lib/pykubelet-dev")
_MARKER_TEXT = """\
This directory belongs to a Kubernetes control plane for development, made by pykubelet.
`pykubelet dev cluster down --data-dir ...` stops it and removes everything in it.
"""
_IGNORED_ENTRIES = frozenset({"lost+found", "lock"})


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `up`; None if not set."""

    port: int | None = None
    signing_duration: str | None = None
    audit: bool | None = None
    verify_kubelets: bool | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Observed state of a cluster."""

    settings: Settings | None
    """None if there is no cluster."""
    running: dict[Component, Process]
    ready: bool

    @property
    def missing(self) -> list[Component]:
        """Components that do not run."""
        return [component for component in Component if component not in self.running]


def bring_up(directory: Path, options: UpOptions, report: Callable[[str], None]) -> tuple[DevCluster, bool]:
    """Ensure that a cluster runs; return it and whether a process had to be started.

    Raises DevClusterError.
    """
    layout = Layout.at(directory)
    _require_owned(layout)
    # Nothing is created if the executables are missing or the port is in use.
    programs = find_programs(report)
    found = processes.running(layout)
    settings = _settings(layout, options, found)
    if Component.APISERVER not in found and (owner := find_port_owner(settings.port)):
        raise DevClusterError(
            f"port {settings.port} of the API server is taken by {owner}: stop that, or give another --port"
        )
    _create_marker(layout)
    with _hold_lock(layout, "up"):
        found = processes.running(layout)
        cluster = DevCluster(layout, settings, programs, owned=False)
        if len(found) < len(Component):
            if Component.APISERVER not in found:
                cluster.prepare()
            layout.save_settings(settings)
            report(f"Starting {', '.join(name for name in Component if name not in found)}")
        cluster.start()
    return cluster, len(found) < len(Component)


def tear_down(directory: Path, report: Callable[[str], None]) -> bool:
    """Stop a cluster and remove its directory; return whether there was a cluster.

    Raises DevClusterError.
    """
    layout = Layout.at(directory)
    _require_owned(layout)
    if not layout.directory.exists():
        return _stop_all(layout, report)
    with _hold_lock(layout, "down"):
        found = _stop_all(layout, report) or layout.marker.exists()
        # The marker is removed last, so that an interrupted `down` can be repeated.
        try:
            for path in layout.directory.iterdir():
                if path not in (layout.marker, layout.lock):
                    remove_tree(path)
            layout.marker.unlink(missing_ok=True)
            layout.lock.unlink(missing_ok=True)
            layout.directory.rmdir()
        except OSError as err:
            raise DevClusterError(f"{layout.directory} cannot be removed: {err}") from err
    return found


def observe(directory: Path) -> State:
    """Return the state of a cluster. Raises DevClusterError for a directory without the marker."""
    layout = Layout.at(directory)
    _require_owned(layout)
    settings = layout.load_settings()
    found = processes.running(layout)
    ready = False
    if settings is not None and Component.APISERVER in found:
        with suppress(OSError):  # some certificates do not exist
            ready = admin_client(layout, settings).ready()
    return State(settings, found, ready)


def _settings(layout: Layout, options: UpOptions, found: dict[Component, Process]) -> Settings:
    """Return the stored settings, changed by the options; new ones for a new cluster."""
    stored = layout.load_settings()
    if stored is None:
        if found:
            raise DevClusterError(
                f"processes of a cluster in {layout.directory} run without its files: "
                "end them with `pykubelet dev cluster down`"
            )
        fresh = new_settings(options.port or DEFAULT_PORT)
        return msgspec.structs.replace(
            fresh,
            signing_duration=options.signing_duration or YEAR,
            audit=bool(options.audit),
            verify_kubelets=bool(options.verify_kubelets),
        )
    overrides = {name: value for name in UpOptions.__slots__ if (value := getattr(options, name)) is not None}
    changed = msgspec.structs.replace(stored, **overrides)
    if found and changed != stored:
        names = " ".join(
            f"--{name.replace('_', '-')}" for name in overrides if _differs(stored, changed, name)
        )
        raise DevClusterError(
            f"a cluster already runs in {layout.directory} with another {names}: "
            "remove it first with `pykubelet dev cluster down`"
        )
    if not found:
        # Only the cluster's own processes use these ports, and the host's address may have changed.
        fresh = new_settings(changed.port)
        changed = msgspec.structs.replace(
            changed,
            address=fresh.address,
            etcd_port=fresh.etcd_port,
            etcd_peer_port=fresh.etcd_peer_port,
        )
    return changed


def _differs(old: Settings, new: Settings, name: str) -> bool:
    return bool(getattr(old, name) != getattr(new, name))


def _stop_all(layout: Layout, report: Callable[[str], None]) -> bool:
    found = processes.running(layout)
    for component in reversed(Component):
        if component in found:
            report(f"Stopping {component}")
            # No grace period: the data is about to be removed.
            if not processes.stop_process(found[component], grace=0):
                raise DevClusterError(f"{component} (pid {found[component].pid}) does not end: see dmesg")
    return bool(found)


def _require_owned(layout: Layout) -> None:
    directory = layout.directory
    if not os.path.lexists(directory) or layout.marker.is_file():
        return
    try:
        empty = {path.name for path in directory.iterdir()} <= _IGNORED_ENTRIES
    except OSError as err:
        raise DevClusterError(f"data directory {directory} cannot be used: {err.strerror}") from err
    if not empty:
        raise DevClusterError(
            f"{directory} was not made by `pykubelet dev cluster` (it has no {layout.marker.name} file): "
            "nothing in it is touched; choose another --data-dir, or remove it yourself"
        )


def _create_marker(layout: Layout) -> None:
    directory = layout.directory
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if not layout.marker.exists():
            layout.marker.write_text(_MARKER_TEXT)
    except FileNotFoundError:
        raise DevClusterError(
            f"data directory {directory} cannot be made: run 'mkdir -p {directory.parent}' first"
        ) from None
    except OSError as err:
        raise DevClusterError(
            f"data directory {directory} cannot be written ({err.strerror}): "
            "run it with sudo, or choose another --data-dir"
        ) from err


@contextmanager
def _hold_lock(layout: Layout, purpose: str) -> Iterator[None]:
    """Hold the lock, so that no other process starts or removes the cluster."""
    fd = _lock(layout)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{purpose} (pid {os.getpid()})".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _lock(layout: Layout) -> int:
    while True:
        try:
            fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as err:
            reason = "no permission: run it with sudo" if err.errno == errno.EACCES else err.strerror
            raise DevClusterError(f"{layout.lock} cannot be opened: {reason}") from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 64, 0).decode(errors="replace") or "another command"
            os.close(fd)
            raise DevClusterError(
                f"`pykubelet dev cluster {owner}` is at work on {layout.directory}: wait until it is done"
            ) from None
        # A `down` may have removed the file between open and flock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), layout.lock.stat()):
                return fd
        os.close(fd)

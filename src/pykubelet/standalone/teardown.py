"""Removal of a private runtime: everything that it created, whatever state it is in.

Pods are first removed through CRI, so that the CNI plugins release their resources. Then everything is
removed by name and by path, which also works if containerd is broken or uninstalled, or the host was
rebooted in between. Every step is idempotent: an interrupted `down` is completed by the next one. The data
directory is removed last and its marker at the very end, so that the remains can always be recognized.

`leftovers` inspects the present state of the host (processes, mounts, cgroups, links, iptables, files), not
stored state, so that `down` can find what to remove and verify that it is gone.

IPv4 forwarding, which the bridge plugin enables for the whole host, stays enabled, because other software
may rely on it by now.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pykubelet.cri.connect import RuntimeConnection
from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.linux import iptables
from pykubelet.linux import network as links
from pykubelet.linux.host_info import boot_id
from pykubelet.linux.mounts import mounts_below, plan_unmounts, read_mounts, remove_tree, unmount
from pykubelet.linux.processes import (
    CommandError,
    Process,
    bound_unix_sockets,
    end,
    find_process,
    list_processes,
    run,
)
from pykubelet.logs import get_logger
from pykubelet.standalone.daemon import Daemon, find_daemons, stop_orphans
from pykubelet.standalone.data_dir import (
    SHARED_DIRECTORIES,
    State,
    hold_lock,
    is_owned,
    load_state,
    lock_owner,
    require_owned,
    save_state,
)
from pykubelet.standalone.instance import NAMESPACE, AlreadyRunning, EmbeddedError, Instance
from pykubelet.standalone.instance_registry import open_registry
from pykubelet.standalone.requirements import inspect_host
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
SHIM_SOCKETS = Path("/run/containerd/s")
CNI_RESULTS = Path("/var/lib/cni/results")
_ID = r"[0-9a-f]{64}"


async def leftovers(instance: Instance, *, keep_data: bool = False) -> list[str]:
    """Return one line for each existing object of this private runtime; empty if nothing is left.

    With `keep_data` the data directory itself may exist.
    """
    found = [f"containerd with pid {process.pid}" for process in find_daemons(instance)]
    found += [f"shim with pid {process.pid}" for process in find_shims(instance)]
    for tree in find_cgroups(instance):
        found.append(f"cgroup {tree}")
        found += [f"process {pid} in cgroup {tree}" for pid in sorted(cgroup_tree.members(tree))]
    found += [f"mount {mount.point}" for mount in mounts_below(read_mounts(), instance.data_dir)]
    found += [f"network link {port}" for port in links.bridge_ports(instance.bridge)]
    if links.link_exists(instance.bridge):
        found.append(f"network link {instance.bridge}")
    traces = await iptables.network_traces(instance.name, find_ids(instance))
    found += [f"packet filter rule {trace}" for trace in traces]
    found += [f"file {path}" for path in find_cni_results(instance)]
    found += [f"file {path}" for path in shim_sockets(instance, find_ids(instance)) if path.exists()]
    if not keep_data and os.path.lexists(instance.marker):
        found.append(f"directory {instance.data_dir}")
    return found


def find_shims(instance: Instance) -> list[Process]:
    """Return the shim processes of this private runtime."""
    address = str(instance.socket)
    return [
        process
        for process in list_processes()
        if process.argv
        and Path(process.argv[0]).name.startswith("containerd-shim")
        and _option(process, "-address") == address
    ]


def find_cni_plugins(ids: set[str]) -> list[Process]:
    """Return the CNI plugins that run for these sandboxes, with the processes that they have started.

    A plugin outlives a containerd that is killed, and may create an empty iptables chain again.
    """
    markers = {f"CNI_CONTAINERID={id}".encode() for id in ids}
    found = []
    for process in list_processes():
        with suppress(OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if not markers.isdisjoint(variables):
                found.append(process)
    return found


def find_cgroups(instance: Instance) -> list[Path]:
    """Return the cgroups of this private runtime in every hierarchy, for both cgroup drivers."""
    return [
        tree for name in (instance.name, systemd_slice(instance)) for tree in cgroup_tree.find_trees(name)
    ]


def systemd_slice(instance: Instance) -> str:
    """Return the cgroup root's name with the systemd driver, where a dash would separate a parent slice."""
    return instance.name.replace("-", "_") + ".slice"


def find_cni_results(instance: Instance) -> list[Path]:
    """Return libcni's result files of this private runtime's pods."""
    # The name of another private runtime may begin with this one, so a prefix match is not enough.
    name_pattern = re.compile(rf"{re.escape(instance.name)}-({_ID})-[^/]+")
    names = _names(CNI_RESULTS)
    ids = {match[1] for name in names if (match := name_pattern.fullmatch(name))} | find_ids(instance)
    pattern = name_pattern.pattern + "|" + "|".join(f"cni-loopback-{id}-lo" for id in ids)
    return sorted(CNI_RESULTS / name for name in names if re.fullmatch(pattern, name))


def find_ids(instance: Instance) -> set[str]:
    """Return the IDs of all containers and sandboxes that have files or a shim."""
    cri = instance.containerd_root / "io.containerd.grpc.v1.cri"
    directories = [
        cri / "sandboxes",
        cri / "containers",
        instance.containerd_state / "io.containerd.grpc.v1.cri" / "sandboxes",
        instance.containerd_state / "io.containerd.runtime.v2.task" / NAMESPACE,
        runc_root(instance),
    ]
    seen = {name for directory in directories for name in _names(directory)}
    seen |= {shim_id(process) for process in find_shims(instance)}
    return {name for name in seen if re.fullmatch(_ID, name)}


def shim_sockets(instance: Instance, ids: set[str]) -> list[Path]:
    """Return the paths of the shim sockets of these containers, by containerd's own rule."""
    return [
        SHIM_SOCKETS / hashlib.sha256(f"{instance.socket}/{NAMESPACE}/{id}".encode()).hexdigest()
        for id in sorted(ids)
    ]


def dead_sockets(sockets: Iterable[Path]) -> list[Path]:
    """Return the sockets that exist but are not bound by any process, so that none can be in use."""
    existing = [path for path in sockets if path.is_socket()]
    bound = bound_unix_sockets()
    return [path for path in existing if str(path) not in bound]


def runc_root(instance: Instance) -> Path:
    """Return the directory in which runc stores the state of the containers, one directory each."""
    return instance.containerd_state / "runc" / NAMESPACE


def shim_id(shim: Process) -> str:
    """Return the ID of the sandbox or container that a shim was started for."""
    return _option(shim, "-id")


def _option(process: Process, name: str) -> str:
    try:
        return process.argv[process.argv.index(name) + 1]
    except (ValueError, IndexError):
        return ""


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


Report = Callable[[str], None]
KUBELET_GRACE = 20.0
_MAX_CONCURRENT_REMOVALS = 4
_START_TIMEOUT = 15.0


async def down(instance: Instance, report: Report, *, keep_data: bool = False) -> list[str]:
    """Stop the kubelet of a data directory and remove everything of it.

    With `keep_data` its files stay: manifests, images, logs and volumes, from which the next `up` starts the
    pods again.
    `report` is called with a line per step. Return what could not be removed, one line each; empty if nothing
    is left. Raises EmbeddedError when the directory is not pykubelet's or another `down` is running.
    """
    if os.geteuid() != 0:
        raise EmbeddedError("root is needed to remove containers: use sudo")
    require_owned(instance)
    if not is_owned(instance):
        await erase(instance, report)
        return await leftovers(instance)
    await _stop_kubelet(instance, report)
    with hold_lock(instance, "down"):
        _record_ids(instance)
        await _remove_pods(instance, report)
        await erase(instance, report, keep_data=keep_data)
    remaining = await leftovers(instance, keep_data=keep_data)
    # Without its marker `leftovers` does not report the directory.
    if instance.data_dir.is_dir() and not is_owned(instance) and not instance.data_dir.is_mount():
        remaining.append(f"directory {instance.data_dir}")
    return remaining


async def erase(instance: Instance, report: Report = log.info, *, keep_data: bool = False) -> None:
    """Remove everything by name and by path, without CRI; the caller holds the lock.

    With `keep_data` the files of the data directory stay.
    Failures are logged and skipped; `leftovers` reports what remains.
    """
    stored = _state(instance)
    ids = find_ids(instance) | set(stored.removing if stored is not None else ())
    with _log_failure("stop containerd"):
        await stop_orphans(instance)
    for plugin in find_cni_plugins(ids):
        await end(plugin, grace=0)
    for id in sorted(ids):
        with _log_failure("remove the container"):
            await delete_container(instance, id)
    for shim in find_shims(instance):
        await end(shim, grace=0)
    await _remove_cgroups(instance)
    await asyncio.to_thread(_unmount_all, instance)
    for path in [*find_cni_results(instance), *shim_sockets(instance, ids)]:
        with _log_failure("remove the file"):
            path.unlink(missing_ok=True)
    # A private runtime that starts now must not record the objects being removed as foreign.
    async with open_registry() as registry:
        # Shared objects are removed with the last private runtime: plugins of the others may be using them.
        shared = None if registry.other_states(instance) else stored
        chains = iptables.SHARED_CHAINS if shared is None else shared.found_chains
        await _remove_network(instance, ids, keep_chains=chains, sweep=shared is not None)
        if shared is not None:
            _remove_outside(shared)
        registry.unregister(instance)
    if is_owned(instance) and not keep_data:
        report(f"Removing {instance.data_dir}")
        with _log_failure("remove the data directory"):
            await asyncio.to_thread(_remove_directory, instance)


def _record_ids(instance: Instance) -> None:
    """Store the IDs of all containers and sandboxes, for a `down` that follows an interrupted one."""
    stored, ids = _state(instance), find_ids(instance)
    if stored is not None and not ids.issubset(stored.removing):
        stored.removing = sorted(ids | set(stored.removing))
        save_state(instance, stored)


async def _stop_kubelet(instance: Instance, report: Report) -> None:
    for _ in range(50):
        found = lock_owner(instance)
        if found is None:
            return
        if found.purpose == "down":
            raise AlreadyRunning(
                f"{instance.data_dir} is already being removed with pid {found.pid}: wait until that is done",
                found.pid,
            )
        if found.pid == os.getpid():
            raise EmbeddedError(f"this process itself runs on {instance.data_dir}: stop that first")
        if found.pid and (process := find_process(found.pid)):
            report(f"Stopping the agent with pid {found.pid}")
            if not await end(process, grace=KUBELET_GRACE):
                raise EmbeddedError(f"the agent with pid {found.pid} cannot be stopped, not even killed")
        # The pid is written shortly after locking, and the lock is released shortly after the exit.
        await asyncio.sleep(0.1)


async def _remove_pods(instance: Instance, report: Report) -> None:
    """Remove all pods through CRI, with a containerd started for this purpose, if there are any."""
    stored = _state(instance)
    # containerd drops shims that it finds dead, and with them the paths of their sockets.
    for path in dead_sockets(shim_sockets(instance, find_ids(instance))):
        path.unlink(missing_ok=True)
    if not find_ids(instance) or stored is None or stored.boot_id != boot_id():
        return
    try:
        host = await finish_in_thread(inspect_host)
        daemon = Daemon(instance, host, start_timeout=_START_TIMEOUT)
        await daemon.start()
    except (EmbeddedError, OSError) as err:
        report(f"containerd does not start ({err}): removing its pods without it")
        return
    try:
        async with await daemon.connect() as cri:
            sandboxes = [sandbox.id for sandbox in await cri.runtime.list_pod_sandbox()]
            if sandboxes:
                report(f"Removing {len(sandboxes)} pod{'' if len(sandboxes) == 1 else 's'}")
            limiter = asyncio.Semaphore(_MAX_CONCURRENT_REMOVALS)
            async with asyncio.TaskGroup() as tasks:
                for id in sandboxes:
                    tasks.create_task(_remove_pod(cri, id, limiter, report), name=f"remove-{id[:12]}")
    except CriError as err:
        report(f"containerd does not remove its pods ({err}): removing them without it")
    finally:
        await daemon.stop()


async def _remove_pod(
    cri: RuntimeConnection, sandbox: str, limiter: asyncio.Semaphore, report: Report
) -> None:
    async with limiter:
        try:
            with suppress(NotFound):
                await cri.runtime.stop_pod_sandbox(sandbox)
                await cri.runtime.remove_pod_sandbox(sandbox)
        except CriError as err:
            report(
                f"containerd does not remove the pod {sandbox[:12]} ({err}): removing it without containerd"
            )


async def delete_container(instance: Instance, id: str, runc: str = "runc") -> None:
    """Kill and delete a container without containerd, if runc knows it. Raises CommandError."""
    if (runc_root(instance) / id).is_dir():
        await run(runc, "--root", str(runc_root(instance)), "delete", "--force", id)


async def _remove_cgroups(instance: Instance) -> None:
    if find_cgroups(instance) and Path("/run/systemd/system").is_dir():
        with suppress(CommandError):
            await run("systemctl", "stop", systemd_slice(instance))
    for tree in find_cgroups(instance):
        with _log_failure("empty and remove the cgroup"):
            await cgroup_tree.kill_members(tree)
            await cgroup_tree.remove(tree)


def _unmount_all(instance: Instance) -> None:
    # Unmounting can reveal mounts below, so several rounds may be needed.
    for _ in range(10):
        points = plan_unmounts(read_mounts(), instance.data_dir)
        if not points:
            return
        for point in points:
            with _log_failure("unmount"):
                try:
                    unmount(point)
                except OSError:
                    unmount(point, detach=True)


async def _remove_network(
    instance: Instance, ids: set[str], *, keep_chains: Collection[str], sweep: bool
) -> None:
    for link in [*links.bridge_ports(instance.bridge), instance.bridge]:
        if links.link_exists(link):
            with _log_failure("remove the network link"):
                await links.delete_link(link)
    with _log_failure("remove packet filter rules"):
        await iptables.remove_network(instance.name, sandboxes=ids, keep_chains=keep_chains, sweep=sweep)


def _remove_outside(stored: State) -> None:
    """Remove the shared directories that private runtimes created, if they are empty."""
    if str(SHIM_SOCKETS) not in stored.found_paths and SHIM_SOCKETS.is_dir():
        # Sockets of shims that crashed while a kubelet was running.
        for path in dead_sockets(SHIM_SOCKETS.iterdir()):
            path.unlink(missing_ok=True)
    for directory in SHARED_DIRECTORIES:
        if str(directory) not in stored.found_paths:
            with suppress(OSError):
                directory.rmdir()


def _remove_directory(instance: Instance) -> None:
    """Delete the contents of the data directory, with state, marker and lock at the end.

    The directory itself stays if a file system is mounted on it, which belongs to the administrator.
    """
    mounted = instance.data_dir.is_mount()
    last = (instance.state, instance.marker, instance.lock)
    for path in sorted(instance.data_dir.iterdir()):
        if path not in last and not (mounted and path.name == "lost+found"):
            remove_tree(path)
    for path in last:
        path.unlink(missing_ok=True)
    if not mounted:
        instance.data_dir.rmdir()


def _state(instance: Instance) -> State | None:
    try:
        return load_state(instance)
    except EmbeddedError:
        # Without the state it is unknown what existed before, so shared objects are kept.
        return None


@contextmanager
def _log_failure(task: str) -> Iterator[None]:
    """Log the failure of a step and continue: one failure must not prevent the other steps."""
    try:
        yield
    except (OSError, CommandError, EmbeddedError) as err:
        log.error(err, f"Failed to {task}")

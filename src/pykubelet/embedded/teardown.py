"""Removing a private runtime: everything that it ever made, whatever state it is in.

First politely, through CRI, so that the CNI plugins free what they took. Then by force, by name
and by path, which also works when containerd is broken, was removed, or the machine was restarted
in between. Every step may find its work already done: an interrupted `down` is finished by the
next. The data directory goes last and its marker at the very end, so that what is left can always
be recognised.

Forwarding of IPv4 packets, which the bridge plugin switches on for the whole machine, stays on:
nobody can know who else relies on it by now.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError, NotFound
from pykubelet.embedded import claim, needs, state
from pykubelet.embedded.daemon import Daemon, stop_strays
from pykubelet.embedded.errors import AlreadyRunning, EmbeddedError
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.leftovers import (
    SHIM_SOCKETS,
    dead_sockets,
    find_cgroups,
    find_cni_plugins,
    find_cni_results,
    find_ids,
    find_shims,
    leftovers,
    runc_root,
    shim_sockets,
    systemd_slice,
)
from pykubelet.embedded.lock import hold, holder
from pykubelet.embedded.registry import open_registry
from pykubelet.host import cgroup_tree, iptables, links
from pykubelet.host.clock import boot_id
from pykubelet.host.mounts import plan_unmounts, read_mounts, remove_tree, unmount
from pykubelet.host.processes import CommandError, end, find_process, run
from pykubelet.logs import get_logger

log = get_logger(__name__)

Say = Callable[[str], None]

AGENT_GRACE = 20.0
_PODS_AT_ONCE = 4
_START_TIMEOUT = 15.0


async def down(instance: Instance, say: Say) -> list[str]:
    """Stop the agent of a data directory and remove everything of it; `say` gets a line per step.

    Returns what could not be removed, one line each; empty means that nothing is left. Raises
    EmbeddedError when the directory is not ours or another `down` is at work.
    """
    if os.geteuid() != 0:
        raise EmbeddedError("root is needed to remove containers: use sudo")
    claim.require_ours(instance)
    if not claim.is_ours(instance):
        await erase(instance, say)
        return await leftovers(instance)
    await _stop_agent(instance, say)
    with hold(instance, "down"):
        _record_ids(instance)
        await _remove_pods(instance, say)
        await erase(instance, say)
    left = await leftovers(instance)
    # Without its marker it no longer shows as ours, but it was.
    if instance.data_dir.is_dir() and not claim.is_ours(instance) and not instance.data_dir.is_mount():
        left.append(f"directory {instance.data_dir}")
    return left


async def erase(instance: Instance, say: Say = log.info) -> None:
    """Remove everything by name and by path, without asking any runtime; the caller holds the lock.

    What resists is logged and left; `leftovers` shows it.
    """
    kept = _state(instance)
    ids = find_ids(instance) | set(kept.removing if kept is not None else ())
    with _going_on("stop containerd"):
        await stop_strays(instance)
    for plugin in find_cni_plugins(ids):
        await end(plugin, grace=0)
    for id in sorted(ids):
        with _going_on("remove the container"):
            await _delete_container(instance, id)
    for shim in find_shims(instance):
        await end(shim, grace=0)
    await _remove_cgroups(instance)
    await asyncio.to_thread(_unmount_all, instance)
    for path in [*find_cni_results(instance), *shim_sockets(instance, ids)]:
        with _going_on("remove the file"):
            path.unlink(missing_ok=True)
    # One that starts now must not take what we are about to remove for somebody else's.
    async with open_registry() as registry:
        # What all of us share goes with the last of us: the others' plugins may be using it right now.
        shared = None if registry.others(instance) else kept
        chains = iptables.SHARED_CHAINS if shared is None else shared.found_chains
        await _remove_network(instance, ids, keep_chains=chains, sweep=shared is not None)
        if shared is not None:
            _remove_outside(shared)
        registry.leave(instance)
    if claim.is_ours(instance):
        say(f"Removing {instance.data_dir}")
        with _going_on("remove the data directory"):
            await asyncio.to_thread(_remove_directory, instance)


def _record_ids(instance: Instance) -> None:
    """Store the ids of all containers and sandboxes, for a `down` that follows an interrupted one."""
    kept, ids = _state(instance), find_ids(instance)
    if kept is not None and not ids.issubset(kept.removing):
        kept.removing = sorted(ids | set(kept.removing))
        state.save(instance, kept)


async def _stop_agent(instance: Instance, say: Say) -> None:
    for _ in range(50):
        found = holder(instance)
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
            say(f"Stopping the agent with pid {found.pid}")
            if not await end(process, grace=AGENT_GRACE):
                raise EmbeddedError(f"the agent with pid {found.pid} cannot be stopped, not even killed")
        # Its pid is written a moment after the lock is taken, and the lock falls a moment after the end.
        await asyncio.sleep(0.1)


async def _remove_pods(instance: Instance, say: Say) -> None:
    """Remove all pods through a containerd that is started for this alone, if there is any pod."""
    kept = _state(instance)
    # containerd forgets shims that it finds dead, and with them where their sockets are.
    for path in dead_sockets(shim_sockets(instance, find_ids(instance))):
        path.unlink(missing_ok=True)
    if not find_ids(instance) or kept is None or kept.boot_id != boot_id():
        return
    try:
        daemon = Daemon(instance, needs.inspect_machine(), start_timeout=_START_TIMEOUT)
        await daemon.start()
    except (EmbeddedError, OSError) as err:
        say(f"containerd does not start ({err}): removing its pods without it")
        return
    try:
        async with await daemon.connect() as cri:
            sandboxes = [sandbox.id for sandbox in await cri.runtime.list_pod_sandbox()]
            if sandboxes:
                say(f"Removing {len(sandboxes)} pod{'' if len(sandboxes) == 1 else 's'}")
            turn = asyncio.Semaphore(_PODS_AT_ONCE)
            async with asyncio.TaskGroup() as tasks:
                for id in sandboxes:
                    tasks.create_task(_remove_pod(cri, id, turn, say), name=f"remove-{id[:12]}")
    except CriError as err:
        say(f"containerd does not remove its pods ({err}): removing them without it")
    finally:
        await daemon.stop()


async def _remove_pod(cri: Cri, sandbox: str, turn: asyncio.Semaphore, say: Say) -> None:
    async with turn:
        try:
            with suppress(NotFound):
                await cri.runtime.stop_pod_sandbox(sandbox)
                await cri.runtime.remove_pod_sandbox(sandbox)
        except CriError as err:
            say(f"containerd does not remove the pod {sandbox[:12]} ({err}): removing it without containerd")


async def _delete_container(instance: Instance, id: str) -> None:
    if (runc_root(instance) / id).is_dir():
        await run("runc", "--root", str(runc_root(instance)), "delete", "--force", id)


async def _remove_cgroups(instance: Instance) -> None:
    if find_cgroups(instance) and Path("/run/systemd/system").is_dir():
        with suppress(CommandError):
            await run("systemctl", "stop", systemd_slice(instance))
    for tree in find_cgroups(instance):
        with _going_on("empty and remove the cgroup"):
            await cgroup_tree.kill_members(tree)
            await cgroup_tree.remove(tree)


def _unmount_all(instance: Instance) -> None:
    # Unmounting can uncover what lay below, hence more than one round.
    for _ in range(10):
        points = plan_unmounts(read_mounts(), instance.data_dir)
        if not points:
            return
        for point in points:
            with _going_on("unmount"):
                try:
                    unmount(point)
                except OSError:
                    unmount(point, detach=True)


async def _remove_network(
    instance: Instance, ids: set[str], *, keep_chains: Collection[str], sweep: bool
) -> None:
    for link in [*links.bridge_ports(instance.bridge), instance.bridge]:
        if links.link_exists(link):
            with _going_on("remove the network link"):
                await links.delete_link(link)
    with _going_on("remove packet filter rules"):
        await iptables.remove_network(instance.name, sandboxes=ids, keep_chains=keep_chains, sweep=sweep)


def _remove_outside(kept: state.State) -> None:
    """Remove the directories that exist because of us, if they serve nobody else by now."""
    if str(SHIM_SOCKETS) not in kept.found_paths and SHIM_SOCKETS.is_dir():
        # Shims that crashed while an agent ran left these.
        for path in dead_sockets(SHIM_SOCKETS.iterdir()):
            path.unlink(missing_ok=True)
    for folder in state.OUTSIDE:
        if str(folder) not in kept.found_paths:
            with suppress(OSError):
                folder.rmdir()


def _remove_directory(instance: Instance) -> None:
    """Delete the data directory's content and at last the marker.

    The directory itself stays when a file system is mounted on it: that is its owner's.
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


def _state(instance: Instance) -> state.State | None:
    try:
        return state.load(instance)
    except EmbeddedError:
        # Without it we cannot know what was here before us, so that stays.
        return None


@contextmanager
def _going_on(task: str) -> Iterator[None]:
    """Log what a step could not do and go on: one thing that resists must not keep the others."""
    try:
        yield
    except (OSError, CommandError, EmbeddedError) as err:
        log.error(err, f"Could not {task}")

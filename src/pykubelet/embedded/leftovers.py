"""What is there of a private runtime on this machine.

Goes by what can be seen now (processes, mounts, cgroups, links, packet filter, files), not by what
was remembered, so that `down` can use it to find its work and to prove that it is done.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pykubelet.embedded.daemon import find_daemons
from pykubelet.embedded.instance import NAMESPACE, Instance
from pykubelet.host import cgroup_tree, iptables, links
from pykubelet.host.mounts import mounts_below, read_mounts
from pykubelet.host.processes import Process, bound_unix_sockets, list_processes

SHIM_SOCKETS = Path("/run/containerd/s")
CNI_RESULTS = Path("/var/lib/cni/results")

_ID = r"[0-9a-f]{64}"


async def leftovers(instance: Instance) -> list[str]:
    """Give one line for each thing of this private runtime that exists; empty means clean."""
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
    if os.path.lexists(instance.marker):
        found.append(f"directory {instance.data_dir}")
    return found


def find_shims(instance: Instance) -> list[Process]:
    """Give the processes that watch over our containers."""
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

    A plugin outlives a containerd that is killed, and may create an empty chain in the packet filter again.
    """
    wanted = {f"CNI_CONTAINERID={id}".encode() for id in ids}
    found = []
    for process in list_processes():
        with suppress(OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if not wanted.isdisjoint(variables):
                found.append(process)
    return found


def find_cgroups(instance: Instance) -> list[Path]:
    """Give our cgroups in every hierarchy, of either cgroup driver."""
    return [
        tree for name in (instance.name, systemd_slice(instance)) for tree in cgroup_tree.find_trees(name)
    ]


def systemd_slice(instance: Instance) -> str:
    """Give the cgroup root as the systemd driver names it: there a dash would mean a parent."""
    return instance.name.replace("-", "_") + ".slice"


def find_cni_results(instance: Instance) -> list[Path]:
    """Give the files in which libcni keeps what our pods' networks look like."""
    # Another private runtime's name may begin with ours, hence the whole form and not a prefix.
    ours = re.compile(rf"{re.escape(instance.name)}-({_ID})-[^/]+")
    names = _names(CNI_RESULTS)
    ids = {match[1] for name in names if (match := ours.fullmatch(name))} | find_ids(instance)
    wanted = ours.pattern + "|" + "|".join(f"cni-loopback-{id}-lo" for id in ids)
    return sorted(CNI_RESULTS / name for name in names if re.fullmatch(wanted, name))


def find_ids(instance: Instance) -> set[str]:
    """Give the ids of all containers and sandboxes of which there is a trace."""
    cri = instance.containerd_root / "io.containerd.grpc.v1.cri"
    folders = [
        cri / "sandboxes",
        cri / "containers",
        instance.containerd_state / "io.containerd.grpc.v1.cri" / "sandboxes",
        instance.containerd_state / "io.containerd.runtime.v2.task" / NAMESPACE,
        runc_root(instance),
    ]
    seen = {name for folder in folders for name in _names(folder)}
    seen |= {_option(process, "-id") for process in find_shims(instance)}
    return {name for name in seen if re.fullmatch(_ID, name)}


def shim_sockets(instance: Instance, ids: set[str]) -> list[Path]:
    """Give where the shims of these containers listen: containerd's own rule."""
    return [
        SHIM_SOCKETS / hashlib.sha256(f"{instance.socket}/{NAMESPACE}/{id}".encode()).hexdigest()
        for id in sorted(ids)
    ]


def dead_sockets(sockets: Iterable[Path]) -> list[Path]:
    """Give those that exist although no shim listens there any more; nobody can be using them."""
    existing = [path for path in sockets if path.is_socket()]
    bound = bound_unix_sockets()
    return [path for path in existing if str(path) not in bound]


def runc_root(instance: Instance) -> Path:
    """Give where runc keeps the state of our containers, one folder each."""
    return instance.containerd_state / "runc" / NAMESPACE


def _option(process: Process, name: str) -> str:
    try:
        return process.argv[process.argv.index(name) + 1]
    except (ValueError, IndexError):
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []

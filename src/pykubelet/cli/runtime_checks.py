"""The doctor's checks of what surrounds the agent: runtime, programs, pod network, ports, packet filter."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pykubelet.cli.doctor_checks import Check, Finding, Patient, fail, ok, split_remedy, warn
from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.lock import holder
from pykubelet.embedded.needs import CNI_FOLDERS, CNI_PLUGINS, PROGRAMS
from pykubelet.host.kernel import read_sysctl
from pykubelet.host.ports import PortHolder, port_holder
from pykubelet.host.processes import search_path

CNI_CONFIG = Path("/etc/cni/net.d")
CNI_SUFFIXES = frozenset({".conf", ".conflist", ".json"})
# Port, what it is for, and whether a node needs it with the default configuration.
PORTS = (
    (10248, "health", True),
    (10250, "the API", True),
    (10255, "the read-only API", False),
    (4194, "old cAdvisor", False),
)
# With a runtime of their own, people bring the runtime's programs, too.
ALWAYS_NEEDED = frozenset({"iptables", "ip"})

_PATIENCE = 5.0


def check_data_dir(patient: Patient) -> list[Finding]:
    """Whether the embedded runtime can live in the data directory."""
    if patient.endpoint is not None:
        return []
    area = "data directory"
    try:
        instance = Instance.at(patient.data_dir)
    except EmbeddedError as err:
        return [fail(area, *split_remedy(err, ": "))]
    if busy := holder(instance):
        return [
            ok(area, f"{instance.data_dir}, in use by 'pykubelet {busy.purpose}' (pid {busy.pid or '?'})")
        ]
    return [ok(area, f"{instance.data_dir}{'' if instance.data_dir.exists() else ', not made yet'}")]


def check_programs(patient: Patient) -> list[Finding]:
    """The programs that are run."""
    wanted = {
        name: package
        for name, package in PROGRAMS.items()
        if patient.endpoint is None or name in ALWAYS_NEEDED
    }
    path = search_path()
    return judge_programs({name: shutil.which(name, path=path) for name in wanted}, wanted)


def judge_programs(found: Mapping[str, str | None], packages: Mapping[str, str]) -> list[Finding]:
    """Judge what is on the search path; `packages` has each program's Debian package."""
    missing = sorted(name for name, place in found.items() if place is None)
    if missing:
        names = " ".join(sorted({packages[name] for name in missing}))
        remedy = f"scripts/setup, or: apt-get install {names}"
        return [fail("programs", f"not installed: {', '.join(missing)}", remedy)]
    return [ok("programs", ", ".join(sorted(found)))]


def check_runtime(patient: Patient) -> list[Finding]:
    """Whether the runtime answers; the embedded one need not run yet."""
    if patient.endpoint is not None:
        return asyncio.run(_ask_runtime(patient.endpoint))
    if _running_node(patient) is None:
        return [ok("runtime", "embedded: 'pykubelet up' starts a private containerd")]
    return asyncio.run(_ask_runtime(Instance.at(patient.data_dir).endpoint))


async def _ask_runtime(endpoint: str) -> list[Finding]:
    # gRPC is heavy, and most of the doctor's work does not need it.
    from prometheus_client import CollectorRegistry

    from pykubelet.api.duration import Duration
    from pykubelet.cri.connect import connect
    from pykubelet.cri.errors import ConnectError, CriError
    from pykubelet.cri.metrics import CriMetrics

    patience, metrics = Duration.of(_PATIENCE), CriMetrics(CollectorRegistry())
    try:
        async with await connect(
            endpoint, timeout=patience, connect_timeout=patience, metrics=metrics
        ) as cri:
            answer = await cri.runtime.status()
            conditions = {
                one.type: "" if one.status else one.message or one.reason or "no reason given"
                for one in answer.status.conditions
            }
            name = f"{cri.version.runtime_name} {cri.version.runtime_version} at {endpoint}"
    except ConnectError as err:
        return [fail("runtime", *split_remedy(err, "; "))]
    except CriError as err:
        return [fail("runtime", f"{endpoint}: {err}", "see the runtime's log")]
    return judge_runtime(name, conditions)


def judge_runtime(name: str, conditions: Mapping[str, str]) -> list[Finding]:
    """Judge a runtime that answered: condition to what is wrong with it ("" for nothing)."""
    found = [ok("runtime", f"{name} speaks CRI v1")]
    if wrong := conditions.get("RuntimeReady"):
        found = [fail("runtime", f"{name} is not ready: {wrong}", "see the runtime's log, and restart it")]
    if wrong := conditions.get("NetworkReady"):
        remedy = f"install a pod network: its configuration goes to {CNI_CONFIG}"
        found.append(warn("runtime", f"the pod network is not ready: {wrong}", remedy))
    return found


def check_cni(patient: Patient) -> list[Finding]:
    """The plugins and the configuration of the pod network."""
    found = judge_cni_plugins({folder: _names(folder) for folder in CNI_FOLDERS})
    if patient.endpoint is None:
        return [*found, ok("CNI configuration", "embedded: 'pykubelet up' writes its own")]
    forwarding = read_sysctl("net/ipv4/ip_forward")
    if forwarding == 0:
        what = "net.ipv4.ip_forward is 0: pods do not reach other machines"
        found.append(
            warn("pod network", what, "sysctl -w net.ipv4.ip_forward=1, unless your pod network sets it")
        )
    return [*found, *judge_cni_config(CNI_CONFIG, _texts(CNI_CONFIG))]


def judge_cni_plugins(folders: Mapping[Path, frozenset[str]]) -> list[Finding]:
    """Judge the plugins that were found in each folder."""
    needed = frozenset(CNI_PLUGINS)
    for folder, names in folders.items():
        if needed <= names:
            return [ok("CNI plugins", f"{len(names)} in {folder}")]
    best = max(folders.values(), key=lambda names: len(needed & names), default=frozenset[str]())
    remedy = "scripts/setup, or: apt-get install containernetworking-plugins"
    what = f"missing: {', '.join(sorted(needed - best))} (looked in {', '.join(map(str, folders))})"
    return [fail("CNI plugins", what, remedy)]


def judge_cni_config(folder: Path, texts: Mapping[str, str]) -> list[Finding]:
    """Judge the network configurations in a folder: file name to text; the first in order is used."""
    area = "CNI configuration"
    if not texts:
        what = f"none in {folder}: pods stay in ContainerCreating"
        return [warn(area, what, "install a pod network (flannel, Calico, Cilium or the like)")]
    name = min(texts)
    try:
        document = json.loads(texts[name])
        network = document["name"]
    except (ValueError, KeyError, TypeError):
        return [
            fail(area, f"{folder / name} is no CNI configuration", "correct or remove it: it comes first")
        ]
    return [ok(area, f"network {network!r} from {folder / name}")]


def check_ports(patient: Patient) -> list[Finding]:
    """The ports that the agent listens on."""
    return judge_ports({port: port_holder(port) for port, *_ in PORTS}, _running_node(patient))


def judge_ports(holders: Mapping[int, PortHolder | None], own: int | None) -> list[Finding]:
    """Judge who holds the ports; `own` is the pid of the node that already runs here, if any."""
    found = []
    for port, purpose, needed in PORTS:
        taken = holders.get(port)
        if taken is None:
            continue
        what = f"{port} ({purpose}) is taken by {taken} on {taken.address}"
        if own and taken.pid == own:
            found.append(ok("ports", f"{port} ({purpose}) is this node's"))
        elif needed:
            found.append(fail("ports", what, "stop it (another kubelet?), or give the agent another port"))
        else:
            found.append(warn("ports", what, "fine as long as the agent's configuration does not use it"))
    free = [str(port) for port, _, _ in PORTS if holders.get(port) is None]
    return [*([ok("ports", f"free: {', '.join(free)}")] if free else []), *found]


def check_packet_filter(_: Patient) -> list[Finding]:
    """Whether iptables really works: the program alone says nothing about the kernel."""
    program = shutil.which("iptables", path=search_path())
    if program is None:
        return [fail("packet filter", "iptables is not installed", "apt-get install iptables")]
    version = _run(program, "--version")
    return judge_packet_filter(version.stdout.strip(), _run(program, "-w", "5", "-t", "nat", "-S"))


def judge_packet_filter(version: str, listing: subprocess.CompletedProcess[str]) -> list[Finding]:
    """Judge by whether the nat table can be listed."""
    area = "packet filter"
    if listing.returncode == 0:
        return [ok(area, f"{version} lists the nat table")]
    why = " ".join(listing.stderr.split()).removeprefix(f"{version}: ") or f"exit code {listing.returncode}"
    remedy = "run as root; load the modules (modprobe ip_tables nf_tables), or switch the backend"
    return [fail(area, f"{version}: {why}", f"{remedy} (update-alternatives --config iptables)")]


def _running_node(patient: Patient) -> int | None:
    """Give the pid of the node that already runs from the data directory."""
    if patient.endpoint is not None:
        return None
    try:
        busy = holder(Instance.at(patient.data_dir))
    except EmbeddedError:
        return None  # check_data_dir tells
    return busy.pid if busy and busy.purpose == "up" else None


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * _PATIENCE, check=False)


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except OSError:
        return frozenset()


def _texts(folder: Path) -> dict[str, str]:
    return {
        name: (folder / name).read_text(errors="replace")
        for name in _names(folder)
        if Path(name).suffix in CNI_SUFFIXES
    }


RUNTIME_CHECKS: tuple[Check, ...] = (
    check_data_dir,
    check_programs,
    check_runtime,
    check_cni,
    check_packet_filter,
    check_ports,
)

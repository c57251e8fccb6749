"""The rig of the conformance suite: a control plane, a container runtime, a registry and one kubelet.

The suite has fixed paths and ports of a kubelet in it, so the rig gives the kubelet `/var/lib/kubelet`,
`/var/log/pods` and `/var/log/containers` as bind mounts in a mount namespace of the run
(`namespace_command`), `/kubepods` as cgroup, and its default ports. All processes end with the run, in
whatever way it ends; the directories, mounts and cgroups are removed by `running_rig`, after SIGINT and
SIGTERM, too.

In the virtual machine (`guest.py`) the rig is configured as upstream's own: with systemd as cgroup driver,
and with cgroups for the kubelet and the runtime (`IN_GUEST`). On this host nothing may be moved to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml

from pykubelet.devcluster.binaries import Binaries as PlanePrograms
from pykubelet.devcluster.binaries import GoBuild, GoModule, ensure_built, find_programs
from pykubelet.devcluster.cluster import START_TIMEOUT
from pykubelet.devcluster.identities import Authority
from pykubelet.devcluster.layout import CLUSTER_DOMAIN
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.standalone.containerd_config import handler_section
from pykubelet.standalone.daemon import find_daemons
from pykubelet.standalone.requirements import inspect_host
from tests.cluster.conftest import running_plane
from tests.conformance.images import (
    BUILDERS,
    MIRRORED,
    SHELL,
    mirror_hosts,
    push_images,
    read_programs,
    split_name,
)
from tests.conformance.table import REFERENCE
from tests.support import newer_runtime
from tests.support.cluster_node import ClusterNode
from tests.support.data_dir import short_dir
from tests.support.image_registry import PROGRAM as REGISTRY_PROGRAM
from tests.support.image_registry import running_registry
from tests.support.node import BIN
from tests.support.plane import Plane
from tests.support.runtime import RunningRuntime, runtime_process
from tests.support.runtime_view import Truth
from tests.vm.machine import MARKER, unit_environment

NODE_NAME = "conformance"
SUITE, GINKGO = "e2e_node.test", "ginkgo"
IN_NAMESPACE = "PYKUBELET_CONFORMANCE_NAMESPACE"
"""Set in the environment of a process that runs in the mount namespace of the run."""
_ROOT = Path("/var/lib/kubelet")
_LOGS = (Path("/var/log/pods"), Path("/var/log/containers"))
_PORT, _HEALTH, _READ_ONLY = 10250, 10248, 10255
_PORTS = (_HEALTH, _READ_ONLY)
KUBELET_CONFIG = "kubelet-config"
"""Name of the kubelet's configuration file, which the suite writes to its working directory."""
_UNIT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HOME", MARKER)
_CGROUP = "kubepods"
_NO_CGO = {"CGO_ENABLED": "0"}
_UPSTREAM = "k8s.io/kubernetes/test"
_API_FLAGS = ("--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",)
"""As the suite's own API server: specs create pods before their namespace has a service account."""
_LENIENT = {"os": "Linux", "kernelSpec": {"versions": [".*"]}}
"""The suite's validation of the host, without kernel options that only distributions' kernels publish."""
_TOKEN_SECONDS = 24 * 3600
_HANDLER = "test-handler"
"""The handler that specs of RuntimeClass expect: another name of runc."""
_HANDLER_SECONDS, _READY_SECONDS, _POLL_SECONDS = 60.0, 90.0, 0.05


@dataclass(frozen=True, slots=True)
class RigOptions:
    """Differences between the rig on this host and in the virtual machine."""

    cgroup_driver: str = "cgroupfs"
    kubelet_cgroup: str = ""
    """Cgroup that the kubelet moves itself to; empty: it stays where it is."""
    kubelet_unit: str = ""
    """Name of the systemd unit of the kubelet, which Serial specs stop and start; empty: it has none."""
    runtime_unit: str = ""
    """Name of the systemd scope of the runtime; empty: it is in the cgroup of the run."""
    repositories: Collection[str] = tuple(BUILDERS)
    """Repositories of the images that the specs pull."""
    slowness: float = 1.0
    """Factor of all time limits."""

    def runtime_prefix(self) -> list[str]:
        """Return the prefix of the runtime's command that starts it in its scope."""
        if not self.runtime_unit:
            return []
        return ["systemd-run", "--scope", "--quiet", "--property=Delegate=yes", f"--unit={self.runtime_unit}"]

    def settings(self) -> dict[str, Any]:
        """Return the fields of the KubeletConfiguration that depend on the host."""
        own = {"kubeletCgroups": self.kubelet_cgroup} if self.kubelet_cgroup else {}
        return {"cgroupDriver": self.cgroup_driver, **own}

    def flags(self) -> list[str]:
        """Return the flags of the kubelet that depend on the host."""
        return [f"--runtime-cgroups=/system.slice/{self.runtime_unit}.scope"] if self.runtime_unit else []


ON_HOST = RigOptions()
IN_GUEST = RigOptions(
    cgroup_driver="systemd",
    kubelet_cgroup="/kubelet.slice",
    kubelet_unit="kubelet-conformance",
    runtime_unit="containerd",
    repositories=("e2e-test-images/agnhost", "e2e-test-images/busybox"),
    slowness=6.0,
)
"""As the suite configures the kubelets that it starts itself on hosts with systemd."""


class RigError(Exception):
    """Raised when the rig cannot be built on this host."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Everything that is built from source for the rig."""

    plane: PlanePrograms
    suite: Path
    """Directory with the suite, ginkgo, agnhost and the stand-ins."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A rig whose node is Ready."""

    binaries: Binaries
    plane: Plane
    node: ClusterNode
    token: str
    """Bearer token of a cluster administrator."""
    scratch: Path
    work: Path
    """Working directory of the suite, with the suite itself and the kubelet's configuration."""
    options: RigOptions

    def suite_environment(self) -> dict[str, str]:
        """Return the environment of the suite, which runs everything with sudo."""
        programs = self.scratch / "programs"
        programs.mkdir(exist_ok=True)
        (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
        (programs / "sudo").chmod(0o755)
        return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def suite_arguments(self) -> list[str]:
        """Return the suite's arguments that make it use this rig instead of starting services."""
        spec = self.scratch / "system-spec.yaml"
        spec.write_text(yaml.safe_dump(_LENIENT))
        settings = self.plane.cluster.settings
        return [
            "--start-services=false",
            "--stop-services=false",
            "--prepull-images=false",
            f"--host=https://{settings.address}:{settings.port}",
            f"--bearer-token={self.token}",
            f"--node-name={self.node.name}",
            f"--container-runtime-endpoint={self.node.instance.endpoint}",
            f"--image-service-endpoint={self.node.instance.endpoint}",
            f"--system-spec-file={spec}",
            f"--dns-domain={CLUSTER_DOMAIN}",
        ]


def suite_module() -> GoModule:
    """Return the Go module of the suite and the programs built from it."""
    return GoModule(
        directory=Path(__file__).parent / "module",
        name="conformance",
        title="the node e2e suite",
        remedy="",
        programs={
            SUITE: GoBuild(f"{_UPSTREAM}/e2e_node", subcommand=("test", "-c")),
            GINKGO: GoBuild("github.com/onsi/ginkgo/v2/ginkgo"),
            "agnhost": GoBuild(f"{_UPSTREAM}/images/agnhost", env=_NO_CGO),
            "nonewprivs": GoBuild(f"{_UPSTREAM}/images/nonewprivs", env=_NO_CGO),
            "standins": GoBuild("./standins", env=_NO_CGO),
        },
    )


def find_binaries(say: Callable[[str], None]) -> Binaries:
    """Return the rig's binaries, building what the cache lacks. Raises NotAvailable.

    With RUNTIME=2 containerd 2.x and runc are built as well, and are the first in PATH.
    """
    newer_runtime.put_first(say)
    return Binaries(find_programs(say), ensure_built(suite_module(), say))


def check_host() -> None:
    """Raise RigError or EmbeddedError when the rig cannot be built here, with the reason and the remedy."""
    if os.geteuid() != 0:
        raise RigError("root is needed to run containers: use sudo")
    for program in (REGISTRY_PROGRAM, str(SHELL), "unshare", "mount", "umount", "ipcmk"):
        if shutil.which(program) is None:
            raise RigError(f"{program} is not installed: run scripts/setup --conformance")
    inspect_host()
    for port in (_PORT, _HEALTH, _READ_ONLY):
        with socket.socket() as probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
            except OSError:
                raise RigError(f"port {port} is in use: stop the kubelet that runs on this host") from None
    for tree in cgroup_tree.find_trees(_CGROUP):
        if cgroup_tree.members(tree):
            raise RigError(f"cgroup {tree} has processes: stop the pods of the kubelet that made it")


def namespace_command(arguments: list[str]) -> list[str]:
    """Return the command that runs this program again in a mount namespace of its own."""
    return ["unshare", "--mount", "--propagation", "private", "--", sys.executable, *arguments]


@contextmanager
def running_rig(
    binaries: Binaries, agent: str, say: Callable[[str], None], options: RigOptions = ON_HOST
) -> Iterator[Rig]:
    """Run a rig with the kubelet `agent` (`ours` or `reference`); it is gone when the block is left.

    Raises RigError, AssertionError with the kubelet's log when the node does not become Ready.
    """
    if os.environ.get(IN_NAMESPACE) != "1":
        raise RigError(f"{IN_NAMESPACE} is not set: start it with `make conformance`")
    with ExitStack() as stack:
        # The run's mounts are its own, and containers need shared ones for mount propagation.
        subprocess.run(["mount", "--make-rshared", "/"], check=True)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyc-", dir="/tmp")))
        stack.enter_context(_cgroups())
        stack.enter_context(undo_host_changes())
        for path in (_ROOT, *_LOGS):
            stack.enter_context(_bound(scratch / path.name, path))
        # The runtime first: its own time limits are for a host that is not busy starting other processes.
        runtime = stack.enter_context(_runtime(options))
        say("Starting the control plane")
        limit = START_TIMEOUT * options.slowness
        plane = stack.enter_context(running_plane(binaries.plane, timeout=limit, api_flags=_API_FLAGS))
        say("Building images and pushing them to the local registry")
        registry = stack.enter_context(running_registry(scratch / "registry"))
        layout = plane.cluster.layout
        authority = Authority(layout.certificate("ca"), layout.key("ca"))
        programs = read_programs(inspect_host(), binaries.suite, authority)
        push_images(registry, programs, _listed_images(binaries, options.repositories))
        for host in MIRRORED:
            directory = runtime.instance.registry_hosts / host
            directory.mkdir(parents=True)
            (directory / "hosts.toml").write_text(mirror_hosts(registry.host))
        _add_handler(runtime, options.cgroup_driver, _HANDLER_SECONDS * options.slowness)
        say(f"Starting the node with the kubelet: {agent}")
        work = scratch / "suite"
        work.mkdir()
        # Ginkgo runs it in its own directory, where it writes the kubelet's configuration.
        (work / SUITE).symlink_to(binaries.suite / SUITE)
        node = _node(plane, runtime, agent, options, work / KUBELET_CONFIG)
        stack.callback(node.truth.close)
        stack.callback(node.kill)
        node.start(wait=False)
        node.wait_registered(_READY_SECONDS * options.slowness)
        yield Rig(binaries, plane, node, _admin_token(plane), scratch, work, options)


@contextmanager
def _runtime(options: RigOptions) -> Iterator[RunningRuntime]:
    with (
        short_dir() as path,
        runtime_process(path, options.cgroup_driver, inside=options.runtime_prefix()) as runtime,
    ):
        try:
            yield runtime
        finally:
            # Before the containers are removed: nothing may be mounted into them any more.
            _unmount_below(_ROOT)


def _add_handler(runtime: RunningRuntime, cgroup_driver: str, seconds: float) -> None:
    """Configure the runtime handler of the suite's RuntimeClass, and wait until containerd has it."""
    instance = runtime.instance
    with instance.containerd_config.open("a") as config:
        config.write(handler_section(instance, inspect_host(), _HANDLER, cgroup_driver=cgroup_driver))
    [daemon] = find_daemons(instance)
    os.kill(daemon.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while all(process.pid == daemon.pid for process in find_daemons(instance)):
        if time.monotonic() > deadline:
            raise RigError(f"containerd did not restart, see {instance.containerd_log}")
        time.sleep(_POLL_SECONDS)
    with contextlib.closing(Truth(runtime.endpoint)) as truth:
        while True:
            try:
                truth.network()
                return
            except grpc.RpcError as err:  # its socket is served before its CRI plugin is initialized
                if time.monotonic() > deadline:
                    raise RigError(f"containerd is not ready after its restart: {err.details()}") from err
            time.sleep(_POLL_SECONDS)


class UnitNode(ClusterNode):
    """A node whose kubelet is a unit of systemd: specs that change its configuration stop and start it."""

    def __init__(
        self,
        plane: Plane,
        runtime: RunningRuntime,
        command: list[str],
        *,
        unit: str,
        reference: bool,
    ) -> None:
        super().__init__(plane, runtime, NODE_NAME, command, _PORTS, root=_ROOT, reference=reference)
        self._unit = f"{unit}.service"
        self._unit_file = Path("/run/systemd/system", self._unit)

    def start(self, *, wait: bool = True) -> None:
        """Start the unit, and return when the kubelet is healthy unless told not to wait."""
        self._unit_file.parent.mkdir(parents=True, exist_ok=True)
        self._unit_file.write_text(unit_text(self.command, self.log, os.environ))
        _systemctl("daemon-reload")
        _systemctl("start", self._unit)
        if wait:
            self.wait("the agent to be healthy", self.is_healthy, _READY_SECONDS * IN_GUEST.slowness)

    def _end(self, number: int) -> int:
        _systemctl("kill", f"--signal={number}", self._unit)
        return 0


def unit_text(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> str:
    """Return the unit of a kubelet whose containers outlive it."""
    kept = {name: value for name, value in environ.items() if name in _UNIT_ENVIRONMENT}
    lines = [
        "[Service]",
        f"ExecStart={shlex.join(command)}",
        f"StandardOutput=append:{log}",
        f"StandardError=append:{log}",
        "KillMode=process",
        "Delegate=yes",
        *unit_environment(kept),
    ]
    return "\n".join(lines) + "\n"


def _systemctl(*arguments: str) -> None:
    subprocess.run(["systemctl", *arguments], check=True)


def _node(plane: Plane, runtime: RunningRuntime, agent: str, options: RigOptions, path: Path) -> ClusterNode:
    """Return the node, whose kubelet's configuration is written to `path`."""
    instance = runtime.instance
    config = kubelet_config(instance.manifests, runtime.endpoint) | options.settings()
    path.write_text(yaml.safe_dump(config))
    reference = plane.cluster.programs.kubelet if agent == REFERENCE else None
    if agent == REFERENCE and reference is None:
        raise RigError("KUBEBUILDER_ASSETS has no kubelet: unset it, and the upstream kubelet is built")
    command = [
        str(reference or BIN / "kubelet"),
        f"--config={path}",
        f"--root-dir={_ROOT}",
        f"--cert-dir={_ROOT}/pki",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={plane.cluster.settings.address}",
        f"--kubeconfig={plane.node_kubeconfig(NODE_NAME)}",
        "-v=4",
        *options.flags(),
    ]
    if reference is not None:
        # Its cadvisor reads the containers' names from containerd, at a fixed path otherwise.
        command.append(f"--containerd={instance.socket}")
    if options.kubelet_unit:
        return UnitNode(plane, runtime, command, unit=options.kubelet_unit, reference=agent == REFERENCE)
    return ClusterNode(plane, runtime, NODE_NAME, command, _PORTS, root=_ROOT, reference=agent == REFERENCE)


def kubelet_config(static_pods: Path, endpoint: str) -> dict[str, Any]:
    """Return the KubeletConfiguration that the suite gives the kubelets that it starts itself."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": endpoint,
        "cgroupRoot": "/",
        "clusterDomain": CLUSTER_DOMAIN,
        "evictionHard": {"memory.available": "250Mi", "nodefs.available": "10%", "nodefs.inodesFree": "5%"},
        "evictionMinimumReclaim": {"nodefs.available": "5%", "nodefs.inodesFree": "5%"},
        "evictionPressureTransitionPeriod": "30s",
        "failCgroupV1": False,
        "failSwapOn": False,
        "fileCheckFrequency": "10s",
        "makeIPTablesUtilChains": False,
        "readOnlyPort": _READ_ONLY,
        "serializeImagePulls": False,
        "staticPodPath": str(static_pods),
        "volumePluginDir": str(_ROOT / "volume-plugins"),
        "volumeStatsAggPeriod": "10s",
    }


def _admin_token(plane: Plane) -> str:
    """Return a bearer token with all permissions: the suite does not use client certificates."""
    account = {"name": "conformance", "namespace": "kube-system"}
    plane.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    group = "rbac.authorization.k8s.io"
    plane.create(
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": account["name"]},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", **account}],
        }
    )
    path = f"{plane.place('serviceaccount', account['namespace'])}/{account['name']}/token"
    request = {"spec": {"expirationSeconds": _TOKEN_SECONDS}}
    answer = plane.request(
        "POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", **request}
    )
    return str(answer["status"]["token"])


def _listed_images(binaries: Binaries, repositories: Collection[str]) -> list[str]:
    command = [str(binaries.suite / SUITE), "--list-images"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd="/tmp", check=True)
    return [name for name in listed.stdout.split() if split_name(name)[0] in repositories]


@contextmanager
def _bound(source: Path, target: Path) -> Iterator[None]:
    """Bind a directory to `target`, which is created if it does not exist and then removed again."""
    source.mkdir()
    made = [path for path in (target, *target.parents) if not path.exists()]
    target.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
        try:
            yield
        finally:
            _unmount_below(target)
            subprocess.run(["umount", "--lazy", str(target)], check=False)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # another process uses it by now
                path.rmdir()


def _unmount_below(directory: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split()[1].replace("\\040", " ") for line in mounts]
    for point in reversed([point for point in points if Path(point).is_relative_to(directory)]):
        if Path(point) != directory:
            subprocess.run(["umount", "--lazy", point], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def _cgroups() -> Iterator[None]:
    """Remove the cgroups of pods when the block is left; `check_host` has seen that they are not others'."""
    try:
        yield
    finally:
        asyncio.run(_remove_cgroups())


async def _remove_cgroups() -> None:
    for tree in cgroup_tree.find_trees(_CGROUP):
        await cgroup_tree.kill_members(tree)
        await cgroup_tree.remove(tree)

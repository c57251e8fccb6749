"""One control plane: command lines, processes, start until it is usable, and stop.

etcd and kube-apiserver are started together, the other two once the API server responds, because they exit
without one. The cluster is usable when a pod can be created: `/readyz` is ok, and the default namespace has
its service account and the ConfigMap of the cluster CA.

The flags are those of kubeadm, with other ports and files. Processes are found by their arguments, not by
pid files, so that a cluster is seen as it is even if its start was killed or a process exited. Signals are
sent through a pidfd, so that they never reach another process with a reused pid.
"""

from __future__ import annotations

import os
import random
import secrets
import select
import signal
import socket
import string
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pykubelet.devcluster.admin_client import (
    UNREACHABLE,
    AdminClient,
    ApiStatusError,
    admin_client,
    bootstrap_objects,
)
from pykubelet.devcluster.binaries import Binaries
from pykubelet.devcluster.identities import LOOPBACK, make_identities
from pykubelet.devcluster.layout import (
    ISSUER,
    POD_CIDR,
    SERVICE_CIDR,
    Component,
    DevClusterError,
    Layout,
    Settings,
)
from pykubelet.linux import HostError
from pykubelet.linux.network import host_address
from pykubelet.linux.processes import Process, environment, find_process, list_processes

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
# What the control plane asks itself says nothing about nodes.
- level: None
  users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"]
  verbs: [get, list, watch]
- level: None
  userGroups: ["system:serviceaccounts:kube-system"]
  verbs: [get, list, watch]
- level: Metadata
"""


def command(component: Component, programs: Binaries, layout: Layout, settings: Settings) -> list[str]:
    """Return the command line of a component."""
    match component:
        case Component.ETCD:
            return [str(programs.etcd), *_etcd(layout, settings)]
        case Component.APISERVER:
            return [str(programs.apiserver), *_apiserver(layout, settings)]
        case Component.CONTROLLER_MANAGER:
            return [str(programs.controller_manager), *_controller_manager(layout, settings)]
        case Component.SCHEDULER:
            return [str(programs.scheduler), *_scheduler(layout)]


def process_marker(component: Component, layout: Layout) -> str:
    """Return the argument that identifies a process as this cluster's."""
    match component:
        case Component.ETCD:
            return f"--data-dir={layout.etcd_data}"
        case Component.APISERVER:
            return f"--tls-cert-file={layout.certificate('apiserver')}"
        case Component.CONTROLLER_MANAGER:
            return f"--kubeconfig={layout.kubeconfig('controller-manager')}"
        case Component.SCHEDULER:
            return f"--kubeconfig={layout.kubeconfig('scheduler')}"


def _etcd(layout: Layout, settings: Settings) -> list[str]:
    clients = f"https://{LOOPBACK}:{settings.etcd_port}"
    peers = f"https://{LOOPBACK}:{settings.etcd_peer_port}"
    pair, authority = _pair(layout, "etcd"), layout.certificate("etcd-ca")
    return [
        process_marker(Component.ETCD, layout),
        "--name=dev",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=dev={peers}",
        f"--cert-file={pair[0]}",
        f"--key-file={pair[1]}",
        "--client-cert-auth",
        f"--trusted-ca-file={authority}",
        f"--peer-cert-file={pair[0]}",
        f"--peer-key-file={pair[1]}",
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={authority}",
        # A single member always wins the election; by default it would wait a second for it.
        "--heartbeat-interval=20",
        "--election-timeout=100",
        "--snapshot-count=10000",
        "--auto-compaction-retention=5m",
        "--logger=zap",
        "--log-level=warn",
    ]


def _apiserver(layout: Layout, settings: Settings) -> list[str]:
    etcd, kubelet, proxy = (
        _pair(layout, name)
        for name in ("apiserver-etcd-client", "apiserver-kubelet-client", "front-proxy-client")
    )
    serving = _pair(layout, "apiserver")
    verifying = [f"--kubelet-certificate-authority={layout.authority}"] if settings.verify_kubelets else []
    auditing = (
        [f"--audit-policy-file={layout.audit_policy}", f"--audit-log-path={layout.audit_log}"]
        if settings.audit
        else []
    )
    return [
        process_marker(Component.APISERVER, layout),
        f"--tls-private-key-file={serving[1]}",
        f"--advertise-address={settings.address}",
        f"--secure-port={settings.port}",
        "--allow-privileged=true",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--enable-bootstrap-token-auth=true",
        f"--client-ca-file={layout.authority}",
        f"--etcd-servers=https://{LOOPBACK}:{settings.etcd_port}",
        f"--etcd-cafile={layout.certificate('etcd-ca')}",
        f"--etcd-certfile={etcd[0]}",
        f"--etcd-keyfile={etcd[1]}",
        f"--kubelet-client-certificate={kubelet[0]}",
        f"--kubelet-client-key={kubelet[1]}",
        *verifying,
        "--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname",
        f"--proxy-client-cert-file={proxy[0]}",
        f"--proxy-client-key-file={proxy[1]}",
        f"--requestheader-client-ca-file={layout.certificate('front-proxy-ca')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={layout.pki / 'sa.pub'}",
        f"--service-account-signing-key-file={layout.key('sa')}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        # By default it waits a minute for watches to end when it is stopped.
        "--shutdown-watch-termination-grace-period=1s",
        *auditing,
        *settings.api_flags,
    ]


def _controller_manager(layout: Layout, settings: Settings) -> list[str]:
    own = layout.kubeconfig("controller-manager")
    return [
        process_marker(Component.CONTROLLER_MANAGER, layout),
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--secure-port=0",
        "--leader-elect=false",
        "--controllers=*,bootstrap-signer-controller,token-cleaner-controller",
        "--use-service-account-credentials=true",
        f"--root-ca-file={layout.authority}",
        f"--service-account-private-key-file={layout.key('sa')}",
        f"--cluster-signing-cert-file={layout.authority}",
        f"--cluster-signing-key-file={layout.key('ca')}",
        f"--cluster-signing-duration={settings.signing_duration}",
        "--allocate-node-cidrs=true",
        f"--cluster-cidr={POD_CIDR}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--cluster-name=dev",
        # It creates this directory, by default below /usr/libexec/kubernetes.
        f"--flex-volume-plugin-dir={layout.directory / 'volume-plugins'}",
        # With the default of 20 requests per second its forty controllers take five seconds to start.
        "--kube-api-qps=500",
        "--kube-api-burst=500",
        *settings.controller_flags,
    ]


def _scheduler(layout: Layout) -> list[str]:
    own = layout.kubeconfig("scheduler")
    return [
        process_marker(Component.SCHEDULER, layout),
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--secure-port=0",
        "--leader-elect=false",
    ]


def _pair(layout: Layout, name: str) -> tuple[str, str]:
    return str(layout.certificate(name)), str(layout.key(name))


_KILL_TIMEOUT = 10.0


def running(layout: Layout) -> dict[Component, Process]:
    """Return the running components of this cluster."""
    found = {}
    marks = {component: process_marker(component, layout) for component in Component}
    for process in list_processes():
        for component, argument in marks.items():
            if argument in process.argv and Path(process.argv[0]).name == component:
                found[component] = process
    return found


def spawn(command: Sequence[str], log: Path, *, owned: bool) -> subprocess.Popen[bytes]:
    """Start a component in its own session, with its output appended to `log`.

    An owned process is killed when the thread that started it ends in any way; others keep running.
    """
    wrapper = ["setpriv", "--pdeathsig", "KILL", "--"] if owned else []
    # The control plane connects only to itself and to nodes, never through a proxy.
    env = {name: value for name, value in environment().items() if not name.lower().endswith("_proxy")}
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*wrapper, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=env,
                start_new_session=True,
            )
    except OSError as err:
        raise DevClusterError(f"{Path(command[0]).name} cannot be started: {err.strerror or err}") from err


def stop_process(process: Process, *, grace: float) -> bool:
    """Terminate a process, kill it after `grace` seconds (0: immediately); return whether it has exited."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        current = find_process(process.pid)
        if current is None or current.start != process.start:
            return True
        if grace > 0 and _signal(fd, signal.SIGTERM, grace):
            return True
        return _signal(fd, signal.SIGKILL, _KILL_TIMEOUT)
    finally:
        os.close(fd)


def last_log_error(log: Path, limit: int = 500) -> str:
    """Return the last error in a component's log, else its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it said nothing"
    nonempty_lines = [line.strip() for line in lines if line.strip()]
    error_lines = [
        line for line in nonempty_lines if line[0] in "EF" or '"level":"fatal"' in line or "rror:" in line
    ]
    return (error_lines or nonempty_lines or ["it said nothing"])[-1][-limit:]


def _signal(fd: int, number: signal.Signals, timeout: float) -> bool:
    """Send a signal and return whether the process exits within `timeout` seconds."""
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


START_TIMEOUT = 120.0
STOP_GRACE = 15.0
_POLL_SECONDS = 0.05
_PORTS = range(20000, 32000)
"""Ports below the kernel's ephemeral range, so that a free port is not taken by an outgoing connection."""
_USABLE = (
    "/api/v1/namespaces/default/serviceaccounts/default",
    "/api/v1/namespaces/default/configmaps/kube-root-ca.crt",
    "/api/v1/namespaces/kube-node-lease",
)
_DEPENDENT_COMPONENTS = (Component.CONTROLLER_MANAGER, Component.SCHEDULER)
_MAX_RESTARTS = 5
"""Maximum number of restarts: on a slow host these components exit before the API server is ready.

They are restarted once it is ready."""


def new_settings(port: int = 0, *, address: str = "") -> Settings:
    """Return the settings of a new cluster: free ports, this host's address, a bootstrap token.

    Raises DevClusterError when the host has no usable address.
    """
    try:
        address = address or str(host_address())
    except HostError as err:
        raise DevClusterError(f"this machine has no address that a node could use: {err}") from err
    # `port` itself may be among the free ones.
    ports = [free for free in free_ports(4) if free != port]
    return Settings(
        address=address,
        port=port or ports[0],
        etcd_port=ports[1],
        etcd_peer_port=ports[2],
        token=f"{_random_string(6)}.{_random_string(16)}",
    )


def free_ports(count: int) -> list[int]:
    """Return ports that are not in use. Raises DevClusterError."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise DevClusterError(f"no free port between {_PORTS.start} and {_PORTS.stop}: stop what listens there")


class DevCluster:
    """A control plane in a directory.

    With `owned`, its processes end with the thread that starts them; else they outlive this process.
    """

    def __init__(self, layout: Layout, settings: Settings, programs: Binaries, *, owned: bool) -> None:
        self.layout = layout
        self.settings = settings
        self.programs = programs
        self._owned = owned
        self._started: dict[Component, subprocess.Popen[bytes]] = {}
        self._api: AdminClient | None = None

    @property
    def server(self) -> str:
        """URL of the API server for other hosts and for pods."""
        return f"https://{self.settings.address}:{self.settings.port}"

    @property
    def api(self) -> AdminClient:
        """Client of the administrator."""
        if self._api is None:
            self._api = admin_client(self.layout, self.settings)
        return self._api

    def prepare(self) -> None:
        """Create all files that the components need; existing CAs and their keys are kept."""
        layout = self.layout
        layout.directory.mkdir(mode=0o700, exist_ok=True)
        make_identities(layout, self.settings)
        layout.audit_policy.write_text(AUDIT_POLICY)
        layout.etcd_data.mkdir(mode=0o700, exist_ok=True)
        self._api = None

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start the components that do not run and return when the cluster is usable.

        Raises DevClusterError; the components that this call started are then stopped.
        """
        present = set(self.running())
        deadline = time.monotonic() + timeout
        try:
            for component in (Component.ETCD, Component.APISERVER):
                if component not in present:
                    self.start_component(component)
            self._wait("the API server to answer", self._is_responding, deadline)
            for component in _DEPENDENT_COMPONENTS:
                if component not in present:
                    self.start_component(component)
            self._wait("the API server to be ready", self.is_ready, deadline)
            self._wait("the first objects to be made", self._make_objects, deadline)
            self._wait("the default namespace to be usable", self._is_usable, deadline)
        except BaseException:
            for component in set(Component) - present:
                self.stop_component(component, grace=0)
            raise

    def stop(self, grace: float = STOP_GRACE) -> None:
        """Stop all components, in reverse order of their start."""
        for component in reversed(Component):
            self.stop_component(component, grace=grace)

    def start_component(self, component: Component) -> None:
        """Start one component."""
        argv = command(component, self.programs, self.layout, self.settings)
        if component is Component.ETCD and not self.settings.durable and _can_skip_fsync(self.programs):
            argv.append("--unsafe-no-fsync")
        self._started[component] = spawn(argv, self.layout.log(component), owned=self._owned)

    def stop_component(self, component: Component, *, grace: float = STOP_GRACE) -> None:
        """Stop one component if it runs; with a grace of 0 it is killed."""
        process = self.running().get(component)
        has_exited = process is None or stop_process(process, grace=grace)
        if (child := self._started.pop(component, None)) is not None:
            child.poll()  # reap the zombie
        if not has_exited:
            raise DevClusterError(f"{component} does not end: it hangs in the kernel, look at dmesg")

    def restart_component(self, component: Component, **changes: object) -> None:
        """Stop one component and start it again, with changed settings if given."""
        self.stop_component(component)
        self.settings = msgspec.structs.replace(self.settings, **changes)
        self.start_component(component)

    def running(self) -> dict[Component, Process]:
        """Return the running components."""
        return running(self.layout)

    def is_ready(self) -> bool:
        """Return whether the API server is ready."""
        return self.api.ready()

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the API server is ready. Raises DevClusterError after `timeout` seconds."""
        self._wait("the API server to be ready", self.is_ready, time.monotonic() + timeout)

    def _is_responding(self) -> bool:
        try:
            self.api.request("GET", "/livez", timeout=5)
        except ApiStatusError:
            return True
        except UNREACHABLE:
            return False
        return True

    def _make_objects(self) -> bool:
        for path, document in bootstrap_objects(self.settings.token):
            try:
                self.api.request("POST", path, document)
            except ApiStatusError as err:
                if err.code != 409:
                    return False
            except UNREACHABLE:
                return False
        return True

    def _is_usable(self) -> bool:
        try:
            for path in _USABLE:
                self.api.request("GET", path)
        except (*UNREACHABLE, ApiStatusError):
            return False
        return True

    def _wait(self, what: str, is_done: Callable[[], bool], deadline: float) -> None:
        restarts_left = _MAX_RESTARTS
        while True:
            checked_at = time.monotonic()
            if is_done():
                return
            for component, child in list(self._started.items()):
                if find_process(child.pid) is not None:
                    continue
                if component in _DEPENDENT_COMPONENTS and not self.is_ready():
                    continue  # it would exit again, and its start delays the API server
                if component not in _DEPENDENT_COMPONENTS or not restarts_left:
                    log_error = last_log_error(self.layout.log(component))
                    raise DevClusterError(f"{component} ended while waiting for {what}: {log_error}")
                restarts_left -= 1
                self.start_component(component)
            if time.monotonic() > deadline:
                log_error = last_log_error(self.layout.log(Component.APISERVER))
                raise DevClusterError(
                    f"waited too long for {what}; kube-apiserver said last: {log_error}; "
                    f"the logs are in {self.layout.directory}"
                )
            # On a slow host a check takes long: half of the time is left to the components.
            time.sleep(max(_POLL_SECONDS, time.monotonic() - checked_at))


def _can_skip_fsync(programs: Binaries) -> bool:
    """Return whether this etcd has the flag --unsafe-no-fsync (from 3.5 on)."""
    done = subprocess.run([programs.etcd, "--help"], capture_output=True, text=True, check=False)
    return "--unsafe-no-fsync" in done.stdout + done.stderr


def _random_string(length: int) -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(length))

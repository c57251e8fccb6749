"""One control plane as a whole: made ready, started, watched until it can be used, stopped.

etcd and kube-apiserver start at once, the other two as soon as the API server answers at all: they
would give up on one that does not. Usable means that a pod can be created: the API server says
`/readyz`, and the default namespace has its service account and the cluster's authority.

The command lines of the four programs: those of kubeadm, on ports and in files of our own.

The control plane's processes: starting them, finding them again, ending them.

They are found by what they were started with, not by pid files, so a cluster whose starter was
killed in the middle, or that lost one of its processes, is seen as it is. A process is signalled
through a pidfd: never another one that got its pid.
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
    admin_api,
    first_objects,
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
    """Give the command that starts a component."""
    match component:
        case Component.ETCD:
            return [str(programs.etcd), *_etcd(layout, settings)]
        case Component.APISERVER:
            return [str(programs.apiserver), *_apiserver(layout, settings)]
        case Component.CONTROLLER_MANAGER:
            return [str(programs.controller_manager), *_controller_manager(layout, settings)]
        case Component.SCHEDULER:
            return [str(programs.scheduler), *_scheduler(layout)]


def mark(component: Component, layout: Layout) -> str:
    """Give the argument by which a process is known to be this cluster's."""
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
        mark(Component.ETCD, layout),
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
        # One member has nobody to lose an election to; by default it would wait a second for one.
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
        mark(Component.APISERVER, layout),
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
        # Or it would wait a minute for watches to end when it is stopped.
        "--shutdown-watch-termination-grace-period=1s",
        *auditing,
        *settings.api_flags,
    ]


def _controller_manager(layout: Layout, settings: Settings) -> list[str]:
    own = layout.kubeconfig("controller-manager")
    return [
        mark(Component.CONTROLLER_MANAGER, layout),
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
        # It makes this folder, which is /usr/libexec/kubernetes/… by default.
        f"--flex-volume-plugin-dir={layout.directory / 'volume-plugins'}",
        # With the default of 20 a second it takes five seconds to start its forty controllers.
        "--kube-api-qps=500",
        "--kube-api-burst=500",
    ]


def _scheduler(layout: Layout) -> list[str]:
    own = layout.kubeconfig("scheduler")
    return [
        mark(Component.SCHEDULER, layout),
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--secure-port=0",
        "--leader-elect=false",
    ]


def _pair(layout: Layout, name: str) -> tuple[str, str]:
    return str(layout.certificate(name)), str(layout.key(name))


_KILL_TIMEOUT = 10.0


def running(layout: Layout) -> dict[Component, Process]:
    """Give the components of this cluster that run now."""
    found = {}
    marks = {component: mark(component, layout) for component in Component}
    for process in list_processes():
        for component, argument in marks.items():
            if argument in process.argv and Path(process.argv[0]).name == component:
                found[component] = process
    return found


def spawn(command: Sequence[str], log: Path, *, owned: bool) -> subprocess.Popen[bytes]:
    """Start a component, with what it says appended to its log.

    Owned ones are killed when the thread that started them ends, in whatever way; the others have a
    session of their own and outlive everybody.
    """
    tied = ["setpriv", "--pdeathsig", "KILL", "--"] if owned else []
    # The control plane talks to itself and to nodes; a proxy for the world outside is none for that.
    env = {name: value for name, value in environment().items() if not name.lower().endswith("_proxy")}
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*tied, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=env,
                start_new_session=True,
            )
    except OSError as err:
        raise DevClusterError(f"{Path(command[0]).name} cannot be started: {err.strerror or err}") from err


def end(process: Process, *, grace: float) -> bool:
    """Ask a process to end, kill it after `grace` seconds (at once with 0); returns whether it is gone."""
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


def last_words(log: Path, limit: int = 500) -> str:
    """Give in one line what a component said last, complaints before chatter."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it said nothing"
    spoken = [line.strip() for line in lines if line.strip()]
    complaints = [line for line in spoken if line[0] in "EF" or '"level":"fatal"' in line or "rror:" in line]
    return (complaints or spoken or ["it said nothing"])[-1][-limit:]


def _signal(fd: int, number: signal.Signals, timeout: float) -> bool:
    """Signal a process and say whether it ends within the time."""
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


START_TIMEOUT = 120.0
STOP_GRACE = 15.0
_LOOK_AGAIN = 0.05
_PORTS = range(20000, 32000)
"""Below what the kernel gives to outgoing connections, so that a free one stays free."""
_USABLE = (
    "/api/v1/namespaces/default/serviceaccounts/default",
    "/api/v1/namespaces/default/configmaps/kube-root-ca.crt",
    "/api/v1/namespaces/kube-node-lease",
)
_THE_OTHERS = (Component.CONTROLLER_MANAGER, Component.SCHEDULER)
_AGAIN = 5
"""How often they are started again: on a slow machine they give up before the API server is ready."""


def new_settings(port: int = 0, *, address: str = "") -> Settings:
    """Choose for a new cluster: free ports, this machine's address, a bootstrap token.

    Raises DevClusterError when the machine has no address to be reached at.
    """
    try:
        address = address or str(host_address())
    except HostError as err:
        raise DevClusterError(f"this machine has no address that a node could use: {err}") from err
    # The one that was given is free, too.
    ports = [free for free in free_ports(4) if free != port]
    return Settings(
        address=address,
        port=port or ports[0],
        etcd_port=ports[1],
        etcd_peer_port=ports[2],
        token=f"{_random_word(6)}.{_random_word(16)}",
    )


def free_ports(count: int) -> list[int]:
    """Give ports that nobody listens on."""
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
    """A control plane in a directory that is ours.

    With `owned`, its processes end with the thread that starts them; else they outlive us.
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
        """The API server's address for everybody but this machine."""
        return f"https://{self.settings.address}:{self.settings.port}"

    @property
    def api(self) -> AdminClient:
        """The admin's line to the API server."""
        if self._api is None:
            self._api = admin_api(self.layout, self.settings)
        return self._api

    def prepare(self) -> None:
        """Make every file that the programs need; authorities and keys that are there already stay."""
        layout = self.layout
        layout.directory.mkdir(mode=0o700, exist_ok=True)
        make_identities(layout, self.settings)
        layout.audit_policy.write_text(AUDIT_POLICY)
        layout.etcd_data.mkdir(mode=0o700, exist_ok=True)
        self._api = None

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start what does not run yet and return when the cluster is usable.

        Raises DevClusterError, and then nothing runs that this call has started.
        """
        present = set(self.running())
        deadline = time.monotonic() + timeout
        try:
            for component in (Component.ETCD, Component.APISERVER):
                if component not in present:
                    self.start_component(component)
            self._wait("the API server to answer", self._answers, deadline)
            for component in _THE_OTHERS:
                if component not in present:
                    self.start_component(component)
            self._wait("the API server to be ready", self.is_ready, deadline)
            self._wait("the first objects to be made", self._make_objects, deadline)
            self._wait("the default namespace to be usable", self._is_usable, deadline)
        except BaseException:
            for component in set(Component) - present:
                self.end_component(component, grace=0)
            raise

    def stop(self, grace: float = STOP_GRACE) -> None:
        """End everything, in the order in which that goes without complaints."""
        for component in reversed(Component):
            self.end_component(component, grace=grace)

    def start_component(self, component: Component) -> None:
        """Start one process."""
        argv = command(component, self.programs, self.layout, self.settings)
        if component is Component.ETCD and not self.settings.durable and _can_skip_fsync(self.programs):
            argv.append("--unsafe-no-fsync")
        self._started[component] = spawn(argv, self.layout.log(component), owned=self._owned)

    def end_component(self, component: Component, *, grace: float = STOP_GRACE) -> None:
        """End one process if it runs; with a grace of 0 as a power cut would."""
        process = self.running().get(component)
        gone = process is None or end(process, grace=grace)
        if (child := self._started.pop(component, None)) is not None:
            child.poll()  # or it would stay as a zombie
        if not gone:
            raise DevClusterError(f"{component} does not end: it hangs in the kernel, look at dmesg")

    def restart_component(self, component: Component, **changes: object) -> None:
        """End one process and start it again, with other settings if some are given."""
        self.end_component(component)
        self.settings = msgspec.structs.replace(self.settings, **changes)
        self.start_component(component)

    def running(self) -> dict[Component, Process]:
        """Give the processes that run now."""
        return running(self.layout)

    def is_ready(self) -> bool:
        """Whether the API server says that it is."""
        return self.api.ready()

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Return when the API server is ready; raises DevClusterError when it is not in time."""
        self._wait("the API server to be ready", self.is_ready, time.monotonic() + timeout)

    def _answers(self) -> bool:
        try:
            self.api.request("GET", "/livez", timeout=5)
        except ApiStatusError:
            return True
        except UNREACHABLE:
            return False
        return True

    def _make_objects(self) -> bool:
        for path, document in first_objects(self.settings.token):
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

    def _wait(self, what: str, look: Callable[[], bool], deadline: float) -> None:
        again = _AGAIN
        while not look():
            for component, child in list(self._started.items()):
                if find_process(child.pid) is not None:
                    continue
                if component not in _THE_OTHERS or not again:
                    told = last_words(self.layout.log(component))
                    raise DevClusterError(f"{component} ended while waiting for {what}: {told}")
                again -= 1
                self.start_component(component)
            if time.monotonic() > deadline:
                told = last_words(self.layout.log(Component.APISERVER))
                raise DevClusterError(
                    f"waited too long for {what}; kube-apiserver said last: {told}; "
                    f"the logs are in {self.layout.directory}"
                )
            time.sleep(_LOOK_AGAIN)


def _can_skip_fsync(programs: Binaries) -> bool:
    """Whether this etcd knows how to be quick instead of safe (from 3.5 on)."""
    done = subprocess.run([programs.etcd, "--help"], capture_output=True, text=True, check=False)
    return "--unsafe-no-fsync" in done.stdout + done.stderr


def _random_word(length: int) -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(length))

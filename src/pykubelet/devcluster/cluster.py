"""One control plane as a whole: made ready, started, watched until it can be used, stopped.

etcd and kube-apiserver start at once, the other two as soon as the API server answers at all: they
would give up on one that does not. Usable means that a pod can be created: the API server says
`/readyz`, and the default namespace has its service account and the cluster's authority.
"""

from __future__ import annotations

import random
import secrets
import socket
import string
import subprocess
import time
from collections.abc import Callable

import msgspec

from pykubelet.devcluster import processes
from pykubelet.devcluster.api import UNREACHABLE, Api, ApiRefusal, admin_api
from pykubelet.devcluster.commands import AUDIT_POLICY, command
from pykubelet.devcluster.errors import DevClusterError
from pykubelet.devcluster.identities import make_identities
from pykubelet.devcluster.layout import Component, Layout, Settings
from pykubelet.devcluster.objects import first_objects
from pykubelet.devcluster.programs import Programs
from pykubelet.host import HostError
from pykubelet.host.addresses import host_address
from pykubelet.host.processes import Process, find_process

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

    def __init__(self, layout: Layout, settings: Settings, programs: Programs, *, owned: bool) -> None:
        self.layout = layout
        self.settings = settings
        self.programs = programs
        self._owned = owned
        self._started: dict[Component, subprocess.Popen[bytes]] = {}
        self._api: Api | None = None

    @property
    def server(self) -> str:
        """The API server's address for everybody but this machine."""
        return f"https://{self.settings.address}:{self.settings.port}"

    @property
    def api(self) -> Api:
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
        self._started[component] = processes.spawn(argv, self.layout.log(component), owned=self._owned)

    def end_component(self, component: Component, *, grace: float = STOP_GRACE) -> None:
        """End one process if it runs; with a grace of 0 as a power cut would."""
        process = self.running().get(component)
        gone = process is None or processes.end(process, grace=grace)
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
        return processes.running(self.layout)

    def is_ready(self) -> bool:
        """Whether the API server says that it is."""
        return self.api.ready()

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Return when the API server is ready; raises DevClusterError when it is not in time."""
        self._wait("the API server to be ready", self.is_ready, time.monotonic() + timeout)

    def _answers(self) -> bool:
        try:
            self.api.request("GET", "/livez", timeout=5)
        except ApiRefusal:
            return True
        except UNREACHABLE:
            return False
        return True

    def _make_objects(self) -> bool:
        for path, document in first_objects(self.settings.token):
            try:
                self.api.request("POST", path, document)
            except ApiRefusal as err:
                if err.code != 409:
                    return False
            except UNREACHABLE:
                return False
        return True

    def _is_usable(self) -> bool:
        try:
            for path in _USABLE:
                self.api.request("GET", path)
        except (*UNREACHABLE, ApiRefusal):
            return False
        return True

    def _wait(self, what: str, look: Callable[[], bool], deadline: float) -> None:
        again = _AGAIN
        while not look():
            for component, child in list(self._started.items()):
                if find_process(child.pid) is not None:
                    continue
                if component not in _THE_OTHERS or not again:
                    told = processes.last_words(self.layout.log(component))
                    raise DevClusterError(f"{component} ended while waiting for {what}: {told}")
                again -= 1
                self.start_component(component)
            if time.monotonic() > deadline:
                told = processes.last_words(self.layout.log(Component.APISERVER))
                raise DevClusterError(
                    f"waited too long for {what}; kube-apiserver said last: {told}; "
                    f"the logs are in {self.layout.directory}"
                )
            time.sleep(_LOOK_AGAIN)


def _can_skip_fsync(programs: Programs) -> bool:
    """Whether this etcd knows how to be quick instead of safe (from 3.5 on)."""
    done = subprocess.run([programs.etcd, "--help"], capture_output=True, text=True, check=False)
    return "--unsafe-no-fsync" in done.stdout + done.stderr


def _random_word(length: int) -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(length))

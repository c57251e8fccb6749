"""The composition root: builds every part of the agent and starts it, in the order a reader expects.

`Kubelet.run` is the start-up of a node agent from top to bottom; each step says so in the log.
Whatever a step opens goes on one exit stack, so stopping is the same list backwards and a start
that fails half-way leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pykubelet import KUBERNETES_VERSION, __version__
from pykubelet.config.load import Loaded
from pykubelet.cri.client import Cri, connect
from pykubelet.cri.errors import CriError, Unimplemented
from pykubelet.cri.metrics import CriMetrics
from pykubelet.cri.runtime_pb2 import CgroupDriver
from pykubelet.host import addresses, cgroups, hostname, lockfile, notify, oom, rlimits, swap
from pykubelet.logs import get_logger
from pykubelet.logs.setup import log_health
from pykubelet.server.configz import configz_document
from pykubelet.server.health import Check, health_routes
from pykubelet.server.http import http_server
from pykubelet.sync.loop import SyncLoop
from pykubelet.sync.runtime_state import RuntimeState
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

CONNECT_SECONDS = 10.0
"""How long a runtime may take to answer at start-up."""


class StartError(Exception):
    """The agent cannot start here; the text is one line with the cause and a remedy."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who this node is on the network."""

    host_name: str
    name: str
    ips: list[addresses.IPAddress]


class Kubelet:
    """One node agent; several can live in one process."""

    def __init__(self, loaded: Loaded) -> None:
        self.flags = loaded.flags
        self.config = loaded.config
        self.gates = loaded.gates
        self.registry = CollectorRegistry()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Ask `run` to end; safe to call at any time and more than once."""
        self._stop.set()

    async def run(self) -> None:
        """Start everything, wait until stopped, and stop everything in reverse order."""
        log.info("Kubelet version", kubeletVersion=f"{KUBERNETES_VERSION}+pykubelet{__version__}")
        async with contextlib.AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(TaskScope())
            await self._take_lock(stack, tasks)
            configz = configz_document(self.config)
            log.v(5).info("KubeletConfiguration", configuration=configz["kubeletconfig"])
            self._choose_mode()
            identity = self._identify()
            self._check_machine()
            self._adjust_process()
            cri = await self._connect_runtime(stack)
            await self._take_cgroup_driver(cri)
            if self._stop.is_set():
                return
            checks = self._start_parts(tasks, cri)
            await self._serve_health(stack, checks)
            notify.ready()
            if interval := notify.watchdog_interval():
                tasks.start(
                    notify.keep_alive(interval, lambda: all(check() is None for check in checks.values())),
                    name="watchdog",
                )
            log.info("Started kubelet", node=identity.name, pid=os.getpid())
            await self._stop.wait()
            log.info("Stopping kubelet")
            notify.stopping()
        log.info("Stopped kubelet")

    async def _take_lock(self, stack: contextlib.AsyncExitStack, tasks: TaskScope) -> None:
        path = self.flags.lock_file
        if not path:
            return
        log.info("Acquiring file lock", path=path)
        lock = await stack.enter_async_context(lockfile.LockFile(path))
        if self.flags.exit_on_lock_contention:
            log.info("Watching for inotify events", path=path)
            tasks.start(self._stop_on_contention(lock), name="lock-contention")

    async def _stop_on_contention(self, lock: lockfile.LockFile) -> None:
        reason = await lock.wait_for_contention()
        log.info("Somebody else wants the lock file: stopping", path=self.flags.lock_file, event=reason)
        self.stop()

    def _choose_mode(self) -> None:
        if self.flags.kubeconfig:
            raise StartError(
                "cluster mode (--kubeconfig) is not part of this version yet: leave the flag out to run standalone"
            )
        log.info("Standalone mode, no API client")

    def _identify(self) -> NodeIdentity:
        host = hostname.node_hostname(self.flags.hostname_override)
        ips = addresses.node_ips(self.flags.node_ip)
        log.info("Node identity", hostName=host, nodeName=host, nodeIPs=[str(ip) for ip in ips])
        return NodeIdentity(host, host, ips)

    def _check_machine(self) -> None:
        mode = cgroups.detect()
        log.info("Cgroups", version=mode.version, driver=self.config.cgroup_driver)
        if mode.version == 1:
            if self.config.fail_cgroup_v1:
                raise StartError(
                    "this machine has cgroup v1 and failCgroupV1 is set: boot with cgroup v2 or set failCgroupV1: false"
                )
            log.warning("cgroup v1 is in maintenance mode: plan to move this node to cgroup v2")
        if refusal := swap.refusal(self.config.fail_swap_on):
            raise StartError(refusal)

    def _adjust_process(self) -> None:
        try:
            oom.set_score(0, self.config.oom_score_adj)
        except OSError as err:
            log.warning(
                "Could not set the OOM score; going on without", score=self.config.oom_score_adj, err=err
            )
        limit = rlimits.raise_open_files(self.config.max_open_files)
        if limit < self.config.max_open_files:
            log.warning(
                "Could not raise the open files limit as far as asked",
                asked=self.config.max_open_files,
                limit=limit,
            )

    async def _connect_runtime(self, stack: contextlib.AsyncExitStack) -> Cri:
        endpoint = self.config.container_runtime_endpoint
        image_endpoint = self.config.image_service_endpoint or endpoint
        log.info("Connecting to the container runtime", endpoint=endpoint, imageEndpoint=image_endpoint)
        cri = await connect(
            endpoint,
            image_endpoint,
            timeout=self.config.runtime_request_timeout,
            metrics=CriMetrics(self.registry),
            connect_seconds=CONNECT_SECONDS,
        )
        stack.push_async_callback(cri.close)
        version = await cri.runtime.version()
        log.info(
            "Container runtime initialized",
            containerRuntime=version.runtime_name,
            version=version.runtime_version,
            apiVersion=version.runtime_api_version,
        )
        return cri

    async def _take_cgroup_driver(self, cri: Cri) -> None:
        """Use the runtime's cgroup driver where it tells: two opinions would strand pods."""
        if not self.gates.enabled("KubeletCgroupDriverFromCRI"):
            return
        try:
            answer = await cri.runtime.runtime_config()
        except Unimplemented:
            log.info("The runtime does not tell its cgroup driver; using the configured one")
            return
        except CriError as err:
            log.error(err, "Could not ask the runtime for its cgroup driver; using the configured one")
            return
        driver = "systemd" if answer.linux.cgroup_driver == CgroupDriver.SYSTEMD else "cgroupfs"
        if driver != self.config.cgroup_driver:
            log.info("Using the runtime's cgroup driver", driver=driver, configured=self.config.cgroup_driver)
            self.config.cgroup_driver = driver

    def _start_parts(self, tasks: TaskScope, cri: Cri) -> dict[str, Check]:
        runtime_state = RuntimeState(cri.runtime.status)
        loop = SyncLoop(runtime_state.errors, self.config.sync_frequency)
        tasks.start(runtime_state.run(), name="runtime-state")
        tasks.start(loop.run(), name="sync-loop")
        return {"ping": lambda: None, "log": log_health, "syncloop": loop.health}

    async def _serve_health(self, stack: contextlib.AsyncExitStack, checks: dict[str, Check]) -> None:
        if self.config.healthz_port > 0:
            server = http_server(
                "health", self.config.healthz_bind_address, self.config.healthz_port, health_routes(checks)
            )
            await stack.enter_async_context(server)

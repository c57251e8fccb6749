"""Builds the page for operators and serves it: the facts that its views show, and its server.

On loopback it is plain HTTP without credentials and read-only; on another address it has the TLS, the
authentication and the authorization of the API. The module is imported only when the port is on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web
from prometheus_client.samples import Sample

from pykubelet import KUBERNETES_VERSION, __version__
from pykubelet.agent.host_setup import StartupError
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.apiserver.certificates.x509 import certificates, lifetime
from pykubelet.cm.capacity import node_capacity
from pykubelet.config.types import KubeletConfiguration
from pykubelet.eviction.report import PressureReport
from pykubelet.images.image_gc import ImageGCError
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.paths import container_log_path, pod_log_dir
from pykubelet.logs import get_logger
from pykubelet.server.api import ApiServerDependencies, https_server
from pykubelet.server.auth.request_auth import AuthConfigError, make_authenticator, make_authorizer
from pykubelet.server.cadvisor_api.routes import cadvisor_api_routes
from pykubelet.server.connections import single_error_scope
from pykubelet.server.listeners import PortError, http_server
from pykubelet.server.metrics.stats_metrics import MAX_SCRAPES_PER_USER, ScrapeLimit
from pykubelet.server.page.facts import (
    AgentFacts,
    Calls,
    DiskFacts,
    HostFinding,
    ImagesFacts,
    LogTail,
    NodeFacts,
    PageSettings,
    PodDetails,
    PodFacts,
    VolumeFacts,
)
from pykubelet.server.page.history import AGENT, NODE, SLOT_SECONDS, History, Key, own_interfaces
from pykubelet.server.page.log_tail import read_log_tail
from pykubelet.server.page.routes import Page, error_responses
from pykubelet.server.page.security import same_origin_only
from pykubelet.server.readonly import own_hosts_only
from pykubelet.server.tls import OpensslMissing, ServingTls, TlsProblem, TlsSettings, reloads_certificate
from pykubelet.stats.network import parse_net_dev
from pykubelet.stats.samples import FilesystemUsage, Record
from pykubelet.status.diagnosis import diagnose, failed_run
from pykubelet.util.tasks import RenderTurns, TaskScope, finish_in_thread

if TYPE_CHECKING:
    from pykubelet.agent.servers import ServerDependencies

log = get_logger(__name__)
LAG_SECONDS = 2.0
"""Seconds between two measurements of the event loop's lag."""
SUMMARY_SECONDS = 10.0
"""Seconds for which the report of eviction signals is reused."""
DETAILS_SECONDS = 1.0
"""Seconds that an update waits for details of cgroups."""
REPORT_SECONDS = 3.0
"""Seconds that a view waits for the report of eviction signals."""
IMAGES_AGE_SECONDS = 10.0
"""Age of the list of images from which on the images view has it made again."""
IMAGES_SECONDS = 3.0
"""Seconds that a view waits for a response of the runtime about images."""
HOST_SECONDS = 60.0
"""Seconds for which the findings about the host are reused."""
_PATHS_PER_TURN = 16
_IDENTIFIER = re.compile(r"-(?:[0-9a-f]{8}-?[0-9a-f-]{8,}|[0-9]+)$")
"""End of the name of a task that differs between tasks of the same kind."""
_CRI = ("kubelet_runtime_operations_duration_seconds", "kubelet_runtime_operations_errors")
_REST = "rest_client_request_duration_seconds"
_CERTIFICATES = {
    "client": "kubelet_certificate_manager_client_ttl_seconds",
    "serving": "kubelet_certificate_manager_server_ttl_seconds",
}


@contextlib.asynccontextmanager
async def serving_page(
    parts: ServerDependencies, api: ApiServerDependencies | None, turns: RenderTurns
) -> AsyncIterator[None]:
    """Serve the page while the context is open. Raises PortError, AuthConfigError, StartupError.

    `api` has the TLS and the authorization for addresses other than loopback; None while the API is not
    served. cAdvisor's API is served on the same port. If the port is the default one and taken, the page is
    not served and a warning is logged.
    """
    flags = parts.settings.flags
    port, address = flags.page_port or parts.default_page_port, flags.page_address
    is_loopback = ip_address(address).is_loopback
    async with contextlib.AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(TaskScope())
        source = NodePage(parts, api, lambda: page.updates.clients)
        page = Page(source, tasks)
        statistics = parts.statistics
        cadvisor = cadvisor_api_routes(
            statistics,
            statistics.host_filesystems,
            statistics.machine_info,
            statistics.collector.sample_now,
            ScrapeLimit(max_per_user=None if is_loopback else MAX_SCRAPES_PER_USER, turns=turns),
        )
        routes = [*page.routes(), *cadvisor]
        if is_loopback:
            layers = [
                same_origin_only(),
                own_hosts_only((parts.settings.node_name, socket.gethostname())),
                error_responses(),
            ]
            server = http_server("page", address, port, routes, layers)
        elif api is None:
            raise StartupError(
                f"--page-address {address}: no client of the page could be authorized; set "
                "authentication.x509.clientCAFile, or serve the page on 127.0.0.1 and use `ssh -L`"
            )
        else:
            server = _secure_server(address, port, routes, api)
        try:
            await stack.enter_async_context(server)
        except PortError as err:
            if flags.page_port:
                raise
            log.warning("Page is not served", reason=str(err), remedy="choose another port with --page-port")
        else:
            stack.callback(page.close)
            source.start(tasks)
        yield


@contextlib.asynccontextmanager
async def _secure_server(
    address: str, port: int, routes: Sequence[web.RouteDef], api: ApiServerDependencies
) -> AsyncIterator[None]:
    """Serve the routes with the TLS, the authentication and the authorization of the API."""
    async with single_error_scope() as scope:
        authenticator = make_authenticator(api.config, api.gates, api.auth.review_client, scope, api.metrics)
        authorizer = make_authorizer(
            api.config, api.auth.review_client, lambda: api.auth.node_name, scope, api.metrics
        )
        settings = TlsSettings.from_config(
            api.config, request_certificates=authenticator.requests_certificates
        )
        try:
            tls = ServingTls(
                settings, api.auth.serving_certificate, reloads=reloads_certificate(api.config, api.gates)
            )
        except (TlsProblem, OpensslMissing) as err:
            raise AuthConfigError(str(err)) from err
        api.on_tls(tls)
        async with https_server(
            address,
            port,
            routes,
            tls=tls,
            authenticator=authenticator,
            authorizer=authorizer,
            metrics=api.metrics,
            tracer=api.tracer,
            name="page",
            outermost=(same_origin_only(),),
        ):
            yield


class NodePage:
    """The facts of this node (`server.page.facts.PageSource`)."""

    def __init__(
        self,
        parts: ServerDependencies,
        api: ApiServerDependencies | None,
        clients: Callable[[], int],
    ) -> None:
        """Initialize; `clients` returns the number of connected clients."""
        self._parts = parts
        self._pulls = parts.images.pulls
        self._clients = clients
        self._certificate = api.auth.serving_certificate if api is not None else lambda: None
        self._root = Path(parts.settings.flags.root_dir)
        self._pressure: PressureReport | None = None
        self._pressure_time = -math.inf
        self._lag: float | None = None
        self._totals: dict[str, tuple[float, float]] = {}
        """Number and seconds of all calls at the last measurement, by series."""
        self._image_path = ""
        self._image_path_time = -math.inf
        self.history = History()
        self.settings = PageSettings(
            node_name=parts.settings.node_name,
            version=f"{__version__} (Kubernetes {KUBERNETES_VERSION})",
            started=parts.started.timestamp(),
            data_dir=_data_dir(self._root),
        )
        self._config = parts.reloader.config
        self._capacity = node_capacity(self._config, self._root)
        self._images_time = self._host_time = -math.inf
        self._host_problems: list[HostFinding] = []
        self._images_problem = self._images_wait = ""

    def start(self, tasks: TaskScope) -> None:
        """Start the history."""
        self._parts.statistics.collector.add_listener(self.history.handle_sample)
        tasks.start(self._measure(), name="page-history")

    # PageSource

    def pods(self) -> list[PodFacts]:
        """Return all pods."""
        return [self._pod_facts(pod) for pod in self._parts.engine.pods()]

    def find_pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod without its diagnosis; None if the node has no such pod."""
        named = (pod for pod in self._parts.engine.pods() if pod.metadata.name == name)
        return next((pod for pod in named if pod.metadata.namespace == namespace), None)

    async def node(self) -> NodeFacts:
        """Return the state of the node."""
        root, config = self._record("/"), self._parts.reloader.config
        if config is not self._config:
            self._config, self._capacity = config, node_capacity(config, self._root)
        reserved_cores, reserved_memory = _reserved(config)
        interfaces = (root.network or ()) if root is not None else ()
        checks = {**self._parts.checks, **self._parts.runtime_checks}
        return NodeFacts(
            cores=float(self._capacity["cpu"].nanos) / 1e9,
            memory=int(self._capacity["memory"]),
            cpu=_cores(root),
            usage=root.usage if root is not None else None,
            reserved_cores=reserved_cores,
            reserved_memory=reserved_memory,
            max_pods=int(self._capacity["pods"]) if "pods" in self._capacity else config.max_pods,
            disks=await self._disks(),
            interfaces=interfaces,
            link_speed=_link_speed(each.name for each in own_interfaces(interfaces)),
            pressure=await self._report(),
            checks={name: check() for name, check in checks.items()},
            certificates=await self._certificates(),
            host_problems=await self._doctor_findings(),
        )

    async def pod(self, namespace: str, name: str) -> PodDetails | None:
        """Return a pod; None if the node has no such pod."""
        engine, pod = self._parts.engine, self.find_pod(namespace, name)
        if pod is None:
            return None
        events, timeline = engine.journal(pod.uid)
        observed, facts = engine.syncer.observed(pod.uid), self._pod_facts(pod)
        images = {container.image for container in (*pod.spec.containers, *pod.spec.init_containers)}
        read = partial(_log_tails, self._log_paths(pod, observed), self._failed_log(facts, observed))
        logs, failed_log = await finish_in_thread(read)
        return PodDetails(
            facts=facts,
            events=events,
            timeline=timeline,
            logs=logs,
            failed_log=failed_log,
            probes=engine.syncer.probe_history(pod.uid),
            volumes=list(self._volumes(pod)),
            pulls=[pull for pull in self._pulls() if pull.image in images],
            oom_kills={
                record.target.container: record.oom_events
                for record in self._parts.statistics.collector.records_of(pod.uid)
                if record.target.kind == "container" and record.oom_events
            },
        )

    async def images(self) -> ImagesFacts:
        """Return images and disk usage."""
        statistics, gc = self._parts.statistics, self._parts.image_gc
        await self._detect_images()
        logs: list[VolumeFacts] = []
        volumes: list[VolumeFacts] = []
        layers: list[VolumeFacts] = []
        storage, usage = statistics.latest_storage(), statistics.runtime.latest_layers()
        for pod in self._parts.engine.pods():
            if (found := storage.get(pod.uid)) is not None:
                logs += [
                    VolumeFacts(pod=pod.full_name, name=name, used=files.used or 0)
                    for name, files in found.container_logs.items()
                ]
            volumes += self._volumes(pod)
            observed = self._parts.engine.syncer.observed(pod.uid)
            for container in observed.containers if observed is not None else ():
                if (layer := usage.get(container.id)) is not None and layer.used:
                    layers.append(VolumeFacts(pod=pod.full_name, name=container.name, used=layer.used))
        disks = await self._disks()
        return ImagesFacts(
            images=list(gc.records),
            problem=self._images_problem,
            waits_for=self._images_wait,
            listed_at=gc.listed_at,
            policy=gc.policy,
            disk=next((disk for disk in disks if disk.name == "imagefs"), disks[0] if disks else None),
            loop_time=asyncio.get_running_loop().time(),
            pulls=self._pulls(),
            logs=logs,
            volumes=volumes,
            layers=layers,
        )

    async def _detect_images(self) -> None:
        """List the images and their use again, if that was too long ago; the view shows a failure.

        While another list or a removal is in progress, which may take minutes, the last list is shown.
        """
        now, gc = asyncio.get_running_loop().time(), self._parts.image_gc
        if now - self._images_time < IMAGES_AGE_SECONDS:
            return
        self._images_wait = gc.activity
        if self._images_wait:
            return
        self._images_time = now
        try:
            async with asyncio.timeout(IMAGES_SECONDS):
                await gc.detect()
        except TimeoutError:
            self._images_problem = f"no response within {IMAGES_SECONDS:.0f} s"
        except ImageGCError as err:
            self._images_problem = str(err)
        else:
            self._images_problem = ""

    async def agent(self) -> AgentFacts:
        """Return the state of the kubelet."""
        version = self._parts.cri.version
        return AgentFacts(
            pid=os.getpid(),
            rss=_rss(),
            pss=await finish_in_thread(_pss),
            cpu_seconds=time.process_time(),
            open_files=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - only their number
            threads=threading.active_count(),
            loop_lag=self._lag,
            cri=self._calls(_CRI, "operation_type"),
            api_server=self._calls((_REST,), "verb"),
            tasks=Counter(_task_name(task.get_name()) for task in asyncio.all_tasks()),
            clients=self._clients(),
            runtime=f"{version.runtime_name} {version.runtime_version}",
        )

    async def sample(self) -> None:
        """Sample the node and all pods now, in small steps."""
        collector = self._parts.statistics.collector
        paths = [
            record.target.path
            for record in collector.records()
            if record.target.kind in ("root", "pod", "container")
        ]
        for start in range(0, len(paths), _PATHS_PER_TURN):
            collector.sample_now(paths[start : start + _PATHS_PER_TURN])
            await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DETAILS_SECONDS):
                await collector.refresh_details()

    # Facts

    def _pod_facts(self, pod: Pod) -> PodFacts:
        engine = self._parts.engine
        state = engine.state(pod.uid)
        record = next(
            (
                each
                for each in self._parts.statistics.collector.records_of(pod.uid)
                if each.target.kind == "pod"
            ),
            None,
        )
        return PodFacts(
            pod=pod,
            state=state,
            diagnosis=diagnose(
                pod,
                state,
                engine.history.events(pod.uid),
                datetime.now(UTC),
                job_completed=engine.job_has_completed(pod),
            ),
            cpu=_cores(record),
            memory=record.usage.working_set if record is not None and record.usage is not None else None,
        )

    def _log_paths(self, pod: Pod, observed: ObservedPod | None) -> list[tuple[str, Path | None]]:
        found: list[tuple[str, Path | None]] = []
        for container in (*pod.spec.init_containers, *pod.spec.containers, *pod.spec.ephemeral_containers):
            latest = observed.latest(container.name) if observed is not None else None
            found.append((container.name, self._log_path(pod, latest) if latest is not None else None))
        return found

    def _failed_log(self, facts: PodFacts, observed: ObservedPod | None) -> tuple[str, Path, bool] | None:
        """Return the container that fails, the log of the run that failed, and whether a newer run exists."""
        run = failed_run(facts.pod, facts.diagnosis)
        if run is None or observed is None:
            return None
        name, previous = run
        runs = (each for each in observed.containers if each.name == name)
        found = next((each for each in runs if each.phase == "exited" or not previous), None)
        return (name, self._log_path(facts.pod, found), previous) if found is not None else None

    def _log_path(self, pod: Pod, container: ObservedContainer) -> Path:
        directory = pod_log_dir(
            self._parts.settings.config.pod_logs_dir, pod.metadata.namespace, pod.metadata.name, pod.uid
        )
        return Path(
            container.log_path or f"{directory}/{container_log_path(container.name, container.attempt)}"
        )

    def _volumes(self, pod: Pod) -> Iterator[VolumeFacts]:
        for volume in self._parts.statistics.volume_usage(pod.uid):
            yield VolumeFacts(pod=pod.full_name, name=volume.name, used=volume.stats.used)

    async def _disks(self) -> list[DiskFacts]:
        statistics = self._parts.statistics
        now = asyncio.get_running_loop().time()
        if not self._image_path and now - self._image_path_time >= SUMMARY_SECONDS:
            self._image_path_time = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IMAGES_SECONDS):
                    found = await statistics.runtime.image_filesystems()
                    self._image_path = found.images.mount_point if found.images is not None else ""
        disks, seen = [], set()
        for name, path in (("nodefs", str(self._root)), ("imagefs", self._image_path)):
            usage = await statistics.host_filesystems.of_directory(Path(path)) if path else None
            if usage is not None and (usage.device, usage.major, usage.minor) not in seen:
                seen.add((usage.device, usage.major, usage.minor))
                disks.append(_disk(name, path, usage))
        return disks

    async def _report(self) -> PressureReport | None:
        """Return the report of eviction signals, at most `SUMMARY_SECONDS` old."""
        now = asyncio.get_running_loop().time()
        if now - self._pressure_time >= SUMMARY_SECONDS:
            self._pressure_time = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    self._pressure = await self._parts.eviction.report(measure_volumes=False)
        return self._pressure

    async def _doctor_findings(self) -> list[HostFinding]:
        """Return the findings about the host, at most `HOST_SECONDS` old."""
        now = asyncio.get_running_loop().time()
        if now - self._host_time >= HOST_SECONDS:
            self._host_time = now
            found = await finish_in_thread(self._parts.host_problems)
            config = self._parts.reloader.config
            self._host_problems = [
                HostFinding(each.area, each.what, each.remedy)
                for each in found
                if _is_required(each.area, config)
            ]
        return self._host_problems

    async def _certificates(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self._parts.registry.restricted_registry(_CERTIFICATES.values()).collect():
            for sample in metric.samples:
                kind = next((kind for kind, series in _CERTIFICATES.items() if series == sample.name), "")
                if kind and math.isfinite(sample.value):
                    found[kind] = sample.value
        files = self._certificate()
        if files is not None and "serving" not in found:
            with contextlib.suppress(OSError, ValueError, IndexError):
                pem = await finish_in_thread(files[0].read_bytes)
                found["serving"] = lifetime(certificates(pem)[0]).ends.timestamp() - time.time()
        return found

    def _calls(self, metrics: Sequence[str], label: str) -> list[Calls]:
        """Return the calls by the value of a label, from histograms and counters of errors."""
        counts: Counter[str] = Counter()
        errors: Counter[str] = Counter()
        seconds: defaultdict[str, float] = defaultdict(float)
        for sample in self._samples(metrics):
            name = sample.labels.get(label, "")
            if sample.name.endswith("_seconds_count"):
                counts[name] += int(sample.value)
            elif sample.name.endswith("_seconds_sum"):
                seconds[name] += sample.value
            elif sample.name.endswith("_errors_total"):
                errors[name] += int(sample.value)
        has_errors = len(metrics) > 1
        return [
            Calls(
                operation=name,
                count=count,
                errors=errors[name] if has_errors else None,
                seconds=seconds[name],
            )
            for name, count in counts.items()
        ]

    def _samples(self, metrics: Sequence[str]) -> Iterator[Sample]:
        names = [name for metric in metrics for name in _sample_names(metric)]
        for metric in self._parts.registry.restricted_registry(names).collect():
            yield from metric.samples

    def _record(self, path: str) -> Record | None:
        return self._parts.statistics.collector.record(path)

    # History

    async def _measure(self) -> NoReturn:
        """Record lag, latencies, memory and the node's network until cancelled."""
        loop = asyncio.get_running_loop()
        lag, slot_end = 0.0, loop.time() + SLOT_SECONDS
        while True:
            started = loop.time()
            await asyncio.sleep(LAG_SECONDS)
            lag = max(lag, loop.time() - started - LAG_SECONDS)
            if loop.time() < slot_end:
                continue
            now, slot_end = time.time(), loop.time() + SLOT_SECONDS
            self._lag = lag
            self.history.add(Key(AGENT, "", "lag"), now, lag)
            self.history.add(Key(AGENT, "", "rss"), now, _rss())
            for series, metrics, label in (("cri", _CRI[:1], "operation_type"), ("api", (_REST,), "verb")):
                self._record_latency(series, self._calls(metrics, label), now)
            self.history.handle_network(NODE, now, parse_net_dev(Path("/proc/net/dev").read_bytes()))
            sampled = {record.target.path for record in self._parts.statistics.collector.records()}
            self.history.forget({pod.uid for pod in self._parts.engine.workers.pods()}, sampled)
            lag = 0.0

    def _record_latency(self, series: str, calls: Sequence[Calls], now: float) -> None:
        """Record the mean latency of the calls since the last measurement."""
        count, seconds = sum(call.count for call in calls), sum(call.seconds for call in calls)
        before = self._totals.get(series)
        self._totals[series] = count, seconds
        if before is not None and count > before[0]:
            self.history.add(Key(AGENT, "", series), now, (seconds - before[1]) / (count - before[0]))


def _log_tails(
    paths: Sequence[tuple[str, Path | None]], failed: tuple[str, Path, bool] | None
) -> tuple[list[LogTail], LogTail | None]:
    """Return the ends of the logs, and that of the run that failed. Blocks."""
    tails = []
    for container, path in paths:
        if path is None:
            tails.append(LogTail(container=container, lines=(), note="The container has not run yet."))
        else:
            tails.append(read_log_tail(container, path))
    if failed is None:
        return tails, None
    container, path, previous = failed
    return tails, replace(read_log_tail(container, path), previous=previous)


def _cores(record: Record | None) -> float | None:
    return record.nano_cores / 1e9 if record is not None and record.nano_cores is not None else None


def _disk(name: str, path: str, usage: FilesystemUsage) -> DiskFacts:
    return DiskFacts(
        name=name,
        path=path,
        capacity=usage.capacity,
        available=usage.available,
        inodes=usage.inodes,
        inodes_free=usage.inodes_free,
    )


def _reserved(config: KubeletConfiguration) -> tuple[float, int]:
    """Return the processors and the memory that are reserved for the system."""
    totals = {"cpu": 0, "memory": 0}
    for reservation in (config.kube_reserved, config.system_reserved):
        for name in totals:
            if name in reservation:
                totals[name] += Quantity.parse(reservation[name]).nanos
    return totals["cpu"] / 1e9, totals["memory"] // 10**9


def _is_required(area: str, config: KubeletConfiguration) -> bool:
    """Return whether what `doctor` checks in an area is a problem of a node with this configuration."""
    match area:
        case "swap":
            return bool(config.fail_swap_on)
        case "kernel settings":
            return bool(config.protect_kernel_defaults)
    return True


def _data_dir(root: Path) -> str:
    """Return the data directory of `pykubelet up` whose node this is; empty for the default one."""
    parent = root.parent
    is_up = root.name == "kubelet" and (parent / ".pykubelet").exists()
    return str(parent) if is_up and parent != Path("/var/lib/pykubelet") else ""


def _link_speed(interfaces: Iterable[str]) -> int | None:
    """Return the bits per second of the fastest interface; None if none reports its speed."""
    speeds = []
    for name in interfaces:
        # A virtual interface, or one that is down, reports -1 or an error.
        with contextlib.suppress(OSError, ValueError):
            speeds.append(int(Path(f"/sys/class/net/{name}/speed").read_text()))
    fastest = max(speeds, default=0)
    return fastest * 1_000_000 if fastest > 0 else None


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _pss() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def _sample_names(metric: str) -> tuple[str, ...]:
    """Return the names of the samples that are read of a histogram or a counter."""
    return f"{metric}_count", f"{metric}_sum", f"{metric}_total"


def _task_name(name: str) -> str:
    """Return the name of a task without what differs between tasks of the same kind."""
    kind = _IDENTIFIER.sub("", re.split(r"[ :/]", name, maxsplit=1)[0])
    return "unnamed" if kind in ("", "Task") else kind[:60]

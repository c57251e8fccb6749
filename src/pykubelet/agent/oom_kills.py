"""Builds the watcher of OOM kills: events of the node and of pods, counters of statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import aclosing

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.host_setup import check_tolerated
from pykubelet.cm.cgroups.driver import CgroupWriteError
from pykubelet.cm.cgroups.node_cgroups import Record
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.labels import parse_container
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.oom_watcher import OomKill, kills, open_log, read_oom_kills
from pykubelet.logs import get_logger
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.oom_events import OomEvents, locate, printable
from pykubelet.stats.collector import Collector
from pykubelet.transport.errors import NotFound
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)


def build_oom_watcher(
    settings: AgentSettings,
    cri: RuntimeConnection,
    pod_cgroups: PodCgroups,
    engine: PodEngine,
    collector: Collector,
    node_event: Record,
    tasks: TaskScope,
) -> Callable[[], None]:
    """Return the function that starts to record OOM kills; `node_event` records events of the node.

    Raises StartupError in a user namespace that hides the kernel log, without the feature gate.
    """
    check_kernel_log(settings.gates)
    cgroups = detect_cgroups()

    def cgroups_of_pods() -> Iterator[tuple[str, str]]:
        for pod in engine.workers.pods():
            try:
                yield pod.uid, pod_cgroups.path(pod)
            except CgroupWriteError:
                continue  # it has no cgroup

    async def container_name(container_id: str) -> str:
        try:
            status = (await cri.runtime.container_status(container_id)).status
        except NotFound:
            return ""  # a sandbox
        return parse_container(status.labels, status.annotations).name

    events = OomEvents(
        lambda cgroup: locate(cgroup, collector.find_target(cgroup), cgroups_of_pods),
        container_name,
        lambda uid: engine.workers.pod(uid) or engine.store.get(uid),
        engine.history,
        count_kills=lambda cgroup: read_oom_kills(cgroups.path("memory", cgroup)),
        on_kill=collector.count_oom_in_container,
    )

    def on_kill(kill: OomKill) -> None:
        collector.count_oom(kill.limit or "/")
        events.handle(kill)

    def start() -> None:
        tasks.start(events.run(), name="oom-events")
        tasks.start(record_oom_kills(node_event, on_kill), name="oom-watch")

    return start


def check_kernel_log(gates: FeatureGates, open_log: Callable[[], int] = open_log) -> None:
    """Raise StartupError in a user namespace that hides the kernel log, without the feature gate."""
    try:
        os.close(open_log())
    except OSError as err:
        check_tolerated(f"/dev/kmsg cannot be opened: {err.strerror or err}", gates)


async def record_oom_kills(
    node_event: Record,
    on_kill: Callable[[OomKill], None] = lambda kill: None,
    open_log: Callable[[], int] = open_log,
) -> None:
    """Record SystemOOM events for processes that the kernel killed because the host was out of memory.

    Each kill, also because of a cgroup's limit, is passed to `on_kill`.
    """
    try:
        fd = open_log()
    except OSError as err:
        log.info("Failed to open /dev/kmsg, events of OOM kills are disabled", err=str(err))
        return
    try:
        async with aclosing(kills(fd)) as found:
            async for kill in found:
                if kill.system_oom:
                    process = printable(kill.process)
                    log.v(1).info("Got sys oom event", process=process, pid=kill.pid, cgroup=kill.cgroup)
                    victim = f"victim process: {process}, pid: {kill.pid}"
                    node_event("Warning", "SystemOOM", f"System OOM encountered, {victim}")
                on_kill(kill)
    except OSError as err:
        log.error(err, "Failed to read /dev/kmsg, events of OOM kills are disabled")
    finally:
        os.close(fd)

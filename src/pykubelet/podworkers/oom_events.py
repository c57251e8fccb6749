"""Events of pods for processes that the kernel's OOM killer has killed in them.

The status of a container reports an OOM kill only if its first process was the victim, and the upstream
kubelet records events only when the whole node is out of memory. `OomEvents` records one for each kill, also
of child processes, with the victim and the limit that was reached. It gets the kills from the kernel log
(`linux/oom_watcher`), so those that happen while the kubelet is down are not reported.

A container can have thousands of victims per minute. The first kill is an event immediately; later ones are
combined into one event per container, after 10 s at first and every 5 minutes finally. That is the rate at
which the API server's event correlation accepts warnings of one pod: other warnings of the pod are not
suppressed. The memory is bounded: one entry per container with a kill in the last minutes.

Process names are chosen by users; unprintable characters are replaced.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from pykubelet.api.pod import Pod
from pykubelet.linux.oom_watcher import OomKill
from pykubelet.logs import get_logger
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.stats.samples import Target
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
REASON = "ProcessOOMKilled"
"""Neither `OOMKilling`, which node-problem-detector records of nodes, nor `OOMKilled` of statuses."""
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 300.0
"""Seconds between two events of a container: after the first event, and at most."""
MAX_QUEUED = 1000
MAX_CONTAINERS = 1000
MAX_NAMES = 100
_LONGEST_PATH = 200
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class OomSite:
    """The part of a pod in which a process was killed."""

    pod_uid: str
    pod_cgroup: str
    cgroup: str
    """Cgroup of the container; that of the pod for another process in it."""
    container: str = ""
    """Name of the container; empty if it is unknown, or no container."""
    container_id: str = ""


def locate(
    cgroup: str, target: Target | None, pods: Callable[[], Iterable[tuple[str, str]]]
) -> OomSite | None:
    """Return the site of a cgroup, from the nearest sampled cgroup, or from the uids and cgroups of pods."""
    if target is None:
        return site_in_pods(cgroup, pods())
    if target.kind == "pod":
        return site_in_pods(cgroup, [(target.pod_uid, target.path)])
    return OomSite(target.pod_uid, target.path.rpartition("/")[0], target.path, target.container)


def site_in_pods(cgroup: str, pods: Iterable[tuple[str, str]]) -> OomSite | None:
    """Return the site of a cgroup that is not sampled, from the uids and cgroups of pods.

    The container may be too young to be sampled; its id is the name of its cgroup.
    """
    for uid, pod_cgroup in pods:
        if pod_cgroup and (cgroup == pod_cgroup or cgroup.startswith(f"{pod_cgroup}/")):
            name = cgroup.removeprefix(pod_cgroup).lstrip("/").partition("/")[0]
            found = _CONTAINER_ID.search(name)
            path = f"{pod_cgroup}/{name}" if name else pod_cgroup
            return OomSite(uid, pod_cgroup, path, container_id=found[0] if found else "")
    return None


def format_mebibytes(size: int) -> str:
    """Format bytes as MiB, with one decimal where it is not 0: `64Mi`, `61.5Mi`."""
    return f"{size / 2**20:.1f}".removesuffix(".0") + "Mi"


def printable(name: str) -> str:
    """Replace characters of a name that are not printable."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)


def oom_message(kill: OomKill, site: OomSite, count: int = 1, seconds: float = 0.0) -> str:
    """Return the message of an event for a kill, or for the last of `count` kills within some seconds."""
    limit = f" {format_mebibytes(kill.limit_bytes)}" if kill.limit_bytes is not None else ""
    of_container = f'container "{site.container}"' if site.container else "the pod"
    if not kill.limit:
        cause = "Node out of memory"
    elif kill.limit == site.pod_cgroup:
        cause = f"Memory limit{limit} of the pod reached"
    elif kill.limit == site.cgroup or kill.limit.startswith(f"{site.cgroup}/"):
        cause = f"Memory limit{limit} of {of_container} reached"
    else:
        cause = f'Memory limit{limit} of cgroup "{printable(kill.limit[:_LONGEST_PATH])}" reached'
    victim = f"process {kill.pid} ({printable(kill.process)}) of {of_container}"
    size = f", anon-rss {format_mebibytes(kill.anon_rss)}" if kill.anon_rss is not None else ""
    if count == 1:
        return f"{cause}: killed {victim}{size}"
    return f"{cause}: killed {count} processes in {seconds:.0f}s, the last was {victim}{size}"


@dataclass(slots=True)
class _Tally:
    """Kills in one container since its last event."""

    site: OomSite
    last: OomKill
    last_time: float
    due: float
    """Loop time from which on the next event may be recorded."""
    reported_at: float
    """Loop time of the last event, or of the first kill."""
    delay: float = FIRST_SECONDS
    kills: int = 0
    counter: int | None = None
    """The cgroup's own counter of kills at the last event."""


class OomEvents:
    """Recorder of OOM kills in pods; `run` records what `handle` was called with."""

    def __init__(
        self,
        locate: Callable[[str], OomSite | None],
        container_name: Callable[[str], Awaitable[str]],
        pod: Callable[[str], Pod | None],
        history: PodHistory,
        *,
        count_kills: Callable[[str], int | None] = lambda cgroup: None,
        on_kill: Callable[[str, str], None] = lambda uid, container: None,
    ) -> None:
        """Initialize.

        `locate` returns the site of a cgroup, `container_name` the name of a container by its id (raises
        CriError), `pod` the pod with a uid, `count_kills` the kernel's counter of a cgroup. `on_kill` is
        called with the uid and the container of each kill.
        """
        self._locate = locate
        self._container_name = container_name
        self._pod = pod
        self._history = history
        self._count_kills = count_kills
        self._on_kill = on_kill
        self._queue: deque[tuple[OomKill, OomSite]] = deque(maxlen=MAX_QUEUED)
        self._added = asyncio.Event()
        self._tallies: dict[tuple[str, str], _Tally] = {}
        """Containers with kills in the last minutes, by uid and name or cgroup."""
        self._names: dict[str, str] = {}
        """Names that the runtime has reported, by container id; empty for a sandbox."""

    def handle(self, kill: OomKill) -> None:
        """Handle a kill; one outside of pods is ignored.

        The site is determined immediately, before the cgroup of a killed container is forgotten.
        """
        site = self._locate(kill.cgroup) if kill.cgroup else None
        if site is not None:
            self._queue.append((kill, site))
            self._added.set()

    async def run(self) -> None:
        """Record events until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout(self._seconds_until_due(clock())):
                    await self._added.wait()
            except TimeoutError:
                pass
            self._added.clear()
            while self._queue:
                kill, site = self._queue.popleft()
                self._tally(kill, await self._with_name(site), clock())
            self._record_due(clock())

    async def _with_name(self, site: OomSite) -> OomSite:
        """Return a site with the name of its container, if the runtime reports it."""
        if site.container or not site.container_id:
            return site
        name = self._names.get(site.container_id)
        if name is None:
            try:
                name = await self._container_name(site.container_id)
            except CriError as err:
                log.v(2).info("Failed to get the name of a container", containerID=site.container_id, err=err)
                name = ""
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            self._names[site.container_id] = name
        return replace(site, container=name)

    def _tally(self, kill: OomKill, site: OomSite, now: float) -> None:
        self._on_kill(site.pod_uid, site.container)
        key = (site.pod_uid, site.container or site.cgroup)
        tally = self._tallies.get(key)
        if tally is None:
            if len(self._tallies) >= MAX_CONTAINERS:
                del self._tallies[next(iter(self._tallies))]
            tally = self._tallies[key] = _Tally(site, kill, now, due=now, reported_at=now)
        if tally.site.cgroup != site.cgroup:
            tally.counter = None  # the container was restarted
        tally.site, tally.last, tally.last_time = site, kill, now
        tally.kills += 1

    def _seconds_until_due(self, now: float) -> float | None:
        times = [
            tally.due if tally.kills else tally.last_time + LONGEST_SECONDS
            for tally in self._tallies.values()
        ]
        return wait_seconds(max(0.0, min(times) - now)) if times else None

    def _record_due(self, now: float) -> None:
        for key, tally in list(self._tallies.items()):
            if tally.kills and tally.due <= now:
                self._record(tally, now)
                tally.due, tally.delay = now + tally.delay, min(2 * tally.delay, LONGEST_SECONDS)
            elif not tally.kills and tally.last_time + LONGEST_SECONDS <= now:
                del self._tallies[key]

    def _record(self, tally: _Tally, now: float) -> None:
        counter = self._count_kills(tally.site.cgroup)
        count = tally.kills
        if counter is not None and tally.counter is not None:
            count = max(count, counter - tally.counter)
        message = oom_message(tally.last, tally.site, count, max(1.0, now - tally.reported_at))
        tally.kills, tally.counter, tally.reported_at = 0, counter, now
        pod = self._pod(tally.site.pod_uid)
        if pod is not None:
            self._history.event(pod, "Warning", REASON, message, field_of(pod, tally.site.container))

"""What statistics cost: pods that merely run, and scrapes of their usage, next to the reference kubelet.

Each kubelet is a node of a control plane and a runtime of its own, one after the other. Few, then many pods
are held, first without requests, then with a scraper at the usual intervals. Then each path is scraped
several times on one connection. A scrape's processor time is measured
in three ways:

- windows, the measure of the bound: the difference of two windows of the same length, one before the first
  scrape and one with several in the intervals of a real scraper. It contains all work that scraping causes,
  also in the background, and scatters, because holding the pods takes more processor time than a scrape, in
  bursts: the summary of upstream took 25.5 and 0.9 ms in two runs with 100 pods, ours 15.6 and 13.9 ms;
- slots: a scrape begins with a short slot and costs what the slot takes more than the median of the slots
  before it, with the quartiles as scatter. It leaves out what scraping causes later;
- back to back, which is mostly the rendering.

The longest stall is measured from outside: another process gets `/healthz` all the time while a scrape is in
progress, and what such a request takes longer than usual is the time in which the event loop did not run.
"""

from __future__ import annotations

import http.client
import math
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.node import bare_runtime, data_dir
from bench.plane import Agent, control_plane
from bench.processes import Cost, cost_over, cpu_seconds, pss_mb, rss_mb
from bench.results import Result
from bench.watched_pods import watched_pods
from pykubelet.devcluster.binaries import Binaries, find_programs
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.standalone.instance import Instance

PATHS = ("/metrics/cadvisor", "/stats/summary")
"""The summary last: the kubelet refreshes its sources for 90 s after a request, which is no idle node."""
_MANY = 2.5
"""How many times as many pods are held after the first ones: 100 after 40."""
_CPU_BOUND = {40: 0.5, 100: 1.0}
"""Percent of a core with so many pods."""
_SHORTEST_HOLD_SECONDS = 90.0
"""Seconds over which pods are held at least: resyncs (every 60 to 90 s) and listings (30 s) belong to it."""
_SCRAPER_SECONDS = 15.0
"""Seconds between scrapes of `/metrics/resource` by metrics-server; Prometheus scrapes half as often."""
_SETTLE_SECONDS = 8.0
"""Seconds after the last pod runs: events are sent late, and the first samples are taken."""
_INTERVAL_SECONDS = 10.0
"""Seconds between scrapes of a path."""
_SLOT_SECONDS = 1.0
"""Length of the slots in which processor time is measured; a scrape takes less."""
_SCRAPES, _STALL_ROUNDS = 6, 10
"""Scrapes at a scraper's pace, and scrapes in which stalls are measured."""
_GROUPS, _GROUP_SCRAPES = 5, 10
"""Scrapes back to back: their processor time is measured in groups."""
_SHORTEST_SECONDS = 0.001
_PING_SECONDS = 0.001
_HEADERS = {"Accept": "text/plain;version=0.0.4,*/*", "Accept-Encoding": "gzip"}


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape."""

    seconds: float
    size: int
    """Bytes of the response as sent, possibly compressed."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Median and quartiles of repeated measurements, in seconds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Scatter:
        """Summarize measurements."""
        return cls(*statistics.quantiles(seconds, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{1000 * self.median:.1f} ms ({1000 * self.low:.1f} to {1000 * self.high:.1f})"


@dataclass(frozen=True, slots=True)
class Scrapes:
    """The scrapes of one path."""

    first: Scrape
    seconds: float
    """Median of the scrapes after the first one."""
    window_cpu: float
    """Processor time of one of these with all work that they cause, in seconds."""
    cpu: Scatter
    """Processor time of one of these in its slot."""
    packed_cpu: Scatter
    """Processor time of one of many back to back."""
    stalls: list[float]
    """Seconds of the longest stall of each scrape; empty where it was not measured."""


@dataclass(frozen=True, slots=True)
class StatsRun:
    """The cost of one kubelet."""

    held: dict[int, Cost]
    """By the number of pods; nothing is scraped."""
    scraped: dict[int, Cost]
    """The same while `/metrics/cadvisor` and `/metrics/resource` are scraped."""
    scrapes: dict[str, Scrapes | None]
    """By path; None where it is not served."""


def stats(count: int, hold_seconds: float) -> list[Result]:
    """Measure held pods and scrapes with this kubelet and with the reference."""
    try:
        programs = find_programs(lambda text: print(f"     {text}", flush=True))
    except NotAvailable as err:
        print(f"     statistics are not measured: {err}")
        return []
    seconds = max(hold_seconds, _SHORTEST_HOLD_SECONDS)
    counts = (count, round(_MANY * count))
    ours = _measure(programs, None, counts, seconds)
    _tell("the agent", ours)
    reference = None
    if programs.kubelet is None:
        print("     there is no reference kubelet to compare with")
    else:
        with undo_host_changes():
            reference = _measure(programs, programs.kubelet, counts, seconds)
        _tell("the reference", reference)
    return [*_held_results(ours), *_scrape_results(ours, reference)]


def _held_results(ours: StatsRun) -> list[Result]:
    results = []
    for how, costs in (("held", ours.held), ("held while scraped", ours.scraped)):
        for count, cost in costs.items():
            bound = _CPU_BOUND.get(count, max(_CPU_BOUND.values()))
            what = f"statistics: {count} pods {how} over {cost.seconds:.0f} s: processor"
            results.append(Result(what, cost.cpu_percent, "% of core", bound))
        few = min(costs)
        results.append(Result(f"statistics: {few} pods {how}: memory (PSS)", costs[few].pss_mb, "MB", 70))
    return results


def _scrape_results(ours: StatsRun, reference: StatsRun | None) -> list[Result]:
    results = []
    for path, mine in ours.scrapes.items():
        if mine is None:
            continue
        what = f"scrape of {path}"
        theirs = reference.scrapes[path] if reference is not None else None
        if theirs is not None:
            window = mine.window_cpu / max(theirs.window_cpu, _SHORTEST_SECONDS)
            cpu = mine.cpu.median / max(theirs.cpu.median, _SHORTEST_SECONDS)
            packed = mine.packed_cpu.median / max(theirs.packed_cpu.median, _SHORTEST_SECONDS)
            results += [
                Result(f"{what}: processor time", window, "x reference", 0.5),
                Result(f"{what}: processor time, in its slot", cpu, "x reference", 0.5),
                Result(f"{what}: processor time, back to back", packed, "x reference", 0.5),
                Result(f"{what}: latency", mine.seconds / theirs.seconds, "x reference", 0.5),
            ]
        stall = 1000 * max(mine.stalls)
        results.append(Result(f"{what}: longest loop stall", stall, "ms", 20))
    return results


def _measure(programs: Binaries, program: Path | None, counts: tuple[int, ...], seconds: float) -> StatsRun:
    held: dict[int, Cost] = {}
    scraped: dict[int, Cost] = {}
    with data_dir() as path, bare_runtime(path) as image, control_plane(programs) as plane:
        agent = Agent(plane, Instance.at(path), program)
        try:
            agent.start()
            with watched_pods(plane) as pods:
                running = 0
                for count in counts:
                    names = [f"stats-{number}" for number in range(running, count)]
                    pods.create(image, names)
                    pods.wait_running(names)
                    running = count
                    time.sleep(_SETTLE_SECONDS)
                    held[count] = cost_over(agent.pid, seconds)
                    scraped[count] = _scraped_cost(agent, seconds)
            # The reference has no event loop; what is left would be the noise of the host.
            stall_rounds = _STALL_ROUNDS if program is None else 0
            scrapes = _scrape_all(agent, stall_rounds)
        finally:
            agent.stop()
    return StatsRun(held, scraped, scrapes)


def _scraped_cost(agent: Agent, seconds: float) -> Cost:
    """Watch a process for a while, in which metrics-server and Prometheus scrape it."""
    connection = agent.connect()
    _get(connection, "/healthz")  # the handshake and the authorization are not part of a scrape
    began, before = time.monotonic(), cpu_seconds(agent.pid)
    for number in range(math.ceil(seconds / _SCRAPER_SECONDS)):
        _scrape(connection, "/metrics/resource")
        if number % 2 == 0:
            _scrape(connection, "/metrics/cadvisor")
        time.sleep(max(0.0, began + (number + 1) * _SCRAPER_SECONDS - time.monotonic()))
    elapsed = time.monotonic() - began
    cpu_percent = 100 * (cpu_seconds(agent.pid) - before) / elapsed
    connection.close()
    return Cost(elapsed, cpu_percent, pss_mb(agent.pid), rss_mb(agent.pid))


def _scrape_all(agent: Agent, stall_rounds: int) -> dict[str, Scrapes | None]:
    """Scrape all paths, one after the other."""
    connection = agent.connect()
    _get(connection, "/healthz")  # the handshake and the authorization are not part of a scrape
    found = {path: _scrape_path(agent, connection, path, stall_rounds) for path in PATHS}
    connection.close()
    return found


def _scrape_path(
    agent: Agent, connection: http.client.HTTPSConnection, path: str, stall_rounds: int
) -> Scrapes | None:
    """Scrape a path; None if it is not served."""
    # Before the first scrape: the work in the background that it causes is not part of an idle node.
    idle = cost_over(agent.pid, _SCRAPES * _INTERVAL_SECONDS)
    first = _scrape(connection, path)
    if first is None:
        return None
    others, costs = [], []
    window_used = window_began = 0.0
    for number in range(_SCRAPES):
        before = _slots(agent.pid, round(_INTERVAL_SECONDS / _SLOT_SECONDS) - 1)
        used, began = cpu_seconds(agent.pid), time.monotonic()
        if number == 0:
            window_used, window_began = used, began
        scrape = _scrape(connection, path)
        assert scrape is not None
        time.sleep(max(0.0, began + _SLOT_SECONDS - time.monotonic()))
        share = (time.monotonic() - began) / _SLOT_SECONDS
        costs.append(cpu_seconds(agent.pid) - used - share * statistics.median(before))
        others.append(scrape)
    # The window begins with a scrape, and what the last one causes is in the interval after it.
    time.sleep(_INTERVAL_SECONDS - _SLOT_SECONDS)
    elapsed = time.monotonic() - window_began
    window = cpu_seconds(agent.pid) - window_used - idle.cpu_percent / 100 * elapsed
    packed = [_packed_cost(agent.pid, connection, path) for _ in range(_GROUPS)]
    stalls = []
    for _ in range(stall_rounds):
        stalls.append(_stall(connection, path, agent.health_port))
        time.sleep(_INTERVAL_SECONDS / 2)
    return Scrapes(
        first=first,
        seconds=statistics.median(scrape.seconds for scrape in others),
        window_cpu=max(window, 0.0) / _SCRAPES,
        cpu=Scatter.of(costs),
        packed_cpu=Scatter.of(packed),
        stalls=stalls,
    )


def _slots(pid: int, count: int) -> list[float]:
    """Return the processor time that a process takes in so many slots."""
    found = []
    for _ in range(count):
        used = cpu_seconds(pid)
        time.sleep(_SLOT_SECONDS)
        found.append(cpu_seconds(pid) - used)
    return found


def _packed_cost(pid: int, connection: http.client.HTTPSConnection, path: str) -> float:
    """Return the processor time of one of some scrapes back to back."""
    used = cpu_seconds(pid)
    for _ in range(_GROUP_SCRAPES):
        _scrape(connection, path)
    return (cpu_seconds(pid) - used) / _GROUP_SCRAPES


def _scrape(connection: http.client.HTTPSConnection, path: str) -> Scrape | None:
    """Scrape a path; None if it is not served."""
    began = time.monotonic()
    status, size = _get(connection, path)
    taken = time.monotonic() - began
    if status == http.client.NOT_FOUND:
        return None
    if status != http.client.OK:
        raise RuntimeError(f"GET {path}: {status}")
    return Scrape(taken, size)


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, int]:
    """Get a path; gives the status and the size of the body."""
    connection.request("GET", path, headers=_HEADERS)
    answer = connection.getresponse()
    return answer.status, len(answer.read())


# Stalls


def _stall(connection: http.client.HTTPSConnection, path: str, health_port: int) -> float:
    """Scrape a path; gives by how much the slowest ping during the scrape was slower than a usual one."""
    context = multiprocessing.get_context("spawn")  # a fork would share the connections
    stop, (results, sender) = context.Event(), context.Pipe(duplex=False)
    pinger = context.Process(target=_ping, args=(health_port, stop, sender), daemon=True)
    pinger.start()
    try:
        results.recv()  # it has connected
        time.sleep(0.5)
        began = time.monotonic()
        _get(connection, path)
        ended = time.monotonic()
        stop.set()
        pings: list[tuple[float, float]] = results.recv()
    finally:
        stop.set()
        pinger.join(10)
    usual = statistics.median(taken for at, taken in pings if at < began)
    during = [taken for at, taken in pings if at + taken > began and at < ended]
    return max(max(during, default=usual) - usual, 0.0)


def _ping(port: int, stop: Event, results: Connection) -> None:
    """Get `/healthz` until stopped; sends when each request began (monotonic clock) and what it took."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    pings = []
    _get(connection, "/healthz")
    results.send(None)
    while not stop.is_set():
        began = time.monotonic()
        _get(connection, "/healthz")
        pings.append((began, time.monotonic() - began))
        time.sleep(_PING_SECONDS)
    results.send(pings)


def _tell(who: str, run: StatsRun) -> None:
    for how, costs in (("held", run.held), ("held while scraped", run.scraped)):
        for count, cost in costs.items():
            print(
                f"     {who}, {count} pods {how} over {cost.seconds:.0f} s: "
                f"{cost.cpu_percent:.2f} % of a core, PSS {cost.pss_mb:.0f} MB",
                flush=True,
            )
    for path, scrapes in run.scrapes.items():
        if scrapes is None:
            print(f"     {who}: {path} is not served", flush=True)
            continue
        first = scrapes.first
        print(
            f"     {who}, {max(run.held)} pods, {path}: {1000 * scrapes.seconds:.1f} ms and "
            f"{1000 * scrapes.window_cpu:.1f} ms of processor time, "
            f"in its slot {scrapes.cpu}, back to back {scrapes.packed_cpu} "
            f"(the first one {1000 * first.seconds:.1f} ms), "
            f"{first.size / 1000:.0f} kB{_stall_text(scrapes.stalls)}",
            flush=True,
        )


def _stall_text(stalls: list[float]) -> str:
    return f"; stalls of {', '.join(f'{1000 * stall:.1f}' for stall in stalls)} ms" if stalls else ""

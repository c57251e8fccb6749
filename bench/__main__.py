"""`make bench`: every number that the project claims, measured in one run on this machine."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from bench.cluster import cluster
from bench.floor import measure_floor
from bench.logs import logs
from bench.node import bare_runtime, data_dir, running_node
from bench.page import page
from bench.pods import measure_pods
from bench.probes import probes
from bench.processes import cost_over
from bench.proxied_streams import proxied_streams
from bench.results import Result
from bench.scale import scale
from bench.stats import stats
from bench.streams import streams
from bench.volumes import volumes
from pykubelet.standalone.instance import Instance


def idle(seconds: float) -> list[Result]:
    """The agent without pods: what it costs to have it."""
    with data_dir() as path, running_node(path) as node:
        print(f"     start to healthy, private runtime and seed images included: {node.start_seconds:.2f} s")
        cost_over(node.pid, 5)  # start-up's last work is not idling
        cost = cost_over(node.pid, seconds)
    return [
        Result(f"idle agent over {cost.seconds:.0f} s: processor", cost.cpu_percent, "% of core", 0.5),
        Result("idle agent: memory (PSS)", cost.pss_mb, "MB", 70),
    ]


def pods(count: int, hold_seconds: float) -> list[Result]:
    """Many pods at once, as a ratio to the same pods by bare CRI calls in the same run.

    The floor is measured before and after: these machines are not equally quick all the time.
    """
    with data_dir() as path:
        with bare_runtime(path) as image:
            before = asyncio.run(measure_floor(Instance.at(path), image, count))
        with running_node(path) as node:
            run = asyncio.run(measure_pods(node, image, count, hold_seconds))
        with bare_runtime(path) as image:
            after = asyncio.run(measure_floor(Instance.at(path), image, count))
    floor = before.mean(after)
    for when, times in (("before", before), ("after", after)):
        print(
            f"     the floor {when}, {count} pods by bare CRI calls: all running {times.all_running:.2f} s, "
            f"median {times.median_start:.2f} s, all deleted {times.all_deleted:.2f} s"
        )
    print(
        f"     the agent, {count} pods: all running {run.times.all_running:.2f} s, "
        f"median {run.times.median_start:.2f} s, all deleted {run.times.all_deleted:.2f} s; "
        f"processor for the stop {run.stop_cpu:.2f} s"
    )
    return [
        Result(f"{count} pods: all running", run.times.all_running / floor.all_running, "x floor", 1.2),
        Result(f"{count} pods: median start", run.times.median_start / floor.median_start, "x floor", 1.3),
        Result(
            f"{count} pods: the agent's processor time for the start", run.start_cpu, "s", 1.2 * count / 40
        ),
        Result(
            f"{count} pods held over {run.held.seconds:.0f} s: processor",
            run.held.cpu_percent,
            "% of core",
            1,
        ),
        Result(f"{count} pods held: memory (PSS)", run.held.pss_mb, "MB", 80),
    ]


_TERMINATED = 143
_KINDS = (
    "idle",
    "pods",
    "probes",
    "stats",
    "logs",
    "cluster",
    "scale",
    "volumes",
    "streams",
    "proxied-streams",
    "page",
)


def main() -> int:
    """Run the measurements and print them; non-zero when a bound is broken."""
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("--seconds", type=float, default=60, help="how long to watch the idle agent")
    parser.add_argument("--pods", type=int, default=40, help="how many pods to start at once; 0 for none")
    parser.add_argument(
        "--many",
        type=int,
        default=250,
        help="pods whose cost each is compared with that of --pods; 0 for none",
    )
    parser.add_argument("--only", choices=_KINDS, help="measure only this")
    parser.add_argument("--reference", action="store_true", help="measure the reference kubelet, too")
    options = parser.parse_args()
    # So that the pods and data directories of a measurement are removed whatever ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    results: list[Result] = []
    if options.only in (None, "idle"):
        results += idle(options.seconds)
    if options.only in (None, "pods") and options.pods:
        results += pods(options.pods, options.seconds)
    if options.only in (None, "probes") and options.pods:
        results += probes(options.pods, options.seconds)
    if options.only in (None, "stats") and options.pods:
        results += stats(options.pods, options.seconds)
    if options.only in (None, "logs"):
        results += logs(options.seconds)
    if options.only in (None, "cluster") and options.pods:
        results += cluster(options.pods, options.seconds, reference=options.reference)
    if options.only in (None, "scale") and options.pods and options.many:
        results += scale(options.pods, options.many)
    if options.only in (None, "volumes") and options.pods:
        results += volumes(options.pods)
    if options.only in (None, "streams"):
        results += streams(options.seconds)
    if options.only in (None, "proxied-streams"):
        results += proxied_streams()
    if options.only in (None, "page") and options.pods:
        results += page(options.pods, options.seconds)
    for result in results:
        print(result)
    return 0 if all(result.kept for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

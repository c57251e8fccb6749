"""What volumes add: the same pods with and without them, through the agent, in one run.

Each pod has a configMap, a secret, a projected volume of both and an emptyDir, and a configMap and a secret
of its own. Taken in the order without, with, with, without, so that a machine that slows down or
warms up favours neither.
"""

from __future__ import annotations

import asyncio
import statistics

from bench.node import data_dir, running_node
from bench.pods import start_and_stop
from bench.results import Result
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE

_ORDER = (False, True, True, False)


def volumes(count: int) -> list[Result]:
    """Measure how much later pods with volumes run."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with data_dir() as path, running_node(path) as node:
        asyncio.run(start_and_stop(node, BUSYBOX_IMAGE, 4, with_volumes=True))
        for with_volumes in _ORDER:
            times = asyncio.run(start_and_stop(node, BUSYBOX_IMAGE, count, with_volumes=with_volumes))
            took[with_volumes].append(times.all_running)
            print(
                f"     {count} pods {'with' if with_volumes else 'without'} volumes: "
                f"all running {times.all_running:.2f} s, median {times.median_start:.2f} s, "
                f"all deleted {times.all_deleted:.2f} s",
                flush=True,
            )
    ratio = statistics.mean(took[True]) / statistics.mean(took[False])
    return [Result(f"{count} pods with four volumes each: all running", ratio, "x without", 1.15)]

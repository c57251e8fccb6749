"""A fast container log: its bound, a follower, and the kubelet's processor time, next to the reference.

Each kubelet is a node of a control plane and a runtime of its own, one after the other. A container writes
numbered lines at a fixed rate to its standard output while a client follows its log over HTTPS. The largest
size of the log directory is sampled, and the processor time is that of the kubelet process from the first
line until shortly after the last one: the reference compresses what it has rotated then.
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.node import bare_runtime, data_dir
from bench.plane import Agent, control_plane
from bench.processes import cpu_seconds
from bench.results import Result
from bench.watched_pods import watched_pods
from pykubelet.devcluster.binaries import Binaries, find_programs
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.standalone.instance import Instance

RATE_MB = 100
_LINE = 1000
"""Bytes of a line, with its number and its line break."""
_MAX_SIZE, _MAX_FILES = 10 * 2**20, 5
"""Defaults of containerLogMaxSize and containerLogMaxFiles."""
_SETTLE_SECONDS = 15.0
"""Seconds after the last line in which the processor time is counted, too."""
_STALL_SECONDS = 20.0
"""Seconds without a line after which a follower gives up."""
_SAMPLE_SECONDS = 0.05
_POD = "logs-writer"
# A batch per second: awk writes as fast as it can and waits for the rest of the second.
_SCRIPT = """
until [ -e /go ]; do sleep 0.1; done
second=0
while [ $second -lt {seconds} ]; do
  sleep 1 &
  awk -v first=$((second * {lines})) 'BEGIN {{
    srand(7)
    for (p = 0; p < 64; p++) {{
      text = ""
      while (length(text) < {width}) {{
        w = ""; n = 2 + int(rand() * 8)
        for (c = 0; c < n; c++) w = w substr("abcdefghijklmnopqrstuvwxyz", 1 + int(rand() * 26), 1)
        text = text w " "
      }}
      pads[p] = substr(text, 1, {width})
    }}
    for (i = first; i < first + {lines}; i++) printf "%08d %s\\n", i, pads[i % 64]
  }}'
  wait
  second=$((second + 1))
done
sleep 1000
"""


@dataclass(frozen=True, slots=True)
class LogRun:
    """The behaviour of one kubelet."""

    cpu_seconds: float
    largest_mb: float
    """Largest size of the log directory, in MB."""
    write_seconds: float
    """Seconds until the last line was in the log."""
    lines: int
    """Lines that the follower has read in order, each once."""
    disorder: int
    """Lines that were read twice or out of order."""
    follow_seconds: float


def logs(seconds: float) -> list[Result]:
    """Measure a fast log with this kubelet and with the reference."""
    try:
        programs = find_programs(lambda text: print(f"     {text}", flush=True))
    except NotAvailable as err:
        print(f"     logs are not measured: {err}")
        return []
    total = round(seconds) * RATE_MB * 1_000_000 // _LINE
    ours = _measure(programs, None, round(seconds))
    _tell("the agent", ours, total)
    results = [
        Result(f"log at {RATE_MB} MB/s: lines that a follower missed", total - ours.lines, "lines", 0),
        Result(f"log at {RATE_MB} MB/s: lines read twice or out of order", ours.disorder, "lines", 0),
        Result(
            f"log at {RATE_MB} MB/s: largest size",
            ours.largest_mb * 1e6 / (_MAX_SIZE * _MAX_FILES),
            "x limit",
            # The follower may hold 256 MiB that it has not read.
            1.25 + 256 * 2**20 / (_MAX_SIZE * _MAX_FILES),
        ),
    ]
    if programs.kubelet is None:
        print("     there is no reference kubelet to compare with")
        return results
    with undo_host_changes():
        reference = _measure(programs, programs.kubelet, round(seconds))
    _tell("the reference", reference, total)
    ratio = ours.cpu_seconds / reference.cpu_seconds
    return [*results, Result(f"log at {RATE_MB} MB/s: processor time", ratio, "x reference", 0.5)]


def _measure(programs: Binaries, program: Path | None, seconds: int) -> LogRun:
    lines = RATE_MB * 1_000_000 // _LINE
    script = _SCRIPT.format(seconds=seconds, lines=lines, width=_LINE - 10)
    with data_dir() as path, bare_runtime(path) as image, control_plane(programs) as plane:
        instance = Instance.at(path)
        agent = Agent(plane, instance, program)
        try:
            agent.start()
            with watched_pods(plane) as pods:
                pods.create(image, [_POD], command=["sh", "-c", script])
                pods.wait_running([_POD])
                time.sleep(3)
                return _run(agent, instance, lines * seconds)
        finally:
            agent.stop()


def _run(agent: Agent, instance: Instance, total: int) -> LogRun:
    directory = next(instance.pod_logs.glob(f"*_{_POD}_*")) / "main"
    follower = _Follower(agent, total)
    before, began = cpu_seconds(agent.pid), time.monotonic()
    follower.start()
    connection = agent.connect()
    connection.request("POST", f"/run/default/{_POD}/main?cmd=touch%20/go")
    connection.getresponse().read()
    connection.close()
    largest, written_at, quiet_since, size = 0, began, began, -1
    # The log ends when it has not changed for some seconds, and the follower has ended.
    while time.monotonic() - quiet_since < 3 or follower.is_alive():
        sizes = _sizes(directory)
        largest = max(largest, sum(sizes.values()))
        if sizes.get("0.log", 0) != size:
            size, quiet_since = sizes.get("0.log", 0), time.monotonic()
            written_at = quiet_since
        time.sleep(_SAMPLE_SECONDS)
    time.sleep(max(0.0, written_at + _SETTLE_SECONDS - time.monotonic()))
    return LogRun(
        cpu_seconds=cpu_seconds(agent.pid) - before,
        largest_mb=largest / 1e6,
        write_seconds=written_at - began,
        lines=follower.lines,
        disorder=follower.disorder,
        follow_seconds=follower.ended - began,
    )


def _sizes(directory: Path) -> dict[str, int]:
    sizes = {}
    for path in directory.iterdir():
        try:
            sizes[path.name] = path.stat().st_size
        except FileNotFoundError:
            continue
    return sizes


class _Follower(threading.Thread):
    """A client that follows the log until its last line, or until nothing comes for a while."""

    def __init__(self, agent: Agent, total: int) -> None:
        super().__init__(daemon=True)
        self._connection = agent.connect()
        self._connection.timeout = _STALL_SECONDS
        self._total = total
        self.lines = 0
        self.disorder = 0
        self.ended = 0.0

    def run(self) -> None:
        """Read the log."""
        self._connection.request("GET", f"/containerLogs/default/{_POD}/main?follow=true")
        response = self._connection.getresponse()
        rest, last = b"", -1
        try:
            while last < self._total - 1 and (data := response.read1(1024 * 1024)):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    number = int(line[:8])
                    if number > last:
                        self.lines += 1
                        last = number
                    else:
                        self.disorder += 1
        except (OSError, http.client.HTTPException, ValueError) as err:
            print(f"     the follower ended at line {last}: {err!r}", flush=True)
        self.ended = time.monotonic()
        self._connection.close()


def _tell(who: str, run: LogRun, total: int) -> None:
    print(
        f"     {who}: {total * _LINE / 1e6:.0f} MB written in {run.write_seconds:.1f} s, "
        f"{run.cpu_seconds:.2f} s of processor time, largest log {run.largest_mb:.0f} MB, "
        f"follower read {run.lines} of {total} lines ({run.disorder} twice or out of order) "
        f"in {run.follow_seconds:.1f} s",
        flush=True,
    )

"""A fast container log: its bound, a follower, and the kubelet's processor time, next to the reference.

Each kubelet is a node of a control plane and a runtime of its own, one after the other. A container writes
numbered lines at a fixed rate to its standard output while a client follows its log over HTTPS. The largest
size of the log directory is sampled, and the processor time is that of the kubelet process from the first
line until shortly after the last one: the reference compresses what it has rotated then. The bound of the
size of `docs/logs.md` holds without a follower, for which files are kept: a second, shorter run has none.
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

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
_BLOCKS_PER_SECOND = 10
_BLOCK_LINES = RATE_MB * 1_000_000 // _LINE // _BLOCKS_PER_SECOND
_MAX_SIZE, _MAX_FILES = 10 * 2**20, 5
"""Defaults of containerLogMaxSize and containerLogMaxFiles."""
_SETTLE_SECONDS = 15.0
"""Seconds after the last line in which the processor time is counted, too."""
_STALL_SECONDS = 20.0
"""Seconds without a line after which a follower gives up."""
_SAMPLE_SECONDS = 0.05
_POD = "logs-writer"
_FIRST_CHECK_SECONDS, _CHECK_SECONDS = 1.0, 0.2
"""Seconds until a log that begins to grow, and one that grows fast, is rotated, as in `docs/logs.md`: it is
checked after at most 1 or 0.05 s, and written to until the runtime has opened the next file. After the first
check there are no older files, so that what is written during the reopening is within the bound."""
_FIRST_SECONDS = 3.0
"""Seconds after which the first check has been."""
_ALONE_SECONDS = 20
"""Longest time for which a log without a follower is written."""
_START = "until [ -e /ready ]; do sleep 0.1; done"
# Blocks that were generated before: a marker with the number of the block, and lines with theirs in it. One
# is written as fast as the pipe is read, so a second has several, and what they leave of it is waited for.
_SCRIPT = """
echo '{start}' > /start
awk 'BEGIN {{
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
  for (i = 1; i < {lines}; i++) printf "%08d %s\\n", i, pads[i % 64]
}}' > /block
touch /ready
until [ -e /go ]; do sleep 0.1; done
block=0
while [ $block -lt {blocks} ]; do
  sleep 1 &
  last=$((block + {blocks_per_second}))
  while [ $block -lt $last ]; do
    sleep {pause} &
    pause=$!
    printf "{marker}%07d\\n" $block
    cat /block
    wait $pause
    block=$((block + 1))
  done
  wait
done
sleep 1000
"""
_MARKER = b"S"
"""First byte of the line that begins a block and has its number."""


@dataclass(frozen=True, slots=True)
class LogRun:
    """The behaviour of one kubelet."""

    cpu_seconds: float
    largest_mb: float
    """Largest size of the log directory, in MB."""
    largest_later_mb: float
    """The same without the first seconds, in which the kubelet does not know how fast the log grows."""
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
    alone_seconds = min(round(seconds), _ALONE_SECONDS)
    alone = _measure(programs, None, alone_seconds, follow=False)
    _tell("the agent without a follower", alone, alone_seconds * RATE_MB * 1_000_000 // _LINE)
    ours = _measure(programs, None, round(seconds))
    _tell("the agent", ours, total)
    limit_mb = (1.25 * (_MAX_FILES - 1) + 1) * _MAX_SIZE / 1e6
    results = [
        Result(f"log at {RATE_MB} MB/s: seconds to write", ours.write_seconds, "s", 1.1 * round(seconds)),
        Result(
            f"log at {RATE_MB} MB/s, no follower: largest size at first",
            alone.largest_mb,
            "MB",
            limit_mb + _FIRST_CHECK_SECONDS * RATE_MB,
        ),
        Result(
            f"log at {RATE_MB} MB/s, no follower: largest size",
            alone.largest_later_mb,
            "MB",
            limit_mb + _CHECK_SECONDS * RATE_MB,
        ),
        Result(f"log at {RATE_MB} MB/s: lines that a follower missed", total - ours.lines, "lines", 0),
        Result(f"log at {RATE_MB} MB/s: lines read twice or out of order", ours.disorder, "lines", 0),
        Result(
            f"log at {RATE_MB} MB/s, follower: largest size",
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


def _measure(programs: Binaries, program: Path | None, seconds: int, *, follow: bool = True) -> LogRun:
    blocks = seconds * _BLOCKS_PER_SECOND
    script = _SCRIPT.format(
        start=_START,
        blocks=blocks,
        blocks_per_second=_BLOCKS_PER_SECOND,
        pause=0.8 / _BLOCKS_PER_SECOND,
        lines=_BLOCK_LINES,
        width=_LINE - 10,
        marker=_MARKER.decode(),
    )
    with data_dir() as path, bare_runtime(path) as image, control_plane(programs) as plane:
        instance = Instance.at(path)
        agent = Agent(plane, instance, program)
        try:
            agent.start()
            with watched_pods(plane) as pods:
                pods.create(image, [_POD], command=["sh", "-c", script])
                pods.wait_running([_POD])
                time.sleep(3)
                return _run(agent, instance, _BLOCK_LINES * blocks, follow=follow)
        finally:
            agent.stop()


def _exec(agent: Agent, command: str) -> None:
    """Run a command in the container to its end."""
    connection = agent.connect()
    connection.request("POST", f"/run/default/{_POD}/main?cmd={quote(command)}")
    connection.getresponse().read()
    connection.close()


def _run(agent: Agent, instance: Instance, total: int, *, follow: bool) -> LogRun:
    directory = next(instance.pod_logs.glob(f"*_{_POD}_*")) / "main"
    _exec(agent, "sh /start")
    follower = _Follower(agent, total)
    before, began = cpu_seconds(agent.pid), time.monotonic()
    if follow:
        follower.start()
    _exec(agent, "touch /go")
    largest, later, written_at, quiet_since, size = 0, 0, began, began, -1
    # The log ends when it has not changed for some seconds, and the follower has ended.
    while time.monotonic() - quiet_since < 3 or follower.is_alive():
        sizes = _sizes(directory)
        largest = max(largest, sum(sizes.values()))
        if time.monotonic() - began > _FIRST_SECONDS:
            later = max(later, sum(sizes.values()))
        if sizes.get("0.log", 0) != size:
            size, quiet_since = sizes.get("0.log", 0), time.monotonic()
            written_at = quiet_since
        time.sleep(_SAMPLE_SECONDS)
    time.sleep(max(0.0, written_at + _SETTLE_SECONDS - time.monotonic()))
    return LogRun(
        cpu_seconds=cpu_seconds(agent.pid) - before,
        largest_mb=largest / 1e6,
        largest_later_mb=later / 1e6,
        write_seconds=written_at - began,
        lines=follower.lines,
        disorder=follower.disorder,
        follow_seconds=follower.ended - began if follow else 0.0,
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
        self._first = 0

    def run(self) -> None:
        """Read the log."""
        self._connection.request("GET", f"/containerLogs/default/{_POD}/main?follow=true")
        response = self._connection.getresponse()
        rest, last = b"", -1
        try:
            while last < self._total - 1 and (data := response.read1(1024 * 1024)):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    number = self._number(line)
                    if number > last:
                        self.lines += 1
                        last = number
                    else:
                        self.disorder += 1
        except (OSError, http.client.HTTPException, ValueError) as err:
            print(f"     the follower ended at line {last}: {err!r}", flush=True)
        self.ended = time.monotonic()
        self._connection.close()

    def _number(self, line: bytes) -> int:
        """Return the number of a line in the whole log."""
        if line.startswith(_MARKER):
            self._first = int(line[len(_MARKER) :]) * _BLOCK_LINES
            return self._first
        return self._first + int(line[:8])


def _tell(who: str, run: LogRun, total: int) -> None:
    text = (
        f"     {who}: {total * _LINE / 1e6:.0f} MB written in {run.write_seconds:.1f} s, "
        f"{run.cpu_seconds:.2f} s of processor time, largest log {run.largest_mb:.0f} MB, "
        f"later {run.largest_later_mb:.0f} MB"
    )
    if run.follow_seconds:
        text += (
            f", follower read {run.lines} of {total} lines ({run.disorder} twice or out of order) "
            f"in {run.follow_seconds:.1f} s"
        )
    print(text, flush=True)

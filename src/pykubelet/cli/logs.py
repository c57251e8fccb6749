"""`pykubelet logs`: what a container says, from its log files.

What it wrote to its standard output goes to ours, the same with errors. Following goes on over
restarts of the container and rotations of its log, and ends when nothing more can come.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Container, Pod
from pykubelet.cli.choose import all_containers, choose_container, choose_pod
from pykubelet.cli.client import NodeClient, NodeDown, NotThere
from pykubelet.cli.guard import guarded
from pykubelet.cli.log_places import NoLog, find_attempt, known_runs, log_file, pods_with_logs, prospect
from pykubelet.embedded.instance import Instance
from pykubelet.server.log_files import LogFile, follow
from pykubelet.server.log_lines import LineWriter, LogEntry, Stream
from pykubelet.server.pods import NodePods

PROGRAM = "pykubelet logs"
_EVERY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LogWish:
    """What a person wants to see of a container's log."""

    pod: str
    container: str | None = None
    follow: bool = False
    previous: bool = False
    tail: int | None = None
    timestamps: bool = False
    since: Duration | None = None
    """How old a line may be."""


def run_logs(data_dir: Path, wish: LogWish) -> int:
    """Print the log; returns the exit code."""

    def work() -> int:
        instance = Instance.at(data_dir)
        since = time.time_ns() - wish.since if wish.since is not None else None
        reader = _Reader(instance, wish, Printer(LineWriter(timestamps=wish.timestamps, since=since)))
        reader.choose()
        if wish.follow and not wish.previous:
            asyncio.run(reader.follow())
        else:
            reader.print()
        return 0

    return guarded(PROGRAM, work, NoLog, OSError)


class Printer:
    """Writes lines to the stream that they came from."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._last: Stream = "stdout"

    def print(self, entries: Iterable[LogEntry]) -> None:
        """Print entries; the order in which the container wrote to its two streams is kept."""
        for stream, text in self._writer.write(entries):
            if stream != self._last:
                self.flush()
                self._last = stream
            (sys.stdout if stream == "stdout" else sys.stderr).buffer.write(text)

    def flush(self) -> None:
        """Let everything be seen."""
        (sys.stdout if self._last == "stdout" else sys.stderr).buffer.flush()


class _Reader:
    def __init__(self, instance: Instance, wish: LogWish, printer: Printer) -> None:
        self._instance = instance
        self._client = NodeClient(instance)
        self._wish = wish
        self._printer = printer
        self._pod: Pod
        self._container: Container

    def choose(self) -> None:
        """Find out which container is meant; says so where it had to choose."""
        try:
            node = self._client.pods()
        except NodeDown:
            node = NodePods(pods=pods_with_logs(self._instance))
            if self._wish.follow or not node.pods:
                raise
        self._pod = choose_pod(node.pods, self._wish.pod, node.states)
        self._container, guessed = choose_container(self._pod, self._wish.container)
        if guessed:
            names = ", ".join(container.name for container in all_containers(self._pod))
            print(f"Container {self._container.name} of {names} (choose another with -c)", file=sys.stderr)

    def print(self) -> None:
        """Print the log as it is now."""
        attempt = find_attempt(
            self._pod, self._container.name, self._wish.previous, known_runs(self._file(0))
        )
        try:
            log = LogFile(self._file(attempt))
        except FileNotFoundError:
            name = self._container.name
            raise NoLog(f"the log of run {attempt} of container {name} was removed") from None
        with closing(log):
            self._print_present(log, self._wish.tail)
            self._printer.print(log.rest())
            self._printer.flush()

    async def follow(self) -> None:
        """Print the log and what is added, run after run, until nothing more can come."""
        tail, is_read = self._wish.tail, False
        try:
            attempt = find_attempt(self._pod, self._container.name, False, known_runs(self._file(0)))
        except NoLog:
            attempt = 0
        while True:
            outlook = prospect(*await self._picture(), self._container, attempt)
            if not is_read and self._file(attempt).exists():
                await self._follow_run(attempt, tail)
                tail, is_read = None, True
            elif outlook == "over":
                return
            elif outlook == "next":
                attempt, is_read = attempt + 1, False
            else:
                await asyncio.sleep(_EVERY_SECONDS)

    async def _follow_run(self, attempt: int, tail: int | None) -> None:
        async def goes_on() -> bool:
            return prospect(*await self._picture(), self._container, attempt) == "writing"

        with closing(LogFile(self._file(attempt))) as log:
            self._print_present(log, tail)
            self._printer.flush()
            async for entries in follow(log, goes_on):
                self._printer.print(entries)
                self._printer.flush()

    def _print_present(self, log: LogFile, tail: int | None) -> None:
        if tail is not None:
            self._printer.print(log.skip_to_last(tail))
        self._printer.print(log.entries())

    def _file(self, attempt: int) -> Path:
        return log_file(self._instance, self._pod, self._container.name, attempt)

    async def _picture(self) -> tuple[Pod | None, str]:
        try:
            node = await asyncio.to_thread(self._client.pod, self._pod.uid)
        except NotThere:
            return None, ""
        return node.pods[0], node.states.get(self._pod.uid, "syncing")

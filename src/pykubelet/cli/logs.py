"""`pykubelet logs`: what a container says, from its log files.

What it wrote to its standard output goes to ours, the same with errors. Following goes on over
restarts of the container and rotations of its log, and ends when nothing more can come.

Where a container's logs lie, which of its runs is meant, and whether more is to come.

The decisions behind `pykubelet logs`, without any reading. Runs are counted from 0, as the log files are.
Logs can also be read while no node runs: then the folders tell which pods there were.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pykubelet.api.duration import Duration
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cli.client import (
    KubeletNotRunning,
    NodeClient,
    NotFoundError,
    all_containers,
    choose_container,
    choose_pod,
)
from pykubelet.cli.errors import guarded
from pykubelet.cli.printers import is_finished, is_leaving
from pykubelet.kuberuntime.decide import restarts_after_exit
from pykubelet.kuberuntime.paths import attempts_in_logs, container_log_path, pod_log_dir
from pykubelet.podconfig.static_pods import SOURCE_ANNOTATION
from pykubelet.server.log_files import LineWriter, LogEntry, LogFile, Stream, follow
from pykubelet.server.pods import NodePods
from pykubelet.standalone.instance import Instance

Prospect = Literal["writing", "later", "next", "over"]
"""Of one run: it goes on; it may begin again; its successor is there; nothing more will come."""


class LogNotFound(Exception):
    """There is no log to read; the text says why."""


def log_file(instance: Instance, pod: Pod, container: str, attempt: int) -> Path:
    """The log file of one run of a container."""
    meta = pod.metadata
    folder = pod_log_dir(str(instance.pod_logs), meta.namespace, meta.name, meta.uid)
    return Path(folder) / container_log_path(container, attempt)


def find_attempt(pod: Pod, container: str, previous: bool, known_runs: int) -> int:
    """Decide which run's log is meant; `known_runs` is how many there are by the log files.

    Raises NoLog when that run never was.
    """
    status = container_status(pod, container)
    newest = known_runs - 1 if status is None else status.restart_count
    waiting = status.state.waiting if status is not None else None
    if previous:
        # Between two runs the last one that ended is the previous one, and also the newest.
        attempt = newest if waiting is not None and _has_run(status) else newest - 1
        if attempt < 0:
            raise LogNotFound(f"container {container} of pod {pod.metadata.name} did not run before")
        return attempt
    if newest < 0 or (waiting is not None and not _has_run(status) and known_runs <= newest):
        why = f": {waiting.reason}" if waiting is not None and waiting.reason else ""
        raise LogNotFound(f"container {container} of pod {pod.metadata.name} has not started yet{why}")
    return newest


def prospect(pod: Pod | None, state: str, container: Container, attempt: int) -> Prospect:
    """Decide what is to come of a run's log, by the newest picture of its pod; None is a pod that is gone."""
    if pod is None:
        return "over"
    ends = is_finished(pod) or is_leaving(pod, state)
    status = container_status(pod, container.name)
    if status is None:
        return "over" if ends else "later"
    if status.restart_count > attempt:
        return "next"
    if status.state.running is not None:
        return "writing"
    ended = status.state.terminated
    if ends or (ended is not None and not restarts_after_exit(pod, _as_run(pod, container), ended.exit_code)):
        return "over"
    return "later"


def container_status(pod: Pod, name: str) -> ContainerStatus | None:
    """Find a container's status, of whatever kind it is."""
    found = pod.status
    for status in (
        *found.container_statuses,
        *found.init_container_statuses,
        *found.ephemeral_container_statuses,
    ):
        if status.name == name:
            return status
    return None


def pods_with_logs(instance: Instance) -> list[Pod]:
    """Give the pods that left logs here, for when there is no node to ask: identities and containers only."""
    pods = []
    node = socket.gethostname().lower()
    for folder in _folders(instance.pod_logs):
        namespace, _, rest = folder.name.partition("_")
        name, _, uid = rest.rpartition("_")
        containers = [Container(name=inner.name) for inner in _folders(folder)]
        if name and uid and containers:
            meta = ObjectMeta(
                name=name, namespace=namespace, uid=uid, annotations={SOURCE_ANNOTATION: "file"}
            )
            pods.append(Pod(metadata=meta, spec=PodSpec(node_name=node, containers=containers)))
    return pods


def known_runs(file: Path) -> int:
    """How often a container ran, by the log files beside one of its log files."""
    try:
        return attempts_in_logs(path.name for path in file.parent.iterdir())
    except OSError:
        return 0


def _has_run(status: ContainerStatus | None) -> bool:
    return status is not None and status.last_state.terminated is not None


def _as_run(pod: Pod, container: Container) -> Container:
    """An init container that succeeded is done, whatever the pod's policy says."""
    initial = any(container.name == other.name for other in pod.spec.init_containers)
    if initial and container.restart_policy is None and pod.spec.restart_policy == "Always":
        return Container(name=container.name, restart_policy="OnFailure")
    return container


def _folders(path: Path) -> list[Path]:
    try:
        return sorted((entry for entry in path.iterdir() if entry.is_dir()), key=_age)
    except OSError:
        return []


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


PROGRAM = "pykubelet logs"
_EVERY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What a person wants to see of a container's log."""

    pod: str
    container: str | None = None
    follow: bool = False
    previous: bool = False
    tail: int | None = None
    timestamps: bool = False
    since: Duration | None = None
    """How old a line may be."""


def run_logs(data_dir: Path, wish: LogOptions) -> int:
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

    return guarded(PROGRAM, work, LogNotFound, OSError)


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
    def __init__(self, instance: Instance, wish: LogOptions, printer: Printer) -> None:
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
        except KubeletNotRunning:
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
            raise LogNotFound(f"the log of run {attempt} of container {name} was removed") from None
        with closing(log):
            self._print_present(log, self._wish.tail)
            self._printer.print(log.rest())
            self._printer.flush()

    async def follow(self) -> None:
        """Print the log and what is added, run after run, until nothing more can come."""
        tail, is_read = self._wish.tail, False
        try:
            attempt = find_attempt(self._pod, self._container.name, False, known_runs(self._file(0)))
        except LogNotFound:
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
        except NotFoundError:
            return None, ""
        return node.pods[0], node.states.get(self._pod.uid, "syncing")

"""`pykubelet logs`: prints a container's log files.

Lines of the container's standard output are written to standard output, lines of its standard error to
standard error. Following continues over container restarts and log rotation, and ends when no more lines
can come. With `--since` or `--tail`, lines of rotated and compressed files are printed as well. Runs of a
container are counted from 0, as its log files are.

Logs can also be read while no node runs: the pods and containers are then those of the log directories.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pykubelet.api.duration import Duration
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cli.client import (
    KubeletNotRunning,
    NotFoundError,
    all_containers,
    choose_container,
    choose_pod,
    run_command,
)
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.printers import is_finished, is_terminating
from pykubelet.kuberuntime.decide import restarts_after_exit
from pykubelet.kuberuntime.paths import attempts_in_logs, container_log_path, pod_log_dir
from pykubelet.podconfig.static_pods import SOURCE_ANNOTATION
from pykubelet.server.logs.log_chain import open_newest_rotated
from pykubelet.server.logs.log_files import LineWriter, LogEntry, LogFile, Stream, follow
from pykubelet.server.pods import NodePods

LogOutlook = Literal["writing", "later", "next", "over"]
"""Outlook of one run's log: container runs; it may still start; the next run exists; log is complete."""


class LogNotFound(Exception):
    """Raised when there is no log to read; the text contains the reason."""


def log_file(node: Node, pod: Pod, container: str, attempt: int) -> Path:
    """Return the path of the log file of one run of a container."""
    meta = pod.metadata
    directory = pod_log_dir(str(node.pod_logs), meta.namespace, meta.name, meta.uid)
    return Path(directory) / container_log_path(container, attempt)


def find_attempt(pod: Pod, container: str, previous: bool, known_runs: int) -> int:
    """Return the number of the run whose log to print; `known_runs` is the number of runs with log files.

    Raises LogNotFound when the container has no such run.
    """
    status = container_status(pod, container)
    newest = known_runs - 1 if status is None else status.restart_count
    waiting = status.state.waiting if status is not None else None
    if previous:
        # Between two runs the newest run has ended, so it is also the previous one.
        attempt = newest if waiting is not None and _has_run(status) else newest - 1
        if attempt < 0:
            raise LogNotFound(f"container {container} of pod {pod.metadata.name} did not run before")
        return attempt
    if newest < 0 or (waiting is not None and not _has_run(status) and known_runs <= newest):
        reason = f": {waiting.reason}" if waiting is not None and waiting.reason else ""
        raise LogNotFound(f"container {container} of pod {pod.metadata.name} has not started yet{reason}")
    return newest


def log_outlook(pod: Pod | None, state: str, container: Container, attempt: int) -> LogOutlook:
    """Return the outlook of a run's log from the latest state of its pod; None is a pod that was removed."""
    if pod is None:
        return "over"
    is_ending = is_finished(pod) or is_terminating(pod, state)
    status = container_status(pod, container.name)
    if status is None:
        return "over" if is_ending else "later"
    if status.restart_count > attempt:
        return "next"
    if status.state.running is not None:
        return "writing"
    ended = status.state.terminated
    if is_ending or (
        ended is not None
        and not restarts_after_exit(pod, _with_effective_policy(pod, container), ended.exit_code)
    ):
        return "over"
    return "later"


def container_status(pod: Pod, name: str) -> ContainerStatus | None:
    """Return the status of a container of any type, or None."""
    found = pod.status
    for status in (
        *found.container_statuses,
        *found.init_container_statuses,
        *found.ephemeral_container_statuses,
    ):
        if status.name == name:
            return status
    return None


def pods_with_logs(node: Node) -> list[Pod]:
    """Return the pods that have log directories, with names and containers only, for use without a node."""
    pods = []
    node_name = node.info.node_name
    for directory in _subdirectories(node.pod_logs):
        namespace, _, rest = directory.name.partition("_")
        name, _, uid = rest.rpartition("_")
        containers = [Container(name=subdirectory.name) for subdirectory in _subdirectories(directory)]
        if name and uid and containers:
            meta = ObjectMeta(
                name=name, namespace=namespace, uid=uid, annotations={SOURCE_ANNOTATION: "file"}
            )
            pods.append(Pod(metadata=meta, spec=PodSpec(node_name=node_name, containers=containers)))
    return pods


def known_runs(file: Path) -> int:
    """Return the number of runs of a container, from the log files in the directory of `file`."""
    try:
        return attempts_in_logs(path.name for path in file.parent.iterdir())
    except OSError:
        return 0


def _has_run(status: ContainerStatus | None) -> bool:
    return status is not None and status.last_state.terminated is not None


def _with_effective_policy(pod: Pod, container: Container) -> Container:
    """Return the container with the restart policy that counts.

    It is Never for ephemeral containers, and OnFailure for plain init containers of an Always pod.
    """
    if any(container.name == other.name for other in pod.spec.ephemeral_containers):
        return Container(name=container.name, restart_policy="Never")
    is_init = any(container.name == other.name for other in pod.spec.init_containers)
    if is_init and container.restart_policy is None and pod.spec.restart_policy == "Always":
        return Container(name=container.name, restart_policy="OnFailure")
    return container


def _subdirectories(path: Path) -> list[Path]:
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
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of `pykubelet logs`."""

    pod: str
    container: str | None = None
    follow: bool = False
    previous: bool = False
    tail: int | None = None
    timestamps: bool = False
    since: Duration | None = None
    """Maximum age of a line."""


def run_logs(selection: NodeSelection, options: LogOptions) -> int:
    """Print the log; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        since = time.time_ns() - options.since if options.since is not None else None
        printer = Printer(LineWriter(timestamps=options.timestamps, since=since))
        reader = _Reader(node, options, since, printer)
        reader.select()
        if options.follow and not options.previous:
            asyncio.run(reader.follow())
        else:
            reader.print()
        return 0

    return run_command(PROGRAM, work, LogNotFound, OSError)


class Printer:
    """Output of log lines to the stream that the container wrote them to."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._last: Stream = "stdout"

    def print(self, entries: Iterable[LogEntry]) -> None:
        """Print entries in the order in which the container wrote them, across both streams."""
        for stream, text in self._writer.write(entries):
            if stream != self._last:
                self.flush()
                self._last = stream
            (sys.stdout if stream == "stdout" else sys.stderr).buffer.write(text)

    def flush(self) -> None:
        """Flush the stream that was written last."""
        (sys.stdout if self._last == "stdout" else sys.stderr).buffer.flush()


class _Reader:
    def __init__(self, node: Node, options: LogOptions, since: int | None, printer: Printer) -> None:
        """Initialize; `since` is the time of the oldest line, in nanoseconds since the Unix epoch."""
        self._since = since
        self._node = node
        self._client = node.client
        self._options = options
        self._printer = printer
        self._pod: Pod
        self._container: Container

    def select(self) -> None:
        """Select the pod and the container; print the container if it was picked by default."""
        try:
            node = self._client.pods()
        except KubeletNotRunning:
            node = NodePods(pods=pods_with_logs(self._node))
            if self._options.follow or not node.pods:
                raise
        self._pod = choose_pod(node.pods, self._options.pod, node.states)
        self._container, is_default = choose_container(self._pod, self._options.container)
        if is_default:
            names = ", ".join(container.name for container in all_containers(self._pod))
            print(f"Container {self._container.name} of {names} (choose another with -c)", file=sys.stderr)

    def print(self) -> None:
        """Print the current contents of the log."""
        attempt = find_attempt(
            self._pod, self._container.name, self._options.previous, known_runs(self._file(0))
        )
        path = self._file(attempt)
        try:
            log = LogFile(path) if path.exists() else LogFile(path, open_newest_rotated(path))
        except FileNotFoundError:
            name = self._container.name
            raise LogNotFound(f"the log of run {attempt} of container {name} was removed") from None
        with closing(log):
            self._print_present(log, self._options.tail)
            self._printer.print(log.rest())
            self._printer.flush()

    async def follow(self) -> None:
        """Print the log and appended lines, run after run, until the last log is complete."""
        tail, is_read = self._options.tail, False
        try:
            attempt = find_attempt(self._pod, self._container.name, False, known_runs(self._file(0)))
        except LogNotFound:
            attempt = 0
        while True:
            outlook = log_outlook(*await self._observe_pod(), self._container, attempt)
            if not is_read and self._file(attempt).exists():
                await self._follow_run(attempt, tail)
                tail, is_read = None, True
            elif outlook == "over":
                return
            elif outlook == "next":
                attempt, is_read = attempt + 1, False
            else:
                await asyncio.sleep(_POLL_SECONDS)

    async def _follow_run(self, attempt: int, tail: int | None) -> None:
        async def may_grow() -> bool:
            return log_outlook(*await self._observe_pod(), self._container, attempt) == "writing"

        with closing(LogFile(self._file(attempt))) as log:
            self._print_present(log, tail)
            self._printer.flush()
            async for entries in follow(log, may_grow):
                self._printer.print(entries)
                self._printer.flush()

    def _print_present(self, log: LogFile, tail: int | None) -> None:
        """Print the log; `--tail` and `--since` reach back through its rotated files."""
        with ExitStack() as stack:
            older = log.older(self._since) if tail is not None or self._since is not None else []
            for file in older:
                stack.enter_context(closing(file))
            if tail is not None:
                self._printer.print(log.skip_to_last(tail, older))
            else:
                for file in older:
                    self._printer.print(file.entries())
                    self._printer.print(file.rest())
        self._printer.print(log.entries())

    def _file(self, attempt: int) -> Path:
        return log_file(self._node, self._pod, self._container.name, attempt)

    async def _observe_pod(self) -> tuple[Pod | None, str]:
        try:
            node = await asyncio.to_thread(self._client.pod, self._pod.uid)
        except NotFoundError:
            return None, ""
        return node.pods[0], node.states.get(self._pod.uid, "syncing")

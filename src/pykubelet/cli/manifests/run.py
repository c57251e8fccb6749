"""`pykubelet run FILE`: installs a manifest on the node and waits until its pods are ready or have failed.

ConfigMaps and Secrets are installed the same way, alone or with the pods that use them; they need no
waiting. A running node receives the manifest over its control socket; otherwise it is written to the
manifest directory, which the node reads when it starts. After Ctrl-C or a timeout the manifest stays
installed.

A pod is done when it is ready or has succeeded, a Job when it has completed or failed. A pod has failed when
its phase is Failed, when it is terminating, or when a container waits for one of the FAILURE_REASONS: the
next attempt most likely fails in the same way, and the user needs the cause now. With `restartPolicy:
OnFailure` CrashLoopBackOff is not a failure.

Progress is shown by `run_view`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cli.client import (
    ManifestRejected,
    NodeClient,
    NodeError,
    NotFoundError,
    choose_container,
    choose_pod,
    run_command,
)
from pykubelet.cli.manifests.inventory import served_kinds
from pykubelet.cli.manifests.run_view import LiveView, PlainView, PodSnapshot, statuses_of
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.describe import state_text
from pykubelet.cli.pods.logs import known_runs, log_file
from pykubelet.cli.printers import escape_unprintable, has_condition, is_terminating, status_text
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.images.pull_progress import PullProgress
from pykubelet.linux import HostError
from pykubelet.linux.network import node_name
from pykubelet.podconfig.local_objects import title
from pykubelet.podconfig.manifests import Contents, read_bytes, read_manifest
from pykubelet.podconfig.pod_history import Event
from pykubelet.podconfig.static_pods import (
    ManifestConflict,
    find_running_pod,
    install_manifest,
    mode_for,
    names_of,
    plan_installation,
    read_manifest_dir,
    static_contents,
)
from pykubelet.podconfig.workloads.job import pod_uid, run_hash
from pykubelet.podconfig.workloads.kinds import JobSpec, Workload
from pykubelet.podconfig.workloads.records import DIRECTORY as RECORDS
from pykubelet.podconfig.workloads.records import read_record
from pykubelet.server.logs.log_files import LogFile
from pykubelet.server.pods import NodePods

STEADY_SECONDS = 2.0
"""Seconds that a pod without readiness probes must stay ready, because it may crash right after its start."""
FAILURE_REASONS = frozenset(
    {
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
    }
)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Result of waiting for a pod."""

    good: bool
    status: str
    """Status text such as `ready`, `succeeded`, `CrashLoopBackOff`."""


def run_outcome(pod: Pod, state: str, ready_seconds: float) -> RunOutcome | None:
    """Return the outcome of a pod, or None to keep waiting.

    `ready_seconds` is the time for which the pod has been ready without interruption.
    """
    if pod.status.phase == "Succeeded":
        return RunOutcome(True, "succeeded")
    if pod.status.phase == "Failed":
        return RunOutcome(False, status_text(pod, state))
    if is_terminating(pod, state):
        return RunOutcome(False, "Terminating")
    for status in statuses_of(pod):
        reason = status.state.waiting.reason if status.state.waiting is not None else ""
        may_restart = pod.spec.restart_policy == "OnFailure" and reason == "CrashLoopBackOff"
        if reason in FAILURE_REASONS and not may_restart:
            return RunOutcome(False, reason)
    if is_ready(pod) and (_has_readiness_probes(pod) or ready_seconds >= STEADY_SECONDS):
        return RunOutcome(True, "ready")
    return None


def is_ready(pod: Pod) -> bool:
    """Return whether the pod's Ready condition is true."""
    return has_condition(pod, "Ready")


def explain(pod: Pod, events: Sequence[Event], now: datetime) -> list[str]:
    """Return lines on a failure: pod reason, failing containers and the last three warning events."""
    lines = []
    if pod.status.reason or pod.status.message:
        lines.append(f"{pod.status.reason}: {pod.status.message}".strip(": "))
    for status in failingstatuses_of(pod):
        lines.append(f"container {status.name}: {state_text(status.state, now)}")
        if status.last_state.terminated is not None:
            lines.append(f"container {status.name} before: {state_text(status.last_state, now)}")
    for event in _last_warnings(events, 3):
        times = f" (x{event.count})" if event.count > 1 else ""
        lines.append(f"{event.reason}: {event.message}{times}")
    return lines


def failingstatuses_of(pod: Pod) -> list[ContainerStatus]:
    """Return the statuses of the containers that failed or are not ready."""
    return [status for status in statuses_of(pod) if not _is_healthy(pod, status)]


def _is_healthy(pod: Pod, status: ContainerStatus) -> bool:
    if status.state.running is not None:
        return status.ready or not any(status.name == container.name for container in pod.spec.containers)
    if status.state.terminated is not None:
        return status.state.terminated.exit_code == 0
    # A container that waits for others is not the cause.
    waiting = status.state.waiting
    return waiting is None or waiting.reason in ("", "PodInitializing", "ContainerCreating")


def _last_warnings(events: Iterable[Event], limit: int) -> list[Event]:
    warnings = sorted((e for e in events if e.kind == "Warning"), key=lambda event: event.last)
    return warnings[-limit:]


def _has_readiness_probes(pod: Pod) -> bool:
    return all(container.readiness_probe is not None for container in pod.spec.containers)


PROGRAM = "pykubelet run"
_POLL_SECONDS = 0.25
_LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `pykubelet run`."""

    file: Path
    detach: bool = False
    replace: bool = False
    timeout: float = 300.0
    """Seconds to wait for the pods."""


def run_manifest(selection: NodeSelection, options: RunOptions) -> int:
    """Validate the manifest, install it and wait for its pods; return the exit code."""

    def work() -> int:
        _require_text(options.file)
        node = select_node(selection)
        content = _read(options.file)
        written = _validated(content, str(options.file), served_kinds(node.info))
        directory = manifest_directory(node)
        target = _install(node, directory, options, content, written)
        if not node.is_running():
            has_pods = written.written_pods or any(job.sample for job in written.workloads)
            what = "the pod starts" if has_pods else "it is used"
            start = f"`pykubelet up{node.option}`" if node.instance is not None else "start of the kubelet"
            print(f"The node is not running: {what} with the next {start}.")
            return 0
        waits = [*(_PodWait(pod, target) for pod in written.written_pods), *_job_waits(node, written)]
        if options.detach or not waits:
            return 0
        return _wait(node, waits, options.timeout)

    return run_command(PROGRAM, work, ManifestConflict, OSError)


def manifest_directory(node: Node) -> Path:
    """Return the directory of static pod manifests. Raises NodeError."""
    directory = node.manifests
    if directory is None:
        raise NodeError(
            f"the node on {node.title} takes no manifests: set staticPodPath in its configuration"
        )
    if directory.is_file():
        raise NodeError(f"the staticPodPath {directory} is one file, whose owner writes it: set a directory")
    if not directory.is_dir() and not node.is_running():
        if node.instance is not None:
            raise NodeError(f"there is no node in {node.title}: start one with `pykubelet up`")
        raise NodeError(f"the manifest directory {directory} does not exist: {node.start_hint}")
    return directory


def _require_text(file: Path) -> None:
    """Raise ConfigError for a file whose name cannot be sent to the node."""
    try:
        file.name.encode()
    except UnicodeEncodeError:
        raise ConfigError([Problem(str(file), "has a name that is not UTF-8: rename the file")]) from None


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file)
    except OSError as err:
        raise OSError(f"{file} cannot be read: {err.strerror}") from err


def _validated(content: bytes, origin: str, served: frozenset[str]) -> Contents:
    """Return the contents of a valid manifest, without defaults; its pods may refer to `served` kinds.

    Raises ConfigError.
    """
    try:
        node = node_name()
    except HostError:
        node = "node"  # the kubelet has a --hostname-override; validation does not depend on the name
    static_contents(content, source="file", origin=origin, node_name=node, now=time.time_ns(), served=served)
    written = read_manifest(content, origin)
    if written.is_empty:
        raise ConfigError([Problem(origin, "holds no pod")])
    for warning in written.warnings:
        print(f"{PROGRAM}: warning: {escape_unprintable(str(warning), lines=False)}", file=sys.stderr)
    return written


def _install(node: Node, directory: Path, options: RunOptions, content: bytes, written: Contents) -> Path:
    target = directory / options.file.name
    if options.file.resolve().parent != directory.resolve():
        target = _send_to_node(node, options, content) or _write_manifest(target, options, content, written)
    titles = [*map(title, written.objects), *(workload.title for workload in written.workloads)]
    for name in (*titles, *(pod.metadata.name for pod in written.pods)):
        print(escape_unprintable(f"{name}: handed to the node as {target}", lines=False))
    return target


def _send_to_node(node: Node, options: RunOptions, content: bytes) -> Path | None:
    """Send the manifest to the running node and return its path; None if no node can accept it now."""
    if not node.is_running():
        return None
    try:
        return Path(node.client.put_manifest(options.file.name, content, replace=options.replace).path)
    except ManifestRejected:
        raise
    except NodeError:
        # The node is starting or stopping, or of an older version; it reads the directory when it runs.
        return None


def _write_manifest(target: Path, options: RunOptions, content: bytes, written: Contents) -> Path:
    plan = plan_installation(
        target, names_of(written), read_manifest_dir(target.parent), replace=options.replace
    )
    try:
        install_manifest(plan, content, mode_for(written))
    except OSError as err:
        raise OSError(f"{target} cannot be written: {err.strerror}") from err
    return target


@dataclass(slots=True, kw_only=True)
class _Wait:
    """What is waited for, with the last observed state of its pod."""

    goal: ClassVar[str]
    is_known: bool = False
    """Whether the node has it."""
    pod: Pod | None = None
    state: str = "syncing"
    events: list[Event] = field(default_factory=list)
    outcome: RunOutcome | None = None

    @property
    def name(self) -> str:
        raise NotImplementedError

    def update(self, client: NodeClient, node: NodePods, now: float) -> None:
        """Update the observed state and the outcome."""
        raise NotImplementedError

    @property
    def snapshot(self) -> PodSnapshot:
        return PodSnapshot(self.name, self.pod, self.state, tuple(self.events))

    def observe(self, client: NodeClient, node: NodePods, found: Pod) -> None:
        """Update the state of the pod. Raises NotFoundError if it has just been removed."""
        self.is_known = True
        self.pod, self.state = found, node.states.get(found.uid, "syncing")
        self.events = client.journal(found.uid).events


@dataclass(slots=True)
class _PodWait(_Wait):
    """A pod to wait for."""

    goal = "ready"
    written: Pod
    target: Path
    ready_since: float | None = None

    @property
    def name(self) -> str:
        return self.written.metadata.name

    def update(self, client: NodeClient, node: NodePods, now: float) -> None:
        found = find_running_pod(node.pods, self.written, self.target)
        if found is None:
            self.outcome = RunOutcome(False, "gone") if self.pod is not None else None
            return
        try:
            self.observe(client, node, found)
        except NotFoundError:
            return
        self.ready_since = (self.ready_since or now) if is_ready(found) else None
        steady = now - self.ready_since if self.ready_since is not None else 0.0
        self.outcome = run_outcome(found, self.state, steady)


@dataclass(slots=True)
class _JobWait(_Wait):
    """A Job to wait for; its outcome is in the record that the node keeps."""

    goal = "complete"
    job: Workload
    template: str
    """Hash of the run: the record of a run of another manifest does not count."""
    records: Path

    @property
    def name(self) -> str:
        return self.job.title

    def update(self, client: NodeClient, node: NodePods, now: float) -> None:
        try:
            record = read_record(self.records, self.job.key)
        except ValueError as err:
            raise NodeError(f"the record of {self.name} cannot be read: {err}") from err
        run = record.job if record is not None else None
        if run is None or run.template != self.template:
            return
        self.is_known = True
        uids = {pod_uid(run.uid, entry.serial): entry.status is None for entry in run.pods}
        pods = sorted((pod for pod in node.pods if pod.uid in uids), key=lambda pod: uids[pod.uid])
        if pods:
            with suppress(NotFoundError):
                self.observe(client, node, pods[-1])
        if run.outcome:
            why = f" ({run.reason}: {run.message})" if run.outcome == "Failed" else ""
            self.outcome = RunOutcome(run.outcome == "Complete", f"{run.outcome.lower()}{why}")
            return
        for pod in pods:
            found = run_outcome(pod, node.states.get(pod.uid, "syncing"), 0.0)
            # A pod that ended is replaced until the Job itself fails.
            if found is not None and found.status in FAILURE_REASONS:
                self.outcome = found


def _job_waits(node: Node, written: Contents) -> list[_JobWait]:
    records = node.root_dir / RECORDS
    return [
        _JobWait(job, run_hash(job.spec), records)
        for job in written.workloads
        if isinstance(job.spec, JobSpec) and not job.spec.suspend
    ]


def _wait(node: Node, pod_waits: Sequence[_Wait], timeout: float) -> int:
    client, started_at = node.client, time.monotonic()
    try:
        with LiveView() if sys.stdout.isatty() else PlainView() as view:
            while (now := time.monotonic()) - started_at < timeout:
                found = client.pods()
                for pod_wait in pod_waits:
                    if pod_wait.outcome is None:
                        pod_wait.update(client, found, now)
                view.show([pod_wait.snapshot for pod_wait in pod_waits], _pulls(client, pod_waits))
                if all(pod_wait.outcome is not None for pod_wait in pod_waits):
                    break
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        print("\nThe pod stays with the node: `pykubelet ps` shows it.", file=sys.stderr)
        raise
    results = [_print_result(node, pod_wait, time.monotonic() - started_at) for pod_wait in pod_waits]
    return 0 if all(results) else 1


def _pulls(client: NodeClient, pod_waits: Sequence[_Wait]) -> Sequence[PullProgress]:
    """Return the node's pulls if a container of a pod may wait for one."""
    for pod_wait in pod_waits:
        if pod_wait.outcome is None and pod_wait.pod is not None:
            found = list(statuses_of(pod_wait.pod))
            if not found or any(status.state.waiting is not None for status in found):
                return client.pulls()
    return ()


def _print_result(node: Node, pod_wait: _Wait, seconds: float) -> bool:
    outcome = pod_wait.outcome or RunOutcome(False, f"not {pod_wait.goal} after {seconds:.0f}s")
    if outcome.good:
        # A pod that has ended has no address any more.
        address = pod_wait.pod.status.pod_ip if pod_wait.pod and outcome.status == "ready" else ""
        print(f"{pod_wait.name}: {outcome.status}" + (f", at {address}" if address else ""))
        return True
    print(escape_unprintable(f"{pod_wait.name}: {outcome.status}", lines=False), file=sys.stderr)
    if not pod_wait.is_known:
        print("  the node has not taken the manifest up: see its log", file=sys.stderr)
    if pod_wait.pod is None:
        return False
    for line in explain(pod_wait.pod, pod_wait.events, datetime.now(UTC)):
        print(f"  {escape_unprintable(line, lines=False)}", file=sys.stderr)
    for status in failingstatuses_of(pod_wait.pod):
        lines = _last_log_lines(node, pod_wait.pod, status.name)
        if lines:
            print(f"  the last lines of container {status.name}:", file=sys.stderr)
        for line in lines:
            print(f"    {escape_unprintable(line, lines=False)}", file=sys.stderr)
    print(f"  more: pykubelet describe {pod_wait.pod.metadata.name}", file=sys.stderr)
    return False


def _last_log_lines(node: Node, pod: Pod, container: str) -> list[str]:
    newest = known_runs(log_file(node, pod, container, 0)) - 1
    try:
        with closing(LogFile(log_file(node, pod, container, max(newest, 0)))) as log:
            entries = log.skip_to_last(_LOG_LINES)
    except OSError:
        return []
    return [entry.text.decode(errors="replace") for entry in entries]


RESTART_PROGRAM = "pykubelet restart"


def run_restart(selection: NodeSelection, name: str, container: str | None) -> int:
    """Request the restart from the node; return the exit code."""

    def work() -> int:
        client = select_node(selection).client
        node = client.pods()
        pod = choose_pod(node.pods, name, node.states)
        if container is not None:
            choose_container(pod, container)
        restarted = client.restart(pod.uid, container)
        print(f"Restarting {', '.join(restarted)} of {pod.metadata.name} in place")
        return 0

    return run_command(RESTART_PROGRAM, work)

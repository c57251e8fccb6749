"""Where a container's logs lie, which of its runs is meant, and whether more is to come.

The decisions behind `pykubelet logs`, without any reading. Runs are counted from 0, as the log files are.
Logs can also be read while no node runs: then the folders tell which pods there were.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cli.pod_words import is_finished, is_leaving
from pykubelet.embedded.instance import Instance
from pykubelet.pods.static import SOURCE_ANNOTATION
from pykubelet.runtime.names import attempts_in_logs, container_log_path, pod_log_dir
from pykubelet.runtime.restart import restarts_after_exit

Prospect = Literal["writing", "later", "next", "over"]
"""Of one run: it goes on; it may begin again; its successor is there; nothing more will come."""


class NoLog(Exception):
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
            raise NoLog(f"container {container} of pod {pod.metadata.name} did not run before")
        return attempt
    if newest < 0 or (waiting is not None and not _has_run(status) and known_runs <= newest):
        why = f": {waiting.reason}" if waiting is not None and waiting.reason else ""
        raise NoLog(f"container {container} of pod {pod.metadata.name} has not started yet{why}")
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

"""Log directories of pods, and the links to container logs in /var/log/containers.

The runtime writes the log files; the kubelet creates and removes their directories and links. The files also
count the starts of a container for a runtime that has lost its state. No state is kept in memory.
"""

from __future__ import annotations

import contextlib
import glob
from pathlib import Path

from pykubelet.api.pod import Container, Pod
from pykubelet.kuberuntime.paths import attempts_in_logs, container_log_path, legacy_log_link, pod_log_dir
from pykubelet.linux.mounts import remove_tree
from pykubelet.logs import get_logger

log = get_logger(__name__)


class PodLogs:
    """Log directories of all pods."""

    def __init__(self, pod_logs_dir: str, legacy_logs: Path | None) -> None:
        """Initialize with the directory of links to container logs, None without such links."""
        self._pod_logs_dir = pod_logs_dir
        self._legacy_logs = legacy_logs

    def make_dir(self, pod: Pod) -> None:
        """Ensure that a pod's log directory exists. Raises OSError."""
        self._dir(pod).mkdir(mode=0o755, parents=True, exist_ok=True)

    def count_attempts(self, pod: Pod, container: Container) -> int:
        """Return the number of starts of a container, by its log files."""
        directory = self._dir(pod) / container.name
        return attempts_in_logs(path.name for path in directory.iterdir()) if directory.is_dir() else 0

    def remove_if_empty(self, pod: Pod, container: Container, attempt: int) -> None:
        """Remove the log of one start of a container if nothing was written to it."""
        log_file = self._dir(pod) / container_log_path(container.name, attempt)
        with contextlib.suppress(OSError):
            if not log_file.stat().st_size:
                log_file.unlink()

    def link(self, pod: Pod, container: Container, container_id: str, log_path: str) -> None:
        """Create the link to a container's log, `log_path` in the pod's directory; failures are logged."""
        if self._legacy_logs is None:
            return
        target = self._dir(pod) / log_path
        name = legacy_log_link(pod.metadata.name, pod.metadata.namespace, container.name, container_id)
        try:
            if target.exists():
                self._legacy_logs.mkdir(parents=True, exist_ok=True)
                (self._legacy_logs / name).symlink_to(target)
        except OSError as err:
            log.error(err, "Failed to create legacy symbolic link", path=name, containerID=container_id)

    def remove(self, pod: Pod) -> None:
        """Remove a pod's logs and all links to them; of an orphan only its UID must be known. Blocks.

        Failures are logged and left for the garbage collection of logs.
        """
        name, namespace = pod.metadata.name, pod.metadata.namespace
        if not name or not namespace:
            for directory in Path(self._pod_logs_dir).glob(f"*_{glob.escape(pod.uid)}"):
                _remove_log_dir(directory)
            return
        directory = self._dir(pod)
        _remove_log_dir(directory)
        if self._legacy_logs is not None and self._legacy_logs.is_dir():
            for link in self._legacy_logs.iterdir():
                is_pod_link = link.name.startswith(f"{name}_{namespace}_") and link.is_symlink()
                if is_pod_link and directory in link.readlink().parents:
                    link.unlink(missing_ok=True)

    def _dir(self, pod: Pod) -> Path:
        meta = pod.metadata
        return Path(pod_log_dir(self._pod_logs_dir, meta.namespace, meta.name, meta.uid))


def _remove_log_dir(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as err:
        log.error(err, "Failed to remove pod logs directory", path=path)

"""Names and places that other tools find containers by: logs and links to logs.

Log shippers take pod and container from these paths, so they are the reference's to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LEGACY_LOG_DIR = "/var/log/containers"

_SUFFIX = ".log"
_LONGEST_FILE_NAME = 255
_ROTATED = re.compile(r"([0-9]{1,9})\.log(?:\..*)?", re.ASCII | re.DOTALL)
_LINK = re.compile(r".*-([^-]{6,})\.log", re.DOTALL)


def pod_log_dir(logs_dir: str, namespace: str, name: str, uid: str) -> str:
    """Where a pod's logs live: `/var/log/pods/default_web_4f…`."""
    return f"{logs_dir.rstrip('/')}/{namespace}_{name}_{uid}"


def container_log_path(container: str, attempt: int) -> str:
    """A container's log file, relative to its pod's folder: `main/0.log`."""
    return f"{container}/{attempt}{_SUFFIX}"


def legacy_log_link(pod: str, namespace: str, container: str, container_id: str) -> str:
    """The file name of the link in /var/log/containers that points to a container's log."""
    stem = f"{pod}_{namespace}_{container}-{container_id}"
    return stem[: _LONGEST_FILE_NAME - len(_SUFFIX)] + _SUFFIX


def pod_uid_of_log_dir(name: str) -> str:
    """The pod whose logs a folder holds, by its name; older agents named it just after the uid."""
    return name.rpartition("_")[2]


def container_id_of_link(name: str) -> str | None:
    """The (perhaps cut) id of the container that a link was made for; None for a foreign file."""
    match = _LINK.fullmatch(name)
    return match[1] if match else None


def attempts_in_logs(file_names: Iterable[str]) -> int:
    """How often a container ran, by the names of its log files.

    A runtime that lost its memory (a reboot) would begin again at 0 and write over old logs.
    """
    found = (_ROTATED.fullmatch(name) for name in file_names)
    return max((int(match[1]) + 1 for match in found if match), default=0)

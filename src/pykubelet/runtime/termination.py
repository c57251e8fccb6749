"""The last words of a container: its termination message file, or the end of its log.

The file is written by the container and so is hostile: it is read without following links, only
if it is a plain file, and never more than the limit.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.runtime.labels import TERMINATION_MESSAGE_PATH, TERMINATION_MESSAGE_POLICY

MESSAGE_BYTES = 4096
LOG_BYTES, LOG_LINES = 2048, 80


def termination_message(status: pb.ContainerStatus) -> str:
    """Give what an ended container left to say, after the runtime's own message if there is one."""
    path = status.annotations.get(TERMINATION_MESSAGE_PATH, "")
    host_path = next(
        (mount.host_path for mount in status.mounts if path and mount.container_path == path), ""
    )
    words = _read_start(host_path, MESSAGE_BYTES) if host_path else ""
    wants_log = status.annotations.get(TERMINATION_MESSAGE_POLICY) == "FallbackToLogsOnError"
    if not words and wants_log and status.exit_code != 0 and status.log_path:
        words = log_tail(Path(status.log_path), LOG_LINES, LOG_BYTES)
    if status.message and words:
        return f"{status.message}: {words}"
    return status.message or words


def _read_start(path: str, limit: int) -> str:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        return (
            ""
            if isinstance(err, FileNotFoundError)
            else f"Error on reading termination log {path}: {err.strerror}"
        )
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return f"Error on reading termination log {path}: it is not a plain file"
        return os.read(handle, limit).decode(errors="replace")
    finally:
        os.close(handle)


def log_tail(path: Path, lines: int, limit: int) -> str:
    """Give the end of a container's log in CRI format, without the stamps."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            # A line's stamp is about forty bytes: reading this much covers the limit of text.
            start = max(0, log.tell() - limit - lines * 64)
            log.seek(start)
            raw = log.read(limit + lines * 64).splitlines(keepends=True)
    except OSError as err:
        return f"Error on reading container log {path}: {err.strerror}"
    if start and raw:
        raw = raw[1:]
    text = b"".join(_text_of(line) for line in raw[-lines:])
    return text[-limit:].decode(errors="replace")


def _text_of(line: bytes) -> bytes:
    """Strip `<time> <stream> <F|P> ` from one line; a partial line (P) has no line end of its own."""
    parts = line.split(b" ", 3)
    if len(parts) < 4:
        return line
    return parts[3].rstrip(b"\n") if parts[2] == b"P" else parts[3]

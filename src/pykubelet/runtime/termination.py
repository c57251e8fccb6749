"""The termination message of a container: the end of its message file, or the end of its log.

The container writes the file, so its content and its type are hostile: it is read only if it is a regular
file, without following symbolic links, and never more than the limit. The log belongs to the runtime; some
runtimes make it a symbolic link, so links are followed there. Everything here blocks on the disk: call
`termination_message` in a thread.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.host.regular_files import read_tail
from pykubelet.runtime.labels import TERMINATION_MESSAGE_PATH, TERMINATION_MESSAGE_POLICY

MESSAGE_BYTES = 4096
"""Upper bound of a termination message; of a longer one the last bytes are kept."""
LOG_BYTES, LOG_LINES = 2048, 80
_LINE_BYTES = 16 * 1024
"""Bytes at which runtimes split the lines of a log by default."""


def termination_message(status: pb.ContainerStatus) -> str:
    """Return the message of an exited container, behind the runtime's own message if there is one."""
    path = status.annotations.get(TERMINATION_MESSAGE_PATH, "")
    # The mount is made at the absolute path, the annotation carries the path as it is in the spec.
    absolute = path if path.startswith("/") else f"/{path}"
    host_path = next(
        (mount.host_path for mount in status.mounts if path and mount.container_path == absolute), ""
    )
    message = _read_message(host_path) if host_path else ""
    policy = status.annotations.get(TERMINATION_MESSAGE_POLICY)
    falls_back = policy == "FallbackToLogsOnError" and status.exit_code != 0
    if not message and falls_back and status.reason != "ContainerCannotRun" and status.log_path:
        message = log_tail(Path(status.log_path), LOG_LINES, LOG_BYTES)
    if status.message and message:
        return f"{status.message}: {message}"
    return status.message or message


def _read_message(path: str) -> str:
    try:
        return read_tail(path, MESSAGE_BYTES)[0].decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as err:
        return f"Error on reading termination log {path}: {err.strerror}"


def log_tail(path: Path, lines: int, limit: int) -> str:
    """Return the last lines of a container log in CRI format, without the time stamps."""
    try:
        # A line's prefix has about forty bytes: reading this much covers the limit of text.
        content, cut = read_tail(path, limit + lines * 64 + _LINE_BYTES, follow_symlink=True)
    except OSError as err:
        return f"Error on reading termination message from logs: {path}: {err.strerror}"
    # Not splitlines(), which also ends lines at a carriage return.
    raw = BytesIO(content).readlines()
    # The first line lacks its start; of a long one, what is left has more text than is needed.
    begun = raw.pop(0) if cut and raw else b""
    text = b"".join(_text_of(line) for line in raw[-lines:])
    if len(raw) < lines and len(text) < limit:
        text = begun + text
    return text[-limit:].decode(errors="replace")


def _text_of(line: bytes) -> bytes:
    """Strip `<time> <stream> <F|P> ` from one line; a partial line (P) has no line end of its own."""
    parts = line.split(b" ", 3)
    if len(parts) < 4:
        return line
    return parts[3].rstrip(b"\n") if parts[2] == b"P" else parts[3]

"""How willingly the kernel kills a process when memory runs out.

The agent lowers its own score so that it outlives the pods; without CAP_SYS_RESOURCE the kernel
only lets a score rise. That is worth a line in the log and no more, so failures are plain
OSErrors for the caller to log.
"""

import errno
from pathlib import Path

LOWEST, HIGHEST = -1000, 1000


def set_oom_score(score: int, pid: int = 0, proc: Path = Path("/proc")) -> None:
    """Set oom_score_adj of a process; pid 0 is this one.

    Raises PermissionError when the kernel refuses (said with the reason), ProcessLookupError when
    there is no such process, OSError for the rest, and ValueError for values that cannot be.
    """
    if not LOWEST <= score <= HIGHEST:
        raise ValueError(f"OOM score {score} is out of range: it goes from {LOWEST} to {HIGHEST}")
    path = _file(pid, proc)
    try:
        path.write_text(str(score))
    except PermissionError as err:
        why = "not allowed: a lower OOM score needs CAP_SYS_RESOURCE, another user's process needs root"
        raise PermissionError(err.errno, why, str(path)) from None
    except (FileNotFoundError, ProcessLookupError):
        raise _no_process(pid, path) from None


def oom_score(pid: int = 0, proc: Path = Path("/proc")) -> int:
    """Read oom_score_adj of a process; pid 0 is this one.

    Raises ProcessLookupError when there is no such process.
    """
    path = _file(pid, proc)
    try:
        return int(path.read_text())
    except (FileNotFoundError, ProcessLookupError):
        raise _no_process(pid, path) from None


def _file(pid: int, proc: Path) -> Path:
    if pid < 0:
        raise ValueError(f"process id {pid} cannot be: it is 0 for this process, or positive")
    return proc / (str(pid) if pid else "self") / "oom_score_adj"


def _no_process(pid: int, path: Path) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"no process {pid}", str(path))

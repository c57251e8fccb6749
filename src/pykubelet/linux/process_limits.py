"""Capabilities, file descriptor limit and OOM score of this process.

Capabilities are checked before an operation so that its failure can be explained. The user id is not enough:
root in a container often lacks a capability such as CAP_SYS_RESOURCE, and OOM scores and limits behave
differently then.

`maxOpenFiles`: upstream sets the soft and the hard limit to the configured number and only logs a failure;
here a failure also raises the soft limit as far as possible.

The kubelet lowers its OOM score so that it outlives the pods. Without CAP_SYS_RESOURCE a score can only be
raised. That is not fatal: failures are OSErrors for the caller to log.
"""

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

# In the kernel's order: the position is the bit (include/uapi/linux/capability.h).
NAMES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
)


def is_root() -> bool:
    """Return whether this process runs as uid 0, which upstream requires at start-up."""
    return os.geteuid() == 0


def has_capability(name: str, proc: Path = Path("/proc")) -> bool:
    """Return whether a capability, such as `CAP_SYS_RESOURCE`, is effective for this process."""
    return name in effective_capabilities(proc)


def effective_capabilities(proc: Path = Path("/proc")) -> frozenset[str]:
    """Return the effective capabilities of this process.

    Raises OSError if /proc is not mounted.
    """
    return parse_effective((proc / "self/status").read_text())


def parse_effective(status: str) -> frozenset[str]:
    """Parse CapEff of the text of /proc/PID/status; an unknown capability is named by its bit number."""
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key == "CapEff":
            return _names(int(value, 16))
    return frozenset()


def _names(mask: int) -> frozenset[str]:
    return frozenset(
        NAMES[bit] if bit < len(NAMES) else f"CAP_{bit}"
        for bit in range(mask.bit_length())
        if mask >> bit & 1
    )


@dataclass(frozen=True, slots=True)
class FileDescriptorLimits:
    """The limits in force (`resource.RLIM_INFINITY` for unlimited), and the configured number."""

    soft: int
    hard: int
    configured: int

    @property
    def reached(self) -> bool:
        """Whether the soft limit is at least the configured number."""
        return self.soft == resource.RLIM_INFINITY or self.soft >= self.configured


def raise_open_files(configured: int) -> FileDescriptorLimits:
    """Set both limits to `configured`, or the soft limit as close to it as the kernel allows.

    A hard limit above `configured` is lowered, as in upstream: child processes get the configured limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (configured, configured))
    except (ValueError, OSError):
        # The hard limit cannot be raised: no CAP_SYS_RESOURCE, or more than fs.nr_open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (attainable_soft_limit(configured, hard), hard))
    return FileDescriptorLimits(*resource.getrlimit(resource.RLIMIT_NOFILE), configured)


def attainable_soft_limit(configured: int, hard: int) -> int:
    """Return the highest soft limit up to `configured` under an unchanged hard limit."""
    return configured if hard == resource.RLIM_INFINITY else min(configured, hard)


LOWEST, HIGHEST = -1000, 1000


def set_oom_score(score: int, pid: int = 0, proc: Path = Path("/proc")) -> None:
    """Set oom_score_adj of a process; pid 0 is this process.

    Raises PermissionError with the reason if the kernel denies it, ProcessLookupError if the process does not
    exist, OSError for other failures, and ValueError for a value out of range.
    """
    if not LOWEST <= score <= HIGHEST:
        raise ValueError(f"OOM score {score} is out of range: it goes from {LOWEST} to {HIGHEST}")
    path = _file(pid, proc)
    try:
        path.write_text(str(score))
    except PermissionError as err:
        message = "not allowed: a lower OOM score needs CAP_SYS_RESOURCE, another user's process needs root"
        raise PermissionError(err.errno, message, str(path)) from None
    except (FileNotFoundError, ProcessLookupError):
        raise _no_process(pid, path) from None


def oom_score(pid: int = 0, proc: Path = Path("/proc")) -> int:
    """Return oom_score_adj of a process; pid 0 is this process.

    Raises ProcessLookupError if the process does not exist.
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

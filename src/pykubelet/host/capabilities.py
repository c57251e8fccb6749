"""What this process may do, asked before it tries, so that a refusal can be explained.

Being root is not the question: in a container root often lacks a capability (CAP_SYS_RESOURCE
here and there), and then OOM scores and limits behave differently.
"""

import os
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
    """Whether this process runs as user 0, which is what the reference asks for at start."""
    return os.geteuid() == 0


def has(name: str, proc: Path = Path("/proc")) -> bool:
    """Whether a capability, such as `CAP_SYS_RESOURCE`, is in force for this process."""
    return name in effective(proc)


def effective(proc: Path = Path("/proc")) -> frozenset[str]:
    """List the capabilities in force for this process.

    Raises OSError when /proc is not mounted.
    """
    return parse_effective((proc / "self/status").read_text())


def parse_effective(status: str) -> frozenset[str]:
    """Take the names out of the text of /proc/PID/status; a bit newer than our list has its number."""
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

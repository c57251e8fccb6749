"""How many files the agent may have open (`maxOpenFiles`).

A node with a hundred pods watches and streams a lot. The reference sets both limits to the
configured number and only logs a failure; here a failure also takes what can be had.
"""

import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The limits now in force (`resource.RLIM_INFINITY` for none), and what was asked for."""

    soft: int
    hard: int
    wanted: int

    @property
    def reached(self) -> bool:
        """Whether the process may open as many files as was asked for."""
        return self.soft == resource.RLIM_INFINITY or self.soft >= self.wanted


def raise_open_files(wanted: int) -> OpenFiles:
    """Set both limits to `wanted`, or the soft one as near to it as the kernel allows.

    A hard limit above `wanted` is lowered, as in the reference: children get what was configured.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (ValueError, OSError):
        # The hard limit cannot be raised: no CAP_SYS_RESOURCE, or more than fs.nr_open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (attainable(wanted, hard), hard))
    return OpenFiles(*resource.getrlimit(resource.RLIMIT_NOFILE), wanted)


def attainable(wanted: int, hard: int) -> int:
    """Give the highest soft limit up to `wanted` under a hard limit that stays."""
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)

"""Kernel parameters that pods may set: the safe ones, and what the operator allowed beside them.

Safe is what belongs to a pod's own namespaces and touches nobody else. A parameter of a namespace that the
pod shares with the machine would be the machine's, so it is refused whatever is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pykubelet.admission.link import Attempt, Refusal, Surroundings
from pykubelet.api.pod import PodSpec
from pykubelet.api.sysctl import namespace_of, normal_name

REASON = "SysctlForbidden"

_SAFE: dict[str, tuple[int, int]] = {
    "kernel.shm_rmid_forced": (0, 0),
    "net.ipv4.ip_local_port_range": (0, 0),
    "net.ipv4.tcp_syncookies": (0, 0),
    "net.ipv4.ping_group_range": (0, 0),
    "net.ipv4.ip_unprivileged_port_start": (0, 0),
    "net.ipv4.ip_local_reserved_ports": (3, 16),
    "net.ipv4.tcp_keepalive_time": (4, 5),
    "net.ipv4.tcp_fin_timeout": (4, 6),
    "net.ipv4.tcp_keepalive_intvl": (4, 5),
    "net.ipv4.tcp_keepalive_probes": (4, 5),
    "net.ipv4.tcp_rmem": (4, 15),
    "net.ipv4.tcp_wmem": (4, 15),
}
"""Each with the first kernel that has one per network namespace."""


class Sysctls:
    """Refuses pods with kernel parameters that are not theirs to set."""

    for_running = False

    def __init__(self, given: Surroundings) -> None:
        patterns = [normal_name(one) for one in (*safe_sysctls(given.kernel), *given.allowed_sysctls)]
        self._names = frozenset(one for one in patterns if not one.endswith("*"))
        self._beginnings = tuple(one.removesuffix("*") for one in patterns if one.endswith("*"))

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Refuse the first parameter that is not allowed."""
        spec = attempt.pod.spec
        problems = (self._problem(wish.name, spec) for wish in spec.security_context.sysctls)
        first = next((problem for problem in problems if problem is not None), None)
        return Refusal(REASON, f"forbidden sysctl: {first}") if first is not None else None

    def _problem(self, written: str, spec: PodSpec) -> str | None:
        name = normal_name(written)
        if name not in self._names and not name.startswith(self._beginnings):
            return f'"{name}" not allowlisted'
        shared = {"IPC": spec.host_ipc, "Net": spec.host_network}
        namespace = namespace_of(name) or ""
        return f'"{name}" not allowed with host {namespace} enabled' if shared.get(namespace) else None


def safe_sysctls(kernel: str) -> Iterable[str]:
    """Give what every pod may set on this kernel, by its release; of an unknown one the least."""
    numbers = re.match(r"(\d+)\.(\d+)", kernel)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    return [name for name, first in _SAFE.items() if version >= first]

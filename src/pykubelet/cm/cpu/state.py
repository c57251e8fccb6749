"""State of the CPU manager: exclusive CPUs by container, and their checkpoint file `cpu_manager_state`.

The file has upstream's format and checksum, so that a node with pinned containers can be handed over in
either direction. The checksum is a hash of upstream's data as Go prints it; its purpose is to detect manual
edits. An invalid file is never repaired: CPUs that a running container uses exclusively could be allocated to
another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pykubelet.api import cpuset
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.util.files import write_atomically
from pykubelet.util.text import fnv1a_32, quoted

FILE_NAME = "cpu_manager_state"
REMEDY = "drain the node, delete the file and start again"
Assignments = Mapping[str, Mapping[str, frozenset[int]]]
_PRIVATE = 0o600
_KINDS = ("CPUManagerCheckpoint", "CPUManagerCheckpointV2")
"""Names that upstream has used for its data type; they are part of the checksum. It writes the first."""
_POD_ENTRIES = " PodEntries:(state.PodCPUAssignments)map[]"
"""Addition to the checksummed text by the alpha gate PodLevelResourceManagers, without pod-level CPUs."""


@dataclass(frozen=True)
class CpuState:
    """Exclusive CPUs of containers, and the pool shared by all others.

    Containers of one pod that never run at the same time may have the same CPUs; other containers never do.
    """

    shared: frozenset[int] = frozenset()
    assigned: Assignments = field(default_factory=dict)
    """CPUs by pod UID and container name."""

    def cpus_of(self, uid: str, container: str) -> frozenset[int] | None:
        """Return a container's exclusive CPUs, or None."""
        return self.assigned.get(uid, {}).get(container)

    @property
    def exclusive(self) -> frozenset[int]:
        """All CPUs that are exclusive to some container."""
        return frozenset().union(*(cpus for pod in self.assigned.values() for cpus in pod.values()))

    def with_assigned(self, uid: str, container: str, cpus: frozenset[int]) -> CpuState:
        """Return the state with CPUs moved from the shared pool to a container."""
        mine = {**self.assigned.get(uid, {}), container: cpus}
        return CpuState(self.shared - cpus, {**self.assigned, uid: mine})

    def without(self, uid: str, container: str) -> CpuState:
        """Return the state with a container's CPUs released, except those that its pod still uses."""
        if (cpus := self.cpus_of(uid, container)) is None:
            return self
        left = {name: used for name, used in self.assigned[uid].items() if name != container}
        other_pods = {other: used for other, used in self.assigned.items() if other != uid}
        freed = cpus.difference(*left.values())
        return replace(self, shared=self.shared | freed, assigned=other_pods | ({uid: left} if left else {}))


def read_state(file: Path, policy: str) -> CpuState | None:
    """Read the state of a kubelet process with the same policy; None if the file does not exist.

    Raises PolicyError when the file is unreadable, damaged, or belongs to another policy.
    """
    try:
        document = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as err:
        raise PolicyError(f"{file}: {err.strerror or err}: the CPU manager needs to read its state") from err
    return _decode(document, file, policy)


def write_state(file: Path, policy: str, state: CpuState) -> None:
    """Replace the file atomically. Raises OSError."""
    write_atomically(file, encode(policy, state), _PRIVATE)


def encode(policy: str, state: CpuState) -> bytes:
    """Return the file's content."""
    entries = {
        uid: {name: cpuset.format(cpus) for name, cpus in sorted(containers.items())}
        for uid, containers in sorted(state.assigned.items())
    }
    shared = cpuset.format(state.shared)
    document: dict[str, object] = {"policyName": policy, "defaultCpuSet": shared}
    if entries:
        document["entries"] = entries
    document["checksum"] = _checksum(_KINDS[0], policy, shared, entries)
    return json.dumps(document, separators=(",", ":")).encode()


class _Document(msgspec.Struct, rename="camel"):
    policy_name: str = ""
    default_cpu_set: str = ""
    entries: dict[str, dict[str, str]] | None = None
    pod_entries: dict[str, object] | None = None
    checksum: int = 0


def _decode(content: bytes, file: Path, policy: str) -> CpuState:
    try:
        document = msgspec.json.decode(content, type=_Document)
    except (msgspec.MsgspecError, ValueError) as err:
        raise PolicyError(f"{file}: is not a CPU manager's state ({err}): {REMEDY}") from err
    if document.pod_entries:
        raise PolicyError(
            f"{file}: has CPUs of whole pods, which needs the feature gate PodLevelResourceManagers: {REMEDY}"
        )
    facts = (document.policy_name, document.default_cpu_set, document.entries or {})
    fitting = {_checksum(kind, *facts) for kind in _KINDS} | {_checksum(_KINDS[0], *facts, _POD_ENTRIES), 0}
    if document.checksum not in fitting:
        raise PolicyError(f"{file}: is damaged or was edited: its checksum does not fit: {REMEDY}")
    if document.policy_name != policy:
        raise PolicyError(
            f"{file}: is of cpuManagerPolicy {quoted(document.policy_name)}, but {quoted(policy)} is "
            f"configured: {REMEDY}, or configure the old policy again"
        )
    try:
        return CpuState(
            cpuset.parse(document.default_cpu_set),
            {
                uid: {name: cpuset.parse(cpus) for name, cpus in containers.items()}
                for uid, containers in (document.entries or {}).items()
            },
        )
    except ValueError as err:
        raise PolicyError(f"{file}: {err}: {REMEDY}") from err


def _checksum(
    kind: str, policy: str, shared: str, entries: Mapping[str, Mapping[str, str]], more: str = ""
) -> int:
    printed = _printed({uid: _printed(containers) for uid, containers in entries.items()})
    dump = (
        f"(*state.{kind}){{PolicyName:(string){policy} DefaultCPUSet:(string){shared} "
        f"Entries:(map[string]map[string]string){printed}{more} Checksum:(checksum.Checksum)0}}"
    )
    return fnv1a_32(dump.encode())


def _printed(entries: Mapping[str, str]) -> str:
    return f"map[{' '.join(f'{key}:{value}' for key, value in sorted(entries.items()))}]"

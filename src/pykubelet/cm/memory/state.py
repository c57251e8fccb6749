"""Checkpoint of the memory manager: the file `memory_manager_state`, in upstream's format.

A node can be handed over between the upstream kubelet and this one in both directions: allocations and their
checksum are the same byte for byte. An invalid file is an error, because guessing could allocate one
container's memory to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from pykubelet.cm.memory.numa_memory import Assignments, Machine, MemoryBlock, MemoryTable, NodeMemory
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.util.files import write_if_changed
from pykubelet.util.text import fnv1a_32, quoted

T = TypeVar("T")
_PRIVATE = 0o600


class MemoryState(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True):
    """Content of the file."""

    policy_name: str
    machine_state: Machine
    entries: Assignments = {}


class _File(MemoryState, rename="camel", omit_defaults=True, frozen=True):
    checksum: int = msgspec.field(default=0)


def read_state(path: Path, policy: str) -> MemoryState | None:
    """Read the file; None if it does not exist. Raises PolicyError if it is invalid or of another policy."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise PolicyError(f"cannot read the memory manager's state: {err}") from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise corrupted(path, f"it is not what the memory manager writes ({err})") from err
    if found.policy_name != policy:
        raise corrupted(
            path,
            f"it is of memoryManagerPolicy {quoted(found.policy_name)} while {quoted(policy)} is configured",
        )
    state = MemoryState(found.policy_name, found.machine_state, found.entries)
    # Very old kubelets wrote no checksum.
    if found.checksum and found.checksum != checksum(state):
        raise corrupted(path, "it is corrupted: its checksum does not match its content")
    return state


def write_state(path: Path, state: MemoryState) -> None:
    """Replace the file, unless it has this state already. Raises OSError."""
    write_if_changed(path, encode_state(state), _PRIVATE)


def encode_state(state: MemoryState) -> bytes:
    """Return the file's content."""
    machine = {
        number: NodeMemory(node.number_of_assignments, _sorted(node.memory_map), node.cells)
        for number, node in sorted(state.machine_state.items(), key=lambda item: str(item[0]))
    }
    entries = {uid: _sorted(containers) for uid, containers in sorted(state.entries.items())}
    text = msgspec.json.encode(MemoryState(state.policy_name, machine, entries))
    # The checksum is always the last field, also when empty fields are omitted.
    return text.removesuffix(b"}") + b',"checksum":%d}' % checksum(state)


def checksum(state: MemoryState) -> int:
    """Return the checksum: a hash of the structure as Go's debugging printer shows it."""
    return fnv1a_32(_dump(state).encode())


def corrupted(path: Path, why: str) -> PolicyError:
    """Return the error for an unusable file, with the remedy."""
    return PolicyError(
        f"the memory manager cannot go on from {path}: {why}. Drain this node and delete that file"
    )


def _dump(state: MemoryState) -> str:
    machine = _map((str(number), _dump_node(node)) for number, node in sorted(state.machine_state.items()))
    entries = _map(
        (uid, _map((name, _list(map(_dump_block, blocks))) for name, blocks in sorted(containers.items())))
        for uid, containers in sorted(state.entries.items())
    )
    return (
        f"(*state.MemoryManagerCheckpoint){{PolicyName:(string){state.policy_name} "
        f"MachineState:(state.NUMANodeMap){machine} Entries:(state.ContainerMemoryAssignments){entries} "
        "Checksum:(checksum.Checksum)0}"
    )


def _dump_node(node: NodeMemory) -> str:
    tables = _map((name, _dump_table(table)) for name, table in sorted(node.memory_map.items()))
    return (
        f"<*>{{NumberOfAssignments:(int){node.number_of_assignments} "
        f"MemoryMap:(map[v1.ResourceName]*state.MemoryTable){tables} Cells:{_numbers(node.cells)}}}"
    )


def _dump_table(table: MemoryTable) -> str:
    return (
        f"<*>{{TotalMemSize:(uint64){table.total} SystemReserved:(uint64){table.system_reserved} "
        f"Allocatable:(uint64){table.allocatable} Reserved:(uint64){table.reserved} "
        f"Free:(uint64){table.free}}}"
    )


def _dump_block(block: MemoryBlock) -> str:
    return (
        f"{{NUMAAffinity:{_numbers(block.numa_affinity)} Type:(v1.ResourceName){block.type} "
        f"Size:(uint64){block.size}}}"
    )


def _numbers(numbers: Iterable[int]) -> str:
    return f"([]int){_list(map(str, numbers))}"


def _map(items: Iterable[tuple[str, str]]) -> str:
    return f"map[{' '.join(f'{key}:{value}' for key, value in items)}]"


def _list(items: Iterable[str]) -> str:
    return f"[{' '.join(items)}]"


def _sorted(items: dict[str, T]) -> dict[str, T]:
    return dict(sorted(items.items()))

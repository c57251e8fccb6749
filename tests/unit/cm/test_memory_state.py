"""The state file is the reference's, byte for byte; NUMA nodes and reservations are read and checked."""

from pathlib import Path

import msgspec
import pytest

from pykubelet.cm.memory.manager import MemoryManager
from pykubelet.cm.memory.numa_memory import untouched
from pykubelet.cm.memory.numa_nodes import MemoryNode, read_memory_nodes, reserved_by_node
from pykubelet.cm.memory.state import MemoryState, encode_state, read_state
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.config.types import MemoryReservation
from tests.support.pod_resources import amounts
from tests.unit.cm.numa_machines import GIB, GOLDEN, machine

STATIC = (GOLDEN / "memory_manager_state").read_bytes()
NONE = b'{"policyName":"None","machineState":{},"checksum":4236770233}'
# As after memory was added to the machine: a sound file, of 8 GiB on one node.
BIGGER = encode_state(MemoryState("Static", untouched(machine(8), {0: {"memory": GIB}}), {}))
RESERVED = [MemoryReservation(numa_node=0, limits={"memory": "1Gi"})]


@pytest.mark.parametrize(("policy", "content"), [("Static", STATIC), ("None", NONE)])
def test_memory_state_upstream_file_roundtrips(tmp_path: Path, policy: str, content: bytes) -> None:
    file = tmp_path / "memory_manager_state"
    file.write_bytes(content)
    state = read_state(file, policy)
    assert state is not None
    assert encode_state(state) == content


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (NONE, "memoryManagerPolicy 'None' while 'Static' is configured"),
        (STATIC.replace(b'"size":0', b'"size":1'), "checksum does not match"),
        (STATIC[:-20], "not what the memory manager writes"),
        (b"", "not what the memory manager writes"),
        (b"\xff\xfe", "not what the memory manager writes"),
        (b'{"policyName":"Static","machineState":{"x":{}}}', "not what the memory manager writes"),
        (STATIC, "NUMA node 10, which there is not"),
        (BIGGER, "not that of this machine"),
        (
            b'{"policyName":"Static","machineState":{},"entries":{"u":{"c":[]}},"checksum":0}',
            "there are no NUMA nodes",
        ),
    ],
)
def test_memory_manager_untrusted_state_file_raises_policy_error(
    tmp_path: Path, content: bytes, why: str
) -> None:
    file = tmp_path / "memory_manager_state"
    file.write_bytes(content)
    with pytest.raises(PolicyError) as raised:
        MemoryManager("Static", file, machine(8, 8), RESERVED, amounts(memory="1Gi"))
    message = str(raised.value)
    assert why in message
    assert str(file) in message
    assert "delete that file" in message
    assert file.read_bytes() == content, "what was found stays for whoever looks into it"


def test_read_state_checksum_zero_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "memory_manager_state"
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(STATIC) | {"checksum": 0}))
    assert read_state(file, "Static") is not None


def test_memory_manager_policy_none_writes_policy_name(tmp_path: Path) -> None:
    file = tmp_path / "memory_manager_state"
    MemoryManager("None", file)
    assert file.read_bytes() == NONE
    assert file.stat().st_mode & 0o777 == 0o600
    MemoryManager("None", file)


@pytest.mark.parametrize(
    ("reservations", "kept", "why"),
    [
        ([(0, {"memory": "1Gi"}), (1, {"memory": "512Mi"})], {"memory": "1536Mi"}, None),
        ([(0, {"memory": "1Gi", "hugepages-1Gi": "1Gi"})], {"memory": "1Gi", "hugepages-1Gi": "1Gi"}, None),
        ([(0, {"memory": "1Gi"})], {"memory": "1Gi", "cpu": "1", "ephemeral-storage": "1Gi"}, None),
        ([(2, {"memory": "1Gi"})], {"memory": "1Gi"}, "NUMA node 2, which this machine does not have"),
        ([(0, {"memory": "1Gi"})], {"memory": "2Gi"}, "1Gi of memory .* not equal to 2Gi"),
        ([(0, {"memory": "1Gi"})], {}, "1Gi of memory .* not equal to 0"),
        ([(0, {"memory": "1Gi"})], {"memory": "1Gi", "hugepages-1Gi": "1Gi"}, "0 of hugepages-1Gi"),
        ([], {}, "needs memory that is reserved"),
        (
            [(0, {"memory": "8Gi"})],
            {"memory": "8Gi"},
            "8Gi of memory is reserved but NUMA node 0 has only 6Gi",
        ),
        (
            [(1, {"memory": "1Gi", "hugepages-2Mi": "2Mi"})],
            {"memory": "1Gi", "hugepages-2Mi": "2Mi"},
            "has only 0",
        ),
        ([(0, {"memory": "1100m"})], {"memory": "1100m"}, "whole number of bytes"),
    ],
)
def test_reserved_by_node_checks_sum_and_node_capacity(
    reservations: list[tuple[int, dict[str, str]]], kept: dict[str, str], why: str | None
) -> None:
    given = [MemoryReservation(numa_node=node, limits=limits) for node, limits in reservations]
    nodes = machine(8, 8, pages=2)
    if why is None:
        assert set(reserved_by_node(nodes, given, amounts(**kept))) == {0, 1}
    else:
        with pytest.raises(PolicyError, match=why):
            reserved_by_node(nodes, given, amounts(**kept))


def test_read_memory_nodes_sysfs_tree_returns_nodes(tmp_path: Path) -> None:
    for number, distance in ((0, "10 21\n"), (2, "21 10\n")):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        pages = node / "hugepages/hugepages-2048kB"
        pages.mkdir(parents=True)
        (pages / "nr_hugepages").write_text("512\n")
        (node / "distance").write_text(distance)
        (node / "meminfo").write_text(
            f"Node {number} MemTotal:       8388608 kB\nNode {number} MemFree: 1 kB\n"
        )
    (tmp_path / "sys/devices/system/node/possible").write_text("0-3\n")
    pages_of = {"hugepages-2Mi": GIB}
    assert read_memory_nodes(tmp_path) == [
        MemoryNode(0, 8 * GIB, pages_of, {0: 10, 2: 21}),
        MemoryNode(2, 8 * GIB, pages_of, {0: 21, 2: 10}),
    ]


def test_read_memory_nodes_no_numa_returns_single_node(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:        1048576 kB\n")
    assert read_memory_nodes(tmp_path) == [MemoryNode(0, GIB)]


def test_read_memory_nodes_test_host_returns_memory() -> None:
    nodes = read_memory_nodes()
    assert nodes
    assert sum(node.memory for node in nodes) > 0

"""The file `cpu_manager_state`: byte for byte the reference's, and what is said of files that are not."""

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.cm.cpu.state import FILE_NAME, CpuState, encode, read_state, write_state
from pykubelet.cm.topology.hints import PolicyError

POD, OTHER = "2e4a1b5e-7a5d-4a57-9a6c-0d6c2f9d1c11", "a-uid"
STATE = CpuState(
    frozenset({0, 2, 3}), {POD: {"x": frozenset({1}), "a": frozenset({4, 5})}, OTHER: {"m": frozenset({7})}}
)


def test_encode_equals_upstream_bytes() -> None:
    assert encode("none", CpuState()) == b'{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'
    assert encode("static", STATE) == (
        b'{"policyName":"static","defaultCpuSet":"0,2-3","entries":{'
        b'"2e4a1b5e-7a5d-4a57-9a6c-0d6c2f9d1c11":{"a":"4-5","x":"1"},"a-uid":{"m":"7"}},"checksum":1187526812}'
    )


def test_write_state_then_read_state_round_trips(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    assert read_state(file, "static") is None
    write_state(file, "static", STATE)
    assert read_state(file, "static") == STATE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_write_state_fails_leaves_old_file(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    file.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_state(file, "static", STATE)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a CPU manager's state"),
        (b"{", "is not a CPU manager's state"),
        (b"[]", "is not a CPU manager's state"),
        (b"\xff\xfe", "is not a CPU manager's state"),
        (b'{"policyName":"static","entries":{"container-id":"1"}}', "is not a CPU manager's state"),
        (encode("static", STATE).replace(b'"m":"7"', b'"m":"6"'), "is damaged or was edited"),
        (encode("static", STATE)[:-3] + b"0}", "is damaged or was edited"),
        (encode("none", CpuState()), "is of cpuManagerPolicy 'none', but 'static' is configured"),
        (b'{"policyName":"static","defaultCpuSet":"0-x"}', "'0-x' is not a list of CPUs"),
        (b'{"policyName":"static","defaultCpuSet":"0","podEntries":{"u":{"cpuSet":"1"}}}', "whole pods"),
    ],
)
def test_read_state_invalid_file_raises_policy_error(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / FILE_NAME
    file.write_bytes(content)
    with pytest.raises(PolicyError) as err:
        read_state(file, "static")
    assert str(file) in str(err.value)
    assert words in str(err.value)
    assert "delete the file" in str(err.value)
    assert "\n" not in str(err.value)
    assert file.read_bytes() == content


def test_read_state_unreadable_file_raises_policy_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="needs to read"):
        read_state(tmp_path, "static")


@pytest.mark.parametrize("checksum", [0, 354655845, 2655485041, 1641063351])
def test_read_state_accepts_checksums_of_other_kubelet_versions(tmp_path: Path, checksum: int) -> None:
    """None at all (the oldest), the usual one, and those of data that the newest call otherwise."""
    file = tmp_path / FILE_NAME
    document = {"policyName": "none", "defaultCpuSet": "4-6", "entries": {}, "checksum": checksum}
    file.write_text(json.dumps(document, indent=4))
    assert read_state(file, "none") == CpuState(frozenset({4, 5, 6}))


def test_encode_checksum_equals_upstream_test_value() -> None:
    state = CpuState(
        frozenset({1, 2, 3}),
        {"pod": {"container1": frozenset({4, 5, 6}), "container2": frozenset({1, 2, 3})}},
    )
    assert json.loads(encode("none", state))["checksum"] == 3610638499


def test_without_releases_cpus_not_used_by_same_pod() -> None:
    one, two = frozenset({1, 2}), frozenset({2, 3})
    state = CpuState(frozenset(range(5))).with_assigned("u", "init", one).with_assigned("u", "main", two)
    assert state.shared == {0, 4}
    assert state.exclusive == {1, 2, 3}
    assert state.without("u", "init").shared == {0, 1, 4}
    assert state.without("u", "init").without("u", "main") == CpuState(frozenset(range(5)))
    assert state.without("u", "other") is state
    assert state.without("v", "main") is state


names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=8)
sets = st.frozensets(st.integers(0, 300), max_size=20)


@settings(max_examples=30)
@given(shared=sets, assigned=st.dictionaries(names, st.dictionaries(names, sets, min_size=1), max_size=4))
def test_encode_any_state_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    shared: frozenset[int],
    assigned: dict[str, dict[str, frozenset[int]]],
) -> None:
    file = tmp_path_factory.getbasetemp() / FILE_NAME
    file.write_bytes(encode("static", CpuState(shared, assigned)))
    assert read_state(file, "static") == CpuState(shared, assigned)

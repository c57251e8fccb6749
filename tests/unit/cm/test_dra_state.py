"""The file of claims: the reference's format, whole or refused."""

import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.cm.dra.claims import ClaimInfo, PreparedDevice, decode, encode, read_state, write_state
from pykubelet.cm.topology.hints import PolicyError

# As the reference kubelet wrote it on a node without claims.
EMPTY = (
    b'{"Data":"{\\"kind\\":\\"DRACheckpoint\\",\\"apiVersion\\":\\"checkpoint.dra.kubelet.k8s.io/v1\\",'
    b'\\"ClaimInfoStateList\\":[]}","Checksum":2361995144}'
)
DATA = {
    "kind": "DRACheckpoint",
    "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
    "ClaimInfoStateList": [
        {
            "ClaimUID": "067798be-454e-4be4-9047-1aa06aea63f7",
            "ClaimName": "example",
            "Namespace": "default",
            "PodUIDs": {"139cdb46-f989-4f17-9561-ca10cfb509a6": {}},
            "DriverState": {
                "test-driver.cdi.k8s.io": {
                    "Devices": [
                        {
                            "PoolName": "worker-1",
                            "DeviceName": "dev-1",
                            "ShareID": None,
                            "RequestNames": ["test request"],
                            "CDIDeviceIDs": ["example.com/example=cdi-example"],
                        }
                    ]
                },
                "silent.example.com": {"Devices": None},
            },
        }
    ],
}
RECORD = ClaimInfo(
    "default",
    "example",
    "067798be-454e-4be4-9047-1aa06aea63f7",
    {"139cdb46-f989-4f17-9561-ca10cfb509a6"},
    {
        "test-driver.cdi.k8s.io": (
            PreparedDevice("worker-1", "dev-1", ("test request",), ("example.com/example=cdi-example",)),
        ),
        "silent.example.com": (),
    },
)


def written(data: object) -> bytes:
    text = json.dumps(data)
    return json.dumps({"Data": text, "Checksum": zlib.crc32(text.encode())}).encode()


def test_dra_checkpoint_encode_no_claims_equals_upstream() -> None:
    assert encode([]) == EMPTY
    assert decode(EMPTY) == []


def test_dra_checkpoint_decode_upstream_claim_roundtrips() -> None:
    assert decode(written(DATA)) == [RECORD]
    again = json.loads(encode([RECORD]))
    assert again["Checksum"] == zlib.crc32(again["Data"].encode())
    assert json.loads(again["Data"]) == DATA


def test_dra_checkpoint_decode_null_lists_are_empty() -> None:
    claim = {"ClaimUID": "u", "ClaimName": "c", "Namespace": "n", "PodUIDs": None, "DriverState": None}
    assert decode(written({**DATA, "ClaimInfoStateList": [claim]})) == [ClaimInfo("n", "c", "u")]
    assert decode(written({**DATA, "ClaimInfoStateList": None})) == []


TEXT = st.text(min_size=1, max_size=8)
DEVICES = st.builds(
    PreparedDevice,
    TEXT,
    TEXT,
    st.lists(TEXT, max_size=2).map(tuple),
    st.lists(TEXT, max_size=2).map(tuple),
    st.none() | TEXT,
)
RECORDS = st.builds(
    ClaimInfo,
    TEXT,
    TEXT,
    TEXT,
    st.sets(TEXT, max_size=3),
    st.dictionaries(TEXT, st.lists(DEVICES, max_size=2).map(tuple), max_size=2),
)


@given(st.lists(RECORDS, max_size=4, unique_by=lambda one: one.key))
def test_dra_checkpoint_encode_decode_roundtrips(records: list[ClaimInfo]) -> None:
    content = encode(records)
    assert decode(content) == sorted(records, key=lambda one: one.key)
    assert encode(reversed(records)) == content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (EMPTY.replace(b"[]", b"[ ]"), "its checksum does not match"),
        (EMPTY[:-20], "not what a kubelet writes"),
        (b"", "not what a kubelet writes"),
        (b"\xff\xfe", "not what a kubelet writes"),
        (written([]), "not what a kubelet writes"),
        (
            written({**DATA, "apiVersion": "checkpoint.dra.kubelet.k8s.io/v9"}),
            "DRACheckpoint of checkpoint.dra.kubelet.k8s.io/v9",
        ),
        (b'{"policyName":"none","Checksum":1}', "not what a kubelet writes"),
    ],
)
def test_read_state_corrupt_file_error_names_file_and_remedy(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "dra_manager_state"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        read_state(path)
    text = str(caught.value)
    assert said in text
    assert str(path) in text
    assert "delete that file" in text
    assert "\n" not in text


def test_read_state_unwritable_path_raises_policy_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "dra_manager_state", tmp_path):
        with pytest.raises(PolicyError, match="must be kept there"):
            read_state(path)


def test_read_state_missing_file_created_and_written_state_read_back(tmp_path: Path) -> None:
    path = tmp_path / "dra_manager_state"
    assert read_state(path) == []
    assert path.read_bytes() == EMPTY
    write_state(path, encode([RECORD]))
    assert read_state(path) == [RECORD]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["dra_manager_state"]

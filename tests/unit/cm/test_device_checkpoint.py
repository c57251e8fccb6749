"""The device manager's file: what the reference writes is understood, and what we write is what it writes."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.cm.devices.checkpoint import decode, encode, read_checkpoint, write_checkpoint
from pykubelet.cm.devices.registry import Device, DeviceAllocation, DeviceOwner, DeviceRegistry
from pykubelet.cm.topology.hints import PolicyError

# Made by the reference's own data types and its checksum.
FROM_GO = [
    '{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}',
    '{"Data":{"PodDeviceEntries":[],"RegisteredDevices":null},"Checksum":3252601439}',
    '{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"example.com/a":[],"example.com/b":["z","a"],'
    '"example.com/n":null}},"Checksum":3835567238}',
    '{"Data":{"PodDeviceEntries":[{"PodUID":"uid-1","ContainerName":"c","ResourceName":"example.com/gpu",'
    '"DeviceIDs":{"-1":["d\\u003c\\u0026\\u003e3"],"0":["d1","dé2\\n"],"10":["x"],"2":null},"AllocResp":"AQL/"},'
    '{"PodUID":"uid-2","ContainerName":"d","ResourceName":"example.com/gpu","DeviceIDs":{},"AllocResp":""},'
    '{"PodUID":"uid-3","ContainerName":"d","ResourceName":"example.com/gpu","DeviceIDs":null,"AllocResp":null}],'
    '"RegisteredDevices":{"example.com/gpu":["d1"]}},"Checksum":660368328}',
]


@pytest.mark.parametrize("text", FROM_GO)
def test_decode_upstream_checkpoint_succeeds(text: str) -> None:
    decode(text.encode())


def test_decode_upstream_checkpoint_returns_allocations() -> None:
    table = decode(FROM_GO[3].encode())
    held = table.allocations[DeviceOwner("uid-1", "c", "example.com/gpu")]
    assert held == DeviceAllocation({-1: ("d<&>3",), 0: ("d1", "dé2\n"), 10: ("x",), 2: ()}, b"\x01\x02\xff")
    assert held.ids == {"d<&>3", "d1", "dé2\n", "x"}
    assert set(decode(FROM_GO[2].encode()).resources) == {"example.com/a", "example.com/b", "example.com/n"}
    # Nothing can be given out before the plugin is back.
    assert decode(FROM_GO[2].encode()).usable("example.com/b") == frozenset()


def test_encode_empty_registry_equals_upstream() -> None:
    assert json.loads(encode(DeviceRegistry())) == json.loads(FROM_GO[0])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (FROM_GO[3].replace("uid-2", "uid-4"), "checksum"),
        (FROM_GO[3].replace("660368328", "0"), "checksum"),
        (FROM_GO[3][:100], "not what the device manager writes"),
        ("", "not what the device manager writes"),
        ("[]", "not what the device manager writes"),
        ('{"Data":{"RegisteredDevices":{"a":[1]}}}', "not what the device manager writes"),
        ("\udcff", "not what the device manager writes"),
    ],
)
def test_read_checkpoint_damaged_file_raises_error_with_remedy(
    tmp_path: Path, content: str, problem: str
) -> None:
    path = tmp_path / "kubelet_internal_checkpoint"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PolicyError, match=problem) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "delete that file" in str(caught.value)


def test_read_checkpoint_missing_file_returns_empty_registry(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path / "none").allocations == {}


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
holdings = st.dictionaries(
    st.builds(DeviceOwner, names, names, names),
    st.builds(
        DeviceAllocation,
        st.dictionaries(st.integers(-1, 2**62), st.lists(names, max_size=3).map(tuple), max_size=3),
        st.binary(max_size=20),
    ),
    max_size=4,
)


@settings(max_examples=50)
@given(held=holdings, offered=st.dictionaries(names, st.sets(names, max_size=3), max_size=3))
def test_encode_any_registry_round_trips(
    held: dict[DeviceOwner, DeviceAllocation], offered: dict[str, set[str]]
) -> None:
    table = DeviceRegistry(held)
    for resource, ids in offered.items():
        table.set_devices(resource, map(Device, ids))
    found = decode(encode(table))
    assert found.allocations == held
    assert set(found.resources) == set(offered)


def test_write_checkpoint_replaces_file_atomically(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_checkpoint(path, b"old")
    write_checkpoint(path, encode(DeviceRegistry()))
    assert read_checkpoint(path).allocations == {}
    assert [one.name for one in tmp_path.iterdir()] == ["f"]
    assert path.stat().st_mode & 0o777 == 0o600

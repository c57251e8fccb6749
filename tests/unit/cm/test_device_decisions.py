"""Which devices a container gets, near to which NUMA nodes, and what it gets with them: pure decisions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Container
from pykubelet.cm.devices import device_plugin_pb2 as pb
from pykubelet.cm.devices.plugins import read_devices
from pykubelet.cm.devices.registry import Device, DeviceAllocation, DeviceOwner, DeviceRegistry, Resource
from pykubelet.cm.devices.run_options import DeviceNode, DeviceRunOptions, HostMount
from pykubelet.cm.devices.selection import ChoiceError, choose, device_hints, grants_of, is_served, reusable
from pykubelet.cm.topology.hints import TopologyHint
from tests.support.pod_resources import pod_of

R = "example.com/r"


def table_of(**nodes: list[int]) -> dict[str, Device]:
    return {name: Device(name, nodes=frozenset(near)) for name, near in nodes.items()}


PLACED = table_of(a=[0], b=[0], c=[1], d=[1], e=[])


@pytest.mark.parametrize(
    ("size", "near", "left", "wish", "asked", "given"),
    [
        (2, None, "", "", "abcde", "ab"),
        (2, None, "", "ed", "abcde", "de"),
        (2, None, "", "zzd", "abcde", "ad"),
        (2, {1}, "", "", None, "cd"),
        (1, {1}, "", "d", "cd", "d"),
        (1, {1}, "", "a", "cd", "c"),
        (3, {1}, "", "", "abcde", "acd"),
        (3, {1}, "", "e", "abcde", "cde"),
        (4, {0, 1}, "", "", None, "abcd"),
        (5, {0}, "", "", None, "abcde"),
        (2, {0}, "d", "", "abd", "ad"),
        (2, {0}, "d", "b", "abd", "bd"),
        (1, {0}, "d", "", None, "d"),
        (1, None, "cd", "", None, "c"),
        (1, {7}, "", "", "abcde", "a"),
    ],
)
def test_choose_follows_numa_nodes_and_plugin_preference(
    size: int, near: set[int] | None, left: str, wish: str, asked: str | None, given: str
) -> None:
    available = frozenset("abcde") - frozenset(left)
    nodes = frozenset(near) if near is not None else None
    choice = choose(R, size, PLACED, available, frozenset(left), nodes)
    question = choice.plugin_request
    settled = choice.complete(wish)
    assert settled == frozenset(given)
    if question is None:
        assert asked is None or len(asked) == size
    else:
        assert "".join(sorted(question.available)) == (asked or "".join(sorted(question.available)))
        assert question.size == size
        assert question.required <= settled


def test_choose_devices_without_numa_node_come_last() -> None:
    devices = table_of(a=[], b=[0], c=[1])
    assert choose(R, 2, devices, frozenset("abc"), near=frozenset({1})).complete() == {"b", "c"}


def test_choose_too_few_devices_raises_choice_error() -> None:
    with pytest.raises(ChoiceError) as caught:
        choose(R, 3, PLACED, frozenset("ab"))
    text = f"requested number of devices unavailable for {R}. Requested: 3, Available: 2"
    assert str(caught.value) == text


ids = st.frozensets(st.sampled_from("abcdefgh"))


@given(
    placed=st.dictionaries(st.sampled_from("abcdefgh"), st.frozensets(st.integers(0, 3), max_size=2)),
    held=ids,
    left=ids,
    near=st.none() | st.frozensets(st.integers(0, 3)),
    wish=st.lists(st.sampled_from("abcdefghxyz")),
    size=st.integers(1, 6),
)
def test_choose_any_plugin_preference_returns_available_devices(
    placed: dict[str, frozenset[int]],
    held: frozenset[str],
    left: frozenset[str],
    near: frozenset[int] | None,
    wish: list[str],
    size: int,
) -> None:
    devices = {name: Device(name, nodes=nodes) for name, nodes in placed.items()}
    left &= devices.keys()
    available = frozenset(devices) - held - left
    try:
        choice = choose(R, size, devices, available, left, near)
    except ChoiceError:
        assert len(available) < size - min(size, len(left))
        return
    given = choice.complete(wish)
    assert len(given) == size
    assert given <= available | left
    assert given.isdisjoint(held - left)
    if near is not None and any(placed.values()):
        aligned = {one for one in available if placed[one] & near}
        assert len(given & aligned) >= min(len(aligned), size - min(size, len(left)))


@pytest.mark.parametrize(
    ("size", "held", "resource", "problem"),
    [
        (1, None, None, f"cannot allocate unregistered device {R}"),
        (1, None, Resource(), f"no healthy devices present; cannot allocate unhealthy devices {R}"),
        (
            2,
            "a",
            Resource(PLACED, True),
            f'pod "u" container "c" changed request for resource "{R}" from 1 to 2',
        ),
        (
            1,
            "z",
            Resource(PLACED, True),
            f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {R}",
        ),
        (1, "a", Resource(PLACED, True), True),
        (1, None, Resource(PLACED, True), False),
    ],
)
def test_is_served_checks_previous_allocation_and_health(
    size: int, held: str | None, resource: Resource | None, problem: Any
) -> None:
    holding = DeviceAllocation({-1: tuple(held)}, b"") if held is not None else None
    if isinstance(problem, bool):
        assert is_served(DeviceOwner("u", "c", R), size, holding, resource) is problem
        return
    with pytest.raises(ChoiceError) as caught:
        is_served(DeviceOwner("u", "c", R), size, holding, resource)
    assert str(caught.value) == problem


def test_reusable_returns_devices_of_finished_init_containers() -> None:
    pod = pod_of({}, {}, init=[{}, {}, {}])
    pod.spec.init_containers[1].restart_policy = "Always"
    init, sidecar, last = pod.spec.init_containers
    first, second = pod.spec.containers

    def left(container: Container, **held: str) -> str:
        return "".join(sorted(reusable(pod, container, {name: frozenset(one) for name, one in held.items()})))

    assert left(init) == ""
    assert left(sidecar, i0="ab") == "ab"
    assert left(last, i0="ab", i1="a") == "b"
    assert left(first, i0="ab", i1="a", i2="bc") == "bc"
    assert left(second, i0="ab", i1="a", i2="bc", c0="c") == "b"
    assert left(first, i0="ab", i1="a", i2="bc", c0="", c1="b") == "c"


def hints_text(found: list[TopologyHint] | None) -> Any:
    if found is None:
        return None
    return [f"{''.join(map(str, sorted(one.nodes or ())))}{'!' if one.preferred else ''}" for one in found]


@pytest.mark.parametrize(
    ("size", "devices", "available", "left", "expected"),
    [
        (1, table_of(a=[], b=[]), "ab", "", None),
        (1, PLACED, "abcde", "", ["0!", "1!", "01"]),
        (2, PLACED, "abcde", "", ["0!", "1!", "01"]),
        (2, PLACED, "acd", "", ["1!", "01"]),
        (2, PLACED, "ac", "", ["01"]),
        (3, PLACED, "abc", "", ["01!"]),
        (3, PLACED, "ab", "", []),
        (2, PLACED, "bcd", "a", ["0!", "01"]),
        (1, table_of(a=[0, 1], b=[9]), "ab", "", ["0!", "1!", "01"]),
    ],
)
def test_device_hints_prefer_smallest_numa_node_sets(
    size: int, devices: dict[str, Device], available: str, left: str, expected: Any
) -> None:
    assert hints_text(device_hints(size, devices, available, (0, 1), left)) == expected


def test_device_hints_nodes_without_devices_are_not_combined() -> None:
    devices = table_of(a=[3], b=[30])
    assert hints_text(device_hints(1, devices, "ab", range(36))) == ["3!", "30!", "330"]


@given(
    placed=st.dictionaries(
        st.sampled_from("abcdef"), st.frozensets(st.integers(0, 3), max_size=2), min_size=1
    ),
    size=st.integers(1, 4),
    free=ids,
)
def test_device_hints_any_hint_is_satisfiable(
    placed: dict[str, frozenset[int]], size: int, free: frozenset[str]
) -> None:
    devices = {name: Device(name, nodes=nodes) for name, nodes in placed.items()}
    available = free & devices.keys()
    for hint in device_hints(size, devices, available, range(4)) or ():
        assert hint.nodes is not None
        given = choose(R, size, devices, available, near=hint.nodes).complete()
        assert all(placed[one] & hint.nodes for one in given)


def test_grants_of_merges_allocate_responses() -> None:
    first, second = pb.ContainerAllocateResponse(), pb.ContainerAllocateResponse()
    first.envs["A"], second.envs["A"], second.envs["B"] = "1", "2", "3"
    first.devices.add(host_path="/dev/x", container_path="/dev/y", permissions="rw")
    second.devices.add(host_path="/dev/other", container_path="/dev/y", permissions="r")
    for one in (first, second):
        one.mounts.add(host_path="/lib", container_path="/lib", read_only=True)
        one.cdi_devices.add(name="v.com/c=1")
    second.annotations["k"] = "v"
    held = {
        "b/b": DeviceAllocation({}, second.SerializeToString()),
        "a/a": DeviceAllocation({}, first.SerializeToString()),
    }
    grants, clashes = grants_of(held)
    assert grants == DeviceRunOptions(
        devices=(DeviceNode("/dev/x", "/dev/y", "rw"),),
        cdi_devices=("v.com/c=1",),
        mounts=(HostMount("/lib", "/lib", True),),
        env={"A": "1", "B": "3"},
        annotations={"k": "v"},
    )
    assert clashes == ["environment variable A", "device /dev/y"]
    assert grants_of({}) == (DeviceRunOptions(), [])
    assert grants.and_cdi(()) is grants
    more = grants.and_cdi(("b=1", "b=1", *grants.cdi_devices))
    assert more.cdi_devices == (*grants.cdi_devices, "b=1")
    assert (more.env, more.devices, more.mounts) == (grants.env, grants.devices, grants.mounts)


def test_read_devices_inconsistent_list_skips_invalid_entries() -> None:
    answer = pb.ListAndWatchResponse()
    answer.devices.add(ID="a", health="Healthy")
    answer.devices.add(ID="", health="Healthy")
    answer.devices.add(ID="a", health="broken").topology.nodes.add(ID=-1)
    answer.devices.add(ID="b", health="Healthy").topology.nodes.add(ID=2)
    assert read_devices(answer) == [Device("a", healthy=False), Device("b", nodes=frozenset({2}))]


class TestTable:
    def test_device_registry_lifecycle_updates_counts_and_allocations(self) -> None:
        table = DeviceRegistry()
        assert not table.knows(R)
        table.set_devices(R, [Device("a"), Device("b", nodes=frozenset({0, 1})), Device("c", healthy=False)])
        assert table.counts() == ({R: 3}, {R: 2})
        holder = DeviceOwner("u", "c", R)
        table.reserve(holder, "b")
        assert table.available(R) == {"a"}
        assert not table.retain([])
        table.record_allocation(holder, "b", b"x")
        table.release(holder)
        assert table.allocations[holder].devices == {0: ("b",), 1: ("b",)}
        assert table.allocations[holder].numa_nodes() == {"b": {0, 1}}
        assert table.available(R) == {"a"}
        assert table.set_devices(R, [Device("a"), Device("b", healthy=False)]) == {"u"}
        assert table.set_devices(R, [Device("a", healthy=False), Device("b", healthy=False)]) == frozenset()
        assert table.set_devices(R, [Device("a")]) == {"u"}
        table.withdraw(R)
        assert table.counts() == ({R: 1}, {R: 0})
        table.forget(R)
        assert (table.counts(), table.removed) == (({}, {}), {R})
        assert table.knows(R)  # the container has it still
        assert table.retain(["other"])
        assert not table.knows(R)
        table.set_devices(R, [Device("a")])
        assert not table.removed

    def test_device_registry_forget_registered_resource_is_ignored(self) -> None:
        table = DeviceRegistry(known=[R])
        table.set_devices(R, [Device("a")])
        table.forget(R)
        assert table.usable(R) == {"a"}

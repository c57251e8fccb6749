import errno
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api import cpuset
from pykubelet.cm.cgroups.driver import (
    CgroupDriver,
    CgroupWriteError,
    SystemdSlices,
    cpu_bits,
    round_up_to_percent,
    start_properties,
    unit_of,
    value_properties,
)
from pykubelet.cm.cgroups.values import CgroupValues
from pykubelet.linux import systemd
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from pykubelet.linux.dbus import Variant, decode, encode
from pykubelet.linux.systemd import INFINITY, Property, SystemdError

POD = ("kubepods", "burstable", "pod1-2")


def plain(properties: Any) -> dict[str, Any]:
    return {name: variant.value for name, variant in properties}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ((), "-.slice"),
        (("kubepods",), "kubepods.slice"),
        (("my-root", "kubepods"), "my_root-kubepods.slice"),
        (POD, "kubepods-burstable-pod1_2.slice"),
    ],
)
def test_unit_of_returns_escaped_slice_name(name: tuple[str, ...], unit: str) -> None:
    assert unit_of(name) == unit


def test_start_properties_enable_accounting_of_new_slice() -> None:
    wanted = {
        "Description": "libcontainer container kubepods-burstable-pod1_2.slice",
        "Wants": ["kubepods-burstable.slice"],
        "MemoryAccounting": True,
        "CPUAccounting": True,
        "IOAccounting": True,
        "TasksAccounting": True,
        "DefaultDependencies": False,
    }
    assert plain(start_properties(POD, unified=True)) == wanted
    del wanted["IOAccounting"]
    assert plain(start_properties(POD, unified=False)) == wanted | {"BlockIOAccounting": True}
    assert plain(start_properties(("kubepods",), unified=True))["Wants"] == ["-.slice"]


# values, properties on v2, properties on v1
PROPERTIES: list[tuple[CgroupValues, dict[str, Any], dict[str, Any]]] = [
    (CgroupValues(), {}, {}),
    (CgroupValues(shares=2), {"CPUWeight": 1}, {"CPUShares": 2}),
    (CgroupValues(shares=1024), {"CPUWeight": 39}, {"CPUShares": 1024}),
    (CgroupValues(memory=1 << 26), {"MemoryMax": 1 << 26}, {"MemoryLimit": 1 << 26}),
    (CgroupValues(memory=-1), {"MemoryMax": INFINITY}, {"MemoryLimit": INFINITY}),
    (CgroupValues(pids=100), {"TasksMax": 100}, {"TasksMax": 100}),
    (CgroupValues(pids=0), {"TasksMax": 1}, {"TasksMax": 1}),
    (CgroupValues(pids=-1), {"TasksMax": INFINITY}, {"TasksMax": INFINITY}),
    (CgroupValues(cpus=frozenset({0, 9})), {"AllowedCPUs": b"\x01\x02"}, {"AllowedCPUs": b"\x01\x02"}),
    (CgroupValues(huge_pages={"2MB": 0}), {}, {}),
    (
        CgroupValues(unified={"memory.min": "5", "memory.low": "6", "memory.high": "max", "io.max": "x"}),
        {"MemoryMin": 5, "MemoryLow": 6, "MemoryHigh": INFINITY},
        {},
    ),
    *(
        (CgroupValues(quota=quota, period=period), told, told)
        for quota, period, told in (
            (50_000, 100_000, {"CPUQuotaPeriodUSec": 100_000, "CPUQuotaPerSecUSec": 500_000}),
            (5_000, 10_000, {"CPUQuotaPeriodUSec": 10_000, "CPUQuotaPerSecUSec": 500_000}),
            (-1, 100_000, {"CPUQuotaPeriodUSec": 100_000, "CPUQuotaPerSecUSec": INFINITY}),
        )
    ),
]


@pytest.mark.parametrize(("values", "v2", "v1"), PROPERTIES)
def test_value_properties_follow_cgroup_version(
    values: CgroupValues, v2: dict[str, Any], v1: dict[str, Any]
) -> None:
    for unified, wanted in ((True, v2), (False, v1)):
        properties = [*value_properties(values, unified=unified, version=252)]
        assert plain(properties) == wanted
        assert decode("a(sv)", encode("a(sv)", (properties,))) == (properties,)


def test_value_properties_old_systemd_omits_unknown_properties() -> None:
    values = CgroupValues(quota=1000, cpus=frozenset({0}))
    assert plain(value_properties(values, unified=True, version=241)) == {"CPUQuotaPerSecUSec": 10_000}


@pytest.mark.parametrize(
    ("quota", "period", "rounded"),
    [
        (50_000, 100_000, 50_000),
        (12_300, 100_000, 13_000),
        (1_000, 100_000, 1_000),
        (12_345, 50_000, 12_500),
        (-1, 100_000, -1),
    ],
)
def test_round_up_to_percent_rounds_quota_up(quota: int, period: int, rounded: int) -> None:
    assert round_up_to_percent(CgroupValues(quota=quota, period=period)).quota == rounded


@given(st.integers(1000, 10**8), st.sampled_from([1000, 5000, 20_000, 100_000, 1_000_000]))
def test_round_up_to_percent_adds_at_most_one_percent(quota: int, period: int) -> None:
    rounded = round_up_to_percent(CgroupValues(quota=quota, period=period)).quota
    assert rounded is not None
    # A period that is no multiple of a hundred loses less than a microsecond in the division.
    assert quota - 1 <= rounded <= quota + period // 100
    again = round_up_to_percent(CgroupValues(quota=rounded, period=period)).quota
    assert again == rounded


@given(st.frozensets(st.integers(0, 200), min_size=1))
def test_cpu_bits_encodes_cpuset(cpus: frozenset[int]) -> None:
    raw = cpu_bits(cpus)
    assert (
        frozenset(8 * at + bit for at, byte in enumerate(raw) for bit in range(8) if byte >> bit & 1) == cpus
    )
    assert raw[-1], cpuset.format(cpus)


class Recorder:
    """Stands for systemd: keeps what was asked of it, and refuses everything when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.broken = False

    async def version(self) -> int:
        return 252

    async def start(self, unit: str, properties: list[Property]) -> None:
        self._take("start", unit, properties)

    async def set(self, unit: str, properties: list[Property]) -> None:
        self._take("set", unit, properties)

    async def stop(self, unit: str) -> None:
        self._take("stop", unit, [])

    def _take(self, what: str, unit: str, properties: list[Property]) -> None:
        if self.broken:
            raise SystemdError(errno.ETIMEDOUT, f"systemd, about {unit}: it hangs")
        self.asked.append((what, unit, plain(properties)))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def driver_at(path: Path, recorder: Any) -> CgroupDriver:
    """The systemd driver on a v2 hierarchy without controllers, which a plain folder can be."""
    (path / "cgroup.controllers").write_text("")
    return CgroupDriver(Cgroups(CgroupMode.V2, path, {}, {}), "systemd", manager=recorder)


class TestDriver:
    async def test_driver_make_starts_slice_before_setting_values(
        self, tmp_path: Path, recorder: Recorder
    ) -> None:
        groups = driver_at(tmp_path, recorder)
        await groups.make(("kubepods",), CgroupValues(quota=12_300))
        await groups.make(("kubepods", "pod1-2"), CgroupValues(memory=5))
        folder = tmp_path / "kubepods.slice/kubepods-pod1_2.slice"
        assert folder.is_dir()
        quota = {"CPUQuotaPeriodUSec": 100_000, "CPUQuotaPerSecUSec": 130_000}
        assert [(what, unit) for what, unit, _ in recorder.asked] == [
            ("start", "kubepods.slice"),
            ("set", "kubepods.slice"),
            ("start", "kubepods-pod1_2.slice"),
            ("set", "kubepods-pod1_2.slice"),
        ]
        assert recorder.asked[1][2] == quota
        assert recorder.asked[3][2] == {"MemoryMax": 5}
        await groups.remove(("kubepods", "pod1-2"))
        assert recorder.asked[-1] == ("stop", "kubepods-pod1_2.slice", {})
        assert not folder.exists()

    async def test_driver_systemd_fails_raises_one_line_cgroup_error(
        self, tmp_path: Path, recorder: Recorder
    ) -> None:
        groups = driver_at(tmp_path, recorder)
        await groups.make(("kubepods",), CgroupValues())
        recorder.broken = True
        with pytest.raises(
            CgroupWriteError, match=r"^cannot make a slice: systemd, about a.slice: it hangs$"
        ):
            await groups.make(("a",), CgroupValues())
        with pytest.raises(CgroupWriteError, match=r"^cannot set a slice"):
            await groups.write(("kubepods",), CgroupValues(pids=5))
        with pytest.raises(CgroupWriteError, match=r"^cannot stop a slice"):
            await groups.remove(("kubepods",))
        assert not (tmp_path / "kubepods.slice").exists()

    async def test_driver_invalid_slice_name_raises_cgroup_error(
        self, tmp_path: Path, recorder: Recorder
    ) -> None:
        groups = driver_at(tmp_path, recorder)
        for doing in (groups.make, groups.write):
            with pytest.raises(CgroupWriteError, match="cannot be a part of a systemd slice"):
                await doing(("kubepods", "pod_x"), CgroupValues(shares=2))
        with pytest.raises(CgroupWriteError, match="cannot be a part of a systemd slice"):
            await groups.remove(("kubepods", "pod_x"))
        assert recorder.asked == []

    def test_driver_parse_decodes_slices_only_for_systemd(self, tmp_path: Path, recorder: Recorder) -> None:
        assert driver_at(tmp_path, recorder).parse("/a.slice/a-b.slice") == ("a", "b")
        assert CgroupDriver(Cgroups(CgroupMode.V2, tmp_path, {}, {})).parse("/a.slice/b") == ("a.slice", "b")

    def test_driver_check_without_systemd_raises_cgroup_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(systemd, "is_running", lambda: False)
        machine = Cgroups(CgroupMode.V2, tmp_path, {}, {})
        with pytest.raises(CgroupWriteError, match="systemd does not run this machine: set it to cgroupfs"):
            CgroupDriver(machine, "systemd").check()
        CgroupDriver(machine).check()
        monkeypatch.setattr(systemd, "is_running", lambda: True)
        CgroupDriver(machine, "systemd").check()


async def test_systemd_slices_start_root_does_nothing(recorder: Any) -> None:
    await SystemdSlices(recorder, unified=True).start(())
    assert recorder.asked == []


def test_cgroup_files_memory_limit_below_usage_raises_ebusy(tmp_path: Path) -> None:
    """v2 would kill for it; caches that can be dropped are not in use."""
    folder = tmp_path / "pods"
    folder.mkdir()
    (folder / "memory.current").write_text("1000\n")
    (folder / "memory.stat").write_text("anon 300\nfile 600\nshmem 100\nslab_reclaimable 50\n")
    (folder / "memory.max").write_text("max")
    files = CgroupDriver(Cgroups(CgroupMode.V2, tmp_path, {"memory": tmp_path}, {})).files
    with pytest.raises(CgroupWriteError, match="450 bytes are in use") as refused:
        files.write(("pods",), CgroupValues(memory=449))
    assert refused.value.errno == errno.EBUSY
    assert (folder / "memory.max").read_text() == "max"
    files.write(("pods",), CgroupValues(memory=450))
    assert (folder / "memory.max").read_text() == "450"


def test_start_properties_values_are_dbus_variants() -> None:
    assert all(isinstance(value, Variant) for _, value in start_properties(POD, unified=True))

"""Hints about cgroups: reading the file, and the file systems of cgroups in the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from pykubelet.stats.cadvisor.metrics import cadvisor_chunks
from pykubelet.stats.container_hints import MAX_BYTES, Hints, HintsError, read_container_hints
from pykubelet.stats.samples import DiskIo
from tests.support.prometheus_text import parse
from tests.support.stats_records import FILESYSTEM, MACHINE, NOW, device_name, record

HINT = {
    "full_path": "/system.slice",
    "network_interface": {"veth_host": "veth0", "veth_child": "eth1"},
    "mounts": [{"host_dir": "/data", "container_dir": "/srv"}, {"host_dir": "/logs"}],
}


def test_read_container_hints_mount_points_by_cgroup(tmp_path: Path) -> None:
    other = {"full_path": "/system.slice", "mounts": [{"host_dir": "/ignored"}]}
    path = tmp_path / "hints.json"
    path.write_text(json.dumps({"all_hosts": [HINT, other, {"full_path": "/a"}], "more": 1}))
    assert read_container_hints(path) == {"/system.slice": {"/data", "/logs"}, "/a": set()}


@pytest.mark.parametrize("text", ["{}", '{"all_hosts": null}', "null"])
def test_read_container_hints_empty_or_missing_file_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "hints.json").write_text(text)
    assert read_container_hints(tmp_path / "hints.json") == {}
    assert read_container_hints(tmp_path / "none.json") == {}


@pytest.mark.parametrize("text", ["", "[]", '{"all_hosts": {}}', '{"all_hosts": [{"full_path": 1}]}', "\xff"])
def test_read_container_hints_invalid_file_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hints.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(HintsError, match=rf"cannot use container hints {path}: .*--container-hints"):
        read_container_hints(path)


def test_read_container_hints_large_or_unreadable_file_raises(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_text(" " * (MAX_BYTES + 1))
    with pytest.raises(HintsError, match="larger than"):
        read_container_hints(tmp_path / "large.json")
    with pytest.raises(HintsError, match="cannot read container hints"):
        read_container_hints(tmp_path)


def page(hints: Hints, *, lean: bool = False) -> dict[tuple[str, str, str], float]:
    """Return the values of the metrics of file systems by name, cgroup and device."""
    data = replace(
        FILESYSTEM,
        device="/dev/vdb",
        minor=16,
        mount_point="/data",
        capacity=100,
        used=40,
        io=DiskIo(reads=7, writes=8),
    )
    records = [
        record("root", "/"),
        record("node", "/system.slice"),
        record("pod", "/kubepods/podu1", pod="web"),
        record("container", "/kubepods/podu1/a", pod="web", container="a"),
    ]
    found = cadvisor_chunks(
        records,
        filesystems=[replace(FILESYSTEM, mount_point="/"), data],
        device_name=device_name,
        machine=MACHINE,
        now=NOW,
        lean=lean,
        hints=hints,
    )
    return {
        (series.name, series.get("id"), series.get("device")): value
        for series, value in parse(b"".join(found).decode()).items()
        if series.name in ("container_fs_limit_bytes", "container_fs_reads_total", "container_fs_usage_bytes")
    }


def test_cadvisor_chunks_hinted_cgroup_has_file_systems_of_its_mounts() -> None:
    hinted = page({"/system.slice": frozenset({"/data", "/none"}), "/kubepods/podu1": frozenset({"/"})})
    plain = page({})
    assert {key: value for key, value in hinted.items() if key not in plain} == {
        ("container_fs_limit_bytes", "/system.slice", "/dev/vdb"): 100,
        ("container_fs_usage_bytes", "/system.slice", "/dev/vdb"): 40,
        ("container_fs_reads_total", "/system.slice", "/dev/vdb"): 7,
        ("container_fs_limit_bytes", "/kubepods/podu1", "/dev/vda"): FILESYSTEM.capacity,
        ("container_fs_usage_bytes", "/kubepods/podu1", "/dev/vda"): FILESYSTEM.used,
    }
    # The cgroup's own counter of reads is reported instead of the disk's.
    assert {key: hinted[key] for key in plain} == plain
    assert plain["container_fs_reads_total", "/kubepods/podu1", "/dev/vda"] == 1


def test_cadvisor_chunks_hints_about_root_and_containers_ignored() -> None:
    hints = {path: frozenset({"/data"}) for path in ("/", "/kubepods/podu1/a", "/unknown")}
    assert page(hints) == page({})


def test_cadvisor_chunks_lean_page_without_hints() -> None:
    assert page({"/system.slice": frozenset({"/data"})}, lean=True) == page({}, lean=True)

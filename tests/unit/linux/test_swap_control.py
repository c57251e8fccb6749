"""Which files say that swap can be bounded."""

from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import can_bound_swap


@pytest.mark.parametrize(
    ("files", "unified", "can"),
    [
        ([], False, False),
        (["memory/memory.memsw.limit_in_bytes"], False, True),
        (["memory/memory.memsw.limit_in_bytes"], True, False),
        (["system.slice/memory.max", "system.slice/memory.swap.max"], True, True),
        (["system.slice/memory.max", "system.slice/memory.swap.max"], False, False),
        (["system.slice/memory.max", "swaps"], True, False),
        (["init.scope/cgroup.procs", "swaps"], True, True),
        (["init.scope/cgroup.procs"], True, False),
    ],
)
def test_can_bound_swap_follows_cgroup_files(
    tmp_path: Path, files: list[str], unified: bool, can: bool
) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert can_bound_swap(unified=unified, root=tmp_path, swaps=tmp_path / "swaps") is can


def test_can_bound_swap_without_cgroups_returns_false(tmp_path: Path) -> None:
    assert not can_bound_swap(unified=True, root=tmp_path / "none")

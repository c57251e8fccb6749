from pathlib import Path

import pytest

from pykubelet.linux import process_limits as capabilities


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("0000000000000000", set()),
        ("0000000000000001", {"CAP_CHOWN"}),
        ("0000000001200000", {"CAP_SYS_ADMIN", "CAP_SYS_RESOURCE"}),
        ("0000020000000000", {"CAP_41"}),
    ],
)
def test_names_of_a_mask(mask: str, names: set[str]) -> None:
    assert capabilities.parse_effective(f"Name:\tx\nCapPrm:\tffff\nCapEff:\t{mask}\nCapBnd:\tffff\n") == names


def test_a_status_without_the_line_means_none() -> None:
    assert capabilities.parse_effective("Name:\tx\n") == set()


def test_every_bit_that_the_kernel_knows_has_a_name() -> None:
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    assert len(capabilities.NAMES) == len(set(capabilities.NAMES))
    assert last < len(capabilities.NAMES)


def test_asked_by_name(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("CapEff:\t000001fffeffffff\n")
    assert capabilities.has_capability("CAP_SYS_ADMIN", tmp_path)
    assert not capabilities.has_capability("CAP_SYS_RESOURCE", tmp_path)


@pytest.mark.machine
def test_root_here() -> None:
    assert capabilities.is_root()
    assert capabilities.has_capability("CAP_SYS_ADMIN")

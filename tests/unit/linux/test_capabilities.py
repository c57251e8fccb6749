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
def test_parse_effective_mask_returns_names(mask: str, names: set[str]) -> None:
    assert capabilities.parse_effective(f"Name:\tx\nCapPrm:\tffff\nCapEff:\t{mask}\nCapBnd:\tffff\n") == names


def test_parse_effective_missing_line_returns_empty_set() -> None:
    assert capabilities.parse_effective("Name:\tx\n") == set()


def test_capability_names_cover_kernel_cap_last_cap() -> None:
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    assert len(capabilities.NAMES) == len(set(capabilities.NAMES))
    assert last < len(capabilities.NAMES)


def test_has_capability_checks_effective_set(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("CapEff:\t000001fffeffffff\n")
    assert capabilities.has_capability("CAP_SYS_ADMIN", tmp_path)
    assert not capabilities.has_capability("CAP_SYS_RESOURCE", tmp_path)


@pytest.mark.machine
def test_is_root_on_host_returns_true() -> None:
    assert capabilities.is_root()
    assert capabilities.has_capability("CAP_SYS_ADMIN")

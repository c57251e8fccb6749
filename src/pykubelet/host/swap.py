"""Whether memory of this machine can be swapped out, and to where.

`failSwapOn` hangs on it. Any area that /proc/swaps lists counts, zram as much as a disk: pods
were promised memory, and none of these is memory.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = ("KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class SwapArea:
    """One line of /proc/swaps; sizes in KiB."""

    path: str
    kind: str
    size_kib: int
    used_kib: int
    priority: int

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}, {_size(self.size_kib)}, {_size(self.used_kib)} used)"


def swap_areas(path: Path = Path("/proc/swaps")) -> list[SwapArea]:
    """List the areas in use; none when the kernel knows no swap.

    Raises OSError when the file is there and cannot be read.
    """
    try:
        return parse_swaps(path.read_text())
    except FileNotFoundError:
        return []


def parse_swaps(text: str) -> list[SwapArea]:
    """Read the text of /proc/swaps: a line of headings, then one area a line.

    A line of an unknown shape still is an area: better to refuse once too often than to swap.
    """
    return [_parse_line(line) for line in text.strip().splitlines()[1:] if line.strip()]


def swap_problem(areas: list[SwapArea]) -> str | None:
    """Say in one line why `failSwapOn` refuses to start, or give None when nothing is swapped."""
    if not areas:
        return None
    listed = "; ".join(str(area) for area in areas)
    return (
        f"running with swap on is not supported, and /proc/swaps lists {listed}: "
        "turn it off (swapoff -a, and /etc/fstab) or set --fail-swap-on=false (failSwapOn: false)"
    )


def _parse_line(line: str) -> SwapArea:
    # The name may hold blanks of its own where an old kernel does not escape them.
    fields = line.rsplit(maxsplit=4)
    try:
        name, kind, size, used, priority = fields
        return SwapArea(_unescape(name), kind, int(size), int(used), int(priority))
    except ValueError:
        return SwapArea(line.strip(), "unknown", 0, 0, 0)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _size(kib: int) -> str:
    value, unit = float(kib), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"

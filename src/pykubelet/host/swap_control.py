"""Whether the kernel can bound the swap of a cgroup: not every kernel counts it.

On v2 the file is in every cgroup but the root's, so one below it answers for all.
"""

from __future__ import annotations

from pathlib import Path


def can_bound_swap(
    *, unified: bool, root: Path = Path("/sys/fs/cgroup"), swaps: Path = Path("/proc/swaps")
) -> bool:
    """Look at the cgroups below `root`; `unified` says whether they are v2's."""
    if not unified:
        return (root / "memory/memory.memsw.limit_in_bytes").exists()
    if any(root.glob("*/memory.max")):
        return any(root.glob("*/memory.swap.max"))
    # Nobody has a cgroup with memory yet; where there is swap at all it will be counted.
    try:
        return "memory" in (root / "cgroup.controllers").read_text().split() and swaps.exists()
    except OSError:
        return False

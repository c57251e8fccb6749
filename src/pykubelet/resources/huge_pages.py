"""Sizes of huge pages, in the API's words and in the kernel's.

The API has a resource per size (`hugepages-2Mi`), the kernel's cgroup files have another spelling
(`hugetlb.2MB.max`), its folders a third (`hugepages-2048kB`).
"""

from __future__ import annotations

from pathlib import Path

from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.resources.qos import HUGE_PAGES_PREFIX

UNBOUNDED = 1 << 62

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_FOLDERS = Path("/sys/kernel/mm/hugepages")


def kernel_size(size: int) -> str | None:
    """Write a page size in bytes as cgroup files do: `2MB`; None for a size that no page has."""
    unit = 0
    while size > 0 and size % 1024 == 0 and unit < len(_UNITS) - 1:
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}" if 0 < size < 1024 else None


def page_size(resource: str) -> int | None:
    """Give the bytes of a page of this resource; None when it is not about huge pages."""
    if not resource.startswith(HUGE_PAGES_PREFIX):
        return None
    try:
        return int(Quantity.parse(resource.removeprefix(HUGE_PAGES_PREFIX)))
    except ValueError:
        return None


def page_limits(amounts: Resources, sizes: tuple[str, ...]) -> dict[str, int]:
    """Give bytes for every size that the machine has: what is not asked for is not to be used."""
    limits = dict.fromkeys(sizes, 0)
    for resource, amount in amounts.items():
        size = page_size(resource)
        name = kernel_size(size) if size is not None else None
        if name in limits:
            limits[name] += int(amount)
    return limits


def read_page_sizes(folders: Path = _FOLDERS) -> tuple[str, ...]:
    """Give the sizes that this machine has, as cgroup files write them, smallest first."""
    return tuple(name for size, _ in _read(folders) if (name := kernel_size(size)) is not None)


def read_huge_pages(folders: Path = _FOLDERS) -> Resources:
    """Give the bytes that are set aside for huge pages of each size."""
    return {
        f"{HUGE_PAGES_PREFIX}{Quantity.of(size, 'binary')}": Quantity.of(size * pages, "binary")
        for size, pages in _read(folders)
    }


def _read(folders: Path) -> list[tuple[int, int]]:
    found = []
    for folder in folders.glob("hugepages-*kB"):
        try:
            kilobytes = int(folder.name.removeprefix("hugepages-").removesuffix("kB"))
            found.append((kilobytes * 1024, int((folder / "nr_hugepages").read_text())))
        except (OSError, ValueError):
            continue
    return sorted(found)

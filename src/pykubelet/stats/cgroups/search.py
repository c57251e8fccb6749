"""Search for cgroups that the kubelet has not created: those that a container nests below its own.

cAdvisor samples every cgroup below those of the pods and of the system containers. The runtime does not
report nested ones, so they are searched every global housekeeping interval. A container may nest without
limit, so number and length of the paths that are returned have limits; names are not trusted.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

MAX_NESTED = 64
"""Cgroups that are returned below one cgroup."""
MAX_IN_TOTAL = 1024
"""Cgroups that are returned by one search."""
MAX_PATH = 1024
"""Characters of a path."""
_LINKS_WITHOUT_CHILDREN = 2
"""Links to a directory of cgroupfs that has no directories."""


def find_nested(root: str, parents: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the paths of cgroups below `parents` in the hierarchy at `root`, without the known ones. Blocks.

    What cannot be read is omitted: a cgroup may be removed at any time. As upstream, cgroups of mounts
    (`.mount`) are no containers. Below a known cgroup is not searched, unless it is one of the parents.
    """
    found: list[str] = []
    for parent in parents:
        found += _find_below(root, parent.rstrip("/"), known)
        if len(found) >= MAX_IN_TOTAL:
            break
    return sorted(found[:MAX_IN_TOTAL])


def _find_below(root: str, parent: str, known: Collection[str]) -> list[str]:
    found: list[str] = []
    pending = [parent]
    while pending:
        for child in _children(root, pending.pop()):
            if child in known:
                continue
            if len(found) == MAX_NESTED:
                return found
            found.append(child)
            pending.append(child)
    return found


def _children(root: str, path: str) -> list[str]:
    try:
        if os.stat(root + path).st_nlink == _LINKS_WITHOUT_CHILDREN:  # noqa: PTH116 - no Path for a single call
            return []
        with os.scandir(root + path) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    paths = (f"{path}/{name}" for name in sorted(names) if not name.endswith(".mount"))
    return [child for child in paths if len(child) <= MAX_PATH]

"""Names of cgroups, in the two spellings of the two cgroup drivers.

A cgroup is known here by its parts, `("kubepods", "burstable", "pod4f…")`. The cgroupfs driver
writes them as a path. systemd wants one unit per level, whose name repeats those above it:
`/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod4f….slice`. There a dash means one
level deeper, so dashes inside of a part become underscores, and parts must have none of their own.
"""

from __future__ import annotations

CgroupName = tuple[str, ...]

_SLICE = ".slice"
_POD = "pod"


def parse_path(path: str) -> CgroupName:
    """Take a cgroupfs path apart; `/` and the empty text are the root."""
    return tuple(part for part in path.split("/") if part)


def cgroupfs_path(name: CgroupName) -> str:
    """Write a name as the cgroupfs driver does: `/kubepods/burstable`."""
    return "/" + "/".join(name)


def systemd_path(name: CgroupName) -> str:
    """Write a name as systemd lays it out: `/kubepods.slice/kubepods-burstable.slice`.

    Raises ValueError for a part that could not be read back.
    """
    for part in name:
        if not part or "/" in part or "_" in part:
            raise ValueError(f"{part!r} cannot be a part of a systemd slice: use letters, digits and dashes")
    parts = [part.replace("-", "_") for part in name]
    return "/" + "/".join("-".join(parts[: depth + 1]) + _SLICE for depth in range(len(parts)))


def parse_systemd_path(path: str) -> CgroupName:
    """Take a slice's path, or just its unit name, apart."""
    unit = path.rpartition("/")[2].removesuffix(_SLICE)
    return tuple(part.replace("_", "-") for part in unit.split("-")) if unit else ()


def driver_path(name: CgroupName, driver: str) -> str:
    """Give the path of a cgroup below each hierarchy."""
    return systemd_path(name) if driver == "systemd" else cgroupfs_path(name)


def runtime_parent(name: CgroupName, driver: str) -> str:
    """Give what the runtime takes as a sandbox's cgroup parent: a path, or the name of a slice."""
    return systemd_path(name).rpartition("/")[2] if driver == "systemd" else cgroupfs_path(name)


def last_part(folder: str, driver: str) -> str:
    """Give the last part of the cgroup that a folder, given by its own name, is for."""
    return (parse_systemd_path(folder) or ("",))[-1] if driver == "systemd" else folder


def pod_part(uid: str) -> str:
    """Give the last part of a pod's cgroup; raises ValueError for a uid that is no plain name."""
    if not uid or "/" in uid or "\0" in uid or "\n" in uid:
        raise ValueError(f"{uid!r} cannot be a pod's uid")
    return _POD + uid


def uid_of_part(part: str) -> str | None:
    """Give the pod that a part was made for; None when it is something else's."""
    uid = part.removeprefix(_POD)
    return uid if uid and uid != part else None

"""Showing a folder at another place, with options of its own. Everything here blocks."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pykubelet.host.mounts import MS_BIND, MS_RDONLY, MS_REMOUNT, Mount, mount, read_mounts
from pykubelet.volumes.errors import KindError
from pykubelet.volumes.folders import make_folder

_FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
_PLAIN = frozenset(("bind", "rw", "defaults", "suid", "dev", "exec"))


def bind_flags(options: Collection[str]) -> int:
    """Give the flags of a bind mount with these options; raises KindError for one that it cannot have."""
    if unknown := [option for option in options if option not in _FLAGS and option not in _PLAIN]:
        raise KindError(
            f"mount option {unknown[0]!r} means nothing to a folder of this node: "
            f"possible are {', '.join(_FLAGS)}"
        )
    flags = 0
    for option in options:
        flags |= _FLAGS.get(option, 0)
    return flags


def bind_folder(source: Path, place: Path, flags: int) -> None:
    """Show a folder at another place too, with these flags; harmless to repeat. Raises OSError.

    What is bound there already stays, and gets its flags if an interrupted try did not give them.
    """
    there = mount_at(place)
    if there is None:
        make_folder(place)
        mount(str(source), place, "", flags=MS_BIND)
    missing = flags and (there is None or not _names(flags) <= there.options)
    if missing:
        # A bind takes no flags: they are set in a second step.
        mount("", place, "", flags=MS_REMOUNT | MS_BIND | flags)


def mount_at(place: Path) -> Mount | None:
    """Give what is mounted at a place, on top."""
    real = place.parent.resolve() / place.name
    return next((entry for entry in reversed(read_mounts(real)) if entry.point == real), None)


def _names(flags: int) -> set[str]:
    return {name for name, flag in _FLAGS.items() if flags & flag}

"""Actual state of volumes per pod since this process started; volumes of earlier processes are found on disk.

A volume is recorded before anything is done with it, and until all of the pod's volumes are removed. In
between its shared state is not released (`sweep`), it is not mounted for a second pod against
`ReadWriteOncePod`, and it is not detached (`volumesInUse`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pykubelet.volumes.plugin import MountedVolume, VolumeToMount


@dataclass(slots=True)
class VolumeRecord:
    """A volume that a pod has, or is about to have."""

    wanted: VolumeToMount
    mounted: MountedVolume | None = None
    attached: str = ""
    """Name of the volume in `status.volumesInUse`, set before it is used; empty for most volumes."""
    since: float = 0.0
    """Event-loop time when the pod first required it."""


class VolumeState:
    """Volumes of all pods below one root directory."""

    def __init__(self, root: Path) -> None:
        self._pods = root / "pods"
        self._held: dict[str, dict[str, VolumeRecord]] = {}

    def hold(self, wanted: VolumeToMount) -> VolumeRecord:
        """Record that a pod is about to have a volume, or already has it; return the record."""
        held = self._held.setdefault(wanted.uid, {})
        before = held.get(wanted.volume.name)
        now = VolumeRecord(wanted, since=asyncio.get_running_loop().time())
        if before is not None:
            now.mounted, now.attached, now.since = before.mounted, before.attached, before.since
        held[wanted.volume.name] = now
        return now

    def get(self, uid: str, volume: str) -> VolumeRecord | None:
        """Return the record of a pod's volume, or None."""
        return self._held.get(uid, {}).get(volume)

    def of(self, uid: str) -> list[VolumeRecord]:
        """Return the records of a pod's volumes."""
        return list(self._held.get(uid, {}).values())

    def drop(self, uid: str) -> None:
        """Remove the records of a pod."""
        self._held.pop(uid, None)

    def others(self, wanted: VolumeToMount, folder: str) -> bool:
        """Return whether another pod has the same persistent volume, of the plugin with this directory.

        Pods without records are looked up on disk, where a pod's own volume cannot be distinguished from a
        persistent volume of the same name.
        """
        for uid, held in self._held.items():
            names = {holding.wanted.name for holding in held.values() if holding.wanted.persistent}
            if uid != wanted.uid and wanted.name in names:
                return True
        return any(
            uid != wanted.uid and uid not in self._held
            for uid, kind, name in self._on_disk()
            if (kind, name) == (folder, wanted.name)
        )

    def attached(self) -> list[str]:
        """Return the names (`status.volumesInUse`) of the attached volumes in use."""
        held = (holding.attached for pod in self._held.values() for holding in pod.values())
        return sorted({name for name in held if name})

    def unknown(self, folders: Collection[str]) -> list[str]:
        """Return the uids of pods without records that have a volume in one of these plugins' directories."""
        return sorted({uid for uid, folder, _ in self._on_disk() if folder in folders} - self._held.keys())

    @property
    def names(self) -> NamesInUse:
        """Names of the volumes in use."""
        return NamesInUse(self)

    def in_use(self, name: str) -> bool:
        """Return whether any pod has a volume of this name."""
        return next(self._users(name), None) is not None

    def all_names(self) -> set[str]:
        """Return the names of all pods' volumes."""
        held = {holding.wanted.name for pod in self._held.values() for holding in pod.values()}
        return held | {name for _, _, name in self._on_disk()}

    def _users(self, name: str) -> Iterator[str]:
        for uid, held in self._held.items():
            if any(holding.wanted.name == name for holding in held.values()):
                yield uid
        yield from (uid for uid, _, volume in self._on_disk() if volume == name)

    def _on_disk(self) -> Iterator[tuple[str, str, str]]:
        """Yield the volumes in pods' directories: uid, plugin's directory, name. Reads only names."""
        for uid in _names(self._pods):
            for place in ("volumes", "volumeDevices"):
                for kind in _names(self._pods / uid / place):
                    for name in _names(self._pods / uid / place / kind):
                        yield uid, kind, name


class NamesInUse(Collection[str]):
    """Live view of the names of volumes in use: it includes volumes that are recorded later."""

    def __init__(self, holdings: VolumeState) -> None:
        self._holdings = holdings

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._holdings.in_use(name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._holdings.all_names()))

    def __len__(self) -> int:
        return len(self._holdings.all_names())


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []

"""Which pods have which volumes, as far as this agent has learned since it began; the disk knows the rest.

A volume counts as a pod's from before anything is done with it until all of the pod's are gone: so nobody
takes away a shared part of it (`sweep`), gives it to a second pod that must not have it
(`ReadWriteOncePod`), or detaches it (`volumesInUse`).
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
    """The name by which the volume is in use on this node, from before it is; most have none."""
    since: float = 0.0
    """When the pod first wanted it, in the loop's time."""


class VolumeState:
    """The volumes of all pods below one root."""

    def __init__(self, root: Path) -> None:
        self._pods = root / "pods"
        self._held: dict[str, dict[str, VolumeRecord]] = {}

    def hold(self, wanted: VolumeToMount) -> VolumeRecord:
        """Take note that a pod is about to have a volume, or has it already."""
        held = self._held.setdefault(wanted.uid, {})
        before = held.get(wanted.volume.name)
        now = VolumeRecord(wanted, since=asyncio.get_running_loop().time())
        if before is not None:
            now.mounted, now.attached, now.since = before.mounted, before.attached, before.since
        held[wanted.volume.name] = now
        return now

    def get(self, uid: str, volume: str) -> VolumeRecord | None:
        """Give what is known of a pod's volume."""
        return self._held.get(uid, {}).get(volume)

    def of(self, uid: str) -> list[VolumeRecord]:
        """Give what is known of a pod's volumes."""
        return list(self._held.get(uid, {}).values())

    def drop(self, uid: str) -> None:
        """Take note that a pod has no volumes any more."""
        self._held.pop(uid, None)

    def others(self, wanted: VolumeToMount, folder: str) -> bool:
        """Whether another pod has the same persistent volume, of the kind with this folder.

        Of pods that were not met yet the disk has to tell it, where nobody knows a pod's own volume
        from a persistent one of the same name.
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
        """Give the names of the attached volumes that are in use."""
        held = (holding.attached for pod in self._held.values() for holding in pod.values())
        return sorted({name for name in held if name})

    def unknown(self, folders: Collection[str]) -> list[str]:
        """Give the pods that have something in one of these kinds' folders and that were not met yet."""
        return sorted({uid for uid, folder, _ in self._on_disk() if folder in folders} - self._held.keys())

    @property
    def names(self) -> NamesInUse:
        """The names of the volumes in use."""
        return NamesInUse(self)

    def in_use(self, name: str) -> bool:
        """Whether any pod has a volume of this name."""
        return next(self._users(name), None) is not None

    def all_names(self) -> set[str]:
        """Give the names of all volumes that pods have."""
        held = {holding.wanted.name for pod in self._held.values() for holding in pod.values()}
        return held | {name for _, _, name in self._on_disk()}

    def _users(self, name: str) -> Iterator[str]:
        for uid, held in self._held.items():
            if any(holding.wanted.name == name for holding in held.values()):
                yield uid
        yield from (uid for uid, _, volume in self._on_disk() if volume == name)

    def _on_disk(self) -> Iterator[tuple[str, str, str]]:
        """Give what lies in pods' folders: uid, folder of the kind, name. Only names are read."""
        for uid in _names(self._pods):
            for place in ("volumes", "volumeDevices"):
                for kind in _names(self._pods / uid / place):
                    for name in _names(self._pods / uid / place / kind):
                        yield uid, kind, name


class NamesInUse(Collection[str]):
    """Names of volumes that pods have at the moment of asking: what is begun meanwhile counts too."""

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

"""Actual state of volumes per pod since this process started; volumes of earlier processes are found on disk.

A volume is recorded before anything is done with it, and until all of the pod's volumes are removed. In
between its shared state is not released (`unmount_unused`), it is not mounted for a second pod against
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

    volume: VolumeToMount
    mounted: MountedVolume | None = None
    attached: str = ""
    """Name of the volume in `status.volumesInUse`, set before it is used; empty for most volumes."""
    since: float = 0.0
    """Event-loop time when the pod first required it."""


class VolumeState:
    """Volumes of all pods below one root directory."""

    def __init__(self, root: Path) -> None:
        self._pods = root / "pods"
        self._records: dict[str, dict[str, VolumeRecord]] = {}

    def register(self, volume: VolumeToMount) -> VolumeRecord:
        """Record that a pod is about to have a volume, or already has it; return the record."""
        records = self._records.setdefault(volume.uid, {})
        previous = records.get(volume.pod_volume.name)
        record = VolumeRecord(volume, since=asyncio.get_running_loop().time())
        if previous is not None:
            record.mounted, record.attached, record.since = (
                previous.mounted,
                previous.attached,
                previous.since,
            )
        records[volume.pod_volume.name] = record
        return record

    def get(self, uid: str, volume: str) -> VolumeRecord | None:
        """Return the record of a pod's volume, or None."""
        return self._records.get(uid, {}).get(volume)

    def for_pod(self, uid: str) -> list[VolumeRecord]:
        """Return the records of a pod's volumes."""
        return list(self._records.get(uid, {}).values())

    def unregister(self, uid: str) -> None:
        """Remove the records of a pod."""
        self._records.pop(uid, None)

    def is_used_by_other_pod(self, volume: VolumeToMount, plugin_dir: str) -> bool:
        """Return whether another pod has the same persistent volume, of the plugin with this directory.

        Pods without records are looked up on disk, where a pod's own volume cannot be distinguished from a
        persistent volume of the same name.
        """
        for uid, records in self._records.items():
            names = {record.volume.name for record in records.values() if record.volume.persistent}
            if uid != volume.uid and volume.name in names:
                return True
        return any(
            uid != volume.uid and uid not in self._records
            for uid, directory, name in self._on_disk()
            if (directory, name) == (plugin_dir, volume.name)
        )

    def attached_names(self) -> list[str]:
        """Return the names (`status.volumesInUse`) of the attached volumes in use."""
        names = (record.attached for pod in self._records.values() for record in pod.values())
        return sorted({name for name in names if name})

    def pods_without_records(self, plugin_dirs: Collection[str]) -> list[str]:
        """Return the uids of pods without records that have a volume in one of these plugins' directories."""
        return sorted(
            {uid for uid, directory, _ in self._on_disk() if directory in plugin_dirs} - self._records.keys()
        )

    @property
    def names_in_use(self) -> NamesInUse:
        """Names of the volumes in use."""
        return NamesInUse(self)

    def is_in_use(self, name: str) -> bool:
        """Return whether any pod has a volume of this name."""
        return next(self._users(name), None) is not None

    def all_names(self) -> set[str]:
        """Return the names of all pods' volumes."""
        names = {record.volume.name for pod in self._records.values() for record in pod.values()}
        return names | {name for _, _, name in self._on_disk()}

    def _users(self, name: str) -> Iterator[str]:
        for uid, records in self._records.items():
            if any(record.volume.name == name for record in records.values()):
                yield uid
        yield from (uid for uid, _, volume in self._on_disk() if volume == name)

    def _on_disk(self) -> Iterator[tuple[str, str, str]]:
        """Yield the volumes in pods' directories: uid, plugin's directory, name. Reads only names."""
        for uid in _entry_names(self._pods):
            for subdirectory in ("volumes", "volumeDevices"):
                for plugin_dir in _entry_names(self._pods / uid / subdirectory):
                    for name in _entry_names(self._pods / uid / subdirectory / plugin_dir):
                        yield uid, plugin_dir, name


class NamesInUse(Collection[str]):
    """Live view of the names of volumes in use: it includes volumes that are recorded later."""

    def __init__(self, state: VolumeState) -> None:
        self._state = state

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._state.is_in_use(name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._state.all_names()))

    def __len__(self) -> int:
        return len(self._state.all_names())


def _entry_names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []

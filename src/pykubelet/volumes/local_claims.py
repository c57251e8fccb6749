"""Claims of a standalone node: each is a directory, `local-volumes/<namespace>/<name>` in the root directory.

The directory is created when the first pod uses the claim. It stays when pods go and when the claim's
manifest is removed: only `pykubelet rm --volumes` and `pykubelet down --volumes` delete it. The requested
size is not enforced. The volume is mounted by the plugin of local volumes, so fsGroup, read-only and
sub-paths work as for a PersistentVolume of that type.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.api.storage import READ_WRITE_ONCE_POD, PersistentVolume, PersistentVolumeClaim, VolumeSpec
from pykubelet.api.volume import LocalDisk, Volume
from pykubelet.linux.kernel import label_for_containers
from pykubelet.objects.base import ObjectError
from pykubelet.volumes.errors import format_os_error
from pykubelet.volumes.paths import path_component
from pykubelet.volumes.plugin import FindClaim, VolumeToMount
from pykubelet.volumes.pvc import ClaimError, check_mode, claim_name, volume_to_mount

DIRECTORY = "local-volumes"
_MODE = 0o777
"""Containers of any user can write, as to an emptyDir volume; `DIRECTORY` is open to root only."""


class ClaimResolver(Protocol):
    """Resolver of the claims of pods."""

    async def resolve(self, pod: Pod, volume: Volume) -> VolumeToMount:
        """Return the volume behind a pod's claim. Raises ClaimError, AffinityError."""


def local_volume_path(root: Path, namespace: str, name: str) -> Path:
    """Return the directory of a claim below the kubelet's root directory. Raises ValueError."""
    return root / DIRECTORY / path_component(namespace) / path_component(name)


def claims_with_data(root: Path) -> list[str]:
    """Return the claims that have a directory, as `namespace/name`, sorted."""
    return sorted(
        f"{path.parent.name}/{path.name}" for path in (root / DIRECTORY).glob("*/*") if path.is_dir()
    )


class LocalClaimResolver:
    """Resolver of the claims in the manifests of a standalone node."""

    def __init__(self, root: Path, find_claim: FindClaim) -> None:
        self._root = root
        self._find_claim = find_claim

    async def resolve(self, pod: Pod, volume: Volume) -> VolumeToMount:
        """Return the volume behind a pod's claim, and ensure that its directory exists."""
        namespace, name = pod.metadata.namespace, claim_name(pod, volume)
        try:
            claim = self._find_claim(namespace, name)
        except ObjectError as err:
            raise ClaimError(
                f"{err}: write a PersistentVolumeClaim {name} of namespace {namespace} into a manifest"
            ) from err
        path = local_volume_path(self._root, namespace, name)
        try:
            await asyncio.to_thread(_ensure_directory, self._root / DIRECTORY, path)
        except OSError as err:
            raise ClaimError(f"error processing PVC {namespace}/{name}: {format_os_error(err)}") from err
        found = _persistent_volume(claim, path)
        check_mode(found, pod, volume)
        return volume_to_mount(pod, volume, claim, found)


def _ensure_directory(top: Path, path: Path) -> None:
    if path.is_dir():
        return
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=_MODE, exist_ok=True)
    path.chmod(_MODE)
    label_for_containers(path)


def _persistent_volume(claim: PersistentVolumeClaim, path: Path) -> PersistentVolume:
    meta = claim.metadata
    # A namespace contains no dot, so the name is unique.
    exclusive = claim.spec.access_modes == [READ_WRITE_ONCE_POD]
    return PersistentVolume(
        metadata=ObjectMeta(name=f"{meta.namespace}.{meta.name}"),
        spec=VolumeSpec(
            access_modes=[READ_WRITE_ONCE_POD] if exclusive else [],
            local=LocalDisk(path=str(path)),
        ),
    )

"""Resolution of persistent volume claims to persistent volumes, and validation of both.

The node authorizer lets a node get the single claims and volumes that its pods name, and not watch them. Both
are therefore requested with every attempt, and a pod whose claim is not bound is retried with the pod
worker's exponential back-off, as upstream does. With `--pod-checkpoint-dir` they are stored with the pod, and
the stored ones are used while the API server is unreachable. A volume that must be attached still waits for
the API server, because only it can tell that the volume is attached to no other node.

The validation is pure. Its error texts are upstream's: users and tools search events for them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from pykubelet.api.pod import Pod
from pykubelet.api.storage import (
    BLOCK,
    BOUND,
    FILESYSTEM,
    GROUP,
    MOUNT_OPTIONS,
    PROTECTION,
    READ_WRITE_ONCE_POD,
    PersistentVolume,
    PersistentVolumeClaim,
)
from pykubelet.api.volume import Volume
from pykubelet.apiserver.client import CLAIMS, PERSISTENT_VOLUMES, ApiClient
from pykubelet.apiserver.errors import ApiError, KubeError
from pykubelet.logs import get_logger
from pykubelet.objects.fetch import retry_until_observed
from pykubelet.podconfig.checkpoints import BoundClaim, Checkpoints
from pykubelet.volumes.csi.names import MIGRATED
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.plugin import VolumeToMount

log = get_logger(__name__)


class ClaimError(VolumePluginError):
    """Raised when a claim cannot be used, at least not now; the text is complete and names the claim."""


class AffinityError(VolumePluginError):
    """Raised when the volume's node affinity does not match this node."""

    action = "MountVolume.NodeAffinity check failed"


def claim_name(pod: Pod, volume: Volume) -> str:
    """Return the name of the claim behind a volume: named by the pod, or created for it (ephemeral).

    Empty if the volume has no claim.
    """
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim.claim_name
    return f"{pod.metadata.name}-{volume.name}" if volume.ephemeral is not None else ""


def check_claim(claim: PersistentVolumeClaim, where: str) -> None:
    """Check that a claim (`where` is its `namespace/name`) is bound to a volume. Raises ClaimError."""
    leaving = claim.metadata.deletion_timestamp is not None
    if leaving and PROTECTION not in claim.metadata.finalizers:
        raise ClaimError(f"error processing PVC {where}: PVC is being deleted")
    if claim.status.phase != BOUND:
        raise ClaimError(f"error processing PVC {where}: PVC is not bound")
    if not claim.spec.volume_name:
        raise ClaimError(f"error processing PVC {where}: PVC has empty pvc.Spec.VolumeName")


def check_owner(claim: PersistentVolumeClaim, pod: Pod) -> None:
    """Check that a claim was created for this very pod. Raises ClaimError."""
    if not any(ref.controller and ref.uid == pod.uid for ref in claim.metadata.owner_references):
        claim_key = f"{claim.metadata.namespace}/{claim.metadata.name}"
        raise ClaimError(f"PVC {claim_key} was not created for pod {pod.full_name} (pod is not owner)")


def check_volume(volume: PersistentVolume, claim: PersistentVolumeClaim, where: str) -> None:
    """Check that a volume is bound to the claim that names it. Raises ClaimError."""
    name, ref = volume.metadata.name, volume.spec.claim_ref
    if ref is None:
        raise ClaimError(
            f"error processing PVC {where}: found PV object {name} but it has a nil pv.Spec.ClaimRef "
            "indicating it is not yet bound to the claim"
        )
    if ref.uid != claim.metadata.uid:
        raise ClaimError(
            f"error processing PVC {where}: found PV object {name} but its pv.Spec.ClaimRef.UID {ref.uid} "
            f"does not point to claim.UID {claim.metadata.uid}"
        )


def check_mode(found: PersistentVolume, pod: Pod, volume: Volume) -> None:
    """Check that containers use the volume as its volumeMode requires. Raises ClaimError."""
    mounts, devices = used_names(pod)
    if volume.name in mounts and found.spec.is_block:
        raise ClaimError(f"volume {volume.name} has volumeMode {BLOCK}, but is specified in volumeMounts")
    if volume.name in devices and not found.spec.is_block:
        raise ClaimError(
            f"volume {volume.name} has volumeMode {FILESYSTEM}, but is specified in volumeDevices"
        )


def check_affinity(found: PersistentVolume, labels: Mapping[str, str], node: str) -> None:
    """Check that a volume's node affinity matches a node. Raises AffinityError."""
    affinity = found.spec.node_affinity
    if affinity is None or affinity.required is None:
        return
    try:
        fits = affinity.required.fits(labels, node)
    except ValueError as err:
        raise AffinityError(str(err)) from err
    if not fits:
        raise AffinityError("no matching NodeSelectorTerms")


def volume_to_mount(
    pod: Pod, volume: Volume, claim: PersistentVolumeClaim, found: PersistentVolume
) -> VolumeToMount:
    """Return the volume to mount for a claim. Raises ClaimError unless the volume has exactly one source."""
    sources = found.spec.sources
    if len(sources) != 1:
        what = " and ".join(kind for kind, _ in sources) or "none that is known"
        raise ClaimError(f"the source of persistent volume {found.metadata.name} is {what}")
    ((kind, source),) = sources
    claim_source = volume.persistent_volume_claim
    return VolumeToMount(
        pod,
        volume,
        kind,
        source,
        found.metadata.name,
        persistent=found,
        claim=claim,
        read_only=claim_source is not None and _is_read_only(pod, claim_source.claim_name),
        block=found.spec.is_block,
        mount_options=mount_options(found),
    )


def _is_read_only(pod: Pod, name: str) -> bool:
    """Return whether all of the pod's volumes that name this claim are read-only."""
    claims = (volume.persistent_volume_claim for volume in pod.spec.volumes)
    return all(claim.read_only for claim in claims if claim is not None and claim.claim_name == name)


def mount_options(found: PersistentVolume) -> tuple[str, ...]:
    """Return a volume's mount options, sorted and unique; the legacy annotation overrides the field."""
    written = found.metadata.annotations.get(MOUNT_OPTIONS)
    options = written.split(",") if written is not None else found.spec.mount_options
    return tuple(sorted({option for option in options if option}))


def is_exclusive(found: PersistentVolume) -> bool:
    """Return whether only one pod at a time may use a volume (ReadWriteOncePod)."""
    return found.spec.access_modes == [READ_WRITE_ONCE_POD]


def volume_group(found: PersistentVolume | None) -> int | None:
    """Return the group that processes need to use a volume, from its annotation, or None."""
    text = found.metadata.annotations.get(GROUP, "") if found is not None else ""
    return int(text) if text.isascii() and text.isdigit() else None


def used_names(pod: Pod) -> tuple[set[str], set[str]]:
    """Return the names of the volumes that containers mount, and of those that they use as devices."""
    spec = pod.spec
    containers = (*spec.init_containers, *spec.containers, *spec.ephemeral_containers)
    mounts = {mount.name for container in containers for mount in container.volume_mounts}
    return mounts, {device.name for container in containers for device in container.volume_devices}


class ApiServerUnavailable(ClaimError):
    """Raised when the API server did not respond; what it returned about the claim before still holds."""


class PvcResolver:
    """Resolver of claims to persistent volumes; `api` is None in standalone mode."""

    def __init__(
        self,
        api: ApiClient | None,
        node_name: str,
        node_labels: Callable[[], Mapping[str, str] | None],
        plugin_types: Container[str] = (),
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Initialize with the API client, and the node's name and labels; labels are None while unknown.

        `plugin_types`: the volume types that have a plugin; other types that are migrated to CSI are
        translated. `checkpoints`: None without `--pod-checkpoint-dir`.
        """
        self._api = api
        self._plugin_types = plugin_types
        self._node_name = node_name
        self._node_labels = node_labels
        self._checkpoints = checkpoints

    async def resolve(self, pod: Pod, volume: Volume) -> VolumeToMount:
        """Return the volume behind a pod's claim.

        Raises ClaimError for a claim that cannot be used (yet), and AffinityError for a volume that is not
        accessible from this node.
        """
        name = claim_name(pod, volume)
        if self._api is None:
            raise ClaimError(
                f'volume {volume.name} needs the claim "{name}", and this node belongs to no cluster that '
                "could have one: use emptyDir or hostPath"
            )
        where = f"{pod.metadata.namespace}/{name}"
        claim, found = await self._bound(self._api, pod, volume, name, where)
        found = self._migrated(found, where)
        check_mode(found, pod, volume)
        labels = self._node_labels()
        if labels is not None:
            check_affinity(found, labels, self._node_name)
        return volume_to_mount(pod, volume, claim, found)

    async def _bound(
        self, api: ApiClient, pod: Pod, volume: Volume, name: str, where: str
    ) -> tuple[PersistentVolumeClaim, PersistentVolume]:
        """Return the claim and its volume, or the checkpointed ones while the API server is unreachable."""
        try:
            claim = await self._claim(api, pod.metadata.namespace, name)
            check_claim(claim, where)
            if volume.persistent_volume_claim is None:
                check_owner(claim, pod)
            found = await self._volume(api, claim, where)
            check_volume(found, claim, where)
        except ApiServerUnavailable as err:
            known = self._checkpoints.get(pod.uid) if self._checkpoints is not None else None
            bound = known.claims.get(name) if known is not None else None
            if bound is None:
                raise
            log.v(2).info("Using checkpointed claim", pod=pod.full_name, claim=where, err=err)
            return bound.claim, bound.volume
        if self._checkpoints is not None:
            self._checkpoints.save_used_objects(pod.uid, claim=BoundClaim(claim=claim, volume=found))
        return claim, found

    def _migrated(self, found: PersistentVolume, where: str) -> PersistentVolume:
        if not any(kind in MIGRATED and kind not in self._plugin_types for kind, _ in found.spec.sources):
            return found
        from pykubelet.volumes.csi.translation import migrated_volume

        try:
            return migrated_volume(found)
        except (VolumePluginError, ValueError) as err:
            raise ClaimError(f"error processing PVC {where}: {err}") from err

    async def _claim(self, api: ApiClient, namespace: str, name: str) -> PersistentVolumeClaim:
        try:
            return await retry_until_observed(lambda: api.get(CLAIMS, name, namespace))
        except KubeError as err:
            what = f"error processing PVC {namespace}/{name}: failed to fetch PVC from API server"
            raise _problem(what, err) from err

    async def _volume(self, api: ApiClient, claim: PersistentVolumeClaim, where: str) -> PersistentVolume:
        name = claim.spec.volume_name
        try:
            return await retry_until_observed(lambda: api.get(PERSISTENT_VOLUMES, name))
        except KubeError as err:
            what = f"error processing PVC {where}: failed to fetch PV {name} from API server"
            raise _problem(what, err) from err


def _problem(what: str, err: KubeError) -> ClaimError:
    if isinstance(err, ApiError):
        return ClaimError(f"{what}: {err.message or err}")
    return ApiServerUnavailable(f"{what}: {err}")

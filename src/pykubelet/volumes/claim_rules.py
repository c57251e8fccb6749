"""What must be true of a claim and its volume before a pod may have it: pure, and in the reference's words.

People and programs search events for these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping

from pykubelet.api.persistent import (
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
from pykubelet.api.pod import Pod
from pykubelet.api.volume import Volume
from pykubelet.volumes.errors import KindError
from pykubelet.volumes.kind import Wanted


class ClaimError(KindError):
    """A claim that cannot be used, at least not now; the text is complete and says which."""


class AffinityError(KindError):
    """The volume cannot be reached from this node."""

    action = "MountVolume.NodeAffinity check failed"


def claim_name(pod: Pod, volume: Volume) -> str:
    """Give the name of the claim behind a volume: named by the pod, or made for it."""
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim.claim_name
    return f"{pod.metadata.name}-{volume.name}"


def check_claim(claim: PersistentVolumeClaim, where: str) -> None:
    """Check that a claim (`where` is its `namespace/name`) has a volume; raises ClaimError."""
    leaving = claim.metadata.deletion_timestamp is not None
    if leaving and PROTECTION not in claim.metadata.finalizers:
        raise ClaimError(f"error processing PVC {where}: PVC is being deleted")
    if claim.status.phase != BOUND:
        raise ClaimError(f"error processing PVC {where}: PVC is not bound")
    if not claim.spec.volume_name:
        raise ClaimError(f"error processing PVC {where}: PVC has empty pvc.Spec.VolumeName")


def check_owner(claim: PersistentVolumeClaim, pod: Pod) -> None:
    """Check that a claim was made for this very pod; raises ClaimError."""
    if not any(ref.controller and ref.uid == pod.uid for ref in claim.metadata.owner_references):
        there = f"{claim.metadata.namespace}/{claim.metadata.name}"
        raise ClaimError(f"PVC {there} was not created for pod {pod.full_name} (pod is not owner)")


def check_volume(volume: PersistentVolume, claim: PersistentVolumeClaim, where: str) -> None:
    """Check that a volume is bound to the claim that says so; raises ClaimError."""
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
    """Check that containers want the volume as what it is, files or a device; raises ClaimError."""
    mounts, devices = used_names(pod)
    if volume.name in mounts and found.spec.is_block:
        raise ClaimError(f"volume {volume.name} has volumeMode {BLOCK}, but is specified in volumeMounts")
    if volume.name in devices and not found.spec.is_block:
        raise ClaimError(
            f"volume {volume.name} has volumeMode {FILESYSTEM}, but is specified in volumeDevices"
        )


def check_affinity(found: PersistentVolume, labels: Mapping[str, str], node: str) -> None:
    """Check that a volume can be reached from a node; raises AffinityError."""
    affinity = found.spec.node_affinity
    if affinity is None or affinity.required is None:
        return
    try:
        fits = affinity.required.fits(labels, node)
    except ValueError as err:
        raise AffinityError(str(err)) from err
    if not fits:
        raise AffinityError("no matching NodeSelectorTerms")


def wanted_volume(pod: Pod, volume: Volume, claim: PersistentVolumeClaim, found: PersistentVolume) -> Wanted:
    """Put together what a pod gets for its claim; raises ClaimError for a volume of no kind or several."""
    sources = found.spec.sources
    if len(sources) != 1:
        what = " and ".join(kind for kind, _ in sources) or "none that is known"
        raise ClaimError(f"the source of persistent volume {found.metadata.name} is {what}")
    ((kind, source),) = sources
    named = volume.persistent_volume_claim
    return Wanted(
        pod,
        volume,
        kind,
        source,
        found.metadata.name,
        persistent=found,
        claim=claim,
        read_only=named is not None and _is_read_only(pod, named.claim_name),
        block=found.spec.is_block,
        mount_options=mount_options(found),
    )


def _is_read_only(pod: Pod, name: str) -> bool:
    """Whether a pod only reads what is behind its claim, which several of its volumes may name."""
    claims = (volume.persistent_volume_claim for volume in pod.spec.volumes)
    return all(claim.read_only for claim in claims if claim is not None and claim.claim_name == name)


def mount_options(found: PersistentVolume) -> tuple[str, ...]:
    """Give a volume's mount options in order, each once; an annotation of old wins over the field."""
    written = found.metadata.annotations.get(MOUNT_OPTIONS)
    options = written.split(",") if written is not None else found.spec.mount_options
    return tuple(sorted({option for option in options if option}))


def is_exclusive(found: PersistentVolume) -> bool:
    """Whether only one pod at a time may have a volume."""
    return found.spec.access_modes == [READ_WRITE_ONCE_POD]


def volume_group(found: PersistentVolume | None) -> int | None:
    """Give the group that processes need to use a volume, if it names one."""
    text = found.metadata.annotations.get(GROUP, "") if found is not None else ""
    return int(text) if text.isascii() and text.isdigit() else None


def used_names(pod: Pod) -> tuple[set[str], set[str]]:
    """Give the names of the volumes that containers mount, and of those that they want as devices."""
    spec = pod.spec
    containers = (*spec.init_containers, *spec.containers, *spec.ephemeral_containers)
    mounts = {mount.name for container in containers for mount in container.volume_mounts}
    return mounts, {device.name for container in containers for device in container.volume_devices}

"""CSI volumes of pods, inline or persistent, and the rules of their CSIDriver objects; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pykubelet.api.pod import Pod
from pykubelet.api.storage import CsiDriverSpec
from pykubelet.api.volume import CsiInline, CsiPersistent, SecretReference
from pykubelet.volumes.csi.names import EPHEMERAL, KIND, PERSISTENT, inline_handle, unique_name
from pykubelet.volumes.csi.types import VolumeCapability
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.mounts.selinux import context_option
from pykubelet.volumes.plugin import VolumeToMount

READ_WRITE_ONCE = "ReadWriteOnce"
_ONE_NODE = frozenset((READ_WRITE_ONCE, "ReadWriteOncePod"))
NO_POLICY = "None"
FILE_POLICY = "File"
DEFAULT_POLICY = "ReadWriteOnceWithFSType"


@dataclass(frozen=True, slots=True)
class CsiVolume:
    """A CSI volume to mount for a pod, from an inline or a persistent source."""

    volume_to_mount: VolumeToMount
    driver: str
    handle: str
    ephemeral: bool
    """Inline volume with the lifetime of the pod; it is neither attached nor staged."""
    fs_type: str = ""
    access_modes: tuple[str, ...] = ()
    read_only: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)
    stage_secret: SecretReference | None = None
    publish_secret: SecretReference | None = None
    expand_secret: SecretReference | None = None

    @classmethod
    def parse(cls, volume_to_mount: VolumeToMount) -> CsiVolume:
        """Parse a volume's source. Raises VolumePluginError if it is not CSI or incomplete."""
        source = volume_to_mount.source
        if isinstance(source, CsiInline):
            secret = source.node_publish_secret_ref
            found = cls(
                volume_to_mount,
                source.driver,
                inline_handle(volume_to_mount.uid, volume_to_mount.name),
                ephemeral=True,
                fs_type=source.fs_type or "",
                read_only=source.read_only is True,
                attributes=source.volume_attributes,
                publish_secret=secret
                and SecretReference(name=secret.name, namespace=_namespace(volume_to_mount.pod)),
            )
        elif isinstance(source, CsiPersistent) and volume_to_mount.persistent is not None:
            found = cls(
                volume_to_mount,
                source.driver,
                source.volume_handle,
                ephemeral=False,
                fs_type=source.fs_type,
                access_modes=tuple(volume_to_mount.persistent.spec.access_modes),
                read_only=volume_to_mount.read_only,
                attributes=source.volume_attributes,
                stage_secret=source.node_stage_secret_ref,
                publish_secret=source.node_publish_secret_ref,
                expand_secret=source.node_expand_secret_ref,
            )
        else:
            raise VolumePluginError(f"{KIND}: volume source not found in volume.Spec")
        if not found.driver or not found.handle:
            raise VolumePluginError(
                f"{KIND}: the volume names no {'volume handle' if found.driver else 'driver'}"
            )
        return found

    @property
    def mode(self) -> str:
        """Volume lifecycle mode, in the spelling of CSIDriver objects."""
        return EPHEMERAL if self.ephemeral else PERSISTENT

    @property
    def unique_name(self) -> str:
        """Name of the volume in the node's status."""
        return unique_name(self.driver, self.handle)

    def capability(self, *, group: int | None = None, label: str = "") -> VolumeCapability:
        """Return the capability to request; `group` is the volume mount group, `label` the SELinux label."""
        mode = self.access_modes[0] if self.access_modes else READ_WRITE_ONCE
        if self.volume_to_mount.block:
            return VolumeCapability(mode, block=True)
        # In the order of the spec, unlike `VolumeToMount.mount_options`: a driver may depend on it.
        persistent = self.volume_to_mount.persistent
        options = tuple(persistent.spec.mount_options) if persistent is not None else ()
        if label:
            options = (*options, context_option(label))
        return VolumeCapability(mode, fs_type=self.fs_type, mount_options=options, group=group)


def check_mode(volume: CsiVolume, spec: CsiDriverSpec | None) -> None:
    """Check that a driver supports the volume's lifecycle mode. Raises VolumePluginError.

    `spec` is None if the driver has no CSIDriver object: then it supports persistent volumes only.
    """
    if spec is None:
        if volume.ephemeral:
            raise VolumePluginError(
                f'{KIND}: mounter.SetupAt failed to check volume lifecycle mode: volume mode "{volume.mode}" '
                f"not supported by driver {volume.driver} (no CSIDriver object)"
            )
        return
    if volume.mode not in spec.volume_lifecycle_modes:
        modes = " ".join(f'"{mode}"' for mode in spec.volume_lifecycle_modes)
        raise VolumePluginError(
            f'{KIND}: mounter.SetupAt failed to check volume lifecycle mode: volume mode "{volume.mode}" '
            f"not supported by driver {volume.driver} (only supports [{modes}])"
        )


def must_attach(volume: CsiVolume, spec: CsiDriverSpec | None) -> bool:
    """Return whether the cluster attaches the volume: if persistent, unless `attachRequired` is false."""
    return not volume.ephemeral and (spec is None or spec.attach_required is not False)


def applies_fs_group(volume: CsiVolume, spec: CsiDriverSpec | None, group: int | None) -> bool:
    """Return whether the kubelet applies fsGroup to the files (unless the driver has VOLUME_MOUNT_GROUP)."""
    policy = (spec.fs_group_policy if spec is not None else None) or DEFAULT_POLICY
    if group is None or policy == NO_POLICY or volume.read_only:
        return False
    if policy == FILE_POLICY:
        return True
    if not volume.fs_type:
        return False
    return volume.ephemeral or not _ONE_NODE.isdisjoint(volume.access_modes)


def pod_info(volume: CsiVolume) -> dict[str, str]:
    """Return the pod information for drivers that require it (`podInfoOnMount`)."""
    pod = volume.volume_to_mount.pod
    return {
        "csi.storage.k8s.io/pod.name": pod.metadata.name,
        "csi.storage.k8s.io/pod.namespace": _namespace(pod),
        "csi.storage.k8s.io/pod.uid": pod.uid,
        "csi.storage.k8s.io/serviceAccount.name": pod.spec.service_account_name,
        "csi.storage.k8s.io/ephemeral": "true" if volume.ephemeral else "false",
    }


def _namespace(pod: Pod) -> str:
    return pod.metadata.namespace

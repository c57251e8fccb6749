"""What mounted volumes mean for containers beyond their mounts: devices, images, groups of processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pykubelet.api.pod import Container, Pod
from pykubelet.pods.defaults import default_pull_policy
from pykubelet.resources.grants import DeviceNode
from pykubelet.volumes.mounted import MountedVolume


def block_volumes(volumes: Mapping[str, MountedVolume]) -> dict[str, DeviceNode]:
    """Give the volumes that are block devices, by name; one that is read-only may only be read."""
    return {
        name: DeviceNode(volume.device, "", "r" if volume.read_only else "mrw")
        for name, volume in volumes.items()
        if volume.device
    }


def extra_groups(pod: Pod, volumes: Iterable[MountedVolume]) -> tuple[int, ...]:
    """Give the groups that volumes ask for and that the pod's processes do not have anyway."""
    asked = {volume.group for volume in volumes if volume.group is not None}
    return tuple(sorted(asked - set(pod.spec.security_context.supplemental_groups)))


def wanted_images(
    pod: Pod, container: Container, volumes: Mapping[str, MountedVolume]
) -> dict[str, tuple[str, str]]:
    """Give the images that a container mounts as volumes, by the volumes' names, each with a pull policy."""
    names = {mount.name for mount in container.volume_mounts}
    policies = {
        volume.name: volume.image.pull_policy for volume in pod.spec.volumes if volume.image is not None
    }
    return {
        name: (volume.image, policies.get(name) or default_pull_policy(volume.image))
        for name, volume in volumes.items()
        if volume.image and name in names
    }
